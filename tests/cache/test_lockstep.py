"""Test caches in lockstep: if one refuses an operation, none performs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit
from cache_kit import forward, fresh, picture, simulated, some
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import (
    Cancelled,
    KVCacheFull,
    NativeError,
    SharedCells,
    Unsupported,
    UsageError,
)
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pathlib import Path


def pair(folder: Path, second: dict[str, Any] | None = None, **options: Any) -> kv.LockstepCache:
    """Return two simulated caches in lockstep; ``options`` are those of the second context."""
    return kv.LockstepCache([simulated(folder), simulated(folder, second, **options)])


def both(caches: kv.LockstepCache) -> list[Any]:
    """Return the state of every cache, which a refusal must not change."""
    return [picture(each) for each in caches.caches]


def test_lockstep_caches_apply_every_operation_to_both(tmp_path: Path) -> None:
    """The smaller of the two caches limits the sizes; every operation is made on both."""
    caches: kv.Cache = pair(tmp_path, n_ctx=48, n_batch=16, n_seq_max=3)
    assert (caches.capacity, caches.max_batch, caches.max_sequences) == (48, 16, 3)
    forward(caches, 0, range(30))
    assert caches.copy_prefix(0, 1, 12) == 12
    caches.remove(0, 20)
    caches.remove(1, 0, 4, unshare=True)
    assert (caches.length(0), caches.length(1)) == (20, 8)
    assert caches.can_resume(0, 7)
    assert caches.prepare_restore(0, 99) == 20
    assert isinstance(caches, kv.LockstepCache)
    caches.check()
    assert caches.caches[0].sequences[1].tokens == caches.caches[1].sequences[1].tokens
    with caches:
        pass
    assert not any(each.open for cache in caches.caches for each in cache.sequences)


@pytest.mark.parametrize("code", [1, 2, -3])
def test_failure_in_the_second_cache_undoes_the_first(tmp_path: Path, code: int) -> None:
    """Draft and target never have different tokens after any error."""
    caches = pair(tmp_path)
    forward(caches, 0, range(10))
    forward(caches, 1, range(5))
    before = both(caches)
    caches.caches[1].context.native.fail_next = [code]
    with pytest.raises((KVCacheFull, Cancelled, kv.DecodeError)):
        caches.start_forward([1, 2, 3], [10, 5, 6], [0, 1, 1])
    assert both(caches) == before
    caches.start_forward([1, 2, 3], [10, 5, 6], [0, 1, 1])
    caches.check()


def test_full_second_cache_undoes_the_first(tmp_path: Path) -> None:
    """The first one has twice the cells; the cells it used are freed."""
    caches = pair(tmp_path, n_ctx=32)
    forward(caches, 0, range(20))
    before = both(caches)
    with pytest.raises(KVCacheFull):
        forward(caches, 1, range(13))
    assert both(caches) == before


@pytest.mark.regression(
    "after a cancelled decode in a recurrent memory, sequences outside of the batch had wrong "
    "states",
    by="random_operations",
    of="Python",
)
def test_a_cache_without_rewind_is_last_or_saved(tmp_path: Path) -> None:
    """A memory of states is rolled back by a save, and needs none if it is the last."""
    first, second = simulated(tmp_path), simulated(tmp_path)
    for each in (first, second):
        object.__setattr__(each.context.info, "memory", kv.MemoryType.RECURRENT)
    saves: list[int] = []
    for number, each in enumerate((first, second)):
        save = each.context.native.state_save

        def counting(*given: Any, number: int = number, save: Any = save) -> Any:
            saves.append(number)
            return save(*given)

        each.context.native.state_save = counting
        each.rewinder.saves = False
    caches = kv.LockstepCache([first, second])
    forward(caches, 0, range(10))
    forward(caches, 0, [3])
    assert saves == [0]
    before = both(caches)
    second.context.native.fail_next = [1]
    with pytest.raises(KVCacheFull):
        caches.start_forward([1, 2], [11, 0], [0, 1])
    assert both(caches) == before
    caches.check()
    # An abort removes all states, in every cache.
    second.context.native.fail_next = [2]
    with pytest.raises(Cancelled):
        caches.start_forward([1], [0], [1])
    assert [each.length(0) for each in (first, second)] == [0, 0]
    caches.check()


@pytest.mark.parametrize(("checkpoints", "left"), [(False, 0), (True, 20)])
def test_tokens_lost_by_one_cache_are_removed_from_all(
    tmp_path: Path, checkpoints: bool, left: int
) -> None:
    """An abort empties the sequence, and draft and target continue at the same position."""
    caches = pair(tmp_path, {"partial": False})
    second = caches.caches[1]
    second.rewinder.saves = checkpoints
    forward(caches, 0, range(20))
    forward(caches, 0, [1, 2])
    real = second.context.native.decode
    second.context.native.decode = lambda *args: (real(*args), 2)[1]
    with pytest.raises(Cancelled):
        forward(caches, 0, [3, 4])
    second.context.native.decode = real
    assert second.context.emptied == (0,)
    caches.check()
    assert [each.sequences[0].tokens for each in caches.caches] == [list(range(left))] * 2
    forward(caches, 0, range(left, 30))
    caches.check()


@pytest.mark.parametrize("which", [0, 1])
def test_interrupt_rolls_back_all_caches(tmp_path: Path, which: int) -> None:
    """Ctrl-C after the decode of a cache: it is rolled back with those before it."""
    caches = pair(tmp_path)
    forward(caches, 0, range(10))
    before = both(caches)
    cache = caches.caches[which]
    real = cache.start_forward

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    cache.start_forward = runtime_kit.ours(interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(caches, 0, [3, 4])
    assert both(caches) == before


def test_refused_operations_change_no_cache(tmp_path: Path) -> None:
    """If the second cannot perform an operation, the first has not started it."""
    caches = pair(tmp_path, {"partial": False})
    forward(caches, 0, range(10))
    before = both(caches)
    for refused in (
        lambda: caches.copy_prefix(0, 1, 4),
        lambda: caches.remove(0, 4),
        lambda: caches.remove(0, 2, 4),
    ):
        with pytest.raises(Unsupported):
            refused()
        assert both(caches) == before
    assert [p for p in range(12) if caches.can_resume(0, p)] == [0, 10]
    assert caches.prepare_restore(0, 7) == 0
    caches.copy_prefix(0, 1, 10)
    caches.remove(0, 0)
    caches.check()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["seq_rm", "seq_add", "seq_cp", "state_load"])
def test_interrupt_between_caches_keeps_them_equal(
    tmp_path: Path, name: str, which: int, after: bool
) -> None:
    """Ctrl-C between two caches, or between two steps of one: they stay equal."""
    caches = pair(tmp_path)
    forward(caches, 0, range(10))
    forward(caches, 1, [1, 2, 3])
    caches.copy_prefix(0, 2, 8)
    native = caches.caches[which].context.native
    real = getattr(native, name)

    def interrupted(*args: Any) -> Any:
        setattr(native, name, real)
        if after:
            real(*args)
        raise KeyboardInterrupt

    setattr(native, name, interrupted)
    before = both(caches)
    with pytest.raises(KeyboardInterrupt):
        if name == "seq_cp":
            caches.copy_prefix(0, 1, 6)
        else:
            caches.remove(0, 4, 6, unshare=True)
    caches.check()
    tokens = [[lane.tokens for lane in cache.sequences] for cache in caches.caches]
    assert tokens[0] == tokens[1]
    assert tokens[0][2] == list(range(8))
    changed = tokens[0][1] if name == "seq_cp" else tokens[0][0]
    kept = [] if name == "seq_cp" else list(range(4))
    assert changed == kept or both(caches) == before
    forward(caches, 0, [7, 7])
    caches.check()


def test_error_of_a_later_cache_rolls_back_all(tmp_path: Path) -> None:
    """All were checked before, but the library refuses only then."""
    caches = pair(tmp_path)
    forward(caches, 0, range(10))
    native = caches.caches[1].context.native

    def failing(*_: Any) -> None:
        raise NativeError("no")

    native.seq_cp = failing
    with pytest.raises(NativeError):
        caches.copy_prefix(0, 1, 6)
    assert [cache.length(1) for cache in caches.caches] == [0, 0]
    caches.check()


def test_shared_cell_in_one_cache_stops_the_shift_in_all(tmp_path: Path) -> None:
    """Neither moves anything."""
    caches = pair(tmp_path)
    forward(caches, 0, range(10))
    caches.copy_prefix(0, 1, 8)
    before = both(caches)
    with pytest.raises(SharedCells):
        caches.remove(1, 0, 2)
    assert both(caches) == before


def test_invalid_caches_and_batches_are_refused(tmp_path: Path) -> None:
    """They are: no caches, one twice, unknown numbers, batches too large for one."""
    one = simulated(tmp_path)
    for wrong in ([], [one, one]):
        with pytest.raises(UsageError):
            kv.LockstepCache(wrong)
    caches = pair(tmp_path, n_batch=16, n_seq_max=2)
    before = both(caches)
    for call in (
        lambda: caches.start_forward([1] * 17, range(17), [0] * 17),
        lambda: caches.start_forward([1], [0], [2]),
        lambda: caches.length(2),
        lambda: caches.copy_prefix(0, 2, 1),
        lambda: caches.remove(2, 0),
        lambda: caches.can_resume(-1, 0),
        lambda: caches.prepare_restore(2, 0),
    ):
        with pytest.raises(UsageError):
            call()
    assert both(caches) == before
    caches.caches[0].start_forward([1], [0], [0])
    with pytest.raises(AssertionError, match="must have equal ones"):
        caches.check()


@pytest.mark.native
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.36+patched"])
@pytest.mark.parametrize("name", ["tiny", "recurrent", "sliding"])
def test_failed_target_rolls_back_the_draft(spec: str, name: str) -> None:
    """If the target has no cells or is cancelled, the draft is unchanged."""
    tokens, sizes = some(60), {"max_sequences": 2, "max_batch": 64, "n_ubatch": 32}
    with kv.open(built(spec).folder) as library:
        draft, target = (
            library.load_model(synthetic_models.model(each)) for each in (name, "grouped")
        )
        with kv.LockstepCache(
            [
                kv.ContextCache.init(draft, capacity=128, **sizes),
                kv.ContextCache.init(target, capacity=64, **sizes),
            ]
        ) as caches:
            forward(caches, 0, tokens)
            with pytest.raises(KVCacheFull):
                forward(caches, 0, [1] * 20)
            for cache in caches.caches:
                native, handle = cache.context.native, cache.context.handle
                native.cancel_after(handle, 1)
                with pytest.raises(Cancelled):
                    forward(caches, 1, [2] * 40)
                native.cancel_after(handle, -1)
            caches.check()
            assert caches.caches[1].sequences[0].tokens == tokens
            forward(caches, 0, [5])
            for model, cache in zip((draft, target), caches.caches, strict=True):
                expected = fresh(model, [*tokens, 5])
                assert np.abs(cache.sequences[0].logits().copy() - expected).max() < 0.05
