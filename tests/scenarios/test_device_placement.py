"""Test that runs put the cache on the backend's device, and verify that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyllamakv.errors import Untestable
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.device_placement import ALL, DevicePlacement


def snapshot(*hosts: int) -> SimpleNamespace:
    """Create the buffer information of a snapshot's streams."""
    infos = [SimpleNamespace(host=host, n_layer=1) for host in hosts]
    return SimpleNamespace(streams=[SimpleNamespace(info=info) for info in infos])


def test_models_go_to_the_device() -> None:
    """All layers are offloaded except on the CPU; a server is named if there is one."""
    assert DevicePlacement().params().n_gpu_layers == 0
    assert DevicePlacement("cuda").params().n_gpu_layers == ALL
    assert DevicePlacement("rpc").params("127.0.0.1:1").rpc_servers == "127.0.0.1:1"
    assert DevicePlacement("rpc").remote
    assert not DevicePlacement("cuda").remote


@pytest.mark.parametrize("backend", ["cuda", "rpc", "vulkan"])
def test_cache_in_host_memory_is_untestable_on_a_device(backend: str) -> None:
    """A device buffer is found in any stream; an unknown buffer is accepted."""
    DevicePlacement(backend).check(snapshot(0, 0))
    DevicePlacement(backend).check(snapshot(-1))
    DevicePlacement(backend).check(None)
    with pytest.raises(Untestable, match="host memory"):
        DevicePlacement(backend).check(snapshot(0, 1))
    DevicePlacement("cpu").check(snapshot(1))


def test_devices_get_models_with_wide_rows() -> None:
    """Replacements have as many layers and tokens; a model without one is used itself."""
    assert (
        DevicePlacement("vulkan").model("grouped")
        == DevicePlacement("cuda").model("grouped")
        == "grouped-wide"
    )
    assert DevicePlacement("cuda").model("hybrid") == "hybrid"
    assert DevicePlacement("cuda").model("test") == "test"
    assert DevicePlacement("rpc").model("tiny") == DevicePlacement().model("tiny") == "tiny"
    one, other = synthetic_models.SHAPES["grouped"], synthetic_models.SHAPES["grouped-wide"]
    assert (one.n_layer, one.n_vocab) == (other.n_layer, other.n_vocab)
    assert one.n_head // one.n_head_kv == other.n_head // other.n_head_kv


def test_vulkan_software_device_is_named_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases skip it otherwise, and threads race; variables of the user are kept."""
    for name in ("GGML_VK_VISIBLE_DEVICES", "LP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    expected = {"GGML_VK_VISIBLE_DEVICES": "0", "LP_NUM_THREADS": "1"}
    assert DevicePlacement("vulkan").environment == expected
    assert DevicePlacement("cuda").environment == {}
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    assert DevicePlacement("vulkan").environment == {"LP_NUM_THREADS": "1"}
