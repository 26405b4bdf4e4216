"""The memory of a context is reported by part, with its source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import runtime_kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding import logs
from pyllamakv.binding.protocol import Buffer, MemoryType
from pyllamakv.runtime.breakdown import ROUNDING
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pathlib import Path


def test_lines_of_every_release_are_read() -> None:
    """Device, kind and size are read; other lines are ignored."""
    lines = [
        "llama_kv_cache_init:        CPU KV buffer size =    16.50 MiB",
        "llama_new_context_with_model: KV self size  =   16.50 MiB, K (f16):    8.25 MiB",
        "llama_context:  CUDA_Host  output buffer size =     0.12 MiB",
        "sched_reserve: RPC[127.0.0.1:50052] compute buffer size =     0.31 MiB",
        "load_tensors:   CPU_Mapped model buffer size =   100.00 MiB",
        "llama_memory_recurrent:        CPU RS buffer size =     0.04 MiB",
    ]
    found = logs.buffers((2, line) for line in lines)
    assert [(each.device, each.kind) for each in found] == [
        ("CPU", "KV"),
        ("CUDA_Host", "output"),
        ("RPC[127.0.0.1:50052]", "compute"),
        ("CPU_Mapped", "model"),
        ("CPU", "RS"),
    ]
    assert found[0].bytes == 16.5 * 2**20


def test_breakdown_without_a_log_is_estimated(tmp_path: Path) -> None:
    """Sizes that the library does not report are estimated, and marked as estimated."""
    ctx = runtime_kit.context(tmp_path)
    breakdown = kv.memory_breakdown(ctx)
    assert (breakdown.k.exact, breakdown.v.exact, breakdown.model.exact) == (True, True, True)
    assert breakdown.k.bytes == breakdown.v.bytes > 0
    assert (breakdown.compute.exact, breakdown.compute.bytes) == (False, 4 * 64 * 8)
    assert breakdown.output.bytes == 4 * 32 * ctx.n_vocab
    assert breakdown.total == sum(share.bytes for _, share in breakdown)
    assert json.loads(json.dumps(breakdown.to_json()))["total"] == breakdown.total
    assert str(breakdown).splitlines()[0].startswith("model")


def test_a_log_has_the_memory_of_indexers_and_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of an indexer have no cells; states are recognised by all their names."""
    ctx = runtime_kit.context(tmp_path)
    counted = kv.memory_breakdown(ctx)
    both = counted.k.bytes + counted.v.bytes
    breakdown = [Buffer("CPU", "KV", both + ROUNDING // 2), Buffer("CPU", "compute", 12345)]
    monkeypatch.setattr(ctx.native, "buffers", lambda _: breakdown)
    assert kv.memory_breakdown(ctx).k == counted.k
    assert kv.memory_breakdown(ctx).compute.bytes == 12345
    breakdown.append(Buffer("CPU", "KV", 50000))
    more = kv.memory_breakdown(ctx).k
    assert (more.exact, more.bytes) == (False, counted.k.bytes + 50000 + ROUNDING // 2)
    object.__setattr__(ctx.info, "memory", MemoryType.HYBRID)
    states = kv.memory_breakdown(ctx).states
    assert (states.exact, states.bytes) == (False, 50000 + ROUNDING // 2)
    breakdown.append(Buffer("CPU", "RS", 777))
    assert kv.memory_breakdown(ctx).states.bytes == 777


@pytest.mark.native
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.36+patched"])
def test_a_real_library_reports_its_memory(spec: str, kind: str, isolated: bool) -> None:
    """K and V are counted and agree with the log; compute and output are included."""
    with kv.open(built(spec).folder, isolated=isolated) as library:
        model = library.load_model(synthetic_models.tiny())
        with model.context(2048, 256, 64, flash_attn=True, type_k=kind, type_v=kind) as ctx:
            breakdown = kv.memory_breakdown(ctx)
            row = 64 if kind == "f16" else 34
            assert breakdown.k.bytes == breakdown.v.bytes == ctx.info.n_ctx * row
            assert breakdown.k.exact
            assert breakdown.model.bytes == model.info.n_bytes
            assert breakdown.states.bytes == 0
            assert breakdown.compute.bytes > 4 * 64 * 64
            assert breakdown.compute.known_by == "the library's log"
        with model.context(512, 64) as other:
            assert kv.memory_breakdown(other).k.bytes == 512 * 64


@pytest.mark.native
def test_recurrent_states_have_a_row() -> None:
    """A recurrent memory has no cells to count."""
    with kv.open(built("0.3.36+patched").folder) as library:
        model = library.load_model(synthetic_models.model("recurrent"))
        with model.context(256, 64, n_seq_max=4) as ctx:
            breakdown = kv.memory_breakdown(ctx)
            assert (breakdown.k.bytes, breakdown.v.bytes) == (0, 0)
            assert breakdown.states.bytes > 0
            assert not breakdown.states.exact
