"""Say where the cache of a run lies: in host memory, on a device, or behind an RPC server.

A scenario does not know. Its model is loaded so that every layer, with its K and V, goes to the
device; a run whose cache stays in host memory all the same proves nothing, and says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import ModelParams
from pyllamakv.errors import Untestable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyllamakv.binding.protocol import Device
    from pyllamakv.harness.scenario import Setting
    from pyllamakv.runtime.snapshot import Snapshot

#: More layers than any model has: all of them go to the device.
ALL = 999

#: What a software device calls itself: Mesa's processor driver for Vulkan.
_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader")

#: Later releases pass over devices that are processors unless they are named.
_VULKAN = "GGML_VK_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """Name a backend as runs use it."""

    backend: str = "cpu"

    @property
    def remote(self) -> bool:
        """Tell whether a run needs a server."""
        return self.backend == "rpc"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a worker needs to see the device."""
        if self.backend == "vulkan" and _VULKAN not in os.environ:
            return {_VULKAN: "0"}
        return {}

    @property
    def patience(self) -> float | None:
        """Return the seconds that one call may take, where the usual ones are too few."""
        # The first graphs compile hundreds of pipelines.
        return 600.0 if self.backend == "vulkan" else None

    def params(self, endpoint: str | None = None) -> ModelParams:
        """Return how a model is loaded."""
        if self.backend == "cpu":
            return ModelParams()
        return ModelParams(n_gpu_layers=ALL, rpc_servers=endpoint)

    def check(self, snapshot: Snapshot | None) -> None:
        """Raise Untestable when a cache that belongs on a device lies in host memory."""
        if self.backend == "cpu" or snapshot is None:
            return
        # Where a build cannot tell, `host` is negative.
        if any(cells.info.host > 0 and cells.info.n_layer for cells in snapshot.streams):
            msg = f"the cache lies in host memory, not on a {self.backend} device"
            raise Untestable(msg)

    def judge(self, setting: Setting, devices: Callable[[], Iterable[Device]]) -> None:
        """Raise Untestable for a setting in which this device computes wrongly by itself."""
        if self.backend != "vulkan" or setting.flash_attn:
            return
        names = " ".join(f"{each.name} {each.description}" for each in devices()).lower()
        if any(word in names for word in _SOFTWARE):
            msg = "without flash attention this software device gives wrong logits on its own"
            raise Untestable(msg)
