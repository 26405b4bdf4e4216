"""Targets with faults that the fuzzer must find, each in a separate process."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from pyllamakv.errors import StateError
from qa.fuzzing.target import Target


def key_error(_folder: Path) -> Target:
    """Return a reader with a KeyError after two checks."""

    def run(data: bytes) -> Iterable[Hashable]:
        return [_typed(data)]

    return Target(run, (b"PLK\x01one", b"PLK\x02two"))


def _typed(data: bytes) -> str:
    if not data.startswith(b"PLK"):
        raise StateError("no magic")
    if len(data) < 5:
        raise StateError("too short")
    return {1: "one", 2: "two"}[data[3]]


def sound(_folder: Path) -> Target:
    """Return a reader without a fault."""

    def run(data: bytes) -> Iterable[Hashable]:
        if data[:1] != b"a":
            raise StateError("refused")
        return ["taken"]

    return Target(run, (b"a",))


def dying(_folder: Path) -> Target:
    """Return a reader that ends the process for some inputs."""

    def run(data: bytes) -> Iterable[Hashable]:
        if data[:1] == b"a" and len(data) > 3:
            os.abort()
        return [len(data) > 3]

    return Target(run, (b"abc",))


def silent(_folder: Path) -> Target:
    """Return a reader that waits forever in C, without interruption."""

    def run(data: bytes) -> Iterable[Hashable]:
        while len(data) > 3:
            time.sleep(1)
        return [0]

    return Target(run, (b"abc",))


def busy(_folder: Path) -> Target:
    """Return a reader that computes forever."""

    def run(data: bytes) -> Iterable[Hashable]:
        while len(data) > 3:
            pass
        return [0]

    return Target(run, (b"abc",))


def greedy(_folder: Path) -> Target:
    """Return a reader that allocates an unchecked length."""

    def run(data: bytes) -> Iterable[Hashable]:
        return [len(bytes(int.from_bytes(data[:4], "little")))]

    return Target(run, (b"\x08\0\0\0eight...",))


def fussy(_folder: Path) -> Target:
    """Return a reader that refuses a valid input."""

    def run(_data: bytes) -> Iterable[Hashable]:
        raise StateError("no 7")

    return Target(run, (b"valid",))
