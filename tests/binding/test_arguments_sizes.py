"""Test that creating a context aborts for no sizes, and that a lowered n_ubatch is reported.

Between 0.3.10 and 0.3.14 llama.cpp reserves a graph for n_ubatch tokens, rounded up to a multiple
of n_seq_max, and aborts if that exceeds the cells of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import NativeError
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.native

ROUNDS_UP = ("0.3.10", "0.3.12", "0.3.14")


@pytest.fixture(scope="module", params=[*ROUNDS_UP, "0.3.9", "0.3.16", "0.3.36"])
def release(request: pytest.FixtureRequest) -> str:
    """Return each release."""
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=["stock", "patched"])
def model(request: pytest.FixtureRequest, release: str) -> Iterator[kv.Model]:
    """Load a model in a worker, so that an abort is an error; all later sizes fail then too."""
    folder = built(f"{release}+{request.param}").folder
    with (
        kv.open(folder, isolated=True) as library,
        library.load_model(synthetic_models.tiny()) as loaded,
    ):
        yield loaded


@pytest.mark.slow
@pytest.mark.regression(
    "a context whose n_ubatch, rounded up to a multiple of n_seq_max, exceeded its cells ended "
    "the process between 0.3.10 and 0.3.14",
    by="hostile input",
    of="llama.cpp",
)
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("n_seq_max", [1, 3, 6, 21, 32])
@pytest.mark.parametrize("n_ctx", [32, 50, 64])
def test_every_size_can_be_filled(
    model: kv.Model, release: str, n_ctx: int, n_seq_max: int, flash_attn: bool
) -> None:
    """n_ubatch tokens are one micro-batch, and n_ctx tokens fit into the cache."""
    with model.context(
        n_ctx=n_ctx, n_batch=64, n_ubatch=64, n_seq_max=n_seq_max, flash_attn=flash_attn
    ) as ctx:
        ctx.sequence().prefill([1 + i % 20 for i in range(n_ctx)])
        if release in ROUNDS_UP:
            cells = (n_ctx + 31) // 32 * 32
            assert ctx.info.n_ubatch >= min(n_ctx, cells // n_seq_max * n_seq_max)


@pytest.mark.parametrize("release", ROUNDS_UP, indirect=True)
def test_more_sequences_than_cells_are_refused(model: kv.Model) -> None:
    """The error has both numbers, and the library still works."""
    with pytest.raises(NativeError, match="n_seq_max is 40, n_ctx 32"):
        model.context(n_ctx=32, n_batch=16, n_seq_max=40)
    with model.context(n_ctx=64, n_batch=16, n_seq_max=40) as ctx:
        ctx.sequence().prefill([1, 2, 3])
