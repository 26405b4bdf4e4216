"""Define a fuzz target: its seeds, its mutations, and the function that reads inputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

#: Returns an input made from one or two others.
Mutator = Callable[[Random, bytes, bytes], bytes]


class WrongAnswer(Exception):
    """Raised if an input was accepted or refused wrongly."""


def unchanged(_chance: Random, data: bytes) -> bytes:
    """Return the input unchanged."""
    return data


@dataclass(frozen=True)
class Target:
    """One reader.

    ``run`` reads an input and returns a key of its result; it may raise this package's errors, and
    no others. ``seeds`` are valid inputs: they must be accepted. ``mend`` corrects checksums after
    a mutation, without which most inputs would fail the first check. Coverage is counted over the
    lines of ``modules``. The child may use ``headroom`` bytes of address space more than at the
    start.
    """

    run: Callable[[bytes], Iterable[Hashable]]
    seeds: tuple[bytes, ...]
    modules: tuple[str, ...] = ()
    post_process: Callable[[Random, bytes], bytes] = unchanged
    mutate: Mutator | None = None
    headroom: int = 256 << 20
    longest: int = 1 << 16


def lines(rows: Iterable[Any]) -> bytes:
    """Return rows as JSON, one per line."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def memory() -> str | None:
    """Return a directory in memory, if there is one: every input is written to a file."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and os.access(place, os.W_OK) else None
