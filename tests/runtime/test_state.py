"""Test that sequences are saved and restored completely, or not at all."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import hypothesis_profile  # noqa: F401
import pytest
import runtime_kit as kit
from fakes.simulated import ALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import StateError, Unsupported
from pyllamakv.runtime import state, state_slices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence


def filled(ctx: Context, n: int, first: int = 10) -> Sequence:
    """Return a sequence with ``n`` tokens."""
    a = ctx.sequence()
    a.prefill(range(first, first + n))
    return a


def interleaved(ctx: Context, n: int) -> tuple[Sequence, Sequence]:
    """Return two sequences of ``n`` tokens whose cells alternate."""
    a, b = ctx.sequence(), ctx.sequence()
    for i in range(n):
        ctx.decode([a.feed([10 + i]), b.feed([50 + i])])
    return a, b


@pytest.mark.parametrize("flash_attn", [False, True])
def test_restored_sequence_equals_the_saved_one(tmp_path: Path, flash_attn: bool) -> None:
    """Check tokens, gaps in positions, rows, and text that is generated afterwards."""
    ctx = kit.context(tmp_path, flash_attn=flash_attn)
    a = filled(ctx, 10)
    a.remove(2, 4)
    b = ctx.sequence()
    b.restore(a.save())
    assert (b.tokens, b.positions, b.pos_max) == (a.tokens, a.positions, 9)
    assert (ctx.kv.rows(0, a).k == ctx.kv.rows(0, b).k).all()
    assert ctx.kv.stats.shared == 0
    assert "".join(a.generate(5)) == "".join(b.generate(5))


def test_saved_sequence_loads_in_another_context(tmp_path: Path) -> None:
    """Check a second context, and an empty sequence."""
    saved = filled(kit.context(tmp_path), 6).save()
    ctx = kit.context(tmp_path, n_ctx=128)
    a = filled(ctx, 3, 90)
    a.restore(saved)
    assert a.tokens == list(range(10, 16))
    empty = ctx.sequence()
    a.restore(empty.save())
    assert (a.tokens, ctx.kv.stats.used) == ([], 0)


def test_a_scattered_cache_is_defragmented_first(tmp_path: Path) -> None:
    """Check a restore that needs a hole larger than any."""
    saved = filled(kit.context(tmp_path), 8).save()
    ctx = kit.context(tmp_path, n_ctx=32)
    a, b = interleaved(ctx, 16)
    b.remove()
    c = ctx.sequence()
    c.restore(saved)
    assert c.tokens == list(range(10, 18))
    assert a.tokens == list(range(10, 26))
    assert ctx.kv.stats.used == 24


def test_a_state_that_cannot_fit_changes_nothing(tmp_path: Path) -> None:
    """Check too many cells, with the sequence's own counted as free."""
    saved = filled(kit.context(tmp_path), 20).save()
    ctx = kit.context(tmp_path, n_ctx=32)
    a, b = filled(ctx, 10), filled(ctx, 13)
    with pytest.raises(StateError, match="20 cells and 19 are free"):
        a.restore(saved)
    assert (len(a), a.pos_max, len(b)) == (10, 9, 13)
    b.trim(12)
    a.restore(saved)
    assert (len(a), a.pos_max) == (20, 19)


def test_refused_state_restores_the_previous_content(tmp_path: Path) -> None:
    """Check a library that refuses after it has emptied the sequence."""
    ctx = kit.context(tmp_path)
    saved, a = filled(ctx, 5).save(), filled(ctx, 7, 80)
    raw, load = state.unpack(saved).raw, ctx.native.state_load

    def picky(handle, seq, data):
        if data != raw:
            return load(handle, seq, data)
        ctx.native.seq_rm(handle, seq, -1, -1)
        return 0

    ctx.native.state_load = picky
    with pytest.raises(StateError, match="nothing was changed"):
        a.restore(saved)
    assert a.tokens == list(range(80, 87))
    assert a.pos_max == 6
    assert (ctx.kv.rows(0, a).pos == range(7)).all()


def test_sequence_restored_after_a_refusal_has_own_cells(tmp_path: Path) -> None:
    """A forked sequence has its own cells after a refusal, and may be shifted."""
    ctx = kit.context(tmp_path)
    saved, a = filled(ctx, 5).save(), filled(ctx, 7, 80)
    a.fork()
    raw, load = state.unpack(saved).raw, ctx.native.state_load
    ctx.native.state_load = lambda handle, seq, data: load(handle, seq, data) * (data != raw)
    with pytest.raises(StateError, match="nothing was changed"):
        a.restore(saved)
    marks = {mark for ledger in ctx.ledgers for mark in ledger.marks}
    assert ctx.kv.stats.used == len(marks) == 5 + 7 + 7
    a.shift(3, None, 2)
    assert a.tokens == list(range(80, 87))


@pytest.mark.parametrize("held", [0, 4])
def test_interrupted_restore_is_rolled_back(tmp_path: Path, held: int) -> None:
    """Ctrl-C after the C call: the previous tokens of the sequence are restored."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    a.prefill([3] * 9)
    saved = a.save()
    if held:
        b.prefill([5] * held)
    real = ctx.native.state_load

    def interrupted(*args: object) -> int:
        ctx.native.state_load = real
        real(*args)
        raise KeyboardInterrupt

    ctx.native.state_load = interrupted
    with pytest.raises(KeyboardInterrupt):
        b.restore(saved)
    assert (b.tokens, b.pos_max, ctx.kv.stats.used) == ([5] * held, held - 1, 9 + held)
    b.restore(saved)
    assert b.tokens == a.tokens


def test_unrestorable_state_is_refused_before_the_library_call(tmp_path: Path) -> None:
    """Check that a restore that must fail is refused before the library empties the sequence."""
    ctx = kit.context(tmp_path, {"capabilities": ALL & ~Capability.DEFRAG}, n_ctx=32)
    saved = filled(kit.context(tmp_path, n_ctx=64), 16).save()
    a, b = interleaved(ctx, 16)
    with pytest.raises(StateError, match="largest hole has 1"):
        a.restore(saved)
    assert (len(a), a.pos_max, len(b), b.pos_max) == (16, 15, 16, 15)


def test_sequence_lost_by_a_refused_state_is_reported_as_empty(tmp_path: Path) -> None:
    """Check the one case that loses tokens: it is reported, and the ledger agrees."""
    ctx = kit.context(tmp_path)
    saved, a = filled(ctx, 5).save(), filled(ctx, 7, 80)

    def stubborn(handle, seq, data):
        ctx.native.seq_rm(handle, seq, -1, -1)
        return 0

    ctx.native.state_load = stubborn
    tokens, works = a.tokens, ctx.native.__class__.state_load
    with pytest.raises(StateError, match="is empty now") as failed:
        a.restore(saved)
    assert (a.tokens, a.pos_max) == ([], -1)
    ctx.native.state_load = works.__get__(ctx.native)
    a.restore(failed.value.saved[a.id])
    assert a.tokens == tokens


@pytest.mark.parametrize("fails", [None, "refused", "misplaced", "interrupted"])
def test_state_parts_are_loaded_completely_or_not_at_all(tmp_path: Path, fails: str | None) -> None:
    """Load three parts of a sequence through another one; the last may fail."""
    ctx = kit.context(tmp_path)
    a = filled(ctx, 9)
    content = state.unpack(a.save())
    whole = state_slices.read(content.raw)
    parts = [whole.cut(slice(i, i + 3)).to_bytes() for i in (0, 3, 6)]
    b, spare = ctx.sequence(), ctx.sequence()
    before = ctx.kv.stats.used

    def given() -> Iterator[memoryview]:
        yield from parts[:2]
        if fails == "interrupted":
            raise KeyboardInterrupt
        yield {"refused": memoryview(b"no state"), "misplaced": parts[1]}.get(fails, parts[2])

    if fails is None:
        state.load_parts(b, spare, content, given())
        assert (b.tokens, b.positions, b.pos_max) == (a.tokens, a.positions, 8)
        assert (ctx.kv.rows(0, a).k == ctx.kv.rows(0, b).k).all()
        assert ctx.kv.stats.shared == 0
        assert ctx.kv.stats.used == before + 9
        assert "".join(a.generate(5)) == "".join(b.generate(5))
    else:
        with pytest.raises(KeyboardInterrupt if fails == "interrupted" else StateError):
            state.load_parts(b, spare, content, given())
        assert (len(b), b.pos_max, ctx.kv.stats.used) == (0, -1, before)
    assert (len(spare), spare.pos_max) == (0, -1)


@pytest.mark.parametrize("wrong", [b"", b"short", b"PLKSEQ1\n" + bytes(20), bytes(100)])
def test_other_bytes_are_refused(tmp_path: Path, wrong: bytes) -> None:
    """Check data that is not a save."""
    a = filled(kit.context(tmp_path), 3)
    with pytest.raises(StateError):
        a.restore(wrong)
    assert len(a) == 3


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(data=st.data())
def test_every_flipped_byte_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    """Check damage anywhere in a save."""
    ctx = kit.context(tmp_path)
    a = filled(ctx, 3)
    saved = bytearray(a.save())
    at = data.draw(st.integers(0, len(saved) - 1))
    saved[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(StateError):
        a.restore(bytes(saved))
    assert len(a) == 3


def test_a_damaged_head_with_a_right_checksum_is_refused() -> None:
    """Check saves with changed headers and right checksums."""
    for body in (b"not json", b"{}", b'{"fits": {}, "tokens": 9}', b'{"fits": 1, "tokens": 0}'):
        head = struct.pack("<8sII", b"PLKSEQ1\n", len(body), zlib.crc32(body))
        with pytest.raises(StateError, match="cannot be read"):
            state.unpack(head + body)


def test_another_model_or_cache_is_refused_by_name(tmp_path: Path) -> None:
    """Check that the message names the difference."""
    saved = filled(kit.context(tmp_path), 3).save()
    other = filled(kit.context(tmp_path, flash_attn=True, type_k="q8_0"), 3)
    with pytest.raises(StateError, match=r"type_k 1 .here 8.") as caught:
        other.restore(saved)
    assert "v_transposed" in str(caught.value)


def test_build_without_states_raises_unsupported(tmp_path: Path) -> None:
    """Check both directions."""
    saved = filled(kit.context(tmp_path), 3).save()
    a = filled(kit.context(tmp_path, {"capabilities": ALL & ~Capability.STATES}), 3)
    with pytest.raises(Unsupported):
        a.save()
    with pytest.raises(Unsupported):
        a.restore(saved)
