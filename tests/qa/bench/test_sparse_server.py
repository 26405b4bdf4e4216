"""Test the benchmark of sparse caches in llama-server: its work, but no times."""

from __future__ import annotations

import os

import pytest

from pyllamakv.errors import HarnessError, NotBuilt
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_lab import MODELS
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import sparse_server


@pytest.mark.native
@pytest.mark.slow
def test_the_last_slot_keeps_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response reuses the live tokens; evaluating a prompt again is an error."""
    pytest.importorskip("httpx")
    try:
        for side in ("stock", "patched"):
            find_server(f"{TEST_RELEASE}+{side}")
    except NotBuilt as error:
        pytest.skip(str(error))
    model = synthetic_models.generate(MODELS["full"], home() / "models")
    monkeypatch.setenv(synthetic_models.VARIABLE, str(model))
    monkeypatch.setattr(sparse_server, "TOKENS", 4)
    (figure,) = sparse_server.figures(lambda: None, TEST_RELEASE, pairs=1, slots=5)
    assert figure.name.startswith("0.3.9, 200 live of 2,560 cells: CPU per token")
    assert len(figure.data["patched"]) == len(figure.data["stock"]) == 1
    assert all(seconds > 0 for side in figure.data.values() for seconds in side)

    built = find_server(f"{TEST_RELEASE}+patched")
    with sparse_server.SparseServer(built, model, 2) as server:
        server._client.post("/slots/1?action=erase", {})
        with pytest.raises(HarnessError, match=r"^0 of 200 tokens were reused"):
            server.answer()


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    """It grows with the work of the process, and is absent for an unknown process."""
    before = sparse_server.cpu_seconds(os.getpid())
    sum(range(1_000_000))
    assert sparse_server.cpu_seconds(os.getpid()) > before > 0
    with pytest.raises(ProcessLookupError, match="there is no process"):
        sparse_server.cpu_seconds(2**22 + 1)
