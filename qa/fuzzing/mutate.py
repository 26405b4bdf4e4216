"""Mutate bytes as damage and attacks would: numbers, words, moved and duplicated pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from random import Random
from types import CodeType

#: Boundary values of integer types.
EDGES = (
    0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536,
    2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_WORD = re.compile(rb"[A-Za-z_][\w.-]{1,30}|-?\d+|[^\w\s]{1,4}")
_NUMBER = re.compile(rb"-?\d+")


def words(seeds: Iterable[bytes], codes: Iterable[CodeType]) -> list[bytes]:
    """Return the vocabulary of a format: valid inputs' words, and strings in the reader's code."""
    found = {word for seed in seeds for word in _WORD.findall(seed)[:2000]}
    for code in codes:
        for constant in code.co_consts:
            if isinstance(constant, str):
                constant = constant.encode("utf-8", "replace")
            if isinstance(constant, bytes) and 0 < len(constant) < 40:
                found.add(constant)
    return sorted(found)


#: Mutates bytes of the second argument, with pieces of the third.
_Way = Callable[["Bytes", Random, bytearray, bytes], None]


class Bytes:
    """Mutate bytes, with the vocabulary of a format."""

    def __init__(self, dictionary: list[bytes], longest: int) -> None:
        self._words = dictionary or [b"\0"]
        self._longest = longest

    def __call__(self, chance: Random, data: bytes, other: bytes) -> bytes:
        """Return a mutated input; pieces may come from ``other``."""
        return self._changed(chance, data, other, self._WAYS)

    def in_place(self, chance: Random, data: bytes) -> bytes:
        """Return a mutated input of the same length, with the pieces at their places."""
        return self._changed(chance, data, b"", self._IN_PLACE)

    def _changed(self, chance: Random, data: bytes, other: bytes, ways: tuple[_Way, ...]) -> bytes:
        made = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 8))):
            chance.choice(ways)(self, chance, made, other)
        return bytes(made[: self._longest])

    def _flip(self, chance: Random, made: bytearray, _other: bytes) -> None:
        if made:
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)

    def _byte(self, chance: Random, made: bytearray, _other: bytes) -> None:
        if made:
            made[chance.randrange(len(made))] = chance.randrange(256)

    def _number(self, chance: Random, made: bytearray, _other: bytes) -> None:
        width = chance.choice((1, 2, 4, 4, 8, 8))
        if len(made) < width:
            return
        # Most formats align their numbers, at least relative to each other.
        at = chance.randrange(len(made) - width + 1)
        at = at // 4 * 4 if chance.random() < 0.5 else at
        old = int.from_bytes(made[at : at + width], "little")
        new = chance.choice((chance.choice(EDGES), old + chance.randint(-9, 9), ~old, old * 2))
        made[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")

    def _digits(self, chance: Random, made: bytearray, _other: bytes) -> None:
        found = list(_NUMBER.finditer(made))
        if found:
            match = chance.choice(found)
            old = int(match.group()[:18])
            step = chance.randint(-2, 2)
            new = chance.choice((chance.choice(EDGES), -chance.choice(EDGES), old + step))
            text = chance.choice((str(new), str(new), "1e999", "NaN", "0.5", "9" * 400)).encode()
            made[match.start() : match.end()] = text

    def _word(self, chance: Random, made: bytearray, _other: bytes) -> None:
        at = chance.randrange(len(made) + 1)
        made[at:at] = chance.choice(self._words)

    def _swap(self, chance: Random, made: bytearray, _other: bytes) -> None:
        found = list(_WORD.finditer(made, *self._window(chance, made)))
        if found:
            match = chance.choice(found)
            made[match.start() : match.end()] = chance.choice(self._words)

    def _erase(self, chance: Random, made: bytearray, _other: bytes) -> None:
        begin, end = self._window(chance, made)
        del made[begin:end]

    def _cut(self, chance: Random, made: bytearray, _other: bytes) -> None:
        del made[chance.randrange(len(made) + 1) :]

    def _double(self, chance: Random, made: bytearray, _other: bytes) -> None:
        begin, end = self._window(chance, made)
        made[end:end] = made[begin:end] * chance.choice((1, 1, 2, 20))

    def _borrow(self, chance: Random, made: bytearray, other: bytes) -> None:
        begin, end = self._window(chance, other)
        at = chance.randrange(len(made) + 1)
        behind = at + (end - begin if chance.random() < 0.5 else 0)
        made[at:behind] = other[begin:end]

    def _line(self, chance: Random, made: bytearray, other: bytes) -> None:
        rows = bytes(made).split(b"\n")
        at = chance.randrange(len(rows))
        way = chance.randrange(3)
        if way == 0:
            del rows[at]
        else:
            rows.insert(at, chance.choice(rows if way == 1 else other.split(b"\n")))
        made[:] = b"\n".join(rows)

    def _nest(self, chance: Random, made: bytearray, _other: bytes) -> None:
        at = chance.randrange(len(made) + 1)
        made[at:at] = chance.choice((b"[", b'{"a":', b"(", b"[[")) * chance.choice((3, 300, 1500))

    @staticmethod
    def _window(chance: Random, data: bytes | bytearray) -> tuple[int, int]:
        begin = chance.randrange(len(data) + 1)
        return begin, min(len(data), begin + int(chance.paretovariate(0.8)) + 1)

    _IN_PLACE = (_flip, _byte, _number)
    _WAYS = (
        _flip, _byte, _number, _number, _number, _digits, _digits, _word, _swap, _swap, _erase,
        _erase, _cut, _double, _borrow, _borrow, _line, _line, _nest,
    )  # fmt: skip
