"""Test that memory runs out when a cache is created, or never."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import runtime_kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import Capability
from pyllamakv.runtime import memory_estimate, reservation
from pyllamakv.scenarios import synthetic_models

MIB = 1 << 20
SIZES = {"max_sequences": 2, "capacity": 2048, "max_batch": 1024, "n_ubatch": 512}


def work(cache: kv.ContextCache) -> None:
    """Use all memory of a cache: fill it, request all logits, shift, defragment, continue."""
    for sequence in (0, 1):
        for at in range(0, 2048, 1024):
            places = list(range(at, at + 1024))
            cache.start_forward([1] * 1024, places, [sequence] * 1024, [True] * 1024)
    cache.remove(1, 0)
    cache.remove(0, 100, 200)
    cache.context.kv.update()
    if Capability.DEFRAG in cache.context.native.about.capabilities:
        cache.context.kv.defrag()
    places = [place + (1948 if lane == 0 else 0) for place in range(100) for lane in (0, 1)]
    cache.start_forward([2] * 200, places, [0, 1] * 100)
    cache.check()


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.36+patched"])
def test_memory_runs_out_at_the_start_or_never(spec: str, flash: bool) -> None:
    """Around the smallest sufficient address space, a cache is refused, or works completely."""
    with kv.open(built(spec).folder, isolated=True) as library:
        model = library.load_model(synthetic_models.model("bytes"))
        pid = library.native.pid  # type: ignore[attr-defined]

        def made(room: int) -> bool:
            _limit(pid, room)
            try:
                cache = kv.ContextCache.init(model, flash_attn=flash, **SIZES)
            except kv.NotEnoughMemory:
                return False
            with cache:
                work(cache)
            return True

        low, high = 1 * MIB, 1280 * MIB
        assert not made(low)
        assert made(high)
        while high - low > 2 * MIB:
            middle = (low + high) // 2
            low, high = (low, middle) if made(middle) else (middle, high)


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
@pytest.mark.parametrize("flash", [False, True])
def test_context_that_was_created_can_decode_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, flash: bool
) -> None:
    """Without a check of the address space, too, the created context is sufficient."""
    monkeypatch.setattr(memory_estimate, "GRAPHS", -(1 << 40))
    made = []
    for room in range(2, 44, 4):
        with kv.open(built("0.3.36+patched").folder, isolated=True) as library:
            model = library.load_model(synthetic_models.model("bytes"))
            _limit(library.native.pid, room * MIB)  # type: ignore[attr-defined]
            try:
                cache = kv.ContextCache.init(model, flash_attn=flash, **SIZES)
            except kv.NativeError:
                continue  # refused, or the worker ended: in any case before there was a cache
            made.append(room)
            with cache:
                work(cache)
    assert made


def _limit(pid: int, room: int) -> None:
    resource.prlimit(
        pid, resource.RLIMIT_AS, (memory_estimate.mapped_bytes(pid) + room, resource.RLIM_INFINITY)
    )


def test_a_context_is_left_empty(tmp_path: Path) -> None:
    """No tokens, cells, pending shift or cancel of the check remain."""
    ctx = runtime_kit.context(tmp_path)
    reservation.reserve(ctx, fill_cache=True)
    assert ctx.kv.stats.used == 0
    assert not any(map(len, ctx.ledgers))
    sequence = ctx.sequence()
    ctx.decode(sequence.feed([1] * 32))
    assert len(sequence) == 32


def test_a_rehearsal_fills_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes as many tokens as there are cells, in the largest pieces."""
    ctx = runtime_kit.context(tmp_path, n_ctx=72)
    ctx.native.calls.clear()
    reservation.reserve(ctx, fill_cache=True)
    assert ctx.native.calls == [f"decode {n}" for n in (1, 32, 32, 32, 32, 8)]


def test_missing_work_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flash attention it grows with the cells; missing memory is an error."""
    plain = runtime_kit.context(tmp_path)
    assert (
        reservation.work_bytes(plain.info, plain.model.info.n_head)
        == 2 * 64 * 8 * plain.model.info.n_head
    )
    flash = runtime_kit.context(tmp_path, flash_attn=True)
    assert reservation.work_bytes(flash.info, flash.model.info.n_head) == 0
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _=None: reservation.SLACK)
    reservation.reserve(flash)
    with pytest.raises(kv.NotEnoughMemory, match="work space") as caught:
        reservation.reserve(plain)
    assert caught.value.available == reservation.SLACK


def test_address_space_limit_is_checked_before_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some releases abort when they find no address space for their graphs."""
    model = runtime_kit.model(tmp_path)
    model.context(64).close()
    native: Any = model.native
    freed = list(native.freed)
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _=None: None)
    left = memory_estimate.GRAPHS
    monkeypatch.setattr(memory_estimate, "address_space_left", lambda _=None: left)
    for create in (kv.ContextCache.init, kv.Model.context):
        with pytest.raises(kv.NotEnoughMemory, match="ulimit"):
            create(model)
    assert native.freed == freed


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
@pytest.mark.parametrize("mib", [200, 400, 560])
def test_context_beyond_the_address_space_limit_is_refused(mib: int) -> None:
    """A worker with too little address space refuses the context, and does not abort."""
    with kv.open(built("0.3.9+patched").folder, isolated=True) as library:
        model = library.load_model(synthetic_models.model("deep"))
        _limit(library.native.pid, mib * MIB)  # type: ignore[attr-defined]
        with pytest.raises(kv.NotEnoughMemory):
            model.context(n_ctx=16384)
        assert library.load_model(synthetic_models.model("tiny")).info.n_layer == 1
