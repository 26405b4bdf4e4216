"""Test the prefix cache on real builds: logits after a hit are those of a new decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built
from prefix_kit import serve

import pyllamakv as kv
from pyllamakv.building import variant as variants
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant
    from pyllamakv.cache.lease import PrefixLease

pytestmark = pytest.mark.native

SYSTEM = [1 + (7 * i) % 60 for i in range(90)]
#: A release with memories of streams, windows and states, tested where it is built.
LATE = "0.3.36+patched"


class Oracle:
    """Decode tokens in a new context."""

    def __init__(self, model: kv.Model, **options: Any) -> None:
        self.context = model.context(n_ctx=512, n_batch=512, **options)
        self.worst = 0.0

    def __call__(self, lease: PrefixLease) -> None:
        """Compare the logits of a lease's last token with those of a new decode."""
        mine = lease.sequence.logits().copy()
        self.context.clear()
        with self.context.sequence() as fresh:
            fresh.prefill(lease.sequence.tokens)
            theirs = self.context.logits().copy()
        self.worst = max(self.worst, float(np.abs(mine - theirs).max()))
        assert self.worst < 0.02, lease


@pytest.fixture
def model(variant: Variant, tiny_model: Path) -> Iterator[kv.Model]:
    """Load the tiny model, on stock and patched."""
    with kv.open(variant.folder) as library:
        yield library.load_model(tiny_model)


@pytest.fixture
def late() -> Iterator[kv.OpenLibrary]:
    """Open a late release, or skip."""
    found = variants.find(LATE)
    if found is None:
        pytest.skip(f"{LATE} is not built")
    with kv.open(found.folder) as library:
        yield library


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", ["resident", "memory", "folder"])
def test_logits_after_a_hit_are_those_of_a_fresh_decode(
    model: kv.Model, kind: str, flash_attn: bool, tmp_path: Path
) -> None:
    """The branch is in the cache, in memory and in a file (DataSurvivesSnapshotRestore)."""
    paging = {"resident": None, "memory": "memory", "folder": tmp_path}[kind]
    look = Oracle(model, flash_attn=flash_attn)
    with model.context(
        n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4, flash_attn=flash_attn
    ) as ctx:
        cache = PrefixCache(ctx, paging=paging)
        serve(cache, [*SYSTEM, 1, 2, 3])
        serve(cache, [*SYSTEM, 4, 5])
        if paging:
            cache.page_out([*SYSTEM, 4, 5])
            cache.page_out([*SYSTEM, 1, 2, 3])
            assert ctx.kv.stats.used == 0
        for prompt, cached in (
            ([*SYSTEM, 1, 2, 3], 92),
            ([*SYSTEM, 4, 5, 6], 92),
            ([*SYSTEM[:50], 7], 50),
        ):
            with cache.acquire(prompt) as lease:
                assert lease.cached == cached
                lease.prefill()
                look(lease)
            cache.check()
        assert cache.stats().paged_in == (2 if paging else 0)


def test_two_chats_share_a_thousand_cells(patched: Variant, tiny_model: Path) -> None:
    """Two chats with 1,000 common tokens use 1,000 cells and those of their tails."""
    with kv.open(patched.folder) as library:
        model = library.load_model(tiny_model)
        with model.context(n_ctx=2048, n_batch=512, n_seq_max=4) as ctx:
            cache = PrefixCache(ctx)
            common = [1 + i % 60 for i in range(1000)]
            chats = [[*common, 61, 61], [*common, 62, 62, 62]]
            for turn in range(3):
                for chat in chats:
                    assert serve(cache, chat, [5, 6]) >= (1000 if turn or chat is chats[1] else 0)
                    chat += [5, 6, 7]
            tails = sum(len(chat) - 1 - 1000 for chat in chats)
            assert ctx.kv.stats.used == 1000 + tails
            assert ctx.kv.stats.shared == 1000


def test_cancelled_prompt_continues_exactly(patched: Variant, tiny_model: Path) -> None:
    """Cancel inside of a micro-batch: whole pieces stay, and the result is exact."""
    with kv.open(patched.folder) as library, library.load_model(tiny_model) as model:
        look = Oracle(model)
        with model.context(n_ctx=256, n_batch=32, n_ubatch=16, n_seq_max=3) as ctx:
            cache = PrefixCache(ctx)
            prompt = [*SYSTEM, *range(1, 30)]
            progress = [0]
            for _ in range(60):
                with cache.acquire(prompt) as lease:
                    progress.append(lease.cached)
                    ctx.native.cancel_after(ctx.handle, 40)
                    try:
                        lease.prefill()
                    except kv.Cancelled:
                        ctx.native.cancel_after(ctx.handle, -1)
                    else:
                        look(lease)
                        break
                    lease.sequence.prefill(lease.rest[:1], logits=False)
                cache.check()
            ctx.native.cancel_after(ctx.handle, -1)
            assert progress == sorted(progress)
            with cache.acquire(prompt) as lease:
                lease.prefill()
                look(lease)


def test_page_is_restored_into_scattered_cells(stock: Variant, tiny_model: Path) -> None:
    """Load a state if no two free cells are adjacent, on a release that requires one hole.

    Through 0.3.16, such a state was not restored (llama.cpp #9201, #17527).
    """
    with kv.open(stock.folder) as library, library.load_model(tiny_model) as model:
        look = Oracle(model)
        with model.context(n_ctx=256, n_batch=64, n_ubatch=16, n_seq_max=4) as ctx:
            cache = PrefixCache(ctx, paging="memory")
            serve(cache, SYSTEM)
            cache.page_out(SYSTEM)
            a, b = ctx.sequence(), ctx.sequence()
            for _ in range(120):
                ctx.decode([a.feed([1]), b.feed([2])])
            b.close()
            assert ctx.kv.stats.largest_hole < 90
            with cache.acquire([*SYSTEM, 5]) as lease:
                assert lease.cached == 90
                lease.prefill()
                look(lease)


def test_pages_of_another_cache_type_are_refused(patched: Variant, tiny_model: Path) -> None:
    """A page of a cache with other types is a typed error, and the cache continues."""
    with kv.open(patched.folder) as library, library.load_model(tiny_model) as model:
        pages = []
        caches = []
        for kind in ("f16", "q8_0"):
            ctx = model.context(n_ctx=256, n_seq_max=2, flash_attn=True, type_k=kind, type_v=kind)
            cache = PrefixCache(ctx, paging="memory")
            serve(cache, SYSTEM)
            cache.page_out(SYSTEM)
            pages.append(next(cache.branches.tree.walk()).page)
            caches.append(cache)
        pages[0]._saved = pages[1].read()
        with pytest.raises(kv.PagingError, match="another model or cache"):
            caches[0].page_in(SYSTEM)
        caches[0].check()
        assert serve(caches[0], SYSTEM) == 0


# Other kinds of memory...


@pytest.mark.parametrize("entries", [1, 6])
def test_changed_recurrent_prompt_is_decoded_again(late: kv.OpenLibrary, entries: int) -> None:
    """Repeat and change prompts of a recurrent model.

    Ollama's single entry (5c73c4e2e) ignored a refused trim, so that tokens and state disagreed.
    """
    with late.load_model(synthetic_models.model("recurrent")) as model:
        look = Oracle(model)
        with model.context(n_ctx=256, n_batch=64, n_seq_max=6) as ctx:
            cache = PrefixCache(ctx, entries=entries)
            for prompt in (SYSTEM, SYSTEM, [*SYSTEM[:40], 1], [*SYSTEM, 2], [3]):
                with cache.acquire(prompt) as lease:
                    lease.prefill()
                    look(lease)
                    assert lease.sequence.tokens == prompt
                cache.check()


def test_state_without_rollback_is_cleared_on_early_releases(
    patched: Variant,
) -> None:
    """For a changed recurrent prompt, the whole context has to be cleared."""
    with kv.open(patched.folder) as library:
        model = library.load_model(synthetic_models.model("recurrent"))
        look = Oracle(model)
        with model.context(n_ctx=256, n_batch=64, n_seq_max=1) as ctx:
            cache = PrefixCache(ctx, entries=1)
            for prompt in (SYSTEM, SYSTEM, [*SYSTEM[:40], 1]):
                with cache.acquire(prompt) as lease:
                    lease.prefill()
                    look(lease)
                cache.check()


def test_recurrent_states_are_stored_at_branch_points(late: kv.OpenLibrary) -> None:
    """Branch off a recurrent prompt (RestoreExactOffset): states are at the requested positions.

    States are saved before the last token, so that a repeat is a hit (ollama 4f5999fd3), where a
    prompt diverges from others, and where it is pinned; none beyond the prompt
    (SnapshotBeyondPrefillSkipped).
    """
    with late.load_model(synthetic_models.model("recurrent")) as model:
        look = Oracle(model)
        with model.context(n_ctx=512, n_batch=64, n_seq_max=12) as ctx:
            cache = PrefixCache(ctx)
            found = []
            for prompt in (
                [*SYSTEM, 1, 2],
                [*SYSTEM, 1, 2],  # the same: all but a token
                [*SYSTEM, 3, 4],  # diverges after 90 tokens, where there is no state yet
                [*SYSTEM, 5, 6],  # and now there is
            ):
                with cache.acquire(prompt) as lease:
                    found.append(lease.cached)
                    lease.prefill()
                    look(lease)
                cache.check()
            assert found == [0, 91, 0, 90]
            with cache.acquire([*SYSTEM, 5, 6, 7]) as lease:
                assert lease.cached == 92
                lease.prefill()
                cache.pin("here", [*SYSTEM, 5, 6, 7])
            cache.pin("there", SYSTEM[:50])  # its tokens are evaluated again
            assert sorted(cache.pins) == ["here", "there"]
            cache.check()
            cache.clear()
            assert serve(cache, [*SYSTEM, 5, 6, 7, 8]) == 93


@pytest.mark.regression(
    "a prefix cache refused every new recurrent prompt after an eviction on releases that start no "
    "sequence in place of a removed one",
    by="random_operations",
    of="Python",
)
def test_recurrent_prompts_start_after_evictions_on_early_releases() -> None:
    """Idle branches are paged out before; a lease or a pin must be released first."""
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=256, n_batch=64, n_seq_max=3) as ctx,
    ):
        look = Oracle(model)
        with PrefixCache(ctx) as cache:
            found = []
            for first in (1, 2, 3, 4, 1, 2):
                with cache.acquire([first] * 40) as lease:
                    found.append(lease.cached)
                    lease.prefill()
                    look(lease)
                cache.check()
            assert found == [0, 0, 0, 0, 39, 39]
            with cache.acquire([5] * 40) as lease:
                lease.prefill()
                serve(cache, [7] * 40)
                before = cache.dump()
                with pytest.raises(kv.NoSlotAvailable, match="in place of a removed one"):
                    cache.acquire([6] * 40)
                assert cache.dump() == before
            assert serve(cache, [6] * 40) == 0
        ctx.clear()
        with PrefixCache(ctx, checkpoints=kv.CheckpointSchedule(size=0)) as cache:
            for first in (1, 2, 3, 4):
                serve(cache, [first] * 40)
            cache.pin("here", [4] * 40)
            with pytest.raises(kv.NoSlotAvailable, match="leased or pinned"):
                cache.acquire([5] * 40)
            cache.unpin("here")
            assert serve(cache, [5] * 40) == 0


@pytest.mark.regression(
    "after a cancelled decode in a recurrent memory, sequences outside of the batch had wrong "
    "states",
    by="random_operations",
    of="Python",
)
def test_a_cancelled_recurrent_prompt_leaves_no_state_that_may_be_wrong(
    late: kv.OpenLibrary,
) -> None:
    """If a memory cannot roll back, an aborted decode has changed the states of others."""
    with late.load_model(synthetic_models.model("recurrent")) as model:
        look = Oracle(model)
        with model.context(n_ctx=512, n_batch=64, n_seq_max=8) as ctx:
            cache = PrefixCache(ctx, checkpoints=kv.CheckpointSchedule(interval=32))
            serve(cache, [*SYSTEM, 1])
            cache.pin("here", [*SYSTEM, 1])
            with cache.acquire([*SYSTEM, *([2] * 80)]) as lease:
                calls = iter(range(100))
                real = ctx.native.decode

                def decode(*arguments: Any) -> int:
                    if next(calls) == 2:
                        ctx.native.cancel_after(ctx.handle, 0)
                    return real(*arguments)

                ctx.native.decode = decode
                with pytest.raises(kv.Cancelled):
                    lease.prefill()
                ctx.native.decode = real
                ctx.native.cancel_after(ctx.handle, -1)
            cache.check()
            assert not cache.pins
            with cache.acquire([*SYSTEM, *([2] * 80)]) as lease:
                assert lease.cached == 0
                lease.prefill()
                look(lease)
            cache.check()
            assert serve(cache, [*SYSTEM, *([2] * 80), 3]) == len(SYSTEM) + 80


def test_prompt_before_the_window_is_decoded_again(late: kv.OpenLibrary) -> None:
    """Return to before a sliding window (RestoreOutsideWindow): tokens are decoded again.

    A rotating cache of ollama dropped entries that it still needed.
    """
    with late.load_model(synthetic_models.model("sliding")) as model:
        look = Oracle(model)
        for paging in (None, "memory"):
            with model.context(n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4) as ctx:
                cache = PrefixCache(ctx, paging=paging)
                long = [1 + (5 * i) % 60 for i in range(200)]
                serve(cache, long)
                for prompt in ([*long[:40], 1], [*long, 3], [*long[:190], 4], long):
                    with cache.acquire(prompt) as lease:
                        lease.prefill()
                        look(lease)
                    cache.check()


def test_generation_after_a_cache_hit_has_the_same_text(
    patched: Variant, trained_model: Path
) -> None:
    """A trained model continues from a fork, from a page, and from nothing."""
    with kv.open(patched.folder) as library:
        model = library.load_model(trained_model)
        with model.context(n_ctx=512, n_batch=64, n_seq_max=3) as ctx:
            cache = PrefixCache(ctx, paging="memory")
            prompt = model.tokenize("Once upon a time, there was a little girl")
            texts = []
            for _ in range(3):
                with cache.acquire(prompt) as lease:
                    lease.prefill()
                    lease.make_room(20)
                    texts.append("".join(lease.sequence.generate(max_tokens=20)))
                    tokens = lease.sequence.tokens
                cache.check()
                if len(texts) == 2:
                    cache.page_out(tokens)
            assert texts[0] == texts[1] == texts[2] != ""
