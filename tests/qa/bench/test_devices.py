"""Test the benchmark of device buffers on an RPC server here, within time and memory."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.building import cuda
from pyllamakv.errors import ContextError, Untestable
from qa.bench import cuda_bandwidth, defrag_workloads, devices, sparse
from qa.bench.defrag_workloads import SETTINGS, CacheShape, CacheTypes
from qa.bench.devices import MOVERS, DeviceBenchmark, Rounds

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

SMALL = CacheShape("1B", SETTINGS[0], 256)


def stand(library: Any = None, *, seconds: float = 60.0, rounds: int = 15) -> DeviceBenchmark:
    """Return a benchmark with the given seconds left."""
    return DeviceBenchmark("CUDA", library, rounds, lambda: None, time.monotonic() + seconds)


@pytest.mark.slow
@pytest.mark.native
def test_a_server_is_measured(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """All movers run on memory that is not the host's; without time left, none starts."""
    monkeypatch.setattr(devices, "RPC_PLAN", ((SMALL, "alternate"),))
    (rpc,) = devices.figures(lambda: None, patched.manifest.release, rounds=1)
    assert set(rpc.data) == set(MOVERS)
    assert "in 1 graphs" in rpc.value
    assert "GB/s read and written; scratch: 0." in rpc.limit
    assert rpc.target.startswith("never slower")
    (none,) = devices.on(lambda: None, "rpc", patched.manifest.release, budget=-1.0)
    assert none.name == rpc.name
    assert none.value == "not measured: it takes 0 s or more, 0 s are left"


def test_size_predicted_to_exceed_the_time_is_skipped() -> None:
    """The times of smaller caches predict those of a larger one, also in another setting."""
    there = stand(seconds=100)
    there.paces[SETTINGS[0], 2] = 1 / SMALL.bytes
    large = CacheShape("1B", SETTINGS[1], 256 * 200)
    assert there.needs(large) == pytest.approx(200)
    assert there.movers(large) == ("auto", "staged")
    assert there.movers(SMALL) == devices.MOVERS
    assert there.needs(SMALL) == 0
    figure = devices._row(there, large, "alternate", 1)
    assert figure.name == "CUDA, 1B, 51200 cells, alternate, no flash attention, f16"
    assert figure.value.startswith("not measured: it takes 200 s or more, ")
    assert figure.met is None


def test_size_that_does_not_fit_is_skipped() -> None:
    """Each mover has a cache; if a device reports no memory size, none is excluded."""
    needed = len(MOVERS) * SMALL.bytes + defrag_workloads.BESIDE
    for free, fits in ((needed, True), (needed - 1, False), (0, True)):
        gpu = SimpleNamespace(kind="gpu", memory_free=free)
        cpu = SimpleNamespace(kind="cpu", memory_free=1)
        there = stand(SimpleNamespace(devices=lambda found=(cpu, gpu): list(found)))
        if fits:
            devices._need_memory(there.library, 3 * SMALL.bytes)
        else:
            with pytest.raises(Untestable, match="2 GB are free on the device"):
                devices._need_memory(there.library, 3 * SMALL.bytes)


def test_failed_context_is_a_row_of_the_result() -> None:
    """If a device has no memory for a context, the other figures are still measured."""

    class Library:
        def load_model(self, *_words: Any, **_more: Any) -> None:
            raise ContextError("out of memory\nsecond line")

    figure = devices._row(stand(Library()), SMALL, "alternate", 2)
    assert figure.value == "not measured: out of memory"
    assert figure.target.startswith(">= 10 x the published algorithm, >= 50 %")


@pytest.mark.parametrize(
    ("device", "setting", "share", "met"),
    [
        ("CUDA", SETTINGS[0], 0.6, True),
        ("CUDA", SETTINGS[0], 0.4, False),
        ("CUDA", SETTINGS[0], None, None),
        ("CUDA", SETTINGS[1], 0.4, True),
        ("RPC", SETTINGS[0], None, True),
    ],
)
def test_the_bandwidth_counts_where_v_is_in_rows(
    device: str, setting: CacheTypes, share: float | None, met: bool | None
) -> None:
    """Without flash attention V is transposed; a slower defragmentation misses all targets."""
    there = dataclasses.replace(stand(), device=device)
    cache = CacheShape("1B", setting, 256)
    assert devices._met(there, cache, True, share) is met
    assert devices._met(there, cache, False, share) is False


@pytest.mark.slow
@pytest.mark.native
def test_a_sparse_cache_on_a_device(patched: Variant) -> None:
    """Both caches are on the server, and the compaction moves the remaining cells."""
    release = patched.manifest.release
    found = devices.sparse_on(lambda: None, "rpc", release, cells=2048, pairs=2)
    assert found.name == f"RPC, {release}, 8B, 2048 cells, 200 live at the end"
    assert [len(values) for values in found.data.values()] == [2, 2, 2, 2, devices.COMPACTIONS + 1]
    assert f"a compaction moves {sparse.LIVE} cells" in found.value


def test_sparse_cache_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it has the size of a current context; elsewhere it is small."""
    opened: list[str] = []

    def need(_library: object, size: int) -> None:
        opened.append(f"{size >> 20} MiB")
        raise Untestable("too large")

    monkeypatch.setattr(devices, "_open", lambda *_: nullcontext())
    monkeypatch.setattr(devices, "_need_memory", need)
    for backend in ("cuda", "vulkan"):
        with pytest.raises(Untestable, match="too large"):
            devices.sparse_on(lambda: None, backend, "0.3.36")
    assert opened == ["32768 MiB", "1024 MiB"]


#: A CUDA runtime whose calls take no time, except for the last one.
_RUNTIME = """
#include <stddef.h>
#include <unistd.h>
int cudaMalloc(void **at, size_t size) { *at = at; return %d; }
int cudaMemcpyAsync(void *to, void *from, size_t size, int kind, void *stream)
{ return kind == 3 && size == 1u << 30 ? 0 : 1; }
int cudaDeviceSynchronize(void) { usleep(20000); return 0; }
"""


@pytest.mark.parametrize("status", [0, 2])
def test_the_bandwidth_of_a_gpu_is_measured(tmp_path: Path, status: int) -> None:
    """It runs in a child with the toolkit's runtime; a GPU that refuses has no figure."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    toolkit = cuda.Toolkit(tmp_path / "bin" / "nvcc", "13.0.88", {})
    with pytest.raises(Untestable, match="has no libcudart"):
        cuda_bandwidth.measure(toolkit)
    (tmp_path / "lib64").mkdir()
    source = tmp_path / "runtime.c"
    source.write_text(_RUNTIME % status, encoding="utf-8")
    library = tmp_path / "lib64" / "libcudart.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    if status:
        with pytest.raises(Untestable, match="cudaMalloc returned 2"):
            cuda_bandwidth.measure(toolkit)
    else:
        # The last call takes 20 ms; a busy machine adds to that.
        rate, most = cuda_bandwidth.measure(toolkit), 2 * cuda_bandwidth.SIZE * 20 / 0.02
        assert most / 20 < rate <= most


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that each defragmentation advances by one second."""
    now = [0.0]

    def complete(*_words: Any) -> SimpleNamespace:
        now[0] += 1.0
        return SimpleNamespace(seconds=1.0, graphs=1, scratch=0, bytes=0)

    monkeypatch.setattr(devices, "complete", complete)
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(until: float, share: float) -> Rounds:
    """Run rounds of three seconds until the time or its share is used."""
    rounds = Rounds(DeviceBenchmark("CUDA", None, 15, lambda: None, until), 0.0, share)
    carver = SimpleNamespace(fragment=lambda _mask: None)
    rounds.run(
        dict.fromkeys(MOVERS, (None, carver)), SMALL, defrag_workloads.live("alternate", 256)
    )
    return rounds


def test_rounds_end_in_time(seconds: list[float]) -> None:
    """Only complete rounds count: two if there is time, the others within their share."""
    rounds = run(until=100, share=13.5)
    assert {len(each) for each in rounds.seconds.values()} == {3}
    assert seconds == [12.0]
    assert rounds.stand.paces == {(SMALL.setting, 3): 6 / SMALL.bytes}


def test_too_small_time_share_measures_one_round(seconds: list[float]) -> None:
    """The first one warms up, and the second one counts."""
    assert {len(each) for each in run(until=100, share=1).seconds.values()} == {1}
    assert seconds == [6.0]


def test_time_that_is_too_short_for_a_round(seconds: list[float]) -> None:
    """It is reported, and at most one mover exceeds the time."""
    with pytest.raises(Untestable, match="too few for one round"):
        run(until=5.5, share=5.5)
    assert seconds == [3.0]
