"""Test the choice of tokens from logits, in numpy and over the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import Closed, Unsupported, UsageError
from pyllamakv.runtime.sampler import NumpySampler

if TYPE_CHECKING:
    from pathlib import Path

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)


@given(LOGITS, st.integers(0, 100))
def test_no_temperature_is_greedy(values: list[float], seed: int) -> None:
    """Check the best token, whatever the seed."""
    logits = np.array(values, dtype=np.float32)
    assert NumpySampler(SamplerParams(seed=seed)).sample_logits(logits.copy()) == logits.argmax()


@given(
    LOGITS,
    st.integers(1, 5),
    st.floats(0.05, 1, exclude_max=True),
    st.floats(0.01, 0.9),
    st.integers(0, 2**32 - 1),
)
def test_what_is_cut_off_is_never_chosen(
    values: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Check each limit against the probabilities."""
    logits = np.array(values, dtype=np.float32)
    weights = np.exp(logits.astype(float) - logits.max())
    for params in (
        SamplerParams(seed=seed, temperature=2.0, top_k=top_k),
        SamplerParams(seed=seed, temperature=2.0, top_p=top_p),
        SamplerParams(seed=seed, temperature=2.0, min_p=min_p),
    ):
        token = NumpySampler(params).sample_logits(logits.copy())
        better = int((logits > logits[token]).sum())
        if params.top_k:
            assert better < top_k
        if params.top_p < 1:
            above = weights[logits > logits[token]].sum() / weights.sum()
            assert above < top_p + 1e-6
        if params.min_p:
            assert weights[token] >= min_p - 1e-6


def test_chances_follow_the_logits() -> None:
    """Check shares of many draws, with and without a low temperature."""
    logits = np.log(np.array([0.7, 0.2, 0.1], dtype=np.float32))
    sampler = NumpySampler(SamplerParams(seed=3, temperature=1.0))
    counts = np.bincount([sampler.sample_logits(logits.copy()) for _ in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - [0.7, 0.2, 0.1]).max() < 0.05
    cold = NumpySampler(SamplerParams(seed=3, temperature=0.05))
    assert {cold.sample_logits(logits.copy()) for _ in range(50)} == {0}


def test_repetition_is_punished(tmp_path: Path) -> None:
    """Check that a token just chosen gives way, on both sides of zero."""
    sampler = NumpySampler(SamplerParams(penalty_last_n=4, penalty_repeat=4.0))
    sampler._last = [0]
    assert sampler.sample_logits(np.array([2.0, 1.0], dtype=np.float32)) == 1
    assert sampler.sample_logits(np.array([-1.0, -2.0], dtype=np.float32)) == 1
    sampler.reset()
    assert sampler.sample_logits(np.array([2.0, 1.0], dtype=np.float32)) == 0
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.step(a, 5)
    first = sampler.sample(ctx)
    assert sampler.sample(ctx) != first


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"seed": -1},
        {"seed": 2**32},
        {"penalty_repeat": 0.0},
        {"penalty_last_n": -1},
    ],
)
def test_impossible_parameters_are_refused(tmp_path: Path, options: dict) -> None:
    """Check both samplers."""
    with pytest.raises(UsageError):
        NumpySampler(SamplerParams(**options))
    with pytest.raises(UsageError):
        kit.model(tmp_path).sampler(**options)


def test_a_sampler_of_the_library_ends_with_its_model(tmp_path: Path) -> None:
    """Check use, reset, closing and the order of freeing."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.step(a, 5)
    with ctx.model.sampler(temperature=0.5) as sampler:
        assert sampler.sample(ctx) == ctx.logits().argmax()
        sampler.reset()
    for attempt in (lambda: sampler.sample(ctx), sampler.reset):
        with pytest.raises(Closed):
            attempt()
    other = ctx.model.sampler()
    ctx.model.close()
    assert ctx.native.freed == ["sampler", "sampler", "context", "model"]
    with pytest.raises(Closed):
        other.reset()
    with pytest.raises(Closed):
        ctx.model.sampler()


def test_a_build_without_samplers_says_so(tmp_path: Path) -> None:
    """Check the message."""
    with pytest.raises(Unsupported, match="NumpySampler"):
        kit.model(tmp_path, capabilities=ALL & ~Capability.SAMPLER).sampler()
