"""Test that positions are below 2^30, because llama.cpp overflows beyond."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import KVFileDamaged, ModelError, NativeError
from pyllamakv.runtime import state
from pyllamakv.scenarios import synthetic_models
from qa.fuzzing import native_targets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAST = 2**30 - 1
SPECS = ("0.3.5", "0.3.9", "0.3.14", "0.3.36")


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest) -> Iterator[kv.Model]:
    """Load the smallest model into one release per interface of memories."""
    with (
        kv.open(built(f"{request.param}+patched").folder) as library,
        library.load_model(synthetic_models.tiny()) as loaded,
    ):
        yield loaded


def options(**more: Any) -> dict[str, Any]:
    """Return the sizes of a small context."""
    return {"n_ctx": 32, "n_batch": 16, "n_seq_max": 3, "n_threads": 1, **more}


@pytest.mark.native
@pytest.mark.regression(
    "decodes and shifts accepted positions of 2^30 and above, where sums of two positions overflow",
    by="fuzzing",
    of="shim",
)
@pytest.mark.regression(
    "`plk_seq_div` iterated over all positions up to the last one if shifts divide, which took "
    "hours for a billion",
    by="fuzzing",
    of="shim",
)
def test_decode_or_shift_beyond_the_last_position_is_refused(model: kv.Model) -> None:
    """The last position can be used and freed; one more is refused, and no state changes."""
    with model.context(**options()) as ctx:
        native, handle = ctx.native, ctx.handle
        for pos in (LAST + 1, 2**31 - 1):
            with pytest.raises(NativeError, match="position"):
                native.decode(handle, [1], [pos], None, (0,), None)
            with pytest.raises(NativeError, match="position"):
                native.decode(handle, [1, 2], [0, pos], None, (0, 1), (1,) * 2)
        assert native.decode(handle, [1], [LAST], None, (0,), None) == 0
        assert native.decode(handle, [1], [0], None, (1,), None) == 0
        with pytest.raises(NativeError, match=r"leaves the range of positions"):
            native.seq_add(handle, 0, -1, -1, 1)
        with pytest.raises(NativeError, match=r"leaves the range of positions"):
            native.seq_add(handle, 1, -1, -1, 2**30)
        assert native.seq_pos_max(handle, 0) == LAST
        native.seq_add(handle, 1, -1, -1, LAST)
        assert native.seq_pos_max(handle, 1) == LAST
        native.seq_add(handle, 1, 5, -1, -LAST)
        assert native.seq_pos_max(handle, 1) == 0
        # If shifts divide, not one step for each of a billion positions.
        native.seq_div(handle, 0, -1, -1, 3)
        assert native.seq_pos_max(handle, 0) == LAST // 3
        assert native.seq_rm(handle, 0, -1, -1)
        assert native.seq_pos_max(handle, 0) == -1


@pytest.mark.native
@pytest.mark.parametrize("name", ["recurrent", "hybrid"])
@pytest.mark.parametrize("release", SPECS[1:])
def test_divided_state_has_the_divided_position(release: str, name: str) -> None:
    """A state has no cells that contain its position, only a last position."""
    with kv.open(built(f"{release}+patched").folder) as library:
        try:
            model = library.load_model(synthetic_models.model(name))
        except ModelError:
            pytest.skip("this release does not know the model")
        with model.context(**options()) as ctx:
            for pos in range(7):
                assert ctx.native.decode(ctx.handle, [1], [pos], None, (0,), None) == 0
            ctx.native.seq_div(ctx.handle, 0, -1, -1, 3)
            assert ctx.native.seq_pos_max(ctx.handle, 0) == 2


@pytest.mark.native
@pytest.mark.regression(
    "a state with a position of 2^31 - 1 was refused and stayed in the cache, as llama.cpp "
    "removes no such cell",
    by="fuzzing",
    of="llama.cpp",
)
def test_state_or_kept_file_with_an_invalid_position_is_refused(
    model: kv.Model, tmp_path: Path
) -> None:
    """A state or file with a position out of range is refused, and nothing changes."""
    with model.context(**options()) as ctx:
        a = ctx.sequence()
        a.prefill(range(1, 6))
        before = a.save()
        raw = state.unpack(before).raw
        place = next(at for at in range(len(raw)) if raw[at : at + 4] == struct.pack("<i", 4))
        for pos in (2**30, 2**31 - 1):
            far = bytearray(raw)
            struct.pack_into("<i", far, place, pos)
            with pytest.raises(NativeError, match="position"):
                ctx.native.state_load(ctx.handle, 0, bytes(far))
        assert a.save() == before
    if Capability.MAPPING not in model.native.about.capabilities:
        return
    keep: dict[str, Any] = {"kv_backing": tmp_path / "cache", "kv_keep": True, **options()}
    with model.context(**keep) as ctx:
        ctx.sequence().prefill(range(1, 6))
        cells = ctx.kv.stats.size
    whole = bytearray((tmp_path / "cache").read_bytes())
    at = native_targets.SIZE + 8 + cells * 8
    assert struct.unpack_from("<6i", whole, at) == (0, 1, 2, 3, 4, -1)
    struct.pack_into("<i", whole, at + 16, 2**30)
    mended = native_targets.with_file_checksums(bytes(whole), cells)
    assert mended != whole
    (tmp_path / "cache").write_bytes(mended)
    with pytest.raises(KVFileDamaged, match="positions"):
        model.context(**keep)
    assert (tmp_path / "cache").read_bytes() == mended
