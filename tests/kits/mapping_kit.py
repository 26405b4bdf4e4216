"""Helpers for tests of mapped memory: builds with it, tokens, sequences and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant

#: The last release that fails by default, and the newest one.
RELEASES = ("0.3.9", "0.3.36")

TOKENS = [(7 * i) % 60 + 1 for i in range(200)]


@pytest.fixture(scope="module", params=RELEASES)
def build(request: pytest.FixtureRequest) -> Variant:
    """Return a patched variant."""
    return built(f"{request.param}+patched")


@pytest.fixture
def model(build: Variant, tiny_model: Path) -> Iterator[kv.Model]:
    """Load the tiny model in this process, so that its smaps are the library's."""
    with kv.open(build.folder) as library, library.load_model(tiny_model) as loaded:
        yield loaded


def fill(ctx: kv.Context, tokens: list[int]) -> kv.Sequence:
    """Decode tokens in a new sequence."""
    sequence = ctx.sequence()
    sequence.prefill(tokens)
    return sequence


def three(ctx: kv.Context) -> list[kv.Sequence]:
    """Return three sequences that share, lost, moved and gathered cells."""
    first, second = fill(ctx, TOKENS), ctx.sequence()
    fork = first.fork(100)
    second.prefill(TOKENS[:70])
    first.remove(10, 20)
    second.remove(0, 20)
    if ctx.info.can_shift:
        second.shift(20, None, -20)
    if ctx.info.defrag:
        ctx.kv.defrag()
    return [first, second, fork]


def context_options() -> dict[str, Any]:
    """Return the context options of both sides."""
    return {"n_ctx": 1024, "n_batch": 512, "n_seq_max": 4, "flash_attn": True}


def logits(ctx: kv.Context, sequences: list[kv.Sequence]) -> list[np.ndarray]:
    """Decode a token in each sequence alone and return the logits."""
    found = []
    for sequence in sequences:
        ctx.decode(sequence.feed([3]))
        found.append(sequence.logits().copy())
    return found
