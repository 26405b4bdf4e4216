"""Test sampling of tokens from logits, in numpy and in the library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
import runtime_kit as kit
from fakes.simulated import ALL
from hypothesis import given
from hypothesis import strategies as st

import pyllamakv as kv
from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import Closed, NoTokenAllowed, Unsupported, UsageError
from pyllamakv.runtime.sampler import NumpySampler, token_logprobs

if TYPE_CHECKING:
    from pathlib import Path

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30)


@given(LOGITS, st.integers(0, 100))
def test_no_temperature_is_greedy(values: list[float], seed: int) -> None:
    """Check the best token, with any seed."""
    logits = np.array(values, dtype=np.float32)
    assert NumpySampler(SamplerParams(seed=seed)).sample_logits(logits.copy()) == logits.argmax()


@given(
    LOGITS,
    st.integers(1, 5),
    st.floats(0.05, 1, exclude_max=True),
    st.floats(0.01, 0.9),
    st.integers(0, 2**32 - 2),
)
def test_excluded_tokens_are_never_chosen(
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
    """Check shares of many samples, with and without a low temperature."""
    logits = np.log(np.array([0.7, 0.2, 0.1], dtype=np.float32))
    sampler = NumpySampler(SamplerParams(seed=3, temperature=1.0))
    counts = np.bincount([sampler.sample_logits(logits.copy()) for _ in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - [0.7, 0.2, 0.1]).max() < 0.05
    cold = NumpySampler(SamplerParams(seed=3, temperature=0.05))
    assert {cold.sample_logits(logits.copy()) for _ in range(50)} == {0}


def test_repetition_is_punished(tmp_path: Path) -> None:
    """Check that a sampled token becomes less likely, for positive and negative logits."""
    sampler = NumpySampler(SamplerParams(penalty_last_n=4, penalty_repeat=4.0))
    sampler._last = [0]
    assert sampler.sample_logits(np.array([2.0, 1.0], dtype=np.float32)) == 1
    assert sampler.sample_logits(np.array([-1.0, -2.0], dtype=np.float32)) == 1
    sampler.reset()
    assert sampler.sample_logits(np.array([2.0, 1.0], dtype=np.float32)) == 0
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    a.step(5)
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


def test_unknown_options_are_named(tmp_path: Path) -> None:
    """The error has a similar option, or all."""
    model = kit.model(tmp_path)
    for name, hint in (
        ("temprature", "did you mean temperature"),
        ("tfs_z", "known: seed, "),
        ("repeat_penalty", "did you mean penalty_repeat"),
        ("mirostat_mode", r"did you mean mirostat\?"),
    ):
        with pytest.raises(UsageError, match=f"no option {name}; {hint}"):
            model.sampler(**{name: 1})


def test_a_sampler_of_the_library_ends_with_its_model(tmp_path: Path) -> None:
    """Check use, reset, closing and the order of freeing."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    a.step(5)
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


def test_build_without_samplers_raises_unsupported(tmp_path: Path) -> None:
    """Check the message."""
    with pytest.raises(Unsupported, match="NumpySampler"):
        kit.model(tmp_path, capabilities=ALL & ~Capability.SAMPLER).sampler()


def test_a_missing_sampler_names_its_capability(tmp_path: Path) -> None:
    """In C by the build's capabilities; numpy needs none."""
    model = kit.model(tmp_path)
    there = ALL | Capability.SAMPLER_CHAIN
    for options, name in (
        ({"typical_p": 0.5}, "SAMPLER_CHAIN"),
        ({"penalty_freq": 0.5}, "SAMPLER_CHAIN"),
        ({"samplers": []}, "SAMPLER_CHAIN"),
        ({"temperature": 1, "mirostat": 2}, "SAMPLER_CHAIN"),
        ({"temperature": 1, "dynatemp_range": 0.5}, "SAMPLER_CHAIN"),
        ({"top_n_sigma": 1}, "TOP_N_SIGMA"),
        ({"xtc_probability": 0.5}, "XTC"),
        ({"dry_multiplier": 0.5}, "DRY"),
        ({"temperature": 1, "adaptive_target": 0.5}, "ADAPTIVE_P"),
        ({"grammar": "root ::= [a]"}, "GRAMMAR"),
    ):
        with pytest.raises(Unsupported, match=name) as caught:
            model.sampler(**options)
        assert caught.value.capability == name
        with pytest.raises(Unsupported, match=r"use model\.sampler"):
            NumpySampler(SamplerParams(**options))
        more = there | Capability[name]
        kit.model(tmp_path, capabilities=more).sampler(**options).close()
    with pytest.raises(Unsupported, match=r"use model\.sampler"):
        NumpySampler(SamplerParams(logit_bias={1: 1.0}))


def test_parameters_know_what_they_change() -> None:
    """Sequences can share greedy choices, but not samplers with a history."""
    assert SamplerParams().is_greedy
    assert SamplerParams(top_k=5, min_p=0.1, dry_base=2.0).is_greedy
    assert SamplerParams(penalty_repeat=2.0, penalty_last_n=0).is_greedy
    for options in ({"logit_bias": {1: 1}}, {"xtc_probability": 1}, {"temperature": 0.1}):
        assert not SamplerParams(**options).is_greedy
        assert not SamplerParams(**options).keeps_history
    for options in (
        {"penalty_repeat": 2.0},
        {"penalty_freq": 1},
        {"penalty_present": 1},
        {"dry_multiplier": 1},
        {"grammar": ""},
        {"mirostat": 1, "temperature": 1},
        {"adaptive_target": 0.5, "temperature": 1},
    ):
        assert SamplerParams(**options).keeps_history
        assert not SamplerParams(**options).is_greedy


def test_log_probabilities_are_those_of_the_logits(tmp_path: Path) -> None:
    """They are those of the model: the chosen token's, and the most likely ones', best first."""
    logits = np.array([1.0, 3.0, -np.inf, 3.0, 2.0], dtype=np.float32)
    found = token_logprobs(logits, 4, 3)
    total = math.log(sum(math.exp(each) for each in logits))
    assert [token for token, _ in found.top] == [1, 3, 4]
    assert found.logprob == pytest.approx(2 - total)
    assert [p for _, p in found.top] == pytest.approx([3 - total, 3 - total, 2 - total])
    assert token_logprobs(logits, 0, 0).top == ()
    assert len(token_logprobs(logits, 0, 99).top) == 5
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    with ctx.model.sampler(top_logprobs=2) as sampler:
        a.step(5)
        expected = token_logprobs(ctx.logits().copy(), ctx.logits().argmax(), 2)
        list(a.generate(3, sampler))
        assert [each.token for each in sampler.logprobs] == a.tokens[1:]
        assert sampler.logprobs[0] == expected
        assert all(len(each.top) == 2 for each in sampler.logprobs)
        sampler.reset()
        assert sampler.logprobs == []


def test_processors_change_the_logits(tmp_path: Path) -> None:
    """They get a copy of the logits and the tokens so far; log-probabilities do not change."""
    ctx = kit.context(tmp_path)
    a, seen = ctx.sequence(), []

    def ban_best(tokens: list[int], logits: np.ndarray) -> None:
        seen.append(list(tokens))
        logits[logits.argmax()] = -np.inf

    def prefer(tokens: list[int], logits: np.ndarray) -> None:
        assert np.isinf(logits).any()
        if len(tokens) == 1:
            logits[77] = 100.0

    a.step(5)
    before, second = ctx.logits().copy(), ctx.logits().top(2)[1][0]
    with ctx.model.sampler(processors=[ban_best, prefer], top_logprobs=0) as sampler:
        assert sampler.sample(ctx) == second
        assert (ctx.logits() == before).all()
        assert sampler.sample(ctx) == 77
        assert seen == [[], [second]]
        assert sampler.logprobs == [
            token_logprobs(before, second, 0),
            token_logprobs(before, 77, 0),
        ]
        sampler.reset()
        assert sampler.sample_all(ctx) == [second]
        with pytest.raises(UsageError, match="runs in Python"):
            ctx.advance([a], [5], 2, sampler)
        b = ctx.sequence()
        ctx.step_all([a, b], [5, 6])
        with pytest.raises(UsageError, match="history of one sequence"):
            sampler.sample_all(ctx)


def test_bad_processors_are_named(tmp_path: Path) -> None:
    """Not callable, raising, excluding all tokens, or writing NaN."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    a.step(5)
    for wrong in (5, [5], "ab"):
        with pytest.raises(UsageError, match="processors"):
            ctx.model.sampler(processors=wrong)
    for value, kind in ((-np.inf, NoTokenAllowed), (np.nan, UsageError), (np.inf, UsageError)):
        with (
            ctx.model.sampler(processors=[lambda _, logits, v=value: logits.fill(v)]) as sampler,
            pytest.raises(kind),
        ):
            sampler.sample(ctx)
    with (
        ctx.model.sampler(processors=[lambda tokens, logits: {}[5]]) as sampler,
        pytest.raises(KeyError),
    ):
        sampler.sample(ctx)
    assert sampler.logprobs == []


def test_a_processor_that_returns_scores_is_refused(tmp_path: Path) -> None:
    """Those of other libraries return the scores, which would have no effect here."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    with (
        ctx.model.sampler(processors=[lambda tokens, logits: logits + 1]) as sampler,
        pytest.raises(UsageError, match="in place and return None, not an array"),
    ):
        sampler.sample(ctx)


@pytest.mark.parametrize("wrong", [None, "5", 5.0, -1, 10**6])
def test_a_sampler_that_returns_no_token_is_named(tmp_path: Path, wrong: object) -> None:
    """Check a context and a batcher; the sequence keeps its tokens."""

    class Wrong:
        def sample(self, context: kv.Context, index: int = -1) -> Any:
            return wrong

    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    a.step(5)
    expected = r"the result of Wrong\.sample must be a whole number from 0 to"
    with pytest.raises(UsageError, match=expected):
        next(a.generate(3, Wrong()))
    assert a.tokens == [5]
    a.close()
    with kv.SlotCache(ctx) as cache, kv.Batcher(cache) as batcher:
        one = batcher.submit([1, 2], 3, sampler=Wrong())
        with pytest.raises(UsageError, match=expected):
            one.result()
        assert one.finish_reason == "failed"


def test_a_grammar_with_a_schema_is_refused(tmp_path: Path) -> None:
    """Both restrict the text; together they may allow no token."""
    with pytest.raises(UsageError, match="grammar and json_schema both"):
        kit.model(tmp_path).sampler(grammar='root ::= "a"', json_schema={"type": "object"})


def test_a_seed_repeats_and_no_seed_is_random(tmp_path: Path) -> None:
    """A random seed is in the parameters of the sampler, for a repetition."""
    options = {"temperature": 1.0}
    first, second = (kv.NumpySampler(kv.SamplerParams(**options)) for _ in range(2))
    again = kv.NumpySampler(first.params)
    logits = np.zeros(1000, np.float32)
    draws = [
        [each.sample_logits(logits.copy()) for _ in range(8)] for each in (first, second, again)
    ]
    assert draws[0] == draws[2] != draws[1]
    first.reset()
    assert first.sample_logits(logits.copy()) == draws[0][0]
    model = kit.model(tmp_path)
    with model.sampler() as one, model.sampler() as other, model.sampler(seed=7) as chosen:
        assert one.params.seed != other.params.seed
        assert chosen.params.seed == 7
        assert repr(chosen) == "<Sampler seed=7>"
    assert repr(chosen) == "<Sampler closed>"
    assert kv.SamplerParams().seed is None


def test_accepted_tokens_are_checked(tmp_path: Path) -> None:
    """They must be integers."""
    with kit.model(tmp_path).sampler() as sampler:
        sampler.accept([5, 6])
        for wrong in ("ab", [1.5], 5):
            with pytest.raises(UsageError):
                sampler.accept(wrong)
    with pytest.raises(Closed):
        sampler.accept([5])
