"""The number types of ggml: ids, block sizes and bytes, from ``ggml.h``."""

from __future__ import annotations

from dataclasses import dataclass

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError


@dataclass(frozen=True, slots=True)
class NumberType:
    """Describe one ggml type: ``block`` values are stored in ``bytes`` bytes."""

    name: str
    number: int
    block: int
    bytes: int

    def row_bytes(self, n: int) -> int:
        """Return the bytes of a row of ``n`` values.

        Raises UsageError when a row does not consist of whole blocks.
        """
        if n % self.block:
            msg = (
                f"type {self.name} stores blocks of {self.block} values, and a row of {n} values "
                "is not made of whole blocks; use f16, bf16 or f32"
            )
            raise UsageError(msg)
        return n // self.block * self.bytes

    @property
    def quantized(self) -> bool:
        """Return whether several values share a block."""
        return self.block > 1


_TABLE = """
f32 0 1 4        f16 1 1 2         q4_0 2 32 18      q4_1 3 32 20      q5_0 6 32 22
q5_1 7 32 24     q8_0 8 32 34      q8_1 9 32 36      q2_k 10 256 84    q3_k 11 256 110
q4_k 12 256 144  q5_k 13 256 176   q6_k 14 256 210   q8_k 15 256 292   iq2_xxs 16 256 66
iq2_xs 17 256 74 iq3_xxs 18 256 98 iq1_s 19 256 50   iq4_nl 20 32 18   iq3_s 21 256 110
iq2_s 22 256 82  iq4_xs 23 256 136 i8 24 1 1         i16 25 1 2        i32 26 1 4
i64 27 1 8       f64 28 1 8        iq1_m 29 256 56   bf16 30 1 2       tq1_0 34 256 54
tq2_0 35 256 66  mxfp4 39 32 17
"""


def _read() -> tuple[NumberType, ...]:
    words = _TABLE.split()
    rows = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
    return tuple(NumberType(name, int(a), int(b), int(c)) for name, a, b, c in rows)


TYPES = _read()
_BY_NAME = {kind.name: kind for kind in TYPES}
_BY_NUMBER = {kind.number: kind for kind in TYPES}

#: The types that llama.cpp accepts for a K or V cache.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def number_type(which: str | int) -> NumberType:
    """Return the type with this name or number, or raise UsageError naming those there are."""
    if isinstance(which, str):
        found = _BY_NAME.get(which.lower())
    else:
        found = _BY_NUMBER.get(arguments.integer("a ggml type", which))
    if found is None:
        msg = f"unknown ggml type {arguments.shown(which)}; known are {', '.join(sorted(_BY_NAME))}"
        raise UsageError(msg)
    return found


def cache_type(which: str | int, of: str) -> NumberType:
    """Return the type for the cache of ``of`` ("K" or "V"), or raise UsageError."""
    found = number_type(which)
    if found.name not in CACHE_TYPES:
        msg = f"a {of} cache cannot be {found.name}; use one of {', '.join(CACHE_TYPES)}"
        raise UsageError(msg)
    return found
