"""Test that cells run on the workers of a dask scheduler that have the required device."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
from fakes import cell_results

from pyllamakv.errors import ToolMissing
from pyllamakv.verification import cluster, matrix
from pyllamakv.verification.cell import CellSpec

KITS = str(Path(__file__).resolve().parents[1] / "kits")


class Client:
    """Replace dask's client: record the requested executors, and run immediately."""

    def __init__(self) -> None:
        self.wants: list[dict] = []

    def scheduler_info(self, n_workers: int) -> dict:
        return {"workers": {"a": {"resources": {"CUDA": 2.0}}}}

    def get_executor(self, **wants) -> Executor:
        self.wants.append(wants)

        class Now(Executor):
            def submit(self, work, /, *args, **kwargs):
                future: Future = Future()
                future.set_result(work(*args))
                return future

        return Now()


def test_cell_of_a_backend_requires_its_dask_resource(monkeypatch, tmp_path: Path) -> None:
    """CPU cells run on any worker, CUDA cells on workers with CUDA."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    client = Client()
    specs = [CellSpec("0.3.9"), CellSpec("0.3.9", backend="cuda"), CellSpec("0.3.8")]
    with cluster.Cluster(client) as executor:
        found = matrix.run(specs, executor=executor, judge=cell_results.judge)
    assert [r.spec for r in found] == specs
    assert client.wants == [
        {"pure": False, "retries": 2},
        {"pure": False, "retries": 2, "resources": {"CUDA": 1}},
    ]


def test_a_missing_worker_is_named_with_its_command() -> None:
    """If no worker has the device, the cell waits, and the command to start one is printed."""
    executor = cluster.Cluster(Client(), "tcp://there:8786")
    assert executor.lacking({"cpu", "cuda"}) == []
    hint = "dask worker tcp://there:8786 --resources METAL=1"
    assert executor.lacking({"cpu", "metal"}) == [hint]


def test_missing_distributed_error_names_the_extra(monkeypatch) -> None:
    """The package is optional."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ToolMissing, match="cluster"), cluster.connect("tcp://127.0.0.1:9"):
        pass


def test_two_dask_workers_verify_a_matrix(monkeypatch, tmp_path: Path) -> None:
    """Two processes on loopback verify a matrix, given only the scheduler's address."""
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", KITS)
    trace = tmp_path / "trace"
    trace.mkdir()
    monkeypatch.setenv(cell_results.TRACE, str(trace))
    specs = [CellSpec(name) for name in ("0.3.5", "0.3.6", "b4980", "0.3.9", "0.3.10", "0.3.36")]
    patience = {"distributed.comm.timeouts.connect": "120s"}
    with (
        dask.config.set(patience),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=str(tmp_path / "dask"),
        ) as local,
        cluster.connect(local.scheduler_address) as executor,
    ):
        lacks = executor.lacking({"cpu", "cuda"})
        assert [line.split()[-1] for line in lacks] == ["CUDA=1"]
        found = matrix.run(specs, executor=executor, judge=cell_results.judge)
        again = matrix.run(specs[:2], executor=executor, judge=cell_results.judge)
    assert [r.verdict for r in found] == [
        cell_results.VERDICTS.get(spec.release, "needed") for spec in specs
    ]
    assert again == found[:2]
    judges = {file.name.split(".")[-2] for file in trace.iterdir()}
    assert len(list(trace.iterdir())) == len(specs)
    assert len(judges) == 2
