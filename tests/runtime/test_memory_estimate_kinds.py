"""Test that every kind of memory is exact or refuses, on the test release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from native_kit import built

import pyllamakv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import Cancelled, PartialRemovalRefused, Unsupported
from pyllamakv.scenarios import architectures, synthetic_models
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.verification import discovery

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

KINDS = ["memory-swa", "memory-recurrent", "memory-mla", "sliding-window", "sliding-prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_patched_holds_what_each_kind_of_memory_promises(patched: Variant, name: str) -> None:
    """The scenarios of the matrix pass on this release."""
    one = discovery.find(name)
    with ScenarioRunner() as bench:
        ends = {each.name: bench.run(patched.folder, one, each).outcome for each in one.settings}
    assert {outcome.status for outcome in ends.values()} == {"pass"}, ends


def test_an_unknown_architecture_is_skipped(stock: Variant) -> None:
    """The hybrid model came later, which does not count against a patch."""
    one = discovery.find("memory-hybrid")
    with ScenarioRunner() as bench:
        outcome = bench.run(stock.folder, one, one.settings[0]).outcome
    assert outcome.status == "skip"
    assert "hybrid" in outcome.message


@pytest.fixture
def recurrent(library: Any) -> Iterator[Any]:
    """Yield a context of a recurrent model."""
    with (
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=64, n_batch=64, n_seq_max=4) as ctx,
    ):
        yield ctx


def test_recurrent_memory_reports_states_and_no_cells(recurrent: Any) -> None:
    """It has states, no cells, and empty statistics."""
    info = recurrent.info
    assert (info.memory, info.n_caches, info.can_remove_partly) == (MemoryType.RECURRENT, 0, False)
    assert not info.defrag
    sequence = recurrent.sequence()
    recurrent.decode(sequence.feed(range(20)))
    assert recurrent.kv.snapshot().streams == ()
    assert recurrent.kv.stats.size == 0
    with pytest.raises(Unsupported):
        recurrent.kv.defrag()


def test_partial_operations_on_a_recurrent_state_are_refused(recurrent: Any) -> None:
    """Partial operations change nothing; whole sequences are forked, saved and removed."""
    one = recurrent.sequence()
    recurrent.decode(one.feed(range(20)))
    for cut in (lambda: one.trim(10), lambda: one.remove(4, 8), lambda: one.fork(10)):
        with pytest.raises(PartialRemovalRefused):
            cut()
    assert one.tokens == list(range(20))
    fork = one.fork()
    saved = one.save()
    recurrent.decode([one.feed([5]), fork.feed([5])])
    assert np.allclose(one.logits().copy(), fork.logits().copy(), atol=1e-5)
    fork.restore(saved)
    assert fork.tokens == list(range(20))
    recurrent.decode(fork.feed([5]))
    once = fork.logits().copy()
    one.remove()
    # This release would begin with the stale state; the error has the reason.
    with pytest.raises(Unsupported, match="clear the context"):
        recurrent.decode(one.feed([*range(20), 5]))
    recurrent.clear()
    recurrent.decode(one.feed([*range(20), 5]))
    assert np.allclose(one.logits().copy(), once, atol=1e-4)


def test_aborted_recurrent_decode_removes_all_states(recurrent: Any) -> None:
    """Partial states cannot be rolled back: all are removed, and any sequence may start again."""
    one, other = recurrent.sequence(), recurrent.sequence()
    recurrent.decode([one.feed(range(8)), other.feed(range(8))])
    recurrent.native.cancel_after(recurrent.handle, 1)
    with pytest.raises(Cancelled, match="sequences 0, 1 were emptied"):
        recurrent.decode(one.feed(range(8, 40)))
    recurrent.native.cancel_after(recurrent.handle, -1)
    assert (len(one), len(other)) == (0, 0)
    recurrent.decode(other.feed([1, 2]))
    assert (len(other), other.pos_max) == (2, 1)


@pytest.mark.parametrize("release", ["0.3.5", "0.3.8"])
@pytest.mark.regression(
    "recurrent models through 0.3.8 kept the rest of a cancelled decode for the next one, which "
    "could end the process",
    by="random_operations",
    of="llama.cpp",
)
@pytest.mark.regression(
    "recurrent models through 0.3.8 could swap the states of sequences if one started in the "
    "batch of others",
    by="random_operations",
    of="llama.cpp",
)
def test_recurrent_states_of_old_releases_do_not_mix(release: str) -> None:
    """They mix up sequences that start beside others, and abort after an aborted decode."""
    with (
        pyllamakv.open(built(f"{release}+patched").folder, isolated=True) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=64, n_batch=64, n_ubatch=16, n_seq_max=4) as ctx,
    ):
        one, two, late = (ctx.sequence() for _ in range(3))
        ctx.decode([one.feed(range(8)), two.feed(range(8))])
        ctx.native.cancel_after(ctx.handle, 1)
        ctx.decode([one.feed(range(8, 40)), two.feed(range(8, 16))])
        ctx.native.cancel_after(ctx.handle, -1)
        assert (len(one), len(two)) == (40, 16)
        with pytest.raises(Unsupported, match="in a batch of its own"):
            ctx.decode([one.feed([5]), late.feed(range(16))])
        assert (len(one), len(late)) == (40, 0)
        ctx.decode(late.feed(range(16)))
        ctx.decode([each.feed([5]) for each in (one, two, late)])
        assert np.allclose(two.logits().copy(), late.logits().copy(), atol=1e-5)
        for each in (one, two, late):
            each.remove()
        # Without any state left, it still starts at the place of the last ones.
        with pytest.raises(Unsupported, match="clear the context"):
            ctx.decode([one.feed(range(8)), two.feed(range(8))])
        ctx.clear()
        ctx.decode([one.feed(range(8)), two.feed(range(8))])
        assert (one.pos_max, two.pos_max) == (7, 7)


@pytest.mark.regression(
    "a recurrent sequence that started beside others, or after keep, used their states on 0.3.9",
    by="random_operations",
    of="llama.cpp",
)
def test_states_that_begin_beside_others_or_after_keep_are_refused() -> None:
    """The sequences do not change, and start in a separate batch or after a clear."""
    with (
        pyllamakv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(n_ctx=64, n_batch=64, n_ubatch=16, n_seq_max=4) as ctx,
    ):
        one, two, late = (ctx.sequence() for _ in range(3))
        ctx.decode([one.feed(range(8)), two.feed(range(8))])
        with pytest.raises(Unsupported, match="in a batch of its own"):
            ctx.decode([one.feed([5]), late.feed(range(8))])
        assert (len(one), len(late)) == (8, 0)
        ctx.decode(late.feed(range(8)))
        ctx.decode([each.feed([5]) for each in (one, two, late)])
        assert np.allclose(two.logits().copy(), late.logits().copy(), atol=1e-5)
        ctx.native.seq_keep(ctx.handle, one.id)
        two.remove()
        late.remove()
        with pytest.raises(Unsupported, match="clear the context"):
            ctx.decode(two.feed(range(8)))
        ctx.decode(one.feed([6]))
        assert len(one) == 10


def test_rows_of_latent_attention(library: Any) -> None:
    """Keys are as wide as latent and rotated part together, and forks have the same ones."""
    with (
        library.load_model(synthetic_models.model("latent")) as model,
        model.context(n_ctx=64, n_batch=64, n_seq_max=2) as ctx,
    ):
        assert ctx.info.memory == MemoryType.ATTENTION
        one = ctx.sequence()
        ctx.decode(one.feed(range(12)))
        rows = ctx.kv.rows(1, one)
        assert rows.pos.tolist() == list(range(12))
        assert rows.k.shape == (12, 2 * 64)
        fork = one.fork()
        assert (ctx.kv.rows(1, fork).k == rows.k).all()


def test_masked_window_keeps_all_cells(library: Any) -> None:
    """In this release windows are a mask: all cells stay, and any cut is exact."""
    with (
        library.load_model(synthetic_models.model("sliding")) as model,
        model.context(n_ctx=128, n_batch=128, n_seq_max=2) as ctx,
    ):
        assert (ctx.info.memory, ctx.info.n_caches, ctx.info.n_swa) == (MemoryType.ATTENTION, 1, 0)
        one = ctx.sequence()
        ctx.decode(one.feed([n % 60 for n in range(100)]))
        one.trim(40)
        ctx.decode(one.feed([7]))
        again = ctx.sequence()
        ctx.decode(again.feed([*(n % 60 for n in range(40)), 7]))
        # The same row of the same logits: nothing remains of the removed tokens.
        assert np.allclose(one.ledger.tokens, again.ledger.tokens)
        assert ctx.kv.stats.used == 82


def test_model_that_would_abort_is_refused(library: Any, tmp_path: Path) -> None:
    """A gemma2 of three layers ended the process in this release."""
    shape = architectures.Shape("odd", n_layer=3, architecture="gemma2", window=32)
    path = synthetic_models.generate(shape, tmp_path)
    assert gguf.GGUFReader(path).fields["gemma2.block_count"].contents() == 3
    with library.load_model(path) as model, pytest.raises(Unsupported, match="26, 42 and 46"):
        model.context(n_ctx=64)
