"""Test embeddings with a simulated library: batches, views, and contexts without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit
from fakes.tiny_gguf import write_gguf

from pyllamakv.binding.protocol import Capability, Pooling
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import (
    PromptTooLong,
    StaleLogits,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context


def context(folder: Path, pooling: str = "mean", **options: Any) -> Context:
    """Return a context of 64 cells, 4 sequences and micro-batches of 32 tokens."""
    return kit.context(folder, n_ubatch=32, embeddings=True, pooling=pooling, **options)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_inputs_are_pooled(tmp_path: Path, pooling: str) -> None:
    """Embeddings are equal for one input, several, and text; in any number of batches."""
    ctx = context(tmp_path, pooling)
    assert ctx.info.pooling is Pooling[pooling.upper()]
    inputs = [list(range(start, start + 10)) for start in range(5, 95, 10)]
    found = ctx.embed(inputs)
    assert found.shape == (9, ctx.model.info.n_embd_out)
    assert found.dtype == np.float32
    for row, each in zip(found, inputs, strict=True):
        assert np.array_equal(row, ctx.embed([each])[0])
    assert np.array_equal(ctx.embed(["ab"]), ctx.embed([ctx.model.tokenize("ab")]))
    assert len(ctx.vacant) == 4
    assert ctx.kv.stats.used == 0
    assert ctx.embed([]).shape == (0, ctx.model.info.n_embd_out)


def test_the_mean_is_that_of_the_tokens(tmp_path: Path) -> None:
    """Normalized rows have length 1."""
    plain, pooled = context(tmp_path, "none"), context(tmp_path)
    sequence = plain.sequence()
    plain.decode(sequence.feed(range(5, 25), "last"))
    tokens = np.stack([plain.embedding(i) for i in range(20)])
    row = pooled.embed([range(5, 25)])[0]
    assert np.allclose(row, tokens.mean(axis=0), atol=1e-5)
    unit = pooled.embed([range(5, 25)], normalize=True)[0]
    assert np.allclose(unit * np.linalg.norm(row), row, atol=1e-5)


def test_embeddings_are_views_of_the_last_decode(tmp_path: Path) -> None:
    """They become stale, and each kind of context has its own kind."""
    plain, pooled = context(tmp_path, "none"), context(tmp_path)
    a = plain.sequence()
    with pytest.raises(StaleLogits):
        plain.embedding()
    a.prefill([5, 6, 7], logits=False)
    last = plain.embedding()
    assert np.array_equal(last, plain.embedding(2))
    a.step(8)
    with pytest.raises(StaleLogits, match="embeddings"):
        last.copy()
    for wrong in (2**31, -(2**40), "a", 1.5):
        with pytest.raises(UsageError, match="index"):
            plain.embedding(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'none'"):
        a.embedding()
    b, c = pooled.sequence(), pooled.sequence()
    pooled.decode([b.feed([5, 6]), c.feed([7])])
    assert np.array_equal(b.embedding(), context(tmp_path).embed([[5, 6]])[0])
    with pytest.raises(UsageError, match="'mean'"):
        pooled.embedding()


def test_a_context_has_embeddings_or_logits(tmp_path: Path) -> None:
    """Sampling, generating and batching need logits."""
    ctx = context(tmp_path)
    a = ctx.sequence()
    a.prefill([5, 6, 7])
    with ctx.model.sampler() as sampler:
        calls = [
            ctx.logits, ctx.logits_all, a.logits, lambda: sampler.sample(ctx),
            lambda: list(a.generate(2)), lambda: Batcher(SlotCache(context(tmp_path))),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(UsageError, match="no logits"):
                call()
    plain = kit.context(tmp_path)
    for call in (plain.embedding, plain.sequence().embedding, lambda: plain.embed([[1]])):
        with pytest.raises(UsageError, match="embeddings=True"):
            call()


def test_batches_that_cannot_be_pooled_are_refused(tmp_path: Path) -> None:
    """Nothing is decoded."""
    ctx = context(tmp_path, n_batch=64)
    a, b = ctx.sequence(), ctx.sequence()
    with pytest.raises(UsageError, match="n_ubatch"):
        ctx.decode(a.feed(range(3, 43)))
    with pytest.raises(UsageError, match="sequence 1 needs more tokens"):
        ctx.decode(b.feed([5]))
    with pytest.raises(PromptTooLong, match="input 1 has 40 tokens"):
        ctx.embed([[5], range(3, 43)])
    with pytest.raises(UsageError, match="input 0 has no tokens"):
        ctx.embed([[]])
    assert ctx.kv.stats.used == 0
    streams = {"kv_unified": False, "native": {"capabilities": Capability((1 << 22) - 1)}}
    apart = context(tmp_path, **streams)
    with pytest.raises(UsageError, match="only one"):
        apart.decode([apart.sequence().feed([5, 6]), apart.sequence().feed([7])])
    assert len(context(tmp_path, **streams).embed([[5, 6], [7]])) == 2


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"pooling": "mean"}, UsageError, "embeddings=True"),
        ({"embeddings": True, "pooling": "max"}, UsageError, "mean"),
        ({"embeddings": True, "pooling": 1}, UsageError, "pooling"),
        ({"embeddings": 1}, UsageError, "embeddings"),
        ({"embeddings": True, "pooling": "rank"}, Unsupported, "RANK"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    """The error has the name of the option."""
    with pytest.raises(error, match=reason):
        kit.context(tmp_path, **options)


def test_rank_needs_a_classification_head(tmp_path: Path) -> None:
    """llama.cpp would assert, also if the model file names this pooling."""
    library = kit.library(capabilities=Capability((1 << 22) - 1))
    with pytest.raises(Unsupported, match="classification head"):
        library.load_model(write_gguf(tmp_path / "a.gguf")).context(
            64, embeddings=True, pooling="rank"
        )
    kind = ("llama.pooling_type", 4, (4).to_bytes(4, "little"))
    named = library.load_model(write_gguf(tmp_path / "b.gguf", more=kind))
    with pytest.raises(Unsupported, match="classification head"):
        named.context(64, embeddings=True)
    assert named.context(64, embeddings=True, pooling="mean").info.pooling is Pooling.MEAN
