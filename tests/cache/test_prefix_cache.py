"""Test the prefix cache with a simulated library: hits, cancels, refusals and invariants.

Names in parentheses are those of ollama's tests; hashes are commits of ollama.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import adapter_kit
import pytest
import runtime_kit as kit
from prefix_kit import SYSTEM, feed, make, serve, used

from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import Cancelled, Closed, PrefixStoreForeign, PromptTooLong, UsageError
from qa.random_operations.operation_cases import CaseRunner, generate_operations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def cache(tmp_path: Path) -> PrefixCache:
    """Create a cache of 4 sequences and 128 cells."""
    return make(tmp_path)


@contextmanager
def cancelled(cache: PrefixCache, number: int) -> Iterator[None]:
    """Cancel a decode, counted from now, before it starts."""
    native, calls = cache.context.native, itertools.count(1)
    real = native.decode

    def decode(*arguments: Any) -> int:
        return 2 if next(calls) == number else real(*arguments)

    native.decode = decode
    try:
        yield
    finally:
        native.decode = real


# The single entry...
def test_the_single_entry_keeps_the_longest_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hit, trim the rest, clear without a match; hits, misses and sizes are logged."""
    cache = make(tmp_path, entries=1, paging=0)
    caplog.set_level(logging.INFO, "pyllamakv.cache")
    assert serve(cache, [1, 2, 3, 4], [5, 6]) == 0
    assert serve(cache, [1, 2, 3, 9]) == 3
    assert used(cache) == 4
    assert serve(cache, [7, 8]) == 0
    assert used(cache) == 2
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.reused_tokens, stats.prompt_tokens) == (1, 2, 3, 10)
    assert (stats.resident, stats.cells, stats.nodes) == (1, 2, 1)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith("miss: 0 of 4 tokens cached, 4 to decode")
    assert second.startswith("hit: 3 of 4 tokens cached, 1 to decode")
    assert third.startswith("miss: 0 of 2 tokens cached")
    assert "cells" in third
    assert "bytes" in third


@pytest.mark.parametrize("entries", [1, None])
def test_an_exact_repeat_leaves_one_token_to_decode(tmp_path: Path, entries: int | None) -> None:
    """Repeat a prompt (ExactMatchSeedBehavior): logits need at least one decoded token.

    Ollama's single entry (5c73c4e2e) panicked on a full hit, until dd5eb6337 kept a token.
    """
    cache = make(tmp_path, entries=entries)
    assert serve(cache, [1, 2, 3, 4]) == 0
    for _ in range(3):
        with cache.acquire([1, 2, 3, 4]) as lease:
            assert (lease.cached, lease.rest) == (3, [4])
            lease.prefill()
        cache.check()
    with cache.acquire([1]) as lease:
        assert (lease.cached, lease.rest) == (0, [1])
    assert used(cache) == 4 if entries is None else True


def test_an_empty_prompt_is_refused(cache: PrefixCache) -> None:
    """An empty prompt: ollama sliced minus one token, and panicked."""
    serve(cache, [1, 2])
    for wrong in ([], [259], [-1], [1] * 129):
        with pytest.raises(UsageError):
            cache.acquire(wrong)
    with pytest.raises(PromptTooLong) as caught:
        cache.acquire([1] * 129)
    assert (caught.value.needed, caught.value.available) == (129, 128)
    cache.check()
    assert used(cache) == 2


def test_alternating_conversations_keep_their_prefixes(cache: PrefixCache) -> None:
    """Alternate between two chats, for which ollama's single entry restarted each time."""
    a, b = [*SYSTEM, 1], [*SYSTEM, 2]
    assert serve(cache, a, [3]) == 0
    assert serve(cache, b, [4]) == 20
    for _ in range(3):
        a, b = [*a, 3, 5], [*b, 4, 6]
        assert serve(cache, a, [3]) == len(a) - 1
        assert serve(cache, b, [4]) == len(b) - 1


# The tree...
def test_branches_share_the_cells_of_their_beginning(cache: PrefixCache) -> None:
    """Create two branches and reuse both (BranchCreationAndReuse): their cells are shared."""
    assert serve(cache, [*SYSTEM, 1, 2, 3]) == 0
    assert serve(cache, [*SYSTEM, 4, 5]) == 20
    assert used(cache) == 20 + 3 + 2
    assert serve(cache, [*SYSTEM, 1, 2, 3, 6]) == 23
    assert serve(cache, [*SYSTEM, 4, 5, 7]) == 22
    assert used(cache) == 20 + 4 + 3
    # The common tokens, and for each branch the reused and the evaluated ones.
    assert cache.stats().nodes == 5
    assert cache.context.kv.stats.shared == 20


def test_a_part_of_a_run_is_reused(cache: PrefixCache) -> None:
    """Match 19 of 20 tokens: an earlier ollama reused whole runs only."""
    serve(cache, SYSTEM)
    assert serve(cache, [*SYSTEM[:19], 1]) == 19
    assert used(cache) == 21


def test_conversation_decodes_only_new_tokens(cache: PrefixCache) -> None:
    """Continue a chat (ConversationResumption, ScenarioConversationTurns).

    Only new tokens are stored: ollama's trie (44bdd9a2e) kept a whole cache of every turn.
    """
    chat: list[int] = []
    for turn in range(8):
        chat += [turn + 1, turn + 2, turn + 3]
        assert serve(cache, chat, [90 + turn, 80 + turn]) == max(0, len(chat) - 3)
        chat += [90 + turn, 80 + turn]
    # The last turn was not reused, so it is another node.
    assert (used(cache), cache.stats().resident, cache.stats().nodes) == (40, 1, 2)


def test_equal_prompts_decoded_together_share_cells_afterwards(cache: PrefixCache) -> None:
    """Lease the same prompt twice before it is decoded: afterwards its cells are shared."""
    one, two = cache.acquire([*SYSTEM, 1]), cache.acquire([*SYSTEM, 2])
    one.prefill()
    two.prefill()
    assert used(cache) == 42
    one.release()
    two.release()
    cache.check()
    assert used(cache) == 22
    with cache.acquire([*SYSTEM, 3]) as lease:
        assert lease.cached == 20
    one.release()  # a second time
    cache.check()


def test_a_lease_is_a_source_for_others(cache: PrefixCache) -> None:
    """Fork a leased prompt, as far as it is decoded."""
    with cache.acquire([*SYSTEM, 1]) as one:
        one.prefill()
        with cache.acquire([*SYSTEM, 2]) as two:
            assert two.cached == 20
            two.prefill()
            assert used(cache) == 22
        cache.check()
    cache.check()


def test_cached_prefix_ends_before_a_token_group(cache: PrefixCache) -> None:
    """The cached prefix ends before a group of tokens that it would split."""
    serve(cache, SYSTEM)
    for groups, cached in (([(15, 20)], 15), ([(15, 19)], 19), ([(18, 21), (12, 18)], 18)):
        with cache.acquire([*SYSTEM[:19], 1, 2], groups=groups) as lease:
            assert lease.cached == cached
    stats = cache.stats()
    for wrong in ([(15, 25)], [(4, 4)], [(-1, 3)], [(1, 5), (4, 8)]):
        with pytest.raises(UsageError, match="group"):
            cache.acquire([*SYSTEM[:19], 1, 2], groups=wrong)
    assert cache.stats() == stats


@pytest.mark.parametrize("saved", [False, True])
def test_shifted_tokens_are_not_reused_as_a_prefix(cache: PrefixCache, saved: bool) -> None:
    """Remove tokens in the middle of a leased sequence: the rest is not reused."""
    with cache.acquire(SYSTEM) as lease:
        lease.prefill()
        lease.sequence.remove(2, 6)
        lease.sequence.shift(6, None, -4)
        if saved:
            lease.sequence.restore(lease.sequence.save())
    cache.check()
    assert (used(cache), cache.stats().nodes) == (0, 0)


def test_trimmed_lease_keeps_its_remaining_prefix(cache: PrefixCache) -> None:
    """Roll back a leased sequence and continue differently."""
    serve(cache, SYSTEM)
    with cache.acquire([*SYSTEM, 1]) as lease:
        lease.prefill()
        lease.sequence.trim(5)
        lease.sequence.step(99)
    cache.check()
    assert serve(cache, [*SYSTEM[:5], 99, 98]) == 6
    with cache.acquire([1, 2]) as lease:
        lease.prefill()
        lease.sequence.close()
    cache.check()


# Cancelling...
def test_a_cancelled_prompt_keeps_its_progress(tmp_path: Path) -> None:
    """Cancel twice (ScenarioCancelledPrefills, PrefillSnapshotsKeptOnCancel): 18, 36, done.

    Ollama discarded the decoded tokens of a cancelled prompt, so that retries made no progress
    (ollama #17839).
    """
    cache = make(tmp_path, n_batch=18, n_ubatch=18)
    prompt = [i % 50 for i in range(50)]
    for expected in (0, 18, 36):
        with cache.acquire(prompt) as lease:
            assert lease.cached == expected
            if expected < 36:
                with cancelled(cache, 2), pytest.raises(Cancelled):
                    lease.prefill()
            else:
                lease.prefill()
        cache.check()
    with cache.acquire(prompt) as lease:
        assert lease.cached == 49


def test_divergent_cancelled_prompts_are_both_cached(tmp_path: Path) -> None:
    """Cancel two prompts after their common beginning (ScenarioDivergentCancels)."""
    cache = make(tmp_path, n_batch=10, n_ubatch=10)
    prompts = [[*SYSTEM, *[tail] * 20] for tail in (1, 2)]
    for number, prompt in enumerate(prompts):
        with cache.acquire(prompt) as lease:
            assert lease.cached == (0, 20)[number]
            with cancelled(cache, 4 - 2 * number), pytest.raises(Cancelled):
                lease.prefill()
        cache.check()
    for prompt in prompts:
        assert serve(cache, prompt) == 30


# Lifetime and all at once...
def test_closed_cache_frees_all_cells_and_sequences(cache: PrefixCache) -> None:
    """Close with a lease open; cache and lease are then closed."""
    serve(cache, SYSTEM)
    lease = cache.acquire([1, 2])
    with cache:
        pass
    cache.close()
    assert used(cache) == 0
    lease.release()
    with pytest.raises(Closed):
        cache.acquire([1])
    with pytest.raises(Closed):
        lease.sequence.prefill([1])
    assert len(cache.context.vacant) == 4


def test_invalid_number_of_sequences_is_refused(tmp_path: Path) -> None:
    """Request no sequences, and more than there are."""
    for entries in (0, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            make(tmp_path, entries=entries)


def test_a_change_of_adapters_drops_all_branches(tmp_path: Path) -> None:
    """Pages are dropped too; it is refused while anything is leased, parked, pinned or stored."""
    context, adapter = adapter_kit.simulated(tmp_path)
    prompt = list(range(10, 40))
    with PrefixCache(context, paging="memory") as cache:
        assert serve(cache, prompt) == 0
        cache.page_out(prompt)
        assert serve(cache, prompt[:20]) == 19
        lease = feed(cache.acquire([1, 2, 3]))
        with pytest.raises(UsageError, match="leases"):
            context.set_adapters({adapter: 1.0})
        parked = lease.park()
        with pytest.raises(UsageError, match="leases"):
            context.set_adapters({adapter: 1.0})
        parked.close()
        cache.pin("system", prompt[:5])
        with pytest.raises(UsageError, match="pinned"):
            context.set_adapters({adapter: 1.0})
        cache.unpin("system")
        assert serve(cache, prompt) == 29
        context.set_adapters({adapter: 1.0})
        assert cache.size == 0
        assert serve(cache, prompt) == 0
        assert serve(cache, prompt) == 29
        cache.check()
    with PrefixCache(context, store=tmp_path / "store") as cache:
        with pytest.raises(UsageError, match="store"):
            context.set_adapters({})
        serve(cache, prompt)
    context.set_adapters({})
    with pytest.raises(PrefixStoreForeign, match="adapters"):
        PrefixCache(context, store=tmp_path / "store")
    context.set_adapters({adapter: 1.0})
    with PrefixCache(context, store=tmp_path / "store") as cache:
        assert serve(cache, prompt) == 29


@pytest.mark.parametrize(
    "kind", ["prefix cache", "paged prefix cache", "prefix store", "slot cache"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations_keep_every_invariant(tmp_path: Path, kind: str, seed: int) -> None:
    """Salts, pins, pages, parking, batches, cancels and restarts; logits are those of prompts."""

    def opener() -> Context:
        native = {"heals": True, "contiguous": False}
        return kit.context(tmp_path, native, n_ctx=256, n_batch=96, n_ubatch=32, n_seq_max=5)

    runner = CaseRunner(opener, manager=kind, seed=seed)
    assert runner.play(generate_operations(seed, 100, kind)) is None
