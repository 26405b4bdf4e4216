"""Test the policies: never, after a failure, at a threshold, or always."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from fakes.simulated import ALL

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import NoKVSlot, UsageError
from pyllamakv.runtime import defrag_policy
from pyllamakv.runtime.defrag_policy import DefragCosts, wasted_and_moved_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

SCATTERED = {"contiguous": False}


def counted(ctx: Context) -> list[int]:
    """Return a list that gets an entry for each defragmentation from now on."""
    defrag, seen = ctx.native.defrag, []

    def counting(handle: int) -> Any:
        done = defrag(handle)
        seen.append(done.cells)
        return done

    ctx.native.defrag = counting
    return seen


def sparse(folder: Path, native: dict[str, Any] = SCATTERED, **options: Any) -> Any:
    """Return a context of 1024 cells, a sequence of 20 tokens at cell 600, and the list."""
    ctx = kit.context(folder, native, n_ctx=1024, n_batch=512, **options)
    seen = counted(ctx)
    gone, live = ctx.sequence(), ctx.sequence()
    gone.prefill([5] * 600)
    live.prefill([6] * 20)
    gone.remove()
    return ctx, live, seen


def steps(ctx: Context, sequence: Sequence, n: int) -> None:
    """Decode tokens."""
    for _ in range(n):
        sequence.step(7)


def test_wasted_and_moved_bytes_are_zero_in_a_compact_cache(tmp_path: Path) -> None:
    """Check wasted bytes and bytes to move, sparse and compact."""
    ctx, _, _ = sparse(tmp_path)
    info = ctx.kv.snapshot().streams[0].info
    cell = (info.bytes_k + info.bytes_v) // 1024
    assert wasted_and_moved_bytes(ctx.kv.snapshot()) == ((768 - 256) * cell, 20 * cell)
    ctx.kv.defrag()
    assert wasted_and_moved_bytes(ctx.kv.snapshot()) == (0, 0)


def test_never_is_the_default(tmp_path: Path) -> None:
    """Check that a sparse cache is not changed."""
    ctx, live, seen = sparse(tmp_path)
    steps(ctx, live, 80)
    assert not seen


def test_always_moves_before_the_next_decode_and_not_again(tmp_path: Path) -> None:
    """Check decodes after a removal, without one, and after another."""
    ctx, live, seen = sparse(tmp_path, defrag_policy="always")
    steps(ctx, live, 5)
    assert seen == [20]
    other = ctx.sequence()
    ctx.decode([other.feed([1] * 300), live.feed([2])])
    other.close()
    steps(ctx, live, 2)
    assert len(seen) == 2


def test_threshold_policy_defragments_when_the_loss_exceeds_the_cost(tmp_path: Path) -> None:
    """Check the decode at which it moves, for expensive and cheap moves, and without loss."""
    for price, when in ((25.6 * 10, 10), (0.1, 1), (1e9, None)):
        ctx, live, seen = sparse(
            tmp_path, defrag_policy="threshold", defrag_costs=DefragCosts(attend=1.0, move=price)
        )
        before = None
        for n in range(1, 20):
            live.step(7)
            if seen and before is None:
                before = n
        assert before is None if when is None else abs(before - when) <= 1
    ctx, live, seen = sparse(
        tmp_path, defrag_policy="threshold", defrag_costs=DefragCosts(attend=0.0, move=1.0)
    )
    steps(ctx, live, 80)
    assert not seen


def test_refilled_cache_is_not_defragmented(tmp_path: Path) -> None:
    """Check that the threshold is checked again, and no more once nothing is wasted."""
    ctx, live, seen = sparse(
        tmp_path, defrag_policy="threshold", defrag_costs=DefragCosts(attend=1.0, move=25.6 * 100)
    )
    steps(ctx, live, 3)
    filler = ctx.sequence()
    filler.prefill([1] * 590)
    assert ctx.defrag_policy.dirty
    steps(ctx, live, defrag_policy.LOOK_INTERVAL)
    assert not ctx.defrag_policy.dirty
    steps(ctx, live, 200)
    assert not seen


@pytest.mark.parametrize("policy", ["on_failure", "threshold", "always"])
def test_on_failure_policy_defragments_after_no_slot(tmp_path: Path, policy: str) -> None:
    """Check batches and single tokens if slots must be contiguous."""
    ctx = kit.context(tmp_path, n_ctx=16, defrag_policy=policy)
    a, b, c = ctx.sequence(), ctx.sequence(), ctx.sequence()
    for i in range(8):
        ctx.decode([a.feed([10 + i]), b.feed([5])])
    for place in (6, 4, 2, 0):
        b.remove(place, place + 1)
    ctx.decode(c.feed([1, 2, 3]))
    assert c.tokens == [1, 2, 3]
    with pytest.raises(NoKVSlot) as caught:
        ctx.decode(c.feed([1, 2, 3]))
    assert caught.value.cause == "full"


def test_never_policy_raises_the_failure(tmp_path: Path) -> None:
    """Check that the caller gets the error."""
    ctx = kit.context(tmp_path, n_ctx=16)
    a, b = ctx.sequence(), ctx.sequence()
    for i in range(8):
        ctx.decode([a.feed([10 + i]), b.feed([5])])
    b.remove()
    with pytest.raises(NoKVSlot) as caught:
        ctx.decode(b.feed([1, 2, 3]))
    assert caught.value.cause == "fragmented"


def test_defragmentation_blocked_by_forks_is_retried_after_a_removal(tmp_path: Path) -> None:
    """Check stock, where shared cells cannot be saved and restored."""
    stock = {"capabilities": ALL & ~Capability.DEFRAG, "contiguous": False}
    ctx = kit.context(tmp_path, stock, n_ctx=1024, n_batch=512, defrag_policy="always")
    gone, live = ctx.sequence(), ctx.sequence()
    gone.prefill([5] * 600)
    live.prefill([6] * 20)
    fork = live.fork()
    gone.close()
    steps(ctx, live, 2)
    assert ctx.kv.stats.used_max_p1 == 620
    fork.close()
    steps(ctx, live, 2)
    assert ctx.kv.stats.used_max_p1 == 24


def test_unknown_defrag_policy_is_refused(tmp_path: Path) -> None:
    """Check a policy that does not exist."""
    with pytest.raises(UsageError, match="never, on_failure, threshold, always"):
        kit.context(tmp_path, defrag_policy="sometimes")


def test_costs_can_be_measured(tmp_path: Path) -> None:
    """Check that both constants are positive."""
    made = kit.model(tmp_path, **SCATTERED)
    costs = defrag_policy.measure_defrag_costs(made, cells=1024, rounds=2)
    assert costs.attend >= 0
    assert costs.move > 0
