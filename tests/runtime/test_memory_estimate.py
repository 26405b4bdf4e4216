"""Test that a context that cannot fit is refused before memory is allocated."""

from __future__ import annotations

import dataclasses
import resource
from typing import TYPE_CHECKING

import pytest
from fakes.simulated import SimulatedNative

from pyllamakv.binding.protocol import ContextParams
from pyllamakv.errors import NotEnoughMemory
from pyllamakv.runtime import memory_estimate

if TYPE_CHECKING:
    from pathlib import Path

INFO = SimulatedNative().model_info(0)
MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine with 8 MiB available, no control groups and no limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 9 kB\nMemAvailable: 6144 kB\nSwapFree: 2048 kB\n"
    )
    (tmp_path / "proc/self/statm").write_text("16 1 1")
    monkeypatch.setattr(memory_estimate, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_estimate, "_CGROUP", tmp_path / "cgroup")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    return tmp_path


def test_keys_and_values_are_counted_by_their_types() -> None:
    """Check that q8_0 needs 34 bytes where f16 needs 64, per row of 32."""
    f16 = memory_estimate.context_bytes(INFO, ContextParams(n_ctx=4096))
    q8 = memory_estimate.context_bytes(INFO, ContextParams(n_ctx=4096, type_k=8, type_v=8))
    assert f16 - q8 == 4096 * INFO.n_layer * 2 * (64 - 34)
    uneven = memory_estimate.context_bytes(INFO, ContextParams(n_ctx=4096), uneven=True)
    assert f16 - uneven == 4096 * (INFO.n_layer - 1) * 2 * 64
    unknown = dataclasses.replace(INFO, n_embd_k_gqa=0, n_embd_v_gqa=0)
    assert memory_estimate.context_bytes(unknown, ContextParams(n_ctx=4096)) == f16


def test_available_memory_and_swap_limit_a_context(machine: Path) -> None:
    """Check available memory and swap, and the message's numbers."""
    assert memory_estimate.available_bytes() == 8 * MIB
    memory_estimate.check_memory(INFO, ContextParams(n_ctx=512))
    with pytest.raises(NotEnoughMemory, match=r"8\.0 MiB are available") as caught:
        memory_estimate.check_memory(INFO, ContextParams(n_ctx=1 << 20))
    assert caught.value.available == 8 * MIB
    assert caught.value.needed > caught.value.available


def test_a_limit_on_address_space_sets_a_bound(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check RLIMIT_AS minus the mapped bytes of the process."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (MIB, MIB))
    assert memory_estimate.available_bytes() == MIB - 16 * resource.getpagesize()
    (machine / "proc/self/statm").unlink()
    assert memory_estimate.available_bytes() == MIB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/some/group", "some", ("memory.max", "memory.current")),
        (
            "5:cpu,memory:/some/group",
            "memory/some",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
)
def test_control_groups_set_a_bound(machine: Path, line: str, folder: str, names: tuple) -> None:
    """Check both versions, and that parent groups count."""
    (machine / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
    group = machine / "cgroup" / folder
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{4 * MIB}\n")
    (group / names[1]).write_text(f"{3 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\n")
    assert memory_estimate.available_bytes() == 2 * MIB
    (group / names[0]).write_text("max\n")
    assert memory_estimate.available_bytes() == 8 * MIB


def test_unknown_memory_refuses_no_context(machine: Path) -> None:
    """Check a system that does not report its memory."""
    (machine / "proc/meminfo").unlink()
    assert memory_estimate.available_bytes() is None
    memory_estimate.check_memory(INFO, ContextParams(n_ctx=1 << 30))
