"""Test that streams are those of the context, which may differ from the requested ones.

With LLAMA_SET_ROWS=0, 0.3.15 and 0.3.16 create a unified cache for any request. llama.cpp reads
the variable when it creates a context, and workers set it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import ContextError, ModelError, SharedCells, StateError
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.native

SPECS = [
    f"{release}+{side}"
    for release in ("0.3.9", "0.3.15", "0.3.16", "0.3.36")
    for side in ("stock", "patched")
]

#: Relative to the scale of logits: the effect of another order of cells.
NOISE = 2e-2

TOKENS = [(7 + i * i + i) % 60 for i in range(40)]


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    """Return each variant that is built."""
    built(request.param)
    found: str = request.param
    return found


@pytest.fixture(scope="module", params=["0", "1"])
def library(request: pytest.FixtureRequest, spec: str) -> Iterator[kv.OpenLibrary]:
    """Open a variant in a worker with each value of the variable."""
    env = {"LLAMA_SET_ROWS": request.param}
    with kv.open(built(spec).folder, isolated=True, env=env) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(library: kv.OpenLibrary) -> kv.Model:
    """Load a model of two layers."""
    return library.load_model(synthetic_models.model("grouped"))


@pytest.fixture(params=[True, False], ids=["unified", "separate"])
def asked(request: pytest.FixtureRequest, library: kv.OpenLibrary) -> dict[str, Any]:
    """Return the requested options of a context of four sequences."""
    if not request.param and kv.Capability.KV_UNIFIED not in library.about.capabilities:
        pytest.skip("this release has no streams")
    return {"n_seq_max": 4, "kv_unified": request.param}


def context(model: kv.Model, asked: dict[str, Any], **options: Any) -> Any:
    """Make a context of 1024 cells."""
    return model.context(1024, **{"n_batch": 64, "n_ubatch": 32, **asked, **options})


def fresh(model: kv.Model, tokens: list[int]) -> np.ndarray:
    """Return the logits after these tokens in a new context."""
    with model.context(256, n_batch=64) as ctx:
        ctx.sequence().prefill(tokens)
        return ctx.logits().copy()


def proves(model: kv.Model, sequence: Any, token: int = 5) -> None:
    """Check the logits of one more token against those of a new context."""
    ctx = sequence.context
    ctx.decode(sequence.feed([token]))
    found, expected = ctx.logits().copy(), fresh(model, sequence.tokens)
    assert np.abs(found - expected).max() <= NOISE * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("n_seq_max", [1, 4])
@pytest.mark.parametrize("name", ["grouped", "sliding", "hybrid", "recurrent"])
def test_streams_are_those_of_the_cells(
    library: kv.OpenLibrary, asked: dict[str, Any], name: str, n_seq_max: int
) -> None:
    """The number that the context reports is that of the caches, for every kind of memory."""
    try:
        loaded = library.load_model(synthetic_models.model(name))
        ctx = context(loaded, {**asked, "n_seq_max": n_seq_max})
    except (ContextError, ModelError) as error:
        pytest.skip(str(error))
    with loaded, ctx:
        streams = ctx.kv.snapshot().streams if ctx.info.memory is not MemoryType.RECURRENT else ()
        assert ctx.info.n_streams == len({each.stream for each in streams})
        assert ctx.stream_per_sequence == (ctx.info.n_streams > 1)
        assert ctx.info.n_streams in (0, 1, n_seq_max)
        assert ctx.info.n_seq_max == n_seq_max
        share = ctx.info.n_ctx // ctx.partitions
        for each in streams:
            # In hybrid memories of 0.3.15 and 0.3.16 each stream has n_ctx cells.
            largest = ctx.info.n_ctx if name == "hybrid" else share
            assert each.swa or len(each) in (share, largest)


def test_slots_in_one_hole_are_of_one_stream(spec: str) -> None:
    """Releases with both share the cells if the variable requests contiguous slots."""
    streams = {}
    for rows in ("0", "1"):
        with (
            kv.open(built(spec).folder, isolated=True, env={"LLAMA_SET_ROWS": rows}) as opened,
            opened.load_model(synthetic_models.model("grouped")) as loaded,
        ):
            if kv.Capability.KV_UNIFIED not in opened.about.capabilities:
                pytest.skip("this release has no streams")
            with context(loaded, {"n_seq_max": 4, "kv_unified": False}) as ctx:
                streams[rows] = ctx.info.n_streams
    assert streams == {"0": 1 if spec.startswith("0.3.1") else 4, "1": 4}


def test_a_shift_after_a_fork_moves_no_other_sequence(
    model: kv.Model, asked: dict[str, Any]
) -> None:
    """It is refused if the cells are shared, and exact if each sequence has its own."""
    with context(model, asked) as ctx:
        one = ctx.sequence()
        ctx.decode(one.feed(TOKENS))
        other = one.fork()
        part = one.fork(30)
        assert part.tokens == TOKENS[:30]
        before = [each.save() for each in (one, other, part)]
        if ctx.info.n_streams == 1:
            for move in (lambda: other.shift(16, None, 8), lambda: other.divide(16, None, 2)):
                with pytest.raises(SharedCells) as caught:
                    move()
                assert caught.value.sequences == (one.id, part.id)
            assert [each.save() for each in (one, other, part)] == before
        else:
            other.remove(8, 16)
            other.shift(16, None, -8)
            ctx.kv.update()
            assert [one.save(), part.save()] == [before[0], before[2]]
            assert other.tokens == TOKENS[:8] + TOKENS[16:]
        used = ctx.kv.stats.used
        assert used == (len(TOKENS) if ctx.info.n_streams == 1 else 40 + 32 + 30)
        proves(model, one)
        proves(model, part)
        assert (one.pos_max, part.pos_max) == (40, 30)


def test_shift_of_a_full_slot_keeps_the_forked_neighbour(
    model: kv.Model, asked: dict[str, Any]
) -> None:
    """A forked neighbour keeps its tokens and bytes when the other one shifts."""
    with context(model, asked) as ctx:
        cache = SlotCache(ctx, keep=8, size=64)
        base = TOKENS + TOKENS[:22]
        one = cache.acquire(base)
        one.decode()
        neighbour = cache.acquire([*base[:50], 3, 1, 4, 1, 5])
        neighbour.decode()
        assert neighbour.cached >= 50
        held, before = neighbour.sequence.tokens, neighbour.sequence.save()
        for token in range(12):
            one.decode(token)
        cache.check()
        assert neighbour.sequence.tokens == held
        assert neighbour.sequence.save() == before
        proves(model, neighbour.sequence)
        cache.check()
        used = ctx.kv.stats.used
        shared = ctx.info.n_streams == 1
        assert (used < len(one.sequence) + len(neighbour.sequence)) == shared


def test_slot_size_is_that_of_a_stream_if_there_are_streams(
    model: kv.Model, asked: dict[str, Any]
) -> None:
    """The share of a sequence is that of its stream only where there are streams."""
    with context(model, asked) as ctx:
        streams = ctx.info.n_streams > 1
        with SlotCache(ctx, n_slots=2) as two:
            assert two.size == (ctx.info.n_ctx // 4 if streams else ctx.info.n_ctx // 2)
        with kv.ContextCache(ctx) as whole:
            assert whole.capacity == ctx.info.n_ctx // (4 if streams else 1)
            tokens = [token % 60 for token in range(300)]
            if streams:
                with pytest.raises(kv.KVCacheFull):
                    for start in range(0, 300, 50):
                        places = range(start, start + 50)
                        whole.start_forward(tokens[start : start + 50], places, [0] * 50)
            else:
                for start in range(0, 300, 50):
                    places = range(start, start + 50)
                    whole.start_forward(tokens[start : start + 50], places, [0] * 50)
                assert whole.length(0) == 300
            whole.check()


def test_removal_of_a_copied_middle_shifts_only_own_cells(
    model: kv.Model, asked: dict[str, Any]
) -> None:
    """A copied prefix shifts in streams directly, and in shared cells if it may be unshared."""
    with context(model, asked) as ctx, kv.ContextCache(ctx) as cache:
        cache.start_forward(TOKENS, range(40), [0] * 40)
        cache.copy_prefix(0, 1, 32)
        kept = cache.runtime_sequence(0).save()
        if ctx.info.n_streams == 1:
            with pytest.raises(SharedCells):
                cache.remove(1, 4, 12)
            cache.remove(1, 4, 12, unshare=True)
        else:
            cache.remove(1, 4, 12)
        cache.check()
        assert cache.runtime_sequence(0).save() == kept
        assert cache.runtime_sequence(1).tokens == TOKENS[:4] + TOKENS[12:32]
        proves(model, cache.runtime_sequence(0))
        cache.check()


def test_prefixes_are_shared_or_copied(model: kv.Model, asked: dict[str, Any]) -> None:
    """A prefix cache has the logits of a new context in both cases."""
    with context(model, asked) as ctx, kv.PrefixCache(ctx) as cache:
        for tail in ([1, 2, 3], [9, 8], [1, 2, 4]):
            tokens = [*TOKENS[:30], *tail]
            with cache.acquire(tokens) as lease:
                lease.prefill()
                found, expected = ctx.logits().copy(), fresh(model, tokens)
                assert np.abs(found - expected).max() <= NOISE * np.abs(expected).max()
            cache.check()
        assert cache.stats().reused_tokens >= 60


def test_a_state_moves_between_layouts_or_changes_nothing(
    model: kv.Model, asked: dict[str, Any]
) -> None:
    """A save is restored if it fits, and refused without a change otherwise."""
    with context(model, asked) as ctx, context(model, {"n_seq_max": 4}) as other:
        one, two = ctx.sequence(), other.sequence()
        ctx.decode(one.feed(TOKENS))
        other.decode(two.feed(TOKENS[:20]))
        before = two.save()
        try:
            two.restore(one.save())
        except StateError:
            assert ctx.info.n_streams != other.info.n_streams
            assert two.save() == before
        else:
            assert two.tokens == TOKENS
        proves(model, two)
        again = ctx.sequence()
        again.restore(one.save())
        proves(model, again)
        proves(model, one)


def test_a_hybrid_fork_shares_its_state(library: kv.OpenLibrary, asked: dict[str, Any]) -> None:
    """A shift of one would move the other's state: it is refused in streams as well."""
    try:
        loaded = library.load_model(synthetic_models.model("hybrid"))
        ctx = context(loaded, asked)
    except (ContextError, ModelError) as error:
        pytest.skip(str(error))
    with loaded, ctx:
        one = ctx.sequence()
        ctx.decode(one.feed(TOKENS))
        other = one.fork()
        if not ctx.info.can_shift:
            pytest.skip("this memory shifts no positions")
        for allowed in (False, True) if ctx.stream_per_sequence else (False,):
            with pytest.raises(SharedCells):
                one.shift(None, None, 4, allow_shared=allowed)
        assert (one.positions, other.positions) == ([*range(40)], [*range(40)])
        proves(loaded, other)
        proves(loaded, one)
