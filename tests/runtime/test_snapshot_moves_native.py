"""Test every plan and mover on real builds: equal K, V and cells, limited scratch memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pyllamakv as kv
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.architectures import Shape

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

#: Rows of 64 values, so that a row of blocks is a whole number of words; two heads, three layers.
SHAPE = Shape("movers", n_layer=3, n_embd=64, n_head=2, n_head_kv=2, n_ff=32, n_vocab=64)
PLANS = ("fewest", "ordered")
MOVERS = ("host", "gather", "graph", "staged")
KINDS: dict[str, dict[str, Any]] = {
    "rows": {"flash_attn": True},
    "transposed": {"flash_attn": False},
    "transposed f32": {"flash_attn": False, "type_k": "f32", "type_v": "f32"},
    "q8_0": {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    "q4_0": {"flash_attn": True, "type_k": "q4_0", "type_v": "q4_0"},
    "mixed": {"flash_attn": True, "type_k": "q8_0", "type_v": "f16"},
}


@pytest.fixture(scope="module")
def wide() -> Path:
    """Generate the model."""
    return synthetic_models.generate(SHAPE, home() / "models")


@pytest.fixture
def model(patched: Variant, wide: Path) -> kv.Model:
    """Load it into the patched library."""
    with kv.open(patched.folder) as library:
        yield library.load_model(wide)


def scatter(ctx: kv.Context) -> kv.Sequence:
    """Decode two interleaved sequences at random, remove the second, and return the first."""
    rng = np.random.default_rng(3)
    ends = [0, 0]
    for _ in range(3):
        batch = kv.Batch()
        for _ in range(100):
            chosen = int(rng.integers(2))
            batch.add(int(rng.integers(60)), ends[chosen], chosen)
            ends[chosen] += 1
        ctx.decode(batch)
    gone = ctx.sequence(1)
    gone.remove()
    gone.close()
    return ctx.sequence(0)


def rows(ctx: kv.Context, sequence: kv.Sequence) -> list[kv.KVRows]:
    """Read K and V of every layer."""
    return [ctx.kv.rows(layer, sequence) for layer in range(SHAPE.n_layer)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_mover_moves_the_same(model: kv.Model, kind: str) -> None:
    """No byte of K or V changes, and all movers of a plan have the same final cells."""
    results: dict[str, set[bytes]] = {}
    for plan, mover in itertools.product(PLANS, MOVERS):
        with model.context(
            512, 256, 256, 2, defrag_plan=plan, defrag_mover=mover, **KINDS[kind]
        ) as ctx:
            sequence = scatter(ctx)
            before = rows(ctx, sequence)
            report = ctx.kv.defrag()
            what = f"{plan} by {mover}"
            assert report.moves, what
            assert (report.graphs or 0) == (mover in ("gather", "graph")), what
            for old, new in zip(before, rows(ctx, sequence), strict=True):
                assert np.array_equal(old.pos, new.pos), what
                assert np.array_equal(old.k, new.k), what
                assert np.array_equal(old.v, new.v), what
            seen = ctx.kv.snapshot()
            assert seen.stats.holes == 1, what
            sequence.step(5)
            results.setdefault(plan, set()).add(
                seen.streams[0].pos.tobytes() + ctx.logits().copy().tobytes()
            )
            ctx.kv.defrag()
            assert ctx.counters.defrags == 1, f"{what}: nothing was left to move"
    assert all(len(each) == 1 for each in results.values())


@pytest.mark.parametrize("kind", KINDS)
def test_ordered_is_exact(model: kv.Model, kind: str) -> None:
    """After a plan that keeps the order, logits equal those of a new cache to the last bit."""
    found = []
    for plan in PLANS:
        with (
            model.context(512, 256, 256, 2, defrag_plan=plan, **KINDS[kind]) as ctx,
            model.context(512, 256, 256, 2, **KINDS[kind]) as fresh,
        ):
            sequence, other = scatter(ctx), fresh.sequence()
            other.restore(sequence.save())
            ctx.kv.defrag()
            for each in (sequence, other):
                each.step(5)
            found.append(np.array_equal(ctx.logits().copy(), fresh.logits().copy()))
    assert found[PLANS.index("ordered")]


def test_plan_fewest_moves_less(model: kv.Model) -> None:
    """The default plan moves fewer cells, and both report their scratch memory."""
    moved = {}
    for plan in PLANS:
        with model.context(512, 256, 256, 2, flash_attn=False, defrag_plan=plan) as ctx:
            scatter(ctx)
            report = ctx.kv.defrag()
            moved[plan] = report.cells
            assert report.plan_seconds is not None
            assert 0 < report.plan_seconds < report.seconds
            assert report.scratch is not None
            assert 0 < report.scratch < 10_000
    assert moved["fewest"] < moved["ordered"]


@pytest.mark.slow
def test_a_context_moves_cells_by_its_own_plan(model: kv.Model) -> None:
    """The plan of another context of the same thread does not matter, also before a decode."""
    found = set()
    for plan in PLANS:
        with (
            model.context(
                4096, 512, 512, 2, flash_attn=False, defrag_plan="fewest", defrag_thold=0.1
            ) as ctx,
            model.context(512, 256, 256, 2, flash_attn=False, defrag_plan=plan) as beside,
        ):
            filler, sequence = ctx.sequence(), ctx.sequence()
            filler.prefill([i % 50 for i in range(1000)])
            sequence.prefill([i % 49 for i in range(2000)])
            filler.remove()
            sequence.step(5)  # schedules a defragmentation in releases through 0.3.16
            scatter(beside)
            sequence.step(6)
            assert ctx.counters.defrags == 1
            found.add(ctx.kv.snapshot().streams[0].pos.tobytes())
    assert len(found) == 1


@pytest.mark.slow
def test_threads_move_the_same(model: kv.Model) -> None:
    """Two threads have the same result as one, in a cache that is large enough for both."""
    found = set()
    for threads in (1, 2, 5):
        with model.context(
            8192, 512, 512, 2, flash_attn=False, defrag_threads=threads, n_threads=1
        ) as ctx:
            filler, sequence = ctx.sequence(), ctx.sequence()
            filler.prefill([i % 50 for i in range(3000)])
            sequence.prefill([i % 49 for i in range(5000)])
            filler.remove()
            ctx.kv.defrag()
            found.add(b"".join(each.k.tobytes() + each.v.tobytes() for each in rows(ctx, sequence)))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"defrag_plan": "best"}, "fewest, ordered"),
        ({"defrag_mover": "truck"}, "auto, host"),
        ({"defrag_threads": 0}, "defrag_threads"),
    ],
)
def test_options_are_checked(model: kv.Model, options: dict[str, Any], word: str) -> None:
    """An invalid plan, mover or number of threads is named."""
    with pytest.raises(kv.UsageError, match=word):
        model.context(64, **options)


def in_effect(ctx: kv.Context) -> tuple[object, ...]:
    """Return the options that the library uses."""
    info = ctx.info
    return info.defrag_plan.name, info.defrag_mover.name, info.defrag_threads, info.defrag_thold


CHOSEN: dict[str, Any] = {
    "defrag_plan": "fewest", "defrag_mover": "host", "defrag_threads": 3, "defrag_thold": 0.25,
}  # fmt: skip


def test_the_options_in_effect_are_reported(model: kv.Model) -> None:
    """The library's defaults, or the arguments."""
    with model.context(64, n_threads=2) as ctx:
        assert in_effect(ctx) == ("FEWEST", "AUTO", 2, -1.0)
    with model.context(64, **CHOSEN | {"defrag_plan": "ordered"}) as ctx:
        assert in_effect(ctx) == ("ORDERED", "HOST", 3, 0.25)


@pytest.mark.slow
def test_arguments_win_over_variables(patched: Variant, wide: Path) -> None:
    """Variables replace only the defaults."""
    env = {"PLAN": "ordered", "MOVER": "gather", "THREADS": "2"}
    variables = {f"LLAMA_KV_DEFRAG_{name}": value for name, value in env.items()}
    with kv.open(patched.folder, isolated=True, env=variables) as library:
        loaded = library.load_model(wide)
        with loaded.context(64) as ctx:
            assert in_effect(ctx) == ("ORDERED", "GATHER", 2, -1.0)
        with loaded.context(64, **CHOSEN) as ctx:
            assert in_effect(ctx) == ("FEWEST", "HOST", 3, 0.25)


def test_stock_reports_what_it_has(stock: Variant, wide: Path) -> None:
    """Its threshold, and no plan and mover; the default plan of patched variants is accepted."""
    with (
        kv.open(stock.folder) as library,
        library.load_model(wide) as loaded,
        loaded.context(64, defrag_plan="fewest", defrag_thold=0.25) as ctx,
    ):
        assert in_effect(ctx) == ("UNKNOWN", "UNKNOWN", 0, 0.25)


def test_stock_moves_in_its_own_way(stock: Variant, wide: Path) -> None:
    """Stock has no options, and reports that."""
    with (
        kv.open(stock.folder) as library,
        library.load_model(wide) as loaded,
        pytest.raises(kv.Unsupported, match="patched variant"),
    ):
        loaded.context(64, defrag_plan="ordered")
