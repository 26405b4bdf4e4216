"""Runs put the cache where the backend says, and prove that it is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyllamakv.binding.protocol import Device
from pyllamakv.errors import Untestable
from pyllamakv.harness.placing import ALL, Place
from pyllamakv.harness.scenario import CACHES

SOFTWARE = Device("Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", "gpu", 0, 0)
REAL = Device("CUDA0", "NVIDIA H200", "gpu", 0, 0)


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


def test_a_software_device_needs_flash_attention() -> None:
    """Its plain attention is wrong by itself; a real device's is judged."""
    plain, flash = CACHES[0], CACHES[3]
    with pytest.raises(Untestable, match="flash attention"):
        Place("vulkan").judge(plain, lambda: [SOFTWARE])
    Place("vulkan").judge(flash, lambda: [SOFTWARE])
    Place("vulkan").judge(plain, lambda: [REAL])
    Place("cuda").judge(plain, lambda: [SOFTWARE])


def test_a_processor_is_named_to_vulkan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases pass over it otherwise; what the user says stands."""
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    assert Place("vulkan").environment == {"GGML_VK_VISIBLE_DEVICES": "0"}
    assert Place("cuda").environment == {}
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    assert Place("vulkan").environment == {}
