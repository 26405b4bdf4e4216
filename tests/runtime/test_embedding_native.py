"""Test embeddings on real builds, compared with each other and with numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import embedding_kit
import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import Pooling
from pyllamakv.errors import UsageError
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.native

RELEASES = ("0.3.6", "0.3.9", "0.3.16", "0.3.36", "b11549")
INPUTS = [[1 + (7 * i + start) % 60 for i in range(3 + start)] for start in range(12)]


@pytest.fixture(scope="module", params=[f"{release}+stock" for release in RELEASES])
def library(request: pytest.FixtureRequest) -> Iterator[kv.OpenLibrary]:
    """Open several releases."""
    with kv.open(built(request.param).folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(library: kv.OpenLibrary) -> Iterator[kv.Model]:
    """Load a small model of text."""
    with library.load_model(synthetic_models.model("bytes")) as loaded:
        yield loaded


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
def test_pooled_embeddings_are_those_of_the_tokens(model: kv.Model, unified: bool) -> None:
    """Mean, first and last token, for inputs alone and together in batches."""
    capable = kv.Capability.KV_UNIFIED in model.native.about.capabilities
    if not unified and not capable:
        pytest.skip("all sequences share the cells in this release")
    tokens = []
    with model.context(64, embeddings=True, pooling="none") as context:
        assert context.info.pooling is Pooling.NONE
        for each in INPUTS:
            with context.sequence() as sequence:
                context.decode(sequence.feed(each, "none"))
                tokens.append(np.stack([context.embedding(i) for i in range(len(each))]))
                assert np.array_equal(context.embedding(), tokens[-1][-1])
    expected = {
        "mean": [each.mean(axis=0) for each in tokens],
        "cls": [each[0] for each in tokens],
        "last": [each[-1] for each in tokens],
    }
    assert np.ptp(expected["mean"], axis=0).max() > 0.1
    for pooling, rows in expected.items():
        with model.context(
            256, n_ubatch=32, n_seq_max=4, embeddings=True, pooling=pooling, kv_unified=unified
        ) as context:
            assert context.info.pooling is Pooling[pooling.upper()]
            found = context.embed(INPUTS)
            assert found.shape == (len(INPUTS), model.info.n_embd_out)
            assert np.abs(found - np.stack(rows)).max() < 1e-3
            with context.sequence() as sequence:
                context.decode(sequence.feed(INPUTS[5]))
                assert np.abs(sequence.embedding() - rows[5]).max() < 1e-3
                with context.sequence() as other:
                    with pytest.raises(UsageError):
                        other.embedding()
                    with pytest.raises(kv.DecodeError):
                        other.step(5)  # releases through b5640 would assert


def test_micro_batch_is_reduced_for_mean_pooling(model: kv.Model) -> None:
    """If the number of sequences does not divide a micro-batch, it is made smaller."""
    for n_ctx, n_ubatch, n_seq_max in ((512, 512, 6), (100, 512, 3), (64, 8, 6)):
        options: dict[str, Any] = {"n_ubatch": n_ubatch, "n_seq_max": n_seq_max}
        with model.context(n_ctx, embeddings=True, pooling="mean", **options) as ctx:
            assert ctx.info.n_ubatch % n_seq_max == 0
            assert np.isfinite(ctx.embed([[1, 2], [3]])).all()
    with pytest.raises(UsageError, match="n_seq_max is 6"):
        model.context(64, n_ubatch=4, n_seq_max=6, embeddings=True, pooling="mean")


def test_the_pooling_of_the_file_is_the_default(library: kv.OpenLibrary, tmp_path: Path) -> None:
    """`ContextInfo` has the effective one."""
    path, _head = embedding_kit.encoder(tmp_path / "last.gguf", Pooling.LAST)
    with library.load_model(path) as model:
        assert model.context(64, embeddings=True).info.pooling is Pooling.LAST
        assert model.context(64, embeddings=True, pooling="cls").info.pooling is Pooling.CLS
        assert model.context(64).info.pooling is Pooling.MODEL
    path, _head = embedding_kit.encoder(tmp_path / "none.gguf")
    with library.load_model(path) as model:
        assert model.context(64, embeddings=True).info.pooling is Pooling.NONE


def test_a_classification_head_ranks(library: kv.OpenLibrary, tmp_path: Path) -> None:
    """An encoder of one layer, with a head whose outputs numpy computes from the first token."""
    path, head = embedding_kit.encoder(tmp_path / "encoder.gguf")
    with library.load_model(path) as model:
        tokens = [1, 5, 9, 13]
        with model.context(64, embeddings=True, pooling="cls") as context:
            first = context.embed([tokens])[0]
        with model.context(64, embeddings=True, pooling="rank") as context:
            assert context.info.pooling is Pooling.RANK
            scores = context.embed([tokens, tokens[:2]])
        assert np.abs(scores[0] - head(first)).max() < 1e-3
        assert np.abs(scores[0] - scores[1]).max() > 1e-4


@pytest.mark.slow
def test_a_worker_returns_embeddings(library: kv.OpenLibrary) -> None:
    """They are equal."""
    path = synthetic_models.model("bytes")
    options = {"embeddings": True, "pooling": "mean", "n_seq_max": 4}
    with kv.open(library.about.variant, isolated=True) as apart:
        found = apart.load_model(path).context(64, **options).embed(INPUTS)
    with library.load_model(path) as here:
        assert np.array_equal(found, here.context(64, **options).embed(INPUTS))
