"""Runs put the cache where the backend says, and prove that it is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyllamakv.errors import Untestable
from pyllamakv.scenarios import synthetic
from pyllamakv.scenarios.device_placement import ALL, Place


def snapshot(*hosts: int) -> SimpleNamespace:
    """Make what a snapshot says of the buffers of its streams."""
    infos = [SimpleNamespace(host=host, n_layer=1) for host in hosts]
    return SimpleNamespace(streams=[SimpleNamespace(info=info) for info in infos])


def test_models_go_to_the_device() -> None:
    """All layers do, but for the processor's own backend; a server is named where there is one."""
    assert Place().params().n_gpu_layers == 0
    assert Place("cuda").params().n_gpu_layers == ALL
    assert Place("rpc").params("127.0.0.1:1").rpc_servers == "127.0.0.1:1"
    assert Place("rpc").remote
    assert not Place("cuda").remote


@pytest.mark.parametrize("backend", ["cuda", "rpc", "vulkan"])
def test_a_cache_in_host_memory_proves_nothing(backend: str) -> None:
    """It is found in any stream; what cannot be told is believed."""
    Place(backend).check(snapshot(0, 0))
    Place(backend).check(snapshot(-1))
    Place(backend).check(None)
    with pytest.raises(Untestable, match="host memory"):
        Place(backend).check(snapshot(0, 1))
    Place("cpu").check(snapshot(1))


def test_devices_get_models_with_wide_rows() -> None:
    """They are as deep and have as many tokens; what has no such twin stands for itself."""
    assert Place("vulkan").model("grouped") == Place("cuda").model("grouped") == "grouped-wide"
    assert Place("cuda").model("hybrid") == "hybrid"
    assert Place("cuda").model("test") == "test"
    assert Place("rpc").model("tiny") == Place().model("tiny") == "tiny"
    one, other = synthetic.SHAPES["grouped"], synthetic.SHAPES["grouped-wide"]
    assert (one.n_layer, one.n_vocab) == (other.n_layer, other.n_vocab)
    assert one.n_head // one.n_head_kv == other.n_head // other.n_head_kv


def test_a_processor_is_named_to_vulkan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases pass over it otherwise, and threads race; what the user says stands."""
    for name in ("GGML_VK_VISIBLE_DEVICES", "LP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    expected = {"GGML_VK_VISIBLE_DEVICES": "0", "LP_NUM_THREADS": "1"}
    assert Place("vulkan").environment == expected
    assert Place("cuda").environment == {}
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    assert Place("vulkan").environment == {"LP_NUM_THREADS": "1"}
