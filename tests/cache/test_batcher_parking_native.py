"""Test overcommitted caches over real builds: all requests complete, with the tokens as alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.native

CELLS, SEQUENCES, TEXT = 256, 4, 40

CASES = [
    ("0.3.9+patched", "tiny"),
    ("0.3.36+patched", "tiny"),
    ("0.3.36+patched", "sliding"),
    ("0.3.36+patched", "recurrent"),
    ("0.3.36+patched", "hybrid"),
    ("b11549+patched", "sliding"),
    ("b11549+patched", "hybrid"),
]


@pytest.fixture(params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[kv.Model]:
    """Load a model in a release."""
    spec, name = request.param
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.model(name)) as loaded,
    ):
        yield loaded


def slots(ctx: kv.Context) -> kv.SlotCache:
    """Return slots that share all cells."""
    return kv.SlotCache(ctx, size=ctx.info.n_ctx)


def alone(model: kv.Model, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens that each prompt generates in a context of its own."""
    found = []
    with model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32) as ctx:
        for prompt in prompts:
            ctx.clear()
            with kv.PrefixCache(ctx) as cache, kv.Batcher(cache) as batcher:
                one = batcher.submit(prompt, TEXT, stop_at_end=False)
                batcher.run()
                found.append(one.tokens)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [kv.PrefixCache, slots], ids=["prefixes", "slots"])
def test_an_overcommitted_cache_completes_all(model: kv.Model, make: Any) -> None:
    """Twelve requests of 140 tokens in 256 cells and 4 sequences."""
    system = [1 + (7 * i) % 60 for i in range(40)]
    prompts = [
        [*(system if number % 2 else []), *(1 + (11 * number + 3 * i) % 60 for i in range(60))]
        for number in range(12)
    ]
    expected = alone(model, prompts)
    options = {"n_ctx": CELLS, "n_batch": 64, "n_ubatch": 32, "n_seq_max": SEQUENCES}
    with (
        model.context(**options) as ctx,
        make(ctx) as cache,
        kv.Batcher(cache, max_wait=20) as batcher,
    ):
        going = [batcher.submit(each, TEXT, stop_at_end=False) for each in prompts]
        batcher.run()
        assert [(one.finish_reason, one.error) for one in going] == [("length", None)] * 12
        assert [one.tokens for one in going] == expected
        assert batcher._queue.parks > 0
        cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("make", [kv.PrefixCache, kv.SlotCache], ids=["prefixes", "slots"])
def test_generations_sharing_a_window_complete(model: kv.Model, make: Any) -> None:
    """Four generations fork a prefix longer than a sliding-window cache at the same time."""
    system = [1 + (7 * i) % 60 for i in range(300)]
    prompts = [[*system, number, 5] for number in range(1, 6)]
    with model.context(n_ctx=2048, n_batch=64, n_ubatch=32, n_seq_max=SEQUENCES) as ctx:
        with make(ctx) as cache, kv.Batcher(cache) as batcher:
            batcher.submit(system, 1, stop_at_end=False).result()
            going = [batcher.submit(each, 30, stop_at_end=False) for each in prompts]
            batcher.run()
            cache.check()
            assert [one.error for one in going] == [None] * 5
            together = [one.tokens for one in going]
        with make(ctx) as cache, kv.Batcher(cache) as batcher:
            for prompt, tokens in zip(prompts, together, strict=True):
                one = batcher.submit(prompt, 30, stop_at_end=False)
                batcher.run()
                assert one.tokens == tokens


@pytest.mark.regression(
    "generations of recurrent models had wrong tokens through 0.3.9 if their prompts were decoded "
    "with others, or failed",
    by="random_operations",
    of="llama.cpp",
)
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.8+patched"])
def test_recurrent_prompts_start_beside_others_on_early_releases(spec: str) -> None:
    """Through 0.3.9, a sequence must start in a separate batch, or its state is wrong."""
    prompts = [
        [3 + (first * i) % 50 for i in range(n)] for first, n in enumerate((16, 16, 8, 5, 12))
    ]
    # Long prompts are decoded in pieces, so the later ones start beside several tokens of others.
    schedule = kv.CheckpointSchedule(size=16, interval=8, first=4)
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
    ):
        expected = alone(model, prompts)
        with (
            model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32, n_seq_max=5) as ctx,
            kv.SlotCache(ctx, size=CELLS, checkpoints=schedule) as cache,
            kv.Batcher(cache) as batcher,
        ):
            going = []
            for some in (prompts[:1], prompts[1:2], prompts[2:]):
                going += [batcher.submit(each, TEXT, stop_at_end=False) for each in some]
                batcher.step()
            batcher.run()
            assert [one.tokens for one in going] == expected


@pytest.mark.regression(
    "a slot cache failed recurrent generations on early releases once a slot had been emptied",
    by="random_operations",
    of="Python",
)
@pytest.mark.parametrize("manager", [kv.PrefixCache, kv.SlotCache])
@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.8+patched"])
def test_more_recurrent_prompts_than_sequences_complete_on_early_releases(
    spec: str, budget: int, manager: Any
) -> None:
    """A sequence starts in place of a removed one after the others were saved or dropped."""
    prompts = [[3 + first] * 30 for first in range(7)]
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
    ):
        expected = alone(model, prompts)
        with (
            model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32, n_seq_max=3) as ctx,
            manager(ctx, checkpoints=kv.CheckpointSchedule(budget=budget)) as cache,
            kv.Batcher(cache, max_wait=8) as batcher,
        ):
            going = [batcher.submit(each, TEXT, stop_at_end=False) for each in prompts]
            batcher.run()
            assert [one.tokens for one in going] == expected


def test_a_recurrent_slot_is_not_emptied_for_a_prompt_that_cannot_start() -> None:
    """It is refused without a change while another one is in use, and served afterwards."""
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32, n_seq_max=3) as ctx,
        kv.SlotCache(ctx) as cache,
    ):
        held = cache.acquire([3] * 9)
        held.decode()
        for first in (4, 5):
            with cache.acquire([first] * 9) as lease:
                lease.decode()
        before = cache.dump()
        with pytest.raises(kv.NoSlotAvailable, match="in place of a removed one"):
            cache.acquire([6] * 9)
        assert cache.dump() == before
        with cache.acquire([4] * 10) as lease:
            assert lease.cached == 9
            lease.decode()
        held.decode([7])
        held.release()
        with cache.acquire([6] * 9) as lease:
            lease.decode()
        cache.check()


@pytest.mark.regression(
    "a recurrent generation failed on early releases if another sequence was removed between its "
    "lease and its first decode",
    by="random_operations",
    of="Python",
)
def test_a_recurrent_prompt_waits_if_a_sequence_was_removed_before_it_starts() -> None:
    """It starts after the other generation has ended, as 0.3.9 requires."""
    prompts = [[3] * 20, [4] * 20]
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
    ):
        expected = alone(model, prompts)
        with (
            model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32, n_seq_max=4) as ctx,
            kv.PrefixCache(ctx, entries=3) as cache,
            kv.Batcher(cache) as batcher,
        ):
            going = [batcher.submit(prompts[0], TEXT, stop_at_end=False)]
            batcher.step()
            going.append(batcher.submit(prompts[1], TEXT, stop_at_end=False))
            decode = ctx.decode

            def remove_before(work: Any) -> None:
                ctx.decode = decode  # type: ignore[method-assign]
                with ctx.sequence() as other:
                    ctx.decode(other.feed([5, 6]))
                decode(work)

            ctx.decode = kit.ours(remove_before)  # type: ignore[method-assign]
            batcher.run()
            assert [one.tokens for one in going] == expected


def test_an_idle_recurrent_branch_stays_until_a_lease_has_started() -> None:
    """The error names the lease that must decode first, and nothing is evicted."""
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=CELLS, n_batch=64, n_ubatch=32, n_seq_max=3) as ctx,
        kv.PrefixCache(ctx) as cache,
    ):
        with cache.acquire([4] * 9) as idle:
            idle.prefill()
        with cache.acquire([3] * 9) as lease, cache.acquire([5] * 9):
            lease.prefill()
            with pytest.raises(kv.NoSlotAvailable, match="one has not started"):
                cache.pin("answer", [3] * 9)
            assert cache.stats().evictions == 0
        cache.check()


@pytest.mark.regression(
    "generations in a hybrid memory with a stream per sequence ended with an error on 0.3.16 when "
    "each of them needed one token",
    by="random_operations",
    of="Python",
)
def test_generations_are_decoded_one_by_one_if_a_release_refuses_their_batch() -> None:
    """0.3.16 decodes several sequences of such a memory only in some orders."""
    prompts = [[3 + i] * (9 + i) for i in range(5)]
    with (
        kv.open(built("0.3.16+patched").folder) as library,
        library.load_model(synthetic_models.model("hybrid")) as model,
    ):
        expected = alone(model, prompts)
        with (
            model.context(
                n_ctx=4 * CELLS, n_batch=64, n_ubatch=32, n_seq_max=4, kv_unified=False
            ) as ctx,
            kv.PrefixCache(ctx) as cache,
            kv.Batcher(cache) as batcher,
        ):
            assert ctx.stream_per_sequence
            # The last one takes the sequence of the first, beside those of higher numbers.
            lengths = (2, TEXT, TEXT, TEXT, TEXT)
            going = [
                batcher.submit(each, n, stop_at_end=False)
                for each, n in zip(prompts, lengths, strict=True)
            ]
            batcher.run()
            for one, tokens, n in zip(going, expected, lengths, strict=True):
                assert one.tokens == tokens[:n]
