"""Correct the checksums of a cache file, as llama-kv-mmap.h computes them.

Layout of that header (bytes): magic 8, format 4, state 4, checksum 8, then the checked part:
checksum of cells, checksum of data, generation, bytes, page (8 each), cells, streams, words,
tensors (4 each), layout 8, three texts of 128. Then the search heads, sequences, positions and
tokens of the cells.
"""

from __future__ import annotations

import struct
from random import Random

_A, _B, _ALL = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
_SUM, _SUM_CELLS = 16, 24
SIZE = 88 + 3 * 128
_FORMAT = 3
#: Offset of the state, and its value in a file that was never flushed.
STATE, SCRATCH = 12, struct.pack("<I", 0x96699669)


def checksum(data: bytes, seed: int) -> int:
    """Return the 64-bit checksum of bytes."""

    def mix(total: int, word: int) -> int:
        total = (total ^ word) * _A & _ALL
        return total ^ total >> 29

    sums = [seed ^ _A, (seed + _B) & _ALL, ~seed & _ALL, seed ^ (_A + _B) & _ALL]
    whole = len(data) // 32 * 32
    words = struct.unpack_from(f"<{whole // 8}Q", data)
    for at in range(0, len(words), 4):
        for i in range(4):
            sums[i] = mix(sums[i], words[at + i])
    found = len(data)
    for each, word in zip(sums, struct.unpack("<4Q", data[whole:].ljust(32, b"\0")), strict=True):
        found = mix(found, mix(each, word))
    return found ^ found >> 32


class ChecksumFixer:
    """Correct files of one shape, except the checksum of the data, which few mutations affect."""

    def __init__(self, size: int, n_cells: int = 32, n_stream: int = 1) -> None:
        self._meta = n_stream * (8 + n_cells * (8 + 4 + 4))
        #: End of the checked part.
        self.front = min(size, SIZE + self._meta)

    def __call__(self, chance: Random, data: bytes) -> bytes:
        """Return a file, usually with correct checksums."""
        if len(data) < self.front or chance.random() < 0.2:
            return data
        made = bytearray(data)
        cells = checksum(data[SIZE : SIZE + self._meta], 1)
        struct.pack_into("<Q", made, _SUM_CELLS, cells)
        struct.pack_into("<Q", made, _SUM, checksum(bytes(made[_SUM_CELLS:SIZE]), _FORMAT))
        return bytes(made)
