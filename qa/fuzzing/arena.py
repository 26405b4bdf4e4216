"""Provide buffers that end at an inaccessible page."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from pyllamakv.native._plk import ffi

#: More than the longest buffer of 4-byte elements that an int32_t can count; it takes no memory.
_SPACE = (1 << 33) + (1 << 20)
_NORESERVE = 0x4000
#: Number of elements that are filled; the rest keeps its content, mostly zeros.
FILLED = 4096


class Arena:
    """Ranges of address space, each followed by an inaccessible page."""

    def __init__(self, ranges: int = 6) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._maps = [mmap.mmap(-1, _SPACE, flags=flags) for _ in range(ranges)]
        self._ends = []
        for each in self._maps:
            start = ctypes.addressof(ctypes.c_char.from_buffer(each))
            end = start + _SPACE - mmap.PAGESIZE
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
            self._ends.append(end)
        self._next = 0

    def reset(self) -> None:
        """Free all buffers."""
        self._next = 0

    def allocate(self, type_: Any, elements: int, fill: list[int]) -> Any:
        """Return a pointer to ``n`` elements, the first ones filled with a pattern."""
        size = ffi.sizeof(type_)
        end, self._next = self._ends[self._next], self._next + 1
        elements = max(0, min(elements, (_SPACE - mmap.PAGESIZE) // size))
        pointer = ffi.cast(ffi.typeof(ffi.getctype(type_, "*")), end - elements * size)
        pattern = b"".join((each % (1 << 8 * size)).to_bytes(size, "little") for each in fill)
        filled = min(elements, FILLED) * size if fill else 0
        ffi.memmove(pointer, (pattern * (filled // max(1, len(pattern)) + 1))[:filled], filled)
        return pointer
