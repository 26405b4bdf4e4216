"""Test slots and batching on real builds: reuse, shifts and batches equal single runs."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.cache.slot_choice import checked
from pyllamakv.errors import ReprocessNeeded
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.native

#: Largest difference between orders of the same floating-point sums.
NOISE = 0.02


@pytest.fixture(scope="module", params=["0.3.9+stock", "0.3.9+patched", "0.3.36+patched"])
def library(request: pytest.FixtureRequest) -> Iterator[kv.OpenLibrary]:
    """Open the test release, stock and patched, and the latest where it is built."""
    with kv.open(built(request.param).folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(library: kv.OpenLibrary) -> kv.Model:
    """Load a model of two layers."""
    return library.load_model(synthetic_models.model("grouped"))


@pytest.fixture(params=["plain", "flash", "quantized", "streams"])
def options(request: pytest.FixtureRequest, library: kv.OpenLibrary) -> dict[str, Any]:
    """Return the layout of the cache."""
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "flash": {"flash_attn": True},
        "quantized": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
        "streams": {"flash_attn": True, "kv_unified": False},
    }
    if request.param == "streams" and kv.Capability.STREAMS not in library.about.capabilities:
        pytest.skip("this release has no streams")
    return found[request.param]


def fresh(model: kv.Model, tokens: list[int], options: dict[str, Any]) -> np.ndarray:
    """Return the logits after these tokens in a new context."""
    with model.context(n_ctx=512, n_batch=512, **options) as ctx:
        ctx.sequence().prefill(tokens)
        return ctx.logits().copy()


def close(a: np.ndarray, b: np.ndarray, kind: str = "f16") -> bool:
    """Return whether logits are equal up to noise."""
    far = float(np.abs(a - b).max())
    return far <= (NOISE if kind == "f16" else 8 * NOISE) * float(np.abs(b).max())


def prompt(seed: int, n: int) -> list[int]:
    """Return random-looking tokens."""
    return [(seed * 7 + i * i + i) % 60 for i in range(n)]


@pytest.mark.parametrize("policy", ["longest", "best"])
def test_reused_prompts_give_the_same_logits(
    model: kv.Model, options: dict[str, Any], policy: Any
) -> None:
    """Extended, repeated, forked, shorter, new and evicted prompts equal new contexts."""
    kind = options.get("type_k", "f16")
    with model.context(n_ctx=512, n_batch=64, n_seq_max=3, **options) as ctx:
        cache = SlotCache(ctx, policy=policy)
        base = prompt(1, 80)
        for tokens in (
            base, [*base, *prompt(2, 20)], base, [*base[:50], *prompt(3, 30)], base[:40],
            prompt(4, 60), prompt(5, 60), [*base[:50], *prompt(3, 40)], base, prompt(6, 90),
        ):  # fmt: skip
            with cache.acquire(tokens) as lease:
                lease.decode()
                assert lease.sequence.tokens == tokens
                assert close(ctx.logits().copy(), fresh(model, tokens, options), kind)
            cache.check()
        assert cache.stats().reused_tokens > 200


def test_slot_shift_leaves_its_siblings_unchanged(model: kv.Model, options: dict[str, Any]) -> None:
    """Shift in place if the cells are not shared, else decode again: the sibling is unchanged.

    Ollama also moves the sibling's positions: its logits differ by half of their scale.
    """
    kind, noisy = options.get("type_k", "f16"), "q8_0"
    with model.context(n_ctx=240, n_batch=64, n_seq_max=3, **options) as ctx:
        cache = SlotCache(ctx, keep=8, size=80)
        base = prompt(1, 78)
        one = cache.acquire(base)
        one.decode()
        other = cache.acquire([*base[:70], *prompt(2, 10)])
        other.decode()
        shared = ctx.kv.stats.shared
        try:
            other.make_room(4)
            reprocessed = False
        except ReprocessNeeded as error:
            reprocessed = True
            other.sequence.prefill(error.tokens)
        tokens = [*base[:8], *base[44:70], *prompt(2, 10)]
        assert other.sequence.tokens == tokens
        assert reprocessed is (shared > 0 or not ctx.info.can_shift)
        cache.check()
        if reprocessed:
            assert close(ctx.logits().copy(), fresh(model, tokens, options), kind)
        one.decode([5])
        assert close(ctx.logits().copy(), fresh(model, [*base, 5], options), kind)
        # Now alone: it can be shifted in place, and equals the runtime's result of the same steps.
        other.release()
        with cache.acquire([9, 9]) as lease:
            lease.decode()
        one.decode([6])
        try:
            one.make_room(1)
        except ReprocessNeeded as error:
            assert not ctx.info.can_shift
            one.sequence.prefill(error.tokens)
        assert one.sequence.tokens == [*base[:8], *base[44:], 5, 6]
        cache.check()
        assert cache.stats().shifts >= ctx.info.can_shift
        one.decode([7])
        with model.context(n_ctx=240, n_batch=64, **options) as again:
            sequence = again.sequence()
            sequence.prefill([*base, 5, 6])
            if ctx.info.can_shift:
                sequence.remove(8, 44)
                sequence.shift(44, None, -36)
            else:
                again.clear()
                sequence.prefill(one.sequence.tokens[:-1])
            again.decode(sequence.feed([7]))
            assert close(ctx.logits().copy(), again.logits().copy(), noisy)


@pytest.mark.parametrize("states", [True, False])
def test_recurrent_slot_reuses_only_whole_states(library: kv.OpenLibrary, states: bool) -> None:
    """A state cannot be cut: an extension continues, other prompts need a saved state.

    Ollama's single entry ignored a refused trim; tokens and state disagreed.
    """
    again = 39 if states else 0
    with (
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=256, n_batch=64, n_seq_max=1) as ctx,
    ):
        cache = SlotCache(ctx, checkpoints=None if states else kv.CheckpointSchedule(size=0))
        base = prompt(1, 40)
        for tokens, cached in (
            (base, 0), ([*base, 3, 4], 40), (base, again), (base, again), (prompt(2, 30), 0),
            ([*prompt(2, 30), 1], 30),
        ):  # fmt: skip
            with cache.acquire(tokens) as lease:
                assert lease.cached == cached
                lease.decode()
                got = ctx.logits().copy()
            with model.context(n_ctx=256, n_batch=64) as alone:
                alone.sequence().prefill(tokens)
                assert close(got, alone.logits().copy(), "q8_0")


def test_prefix_outside_the_window_is_decoded_again(library: kv.OpenLibrary) -> None:
    """A prefix with a partial window is decoded again; logits are those of a new context."""
    with (
        library.load_model(synthetic_models.model("sliding")) as model,
        model.context(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=2) as ctx,
    ):
        cache = SlotCache(ctx, policy="longest")
        base = prompt(1, 200)
        for tokens in (base, base, [*base[:120], *prompt(2, 30)], [*base[:120], *prompt(2, 33)]):
            with cache.acquire(tokens) as lease:
                lease.decode()
                got = ctx.logits().copy()
                with model.context(n_ctx=512, n_batch=64, n_ubatch=64) as alone:
                    alone.sequence().prefill(tokens)
                    assert close(got, alone.logits().copy(), "q8_0")
            cache.check()


def greedy(model: kv.Model, tokens: list[int], n: int, options: dict[str, Any]) -> list[int]:
    """Return the most likely continuation in a new context, one token at a time."""
    with model.context(n_ctx=512, n_batch=512, **options) as ctx:
        sequence = ctx.sequence()
        sequence.prefill(tokens)
        chosen = [ctx.logits().argmax()]
        while len(chosen) < n and not (model.info.has_vocab and model.is_eog(chosen[-1])):
            sequence.step(chosen[-1])
            chosen.append(ctx.logits().argmax())
        return chosen


def same_or_tied(
    model: kv.Model,
    tokens: list[int],
    batched: list[int],
    alone: list[int],
    options: dict[str, Any],
) -> bool:
    """Return whether two continuations are equal, or diverge at equally likely tokens."""
    for n, (a, b) in enumerate(zip_longest(batched, alone, fillvalue=-1)):
        if a != b:
            if -1 in (a, b):
                return model.is_eog(max(a, b))
            logits = fresh(model, [*tokens, *alone[:n]], options)
            return bool(abs(logits[a] - logits[b]) <= NOISE * np.abs(logits).max())
    return True


@pytest.mark.parametrize("manager", ["longest", "best", "prefixes"])
def test_batched_prompts_generate_the_same_tokens_as_alone(
    model: kv.Model, options: dict[str, Any], manager: str
) -> None:
    """Ten prompts of all lengths, some with a common beginning, in three slots."""
    prompts = [prompt(n, 5 + 13 * n) for n in range(7)]
    prompts += [[*prompts[6], *prompt(9, 9)], [*prompts[6][:40], *prompt(8, 9)], prompts[6]]
    with model.context(n_ctx=768, n_batch=48, n_ubatch=16, n_seq_max=3, **options) as ctx:
        cache = (
            PrefixCache(ctx) if manager == "prefixes" else SlotCache(ctx, policy=checked(manager))
        )
        with Batcher(cache) as batcher:
            going = [batcher.submit(each, 12) for each in prompts]
            while batcher.step():
                cache.check()
            for each, tokens in zip(going, prompts, strict=True):
                assert each.finish_reason == "length"
                alone = greedy(model, tokens, 12, options)
                assert same_or_tied(model, tokens, each.tokens, alone, options)


TEXTS = ["Once upon a time", "The little dog", "Tom and Lily went to the park", "One day"]


@pytest.mark.parametrize("flash_attn", [False, True])
def test_batched_stories_are_the_same_as_alone(
    library: kv.OpenLibrary, trained_model: Path, flash_attn: bool
) -> None:
    """With the trained model, every text is the same in any batch."""
    options = {"flash_attn": flash_attn}
    with library.load_model(trained_model) as model:
        with model.context(n_ctx=1024, n_batch=16, n_seq_max=4, **options) as ctx:
            cache = SlotCache(ctx)
            with Batcher(cache) as batcher:
                going = [batcher.submit(text, 50) for text in [*TEXTS, *TEXTS[:2]]]
                batcher.run()
            cache.check()
        for each in going:
            alone = greedy(model, each.prompt, 50, options)
            assert same_or_tied(model, each.prompt, each.tokens, alone, options)
            assert each.text == model.detokenize(each.tokens)


def test_cancel_during_a_batch_keeps_the_decoded_tokens(model: kv.Model) -> None:
    """An abort between the graph's nodes rolls back one batch; the prompt continues after it."""
    with model.context(n_ctx=1024, n_batch=64, n_ubatch=16, n_seq_max=2) as ctx:
        cache = SlotCache(ctx)
        with Batcher(cache) as batcher:
            tokens = prompt(3, 300)
            one = batcher.submit(tokens, 4)
            batcher.step()
            batcher.step()
            ctx.native.cancel_after(ctx.handle, 1)
            batcher.step()
            ctx.native.cancel_after(ctx.handle, -1)
            cache.check()
            if one.finish_reason is None:
                pytest.skip("this build decodes a batch without asking")
            assert one.finish_reason == "cancelled"
            again = batcher.submit(tokens, 4)
            again.result()
            assert again.cached == 128
            assert same_or_tied(model, tokens, again.tokens, greedy(model, tokens, 4, {}), {})
