"""Test that a live view shows every change of a context, and does not change the context."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

pytestmark = pytest.mark.native


def test_watched_context_shows_each_operation(stock) -> None:
    """Decodes, failures, removals and moves are shown; afterwards the context is restored."""
    target = Console(file=io.StringIO(), width=200, force_terminal=False, _environ={})
    with (
        kv.open(stock.folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=64, n_batch=64, n_seq_max=4) as context,
    ):
        native = context.native
        with kv.watch(context, title="mine", console=target):
            a, b, c = context.sequence(), context.sequence(), context.sequence()
            for token in range(32):
                context.decode([a.feed([token]), b.feed([token])])
            b.remove()
            assert context.try_decode(c.feed([1] * 8)) == kv.DecodeStatus.NO_SLOT
            context.kv.defrag()
            c.step(1)
            context.advance([c], [2], 3, model.sampler())
            fork = a.fork(4)
            fork.close()
        assert context.native is native
        used = context.kv.stats.used
        a.step(5)
        assert context.kv.stats.used == used + 1
    output = target.file.getvalue()
    assert "batch 8 tokens; no-slot" in output
    assert "defrag; 16 cells moved" in output
    assert "step 1 token\n33 of 64 cells used, 1 hole, largest 31" in output
    assert "advance 3 steps" in output
    assert "copy 0, 3, 4\n36 of 64 cells used" in output
    assert output.rstrip().endswith("·" * 27)


def test_live_view_ends_with_its_block(stock) -> None:
    """The wrappers of the view are removed."""
    target = Console(file=io.StringIO(), force_terminal=False, _environ={})
    with (
        kv.open(stock.folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=64) as context,
    ):
        native = context.native
        with pytest.raises(ZeroDivisionError), kv.watch(context, console=target):
            raise ZeroDivisionError
        assert context.native is native


@pytest.mark.parametrize("terminal", [False, True])
def test_managers_are_shown_below_the_cells(stock, terminal: bool) -> None:
    """Reused, evaluated and parked tokens are shown, for a cache and for a batcher that uses it."""
    target = Console(file=io.StringIO(), width=120, height=40, force_terminal=terminal, _environ={})
    with (
        kv.open(stock.folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(n_ctx=64, n_batch=64, n_seq_max=4) as context,
        kv.PrefixCache(context) as cache,
        kv.Batcher(cache) as batcher,
    ):
        with kv.watch(context, console=target, managers={"prefixes": cache, "batcher": batcher}):
            for _ in range(2):
                batcher.submit([5] * 10, 4, stop_at_end=False)
                batcher.run()
            going = [batcher.submit([n] * 20, 20, stop_at_end=False) for n in (6, 7, 8)]
            batcher.run()
        assert all(len(one.tokens) == 20 for one in going)
        for wrong in (5, {"a": 5}, {5: cache}, {"a": kv.PrefixCache}):
            with pytest.raises(TypeError), kv.watch(context, console=target, managers=wrong):
                pass
    output = target.file.getvalue()
    assert "prefixes: nothing yet" in output
    assert "prefixes: 9 reused tokens, 1" in output
    assert "batcher: 1 parked, 1 parks" in output
