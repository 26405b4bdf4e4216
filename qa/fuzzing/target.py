"""Say what is fuzzed: where inputs begin, how they change, and what takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

#: Return another input made of one or two that were interesting.
Mutator = Callable[[Random, bytes, bytes], bytes]


class WrongAnswer(Exception):
    """Report an input that was taken or refused wrongly: what is not as it was, or must be."""


def unchanged(_chance: Random, data: bytes) -> bytes:
    """Return an input that needs no mending."""
    return data


@dataclass(frozen=True)
class Target:
    """One reader.

    ``run`` takes an input and returns what tells its answers apart; it may raise the errors of this
    package, and nothing else. ``seeds`` are valid inputs: they must not be refused. ``mend`` makes
    sums right again after a mutation, or most inputs would end at the first check. Coverage is
    counted over the lines of ``modules``. The child may take ``headroom`` bytes of address space
    more than it has at the beginning.
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
    """Return a folder that lies in memory, if there is one: every input is written to a file."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and os.access(place, os.W_OK) else None
