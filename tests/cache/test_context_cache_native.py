"""Test the cache on real libraries: its logits are those of a new context.

Flash attention is on and off; cells are contiguous, scattered, or in a stream per sequence. The
names in docstrings are those of ollama's tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from cache_kit import forward, fresh, picture, some
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import KVCacheFull, SharedCells, Unsupported
from pyllamakv.scenarios import architectures, synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.native

#: The releases, how sequences share cells, and flash attention: V by rows and by columns.
SETTINGS = [
    pytest.param((spec, unified, flash), id=f"{spec}-{'one' if unified else 'streams'}-{flash}")
    for spec, unified in (
        ("0.3.9+stock", True),
        ("0.3.9+patched", True),
        ("0.3.36+patched", True),
        ("0.3.36+patched", False),
    )
    for flash in (False, True)
]
CLOSE = 0.02


class Bench(NamedTuple):
    """A model, a function that creates caches, and the settings of the case."""

    model: kv.Model
    options: dict[str, Any]
    unified: bool

    def cache(self, **sizes: int) -> kv.ContextCache:
        """Create a cache of 2 sequences of 32 tokens by default."""
        wanted = {"max_sequences": 2, "capacity": 32, "max_batch": 32, **sizes}
        return kv.ContextCache.init(self.model, kv_unified=self.unified, **wanted, **self.options)

    def check(self, cache: kv.ContextCache, sequence: int, tokens: list[int]) -> None:
        """Check that a sequence has these tokens, and continues like a new context."""
        cache.check()
        lane = cache.sequences[sequence]
        assert lane.tokens == tokens
        forward(cache, sequence, [11])
        there = lane.logits().copy()
        cache.remove(sequence, len(tokens))
        assert np.abs(there - fresh(self.model, [*tokens, 11], **self.options)).max() < CLOSE


@pytest.fixture(params=SETTINGS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Open a library with the smallest model."""
    spec, unified, flash = request.param
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
    ):
        yield Bench(model, {"flash_attn": flash, "n_ubatch": 16}, unified)


def test_stored_tokens_see_all_earlier_tokens(bench: Bench) -> None:
    """TestStore: each token of a batch attends to earlier ones, and so does the next batch."""
    tokens = some(10)
    with bench.cache() as cache:
        cache.start_forward(tokens[:4], range(4), [0] * 4, [True] * 4)
        rows = cache.context.logits_all().copy()
        for place in range(4):
            expected = fresh(bench.model, tokens[: place + 1], **bench.options)
            assert np.abs(rows[place] - expected).max() < CLOSE
        forward(cache, 0, tokens[4:])
        bench.check(cache, 0, tokens)


def test_interleaved_sequences_do_not_see_each_other(bench: Bench) -> None:
    """TestSequences: two sequences that are interleaved in a batch are independent."""
    a, b = some(8, 1), some(8, 2)
    with bench.cache() as cache:
        for at in (0, 4):
            places = [p for p in range(at, at + 4) for _ in "ab"]
            both = [
                token for pair in zip(a[at : at + 4], b[at : at + 4], strict=True) for token in pair
            ]
            cache.start_forward(both, places, [0, 1] * 4)
        bench.check(cache, 0, a)
        bench.check(cache, 1, b)


def test_cells_of_a_removed_end_are_used_again(bench: Bench) -> None:
    """TestRemove/RemoveEnd: the hole is used again."""
    tokens = some(12)
    with bench.cache() as cache:
        forward(cache, 0, tokens)
        cache.remove(0, 8)
        forward(cache, 0, [5, 6])
        bench.check(cache, 0, [*tokens[:8], 5, 6])
        assert cache.context.kv.stats.used == 10


def test_removed_middle_rotates_later_keys(bench: Bench) -> None:
    """TestRemove/RemoveMiddle: later keys are rotated to their new positions.

    The model has one layer, so that K and V depend on token and position alone.
    """
    tokens = some(20)
    with bench.cache() as cache, bench.cache() as other:
        forward(cache, 0, tokens)
        cache.remove(0, 4, 9)
        cache.context.kv.update()
        rest = tokens[:4] + tokens[9:]
        forward(other, 0, rest)
        moved, expected = (each.context.kv.rows(0, each.sequences[0]) for each in (cache, other))
        assert moved.pos.tolist() == expected.pos.tolist() == list(range(15))
        near = [
            np.abs(_f16(a) - _f16(b)).max()
            for a, b in ((moved.k, expected.k), (moved.v, expected.v))
        ]
        assert near[0] < 0.02
        assert near[1] < 0.002
        bench.check(cache, 0, rest)


def _f16(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.float16).astype(np.float32)


def test_defragmentation_frees_cells_for_a_batch(bench: Bench) -> None:
    """TestDefrag: a full cache with two holes, and a batch that fits into neither.

    An earlier defragmentation gave half of the moved cells wrong positions.
    """
    tokens = some(31)
    with bench.cache(max_sequences=1, capacity=32) as cache:
        cells = cache.context.info.n_ctx
        tokens = some(min(cells, 32))
        forward(cache, 0, tokens)
        cache.remove(0, 2, 4)
        cache.remove(0, 11)
        rest = (tokens[:2] + tokens[4:])[:11]
        free = 32 - 11
        more = some(free, 3)
        forward(cache, 0, more)
        assert cache.context.kv.stats.used == 32
        cache.remove(0, 31)
        bench.check(cache, 0, (rest + more)[:31])


def test_copied_prefix_excludes_the_target_history(bench: Bench) -> None:
    """TestCopy: what follows sees the prefix and nothing of the target's own past."""
    tokens, old = some(12), some(9, 2)
    with bench.cache() as cache:
        forward(cache, 0, tokens)
        forward(cache, 1, old)
        rows = cache.context.kv.rows(0, cache.sequences[0])
        assert cache.copy_prefix(0, 1, 5) == 5
        forward(cache, 1, [7, 8])
        bench.check(cache, 1, [*tokens[:5], 7, 8])
        bench.check(cache, 0, tokens)
        assert (cache.context.kv.rows(0, cache.sequences[0]).k == rows.k).all()
        shared = 5 if bench.unified else 0
        assert cache.context.kv.stats.shared == shared
        before = picture(cache)
        cache.copy_prefix(1, 1, 3)
        assert picture(cache) == before
        assert cache.copy_prefix(0, 1, 99) == 12
        bench.check(cache, 1, tokens)
        assert cache.copy_prefix(0, 1, 0) == 0
        bench.check(cache, 1, [])


def test_a_fork_is_shifted_and_its_sibling_is_not(bench: Bench) -> None:
    """A shift of shared cells would shift the sibling: positions 19 to 15, logits off by 2.9.

    With a stream for each sequence, no cells are shared, and no shift is refused.
    """
    tokens = some(20)
    with bench.cache() as cache:
        forward(cache, 0, tokens)
        cache.copy_prefix(0, 1, 20)
        before = picture(cache)
        if bench.unified:
            with pytest.raises(SharedCells):
                cache.remove(0, 4, 8)
            assert picture(cache) == before
        cache.remove(0, 4, 8, unshare=True)
        bench.check(cache, 1, tokens)
        bench.check(cache, 0, tokens[:4] + tokens[8:])


def test_context_resumes_at_any_position(bench: Bench) -> None:
    """TestCanResume without a window: anywhere, and what follows is as in a fresh context."""
    tokens = some(24)
    with bench.cache() as cache:
        for position in (0, 1, 13, 23, 24):
            cache.remove(0, 0)
            forward(cache, 0, tokens)
            assert cache.can_resume(0, position)
            cache.remove(0, position)
            forward(cache, 0, tokens[position:])
            bench.check(cache, 0, tokens)
        assert not cache.can_resume(0, 25)


def test_batch_fills_all_scattered_cells_and_one_more_fails(bench: Bench) -> None:
    """Exactly as many tokens as free cells fit, wherever these are; one more fails."""
    with bench.cache(capacity=64, max_batch=64) as cache:
        if not bench.unified:
            pytest.skip("sequences have separate cells, which others cannot fragment")
        cells = cache.context.info.n_ctx
        cache.capacity = cells
        for place in range(cells // 2):
            cache.start_forward([place % 60, 7], [place, place], [0, 1])
        cache.remove(1, 0)
        tokens = some(cells // 2, 4)
        forward(cache, 1, tokens[:-32])
        before = picture(cache)
        with pytest.raises(KVCacheFull) as caught:
            forward(cache, 1, some(33))
        assert (caught.value.cells, caught.value.used) == (cells, cells - 32)
        assert picture(cache) == before
        forward(cache, 1, tokens[-32:])
        assert cache.context.kv.stats.free == 0
        cache.remove(1, 60)
        bench.check(cache, 1, tokens[:60])
        cache.remove(0, 60)
        bench.check(cache, 0, [place % 60 for place in range(60)])


def test_whole_sequence_is_removed_after_every_error(bench: Bench) -> None:
    """After any refusal, removing a sequence frees its cells."""
    with bench.cache() as cache:
        forward(cache, 0, some(20))
        forward(cache, 1, some(9, 2))
        cache.context.native.cancel_after(cache.context.handle, 1)
        with pytest.raises(kv.Cancelled):
            cache.start_forward(some(8), range(20, 28), [0] * 8)
        cache.context.native.cancel_after(cache.context.handle, -1)
        for call in (
            lambda: cache.remove(0, 5, 4),
            lambda: cache.start_forward([1], [3], [0]),
            lambda: forward(cache, 0, some(20)),
            lambda: cache.copy_prefix(0, 9, 1),
        ):
            with pytest.raises(kv.KvError):
                call()
        assert cache.sequences[0].tokens == some(20)
        for sequence in (0, 1):
            cache.remove(sequence, 0)
        assert cache.context.kv.stats.used == 0
        forward(cache, 0, some(20))
        bench.check(cache, 0, some(20))


@pytest.mark.parametrize("name", ["recurrent", "hybrid", "sliding", "latent", "indexed"])
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.36+patched"])
def test_whole_sequence_is_removed_after_an_aborted_pass(spec: str, name: str) -> None:
    """It is in memories with states or windows, after many aborted passes."""
    with kv.open(built(spec).folder, isolated=True) as library:
        try:
            model = library.load_model(synthetic_models.model(name))
        except kv.ModelError:
            pytest.skip("this release does not know the architecture")
        sizes = {"max_sequences": 2, "capacity": 96, "max_batch": 32}
        with kv.ContextCache.init(model, n_ubatch=16, **sizes) as cache:
            for _ in range(3):
                for sequence in (0, 1):
                    if cache.can_resume(sequence, 0):
                        forward(cache, sequence, some(40))
                cache.context.native.cancel_after(cache.context.handle, 2)
                with pytest.raises((kv.Cancelled, Unsupported)):
                    forward(cache, 0, some(32))
                cache.context.native.cancel_after(cache.context.handle, -1)
                cache.check()
                for sequence in (0, 1):
                    cache.remove(sequence, 0)
                assert [cache.length(i) for i in (0, 1)] == [0, 0]
                cache.check()


def windowed(library: kv.OpenLibrary, window: int) -> kv.Model:
    """Load a model in which every other layer has a window of this size."""
    from pyllamakv.home import home

    shape = architectures.Shape(f"window{window}", n_layer=26, architecture="gemma2", window=window)
    return library.load_model(synthetic_models.generate(shape, home() / "models"))


@pytest.mark.parametrize("flash", [False, True])
def test_cells_outside_every_window_are_reused(flash: bool) -> None:
    """TestSWA, TestSWASeparateBatches, TestSWAMem: cells outside of every window are reused.

    Two sequences alternate; each pass frees the cells that the other left outside its window. An
    earlier cache checked only the sequences of the batch and became full. Cells that are kept
    beyond the window are masked: logits equal those of a new context.
    """
    with kv.open(built("0.3.36+patched").folder) as library:
        model = windowed(library, 8)
        sizes = {"max_sequences": 2, "capacity": 512, "max_batch": 32, "n_ubatch": 32}
        with kv.ContextCache.init(model, flash_attn=flash, **sizes) as cache:
            tokens = {0: some(500, 1), 1: some(500, 2)}
            small = [each for each in cache.context.kv.snapshot().streams if each.swa]
            assert sum(map(len, small)) < 1000
            for at in range(0, 500, 20):
                for sequence in (0, 1):
                    forward(cache, sequence, tokens[sequence][at : at + 20])
            for sequence in (0, 1):
                forward(cache, sequence, [7])
                there = cache.sequences[sequence].logits().copy()
                expected = fresh(
                    model, [*tokens[sequence], 7], flash_attn=flash, swa_full=True, n_ctx=512
                )
                assert np.abs(there - expected).max() < 0.2
            cache.check()


def test_a_window_of_four_resumes_where_its_cells_are() -> None:
    """TestCanResume and TestCanResumeSWAMem, window 4: refused if the window is incomplete.

    Cells remain until they are reused, so the result depends on the existing cells and not on a
    formula: a rollback beyond the window is possible until then.
    """
    with kv.open(built("0.3.36+patched").folder) as library:
        model = windowed(library, 4)
        sizes = {"max_sequences": 1, "capacity": 512, "max_batch": 32, "n_ubatch": 32}
        with kv.ContextCache.init(
            model, checkpoints=kv.CheckpointSchedule(size=0), **sizes
        ) as cache:
            forward(cache, 0, some(5))
            assert all(cache.can_resume(0, position) for position in range(6))
            assert not cache.can_resume(0, 6)
            forward(cache, 0, some(495))
            held = {
                pos
                for each in cache.context.kv.snapshot().streams
                if each.swa
                for pos in each.pos[each.has(0)].tolist()
            }
            for position in range(501):
                seen = set(range(max(0, position - 3), position))
                expected = position in (0, 500) or seen <= held
                assert cache.can_resume(0, position) == expected, position
            refused = next(p for p in range(500) if not cache.can_resume(0, p))
            before = picture(cache)
            with pytest.raises(Unsupported, match="window"):
                cache.remove(0, refused)
            with pytest.raises(Unsupported):
                cache.remove(0, 2, 4)
            assert picture(cache) == before
