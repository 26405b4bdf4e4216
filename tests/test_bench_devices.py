"""The benchmark of device buffers runs on a server on this machine, and says where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.bench import devices
from pyllamakv.bench.workloads import SETTINGS, Cache

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant


@pytest.mark.native
def test_a_server_is_measured(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """All movers run on memory that is not the host's, and CUDA is measured or says why not."""
    small = Cache("1B", SETTINGS[0], 256)
    monkeypatch.setattr(devices, "RPC_PLAN", ((small, "alternate"),))
    monkeypatch.setattr(devices, "CUDA_PLAN", ((small, "alternate"),))
    rpc, cuda = devices.figures(lambda: None, patched.manifest.release, rounds=1)
    assert set(rpc.data) == set(devices.MOVERS)
    assert "in 1 graphs" in rpc.value
    assert rpc.limit.startswith("scratch: 0.")
    assert cuda.met is not None or "not yet measured: " in cuda.value
