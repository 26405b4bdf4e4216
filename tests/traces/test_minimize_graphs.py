"""Test that failing device operations during a defragmentation never cause wrong data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pyllamakv as kv
from pyllamakv.building.build import build_patched
from pyllamakv.patching import apply
from pyllamakv.patching.definition import Port
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import spec_resolver
from pyllamakv.source.releases import TEST_RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant

FOLDER = Path(__file__).resolve().parents[1] / "data" / "failing"

pytestmark = pytest.mark.native


def doctored(name: str) -> Iterator[Variant]:
    """Build the patched release with another patch of the test."""
    release = spec_resolver.resolve(TEST_RELEASE)
    text = Port.from_file(FOLDER / name)
    built = build_patched(release, apply.apply(release, [text]))
    yield built
    shutil.rmtree(built.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def failing(patched: Variant) -> Iterator[Variant]:
    """Build graphs that write, and then report a failure."""
    yield from doctored("graphs-fail.patch")


@pytest.fixture(scope="module")
def refusing(patched: Variant) -> Iterator[Variant]:
    """Build backends that refuse to copy quantized rows."""
    yield from doctored("device-refuses.patch")


def scattered(ctx: kv.Context) -> kv.Sequence:
    """Create holes: free every other cell of a full cache."""
    keep, gone = ctx.sequence(), ctx.sequence()
    for i in range(128):
        ctx.decode([keep.feed([i % 32]), gone.feed([i % 31])])
    gone.close()
    return keep


@pytest.mark.parametrize("name", ["graphs-fail.patch", "device-refuses.patch"])
def test_planted_faults_apply_to_the_default_release(name: str) -> None:
    """A fault that no longer applied would make the tests below useless."""
    made = apply.apply(spec_resolver.resolve(TEST_RELEASE), [Port.from_file(FOLDER / name)])
    assert [port.id for port in made.ports][-1:] == [Port.from_file(FOLDER / name).id]


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["gather", "graph"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_default_plan_keeps_keys_values_and_logits(
    failing: Variant, mover: Any, flash_attn: bool
) -> None:
    """K, V, positions and logits are unchanged, and the decode that needed space reports it."""
    with kv.open(failing.folder) as library, library.load_model(synthetic_models.tiny()) as model:
        options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "flash_attn": flash_attn}
        with model.context(**options, defrag_mover=mover) as ctx, model.context(**options) as fresh:
            keep = scattered(ctx)
            before, cells = ctx.kv.rows(0, keep), ctx.kv.snapshot()
            other = fresh.sequence()
            other.restore(keep.save())
            with pytest.raises(kv.NoKVSlot) as caught:
                ctx.decode(ctx.sequence().feed(list(range(16))))
            assert caught.value.cause == "fragmented"
            assert np.array_equal(ctx.kv.snapshot().streams[0].pos, cells.streams[0].pos)
            after = ctx.kv.rows(0, keep)
            assert np.array_equal(before.k, after.k)
            assert np.array_equal(before.v, after.v)
            keep.step(5)
            other.step(5)
            assert np.allclose(ctx.logits().copy(), fresh.logits().copy(), atol=0.05)


@pytest.mark.slow
def test_a_failure_of_the_ordered_plan_ends_its_context(failing: Variant) -> None:
    """Overlapping moves cannot be undone: the context refuses all calls; another one works."""
    with (
        kv.open(failing.folder, isolated=True) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(256, n_seq_max=3, defrag_mover="gather", defrag_plan="ordered") as ctx,
        model.context(256, n_seq_max=3) as other,
    ):
        keep = scattered(ctx)
        with pytest.raises(kv.NativeError, match=r"an assertion of llama\.cpp failed"):
            ctx.kv.defrag()
        with pytest.raises(kv.NativeError, match="an earlier call on this context"):
            ctx.decode(keep.feed([1]))
        other.decode(other.sequence().feed([1, 2, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["gather", "graph"])
@pytest.mark.parametrize(
    ("type_k", "type_v"), [("q8_0", "q8_0"), ("q4_0", "q8_0"), ("q8_0", "f16"), ("f16", "f16")]
)
def test_rows_unsupported_by_the_device_move_through_the_host(
    refusing: Variant, mover: Any, type_k: str, type_v: str
) -> None:
    """Rows of 34 and 18 bytes can be neither copied nor gathered; whole words can."""
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "flash_attn": True}
    options |= {"type_k": type_k, "type_v": type_v, "defrag_mover": mover}
    with (
        # An operation that no backend supports ends the process.
        kv.open(refusing.folder, isolated=True) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(**options) as ctx,
    ):
        keep = scattered(ctx)
        before = ctx.kv.rows(0, keep)
        report = ctx.kv.defrag()
        assert report.moves
        assert bool(report.graphs) == ("f16" in (type_k, type_v))
        assert ctx.kv.snapshot().stats.holes == 1
        after = ctx.kv.rows(0, keep)
        assert np.array_equal(before.k, after.k)
        assert np.array_equal(before.v, after.v)
        keep.step(5)
