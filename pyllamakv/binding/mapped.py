"""Say in types what a library can do with a cache in mapped memory: a part of `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle


class Backing(IntEnum):
    """Name what a cache in host memory is made of (``PLK_BACKING_*``)."""

    HEAP = 0
    ANONYMOUS = 1
    TEMPORARY = 2
    FILE = 3


@dataclass(frozen=True, slots=True)
class MappingInfo:
    """Describe the mapped memory of a context (the patch ``mmap-kv``); see `RawMapping`."""

    kind: Backing
    n_mappings: int
    n_tensors: int
    n_cells: int
    kept: bool
    resumed: bool
    generation: int
    bytes_reserved: int
    bytes_committed: int
    bytes_file: int
    bytes_elsewhere: int


@dataclass(frozen=True, slots=True)
class RawMapping:
    """Hold what mapped memory takes.

    ``rows`` (n_tensors, 5) uint64: cache, layer, 0 for K and 1 for V, bytes reserved, committed.
    """

    info: MappingInfo
    rows: NDArray[np.uint64]


class Mapped(Protocol):
    """Read, give back and keep the mapped memory of contexts."""

    def mapping(self, context: ContextHandle) -> RawMapping:
        """Read what mapped memory takes, or raise `Unsupported` where the cache is on the heap."""

    def mapping_trim(self, context: ContextHandle) -> int:
        """Give the memory behind the last used cell back; return how many bytes."""

    def mapping_flush(self, context: ContextHandle, tokens: NDArray[np.int32] | None) -> None:
        """Write a kept cache to its file, with a token for each cell of all caches."""

    def mapping_tokens(self, context: ContextHandle) -> NDArray[np.int32]:
        """Return the tokens that the last flush was given."""
