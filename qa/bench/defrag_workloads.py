"""Define the caches and patterns of live cells that defragmentation is measured with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyllamakv.runtime.ggml_types import number_type
from pyllamakv.scenarios.architectures import Shape

Live = NDArray[np.bool_]

#: Width and number of heads, and number of layers, as in models of one and of eight billion
#: parameters; everything outside the cache is tiny.
SHAPES = {
    "1B": Shape(
        "kv-1b", n_layer=16, n_embd=32, n_head=8, n_head_kv=8, head=64, n_ff=32, n_ctx=1 << 18
    ),
    "8B": Shape(
        "kv-8b", n_layer=32, n_embd=32, n_head=8, n_head_kv=8, head=128, n_ff=32, n_ctx=1 << 18
    ),
}

PATTERNS = ("alternate", "random 10 %", "random 50 %", "random 90 %", "runs of 16")

#: Bytes besides the cache and its copy: the library, a piece of state, the compute buffers.
BESIDE = 2 << 30


@dataclass(frozen=True)
class CacheTypes:
    """The types and layout of K and V in a cache."""

    flash_attn: bool
    kind: str = "f16"

    @property
    def name(self) -> str:
        """Return what a table calls it."""
        return (
            f"flash attention, {self.kind}"
            if self.flash_attn
            else f"no flash attention, {self.kind}"
        )


SETTINGS = (
    CacheTypes(True),
    CacheTypes(False),
    CacheTypes(True, "q8_0"),
    CacheTypes(True, "q4_0"),
)


@dataclass(frozen=True)
class CacheShape:
    """One cache to measure: the name of a shape, a setting, and the number of cells."""

    shape: str
    setting: CacheTypes
    cells: int

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return SHAPES[self.shape].n_layer

    @property
    def width(self) -> int:
        """Return the values in a row of K or V."""
        return SHAPES[self.shape].head * SHAPES[self.shape].n_head_kv

    @property
    def row(self) -> int:
        """Return the bytes of a row of K or V."""
        return number_type(self.setting.kind).row_bytes(self.width)

    @property
    def transposed(self) -> bool:
        """Return whether V has a row per value."""
        return not self.setting.flash_attn

    @property
    def cell(self) -> int:
        """Return the bytes of a cell, over all layers."""
        return 2 * self.row * self.layers

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole cache."""
        return self.cells * self.cell

    def skipped(self, available: int | None) -> str:
        """Return why it cannot be measured in this much memory, or nothing.

        At most two caches exist at the same time, and the block of the same size in which the
        limits are measured.
        """
        needed = 3 * self.bytes + BESIDE
        if available is None or needed <= available:
            return ""
        return f"skipped: needs {needed / 1e9:.0f} GB, {available / 1e9:.0f} GB there"


def live(pattern: str, cells: int, seed: int = 20261120) -> Live:
    """Return the mask of cells that stay in a full cache, (cells,) bool."""
    numbers = np.arange(cells)
    if pattern == "alternate":
        return np.asarray(numbers % 2 == 0)
    kind, _, rest = pattern.partition(" ")
    if kind == "runs":
        length = int(rest.removeprefix("of "))
        return np.asarray(numbers // length % 2 == 0)
    share = int(rest.removesuffix(" %")) / 100
    return np.asarray(np.random.default_rng(seed).random(cells) < share)
