"""Test the runtime over real builds, in this process and in a worker."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

KINDS = [(False, "f16"), (True, "f16"), (True, "q8_0"), (True, "q4_0")]


@pytest.fixture(params=["here", "worker"])
def opened(variant: Variant, request: pytest.FixtureRequest) -> Iterator[kv.OpenLibrary]:
    """Open stock and patched, each in this process and in a worker."""
    with kv.open(variant.folder, isolated=request.param == "worker") as library:
        yield library


@pytest.fixture
def model(opened: kv.OpenLibrary, tiny_model: Path) -> kv.Model:
    """Load the tiny model."""
    return opened.load_model(tiny_model)


@pytest.fixture
def speaking(opened: kv.OpenLibrary) -> kv.Model:
    """Load a model with a vocabulary of bytes."""
    from pyllamakv.scenarios import synthetic_models

    return opened.load_model(synthetic_models.model("bytes"))


def interleave(ctx: kv.Context, n: int) -> tuple[kv.Sequence, kv.Sequence]:
    """Give two sequences ``n`` tokens each, with alternating cells."""
    a, b = ctx.sequence(), ctx.sequence()
    for i in range(n):
        ctx.decode([a.feed([i % 50]), b.feed([(7 * i) % 50])])
    return a, b


def fresh_logits(model: kv.Model, tokens: list[int], **options: Any) -> np.ndarray:
    """Decode tokens in a new context and return the logits of the last."""
    with model.context(n_ctx=512, n_batch=512, **options) as ctx:
        ctx.sequence().prefill(tokens)
        return ctx.logits().copy()


@pytest.mark.slow
def test_text_is_generated_and_recorded(speaking: kv.Model) -> None:
    """Check text, ledger and cache of a generation with special characters in the prompt."""
    with speaking.context(n_ctx=128, n_seq_max=2) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        ctx.decode([a.feed(speaking.tokenize("Grüße 😀")), b.feed(speaking.tokenize("x"))])
        assert "Grüße 😀" in a.text
        text = "".join(a.generate(max_tokens=20, stop_at_end=False))
        assert isinstance(text, str)
        assert a.pos_max == len(a) - 1
        assert b.pos_max == len(b) - 1
        assert ctx.kv.stats.used == len(a) + len(b)


@pytest.mark.slow
def test_one_step_is_one_batch_of_one(model: kv.Model) -> None:
    """Check that it gives the same logits as the general decode."""
    with model.context(n_ctx=64, n_seq_max=2) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        for token in (3, 5, 7):
            a.step(token)
            one = ctx.logits().copy()
            ctx.decode([b.feed([token])])
            assert np.array_equal(one, ctx.logits().copy())
        assert a.tokens == b.tokens == [3, 5, 7]


@pytest.mark.slow
@pytest.mark.parametrize(("flash_attn", "kind"), KINDS)
def test_a_defragmentation_keeps_every_byte(model: kv.Model, flash_attn: bool, kind: str) -> None:
    """Check rows, tokens and later logits, against a context that was never fragmented."""
    options = {"flash_attn": flash_attn, "type_k": kind, "type_v": kind}
    with model.context(n_ctx=256, n_batch=64, n_ubatch=32, n_seq_max=4, **options) as ctx:
        a, b = interleave(ctx, 60)
        b.remove(8, None)
        before, rows = ctx.kv.snapshot(), [ctx.kv.rows(0, each) for each in (a, b)]
        report = ctx.kv.defrag()
        after = ctx.kv.snapshot()
        moves = before.moves_to(after)
        assert before.stats.holes > 1
        assert after.stats.holes == 1
        assert (moves.vanished, moves.appeared) == (0, 0)
        assert report.cells == moves.cells > 0
        for each, old in zip((a, b), rows, strict=True):
            new = ctx.kv.rows(0, each)
            assert np.array_equal(old.pos, new.pos)
            assert np.array_equal(old.k, new.k)
            assert np.array_equal(old.v, new.v)
            assert new.type_k.name == kind
        ctx.decode(a.feed([9, 8, 7]))
        far = np.abs(ctx.logits().copy() - fresh_logits(model, a.tokens, **options)).max()
        assert far < 0.05


def test_a_fragmented_cache_fails_on_stock_and_works_on_patched(
    stock: Variant, patched: Variant, tiny_model: Path
) -> None:
    """Check the cause, the tokens, and the defragmentation by hand and by the patch."""
    for variant, heals in ((stock, False), (patched, True)):
        with kv.open(variant.folder) as library:
            model = library.load_model(tiny_model)
            ctx = model.context(n_ctx=256, n_batch=256, n_ubatch=64, n_seq_max=4)
            a, b = interleave(ctx, 128)
            b.remove()
            before, c = ctx.kv.snapshot(), ctx.sequence()
            feed = c.feed([i % 50 for i in range(100)])
            if heals:
                ctx.decode(feed)
                assert before.moves_to(ctx.kv.snapshot()).cells > 0
                assert before.moves_to(ctx.kv.snapshot()).vanished == 0
            else:
                with pytest.raises(kv.NoKVSlot) as caught:
                    ctx.decode(feed)
                assert caught.value.cause == "fragmented"
                assert caught.value.stats.free == 128
                assert (len(a), a.pos_max, len(c), c.pos_max) == (128, 127, 0, -1)
                assert ctx.try_decode(feed) is kv.DecodeStatus.NO_SLOT
                assert not len(before.moves_to(ctx.kv.snapshot()))
                ctx.kv.defrag()
                ctx.decode(feed)
            assert (len(c), c.pos_max, a.pos_max) == (100, 99, 127)
            assert np.abs(c.logits().copy() - fresh_logits(model, c.tokens)).max() < 0.01


@pytest.mark.slow
def test_decode_into_a_full_cache_reports_it_as_full(model: kv.Model) -> None:
    """Check that failures between micro-batches leave no ghosts."""
    with model.context(n_ctx=256, n_batch=256, n_ubatch=32, n_seq_max=2) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        ctx.decode(a.feed([1] * 200))
        feed = b.feed([2] * 57)
        for _ in range(2):
            with pytest.raises(kv.NoKVSlot) as caught:
                ctx.decode(feed)
            assert caught.value.cause == "full"
            assert (ctx.kv.stats.used, b.pos_max, a.pos_max) == (200, -1, 199)
        a.trim(199)
        ctx.decode(feed)
        assert ctx.kv.stats.used == 256


@pytest.mark.slow
def test_a_cancelled_decode_keeps_every_token(model: kv.Model) -> None:
    """Check a decode that is aborted in its second micro-batch."""
    with model.context(n_ctx=256, n_batch=256, n_ubatch=32, n_seq_max=2) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        ctx.decode([a.feed([1] * 20), b.feed([2] * 9)])
        feed = a.feed([3] * 128)
        for polls in (0, 1, 60, 200):
            ctx.native.cancel_after(ctx.handle, polls)
            try:
                ctx.decode(feed)
            except kv.Cancelled:
                assert (ctx.kv.stats.used, a.pos_max, b.pos_max) == (29, 19, 8)
            else:
                a.trim(20)
        ctx.native.cancel_after(ctx.handle, -1)
        ctx.decode(feed)
        assert a.pos_max == 147
        assert np.abs(ctx.logits().copy() - fresh_logits(model, a.tokens)).max() < 0.01


@pytest.mark.slow
def test_no_wrong_argument_ends_the_process(model: kv.Model, opened: kv.OpenLibrary) -> None:
    """Check arguments that would make llama.cpp abort or throw; the library still works."""
    ctx = model.context(n_ctx=128, n_batch=64, n_ubatch=16, n_seq_max=2)
    a = ctx.sequence()
    ctx.decode(a.feed([1, 2, 3]))
    n_vocab = model.info.n_vocab
    attempts = [
        lambda: ctx.decode(a.feed([n_vocab])),
        lambda: ctx.decode(a.feed([-1])),
        lambda: a.step(n_vocab),
        lambda: ctx.decode(a.feed([1] * 65)),
        lambda: ctx.decode(kv.Batch().add(1, 3, 2)),
        lambda: ctx.decode(kv.Batch().add(1, 9, 0)),
        lambda: ctx.sequence(5),
        lambda: a.remove(3, 1),
        lambda: a.shift(0, None, -2),
        lambda: ctx.logits(5),
        lambda: a.feed("text"),
        lambda: model.context(n_ctx=2**31 - 1),
        lambda: model.context(type_v="q8_0"),
        lambda: model.context(type_k="nonsense"),
        lambda: opened.load_model(__file__),
        lambda: a.restore(b"nonsense"),
        lambda: ctx.kv.rows(99, a),
    ]
    for attempt in attempts:
        with pytest.raises(kv.KvError):
            attempt()
    ctx.decode(a.feed([4]))
    assert a.tokens == [1, 2, 3, 4]


@pytest.mark.slow
def test_logits_are_refused_after_the_next_decode(model: kv.Model) -> None:
    """Check reading before and after the next decode."""
    with model.context(n_ctx=64) as ctx:
        a = ctx.sequence()
        ctx.decode(a.feed([1, 2, 3], logits="all"))
        first, last = ctx.logits(0), ctx.logits()
        assert np.isfinite(np.asarray(last)).all()
        assert not np.array_equal(first.copy(), last.copy())
        a.step(4)
        with pytest.raises(kv.StaleLogits):
            last.argmax()
        assert np.isfinite(ctx.logits().copy()).all()
    with pytest.raises(kv.Closed):
        first.copy()


@pytest.mark.slow
def test_ledger_agrees_with_the_cache_after_forks_and_shifts(model: kv.Model) -> None:
    """Check positions that the library reports against the ledger."""
    with model.context(n_ctx=128, n_seq_max=4) as ctx:
        a = ctx.sequence()
        ctx.decode(a.feed(range(1, 31)))
        b = a.fork(20)
        assert ctx.kv.stats.shared == 20
        with pytest.raises(kv.SharedCells):
            b.shift(0, None, 2)
        a.remove(22, 26)
        a.shift(26, None, -4)
        b.trim(15)
        ctx.decode([a.feed([40]), b.feed([41])])
        assert (a.pos_max, b.pos_max) == (26, 15)
        assert a.tokens == [*range(1, 23), *range(27, 31), 40]
        assert ctx.kv.rows(0, a).pos.tolist() == a.positions
        assert ctx.kv.rows(0, b).pos.tolist() == b.positions
        b.remove()
        a.divide(0, None, 2)
        assert a.pos_max == 13
        assert ctx.kv.rows(0, a).pos.tolist() == a.positions


@pytest.mark.slow
@pytest.mark.parametrize(("flash_attn", "kind"), KINDS)
def test_saved_sequence_is_restored_in_another_context(
    model: kv.Model, flash_attn: bool, kind: str
) -> None:
    """Check rows and logits of a restored sequence, in a cache where no hole is large enough."""
    options = {"flash_attn": flash_attn, "type_k": kind, "type_v": kind}
    with (
        model.context(n_ctx=128, n_seq_max=2, **options) as one,
        model.context(n_ctx=256, n_seq_max=4, **options) as two,
    ):
        a = one.sequence()
        one.decode(a.feed(range(1, 41)))
        saved = a.save()
        a.step(5)
        b, c = interleave(two, 100)
        c.remove()
        d = two.sequence()
        d.restore(saved)
        assert d.tokens == list(range(1, 41))
        assert (two.kv.rows(0, d).k == one.kv.rows(0, a).k[:40]).all()
        assert (two.kv.rows(0, d).v == one.kv.rows(0, a).v[:40]).all()
        assert b.pos_max == 99
        d.step(5)
        far = np.abs(two.logits().copy() - one.logits().copy()).max()
        assert far < 0.05


def test_closing_the_library_closes_models_and_contexts(variant: Variant, tiny_model: Path) -> None:
    """Check the order, and that a second library is not disturbed."""
    other = kv.open(variant.folder).load_model(tiny_model).context(n_ctx=64)
    library = kv.open(variant.folder)
    model = library.load_model(tiny_model)
    ctx = model.context(n_ctx=64)
    a = ctx.sequence()
    a.step(3)
    library.close()
    for attempt in (lambda: a.step(3), model.context, ctx.kv.snapshot, a.save):
        with pytest.raises(kv.Closed):
            attempt()
    other.sequence().step(3)
    assert other.kv.stats.used == 1
    other.model.close()


def test_only_the_patched_library_has_counters(
    stock: Variant, patched: Variant, tiny_model: Path
) -> None:
    """Check that stock reports missing counters, and that patched counts."""
    with kv.open(stock.folder) as library:
        ctx = library.load_model(tiny_model).context(n_ctx=64)
        with pytest.raises(kv.Unsupported):
            _ = ctx.counters
    with kv.open(patched.folder) as library:
        if kv.Capability.COUNTERS not in library.about.capabilities:
            pytest.skip("kv-counters does not apply to this release")
        ctx = library.load_model(tiny_model).context(n_ctx=64)
        before = ctx.counters
        ctx.sequence().step(3)
        assert (ctx.counters - before).slot_searches == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_agree_with_a_ledger(
    variant: Variant, tiny_model: Path, seed: int
) -> None:
    """Check cells, ledgers and logits after random decodes, removals, forks, shifts and more."""
    chance = random.Random(seed)
    with kv.open(variant.folder) as library:
        model = library.load_model(tiny_model)
        ctx = model.context(n_ctx=256, n_batch=64, n_ubatch=16, n_seq_max=6)
        live = [ctx.sequence() for _ in range(3)]
        saved = b""
        for _ in range(250):
            each = chance.choice(live)
            end = each.next_pos
            match chance.choice(
                ["decode"] * 4 + ["remove", "trim", "fork", "shift", "close"] + ["defrag", "save"]
            ):
                case "decode":
                    feed = each.feed([chance.randrange(50) for _ in range(chance.randrange(1, 40))])
                    try:
                        ctx.decode(feed)
                    except kv.NoKVSlot:
                        chance.choice(live).remove()
                case "remove" if end:
                    p0 = chance.randrange(end)
                    each.remove(p0, chance.randrange(p0, end + 1))
                case "trim":
                    each.trim(chance.randrange(len(each) + 1))
                case "fork" if len(live) < 6:
                    live.append(each.fork(chance.randrange(len(each) + 1)))
                case "shift":
                    with contextlib.suppress(kv.SharedCells, kv.UsageError):
                        each.shift(chance.randrange(end + 1), None, chance.randrange(-3, 4))
                case "close" if len(live) > 2:
                    live.remove(each)
                    each.close()
                case "defrag":
                    ctx.kv.defrag()
                case "save" if saved:
                    with contextlib.suppress(kv.StateError):
                        each.restore(saved)
                    saved = b""
                case "save":
                    saved = each.save()
            cells = ctx.kv.snapshot().streams[0]
            for one in live:
                assert sorted(cells.pos[cells.has(one.id)].tolist()) == one.positions
                assert one.pos_max == one.next_pos - 1


@pytest.mark.slow
def test_trained_model_generates_the_same_text_in_all_builds(
    stock: Variant, patched: Variant, trained_model: Path
) -> None:
    """Check greedy text over both builds, here and in a worker."""
    texts = set()
    for variant in (stock, patched):
        for isolated in (False, True):
            with kv.open(variant.folder, isolated=isolated) as library:
                ctx = library.load_model(trained_model).context(n_ctx=256)
                a = ctx.sequence()
                ctx.decode(a.feed(a.context.model.tokenize("Once upon a time")))
                texts.add("".join(a.generate(max_tokens=40)))
    assert len(texts) == 1
    assert len(texts.pop().split()) > 20


@pytest.mark.slow
def test_batched_steps_equal_single_steps(speaking: kv.Model) -> None:
    """Single steps, many steps at once and one by one have equal tokens, rows and ledgers."""
    starts, results = [70, 80, 90], []
    for way in ("alone", "together", "at once"):
        with speaking.context(n_ctx=256, n_seq_max=3) as ctx, speaking.sampler() as sampler:
            lanes = [ctx.sequence() for _ in starts]
            rows = []
            if way == "at once":
                rows = ctx.advance(lanes, starts, 6, sampler)
                while len(rows) < 6:  # it ends where one sequence does
                    rows += ctx.advance(lanes, rows[-1], 6 - len(rows), sampler)
            tokens = starts
            while len(rows) < 6:
                if way == "together":
                    ctx.step_all(lanes, tokens)
                    tokens = sampler.sample_all(ctx)
                    assert tokens == ctx.logits_all().argmax(axis=1).tolist()
                else:
                    chosen = []
                    for lane, token in zip(lanes, tokens, strict=True):
                        lane.step(token)
                        chosen.append(sampler.sample(ctx))
                    tokens = chosen
                rows.append(tokens)
            assert ctx.kv.stats.used == 18
            results.append((rows, [(lane.tokens, lane.positions) for lane in lanes]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("release", "safe"), [("0.3.9", False), ("0.3.16", True), ("0.3.36", True), ("b11549", True)]
)
def test_threads_are_those_in_use(release: str, safe: bool, tiny_model: Path) -> None:
    """They are those of llama.cpp; releases with a shared counter lack the capability."""
    with kv.open(built(f"{release}+stock").folder) as library:
        assert (kv.Capability.THREADS in library.about.capabilities) is safe
        with library.load_model(tiny_model) as model:
            context = model.context(64, n_threads=2, n_threads_batch=3)
            assert (context.info.n_threads, context.info.n_threads_batch) == (2, 3)
            context.set_threads(1)
            assert (context.info.n_threads, context.info.n_threads_batch) == (1, 1)
