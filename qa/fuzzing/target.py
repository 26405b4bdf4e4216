"""Define a fuzz target: its seeds, its mutations, and the function that reads inputs."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

#: Mutates an input as libFuzzer does.
Mutate = Callable[[bytes], bytes]
#: Boundary values of integer types.
EDGES = (
    0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536,
    2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
#: File of a run's counts, in its directory: accepted and refused inputs.
COUNTS, COUNTS_FORMAT = "counts", struct.Struct("<2Q")


class WrongAnswer(Exception):
    """Raised if an input was accepted or refused wrongly."""


def plain(_chance: Random, data: bytes, mutate: Mutate) -> bytes:
    """Mutate an input as libFuzzer does."""
    return mutate(data)


@dataclass(frozen=True)
class Target:
    """One reader.

    ``run`` reads an input; it may raise this package's errors, and no others. What it yields
    describes the result. ``seeds`` are valid inputs: they must be accepted. ``mutate`` receives
    libFuzzer's mutation, and may correct checksums, without which most inputs would fail the first
    check. The process may use ``headroom`` bytes of address space more than at the start. An input
    has at most ``longest`` bytes.
    """

    run: Callable[[bytes], Iterable[Hashable]]
    seeds: tuple[bytes, ...]
    mutate: Callable[[Random, bytes, Mutate], bytes] = plain
    headroom: int = 512 << 20
    longest: int = 1 << 16


def lines(rows: Iterable[Any]) -> bytes:
    """Return rows as JSON, one per line."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def memory() -> str | None:
    """Return a directory in memory, if there is one: every input is written to a file."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and os.access(place, os.W_OK) else None
