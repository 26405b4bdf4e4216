"""Place the cache of a run: in host memory, on a device, or behind an RPC server.

Scenarios are independent of the place. Their model is loaded so that every layer, with its K and V,
is on the device. A run whose cache is in host memory nevertheless is untestable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import ModelParams
from pyllamakv.errors import Untestable
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pyllamakv.runtime.snapshot import Snapshot

#: More layers than any model has: all of them go to the device.
ALL = 999

#: What Vulkan runs with, unless the user says otherwise. Later releases pass over devices that are
#: processors unless they are named. Mesa's own (llvmpipe) gets stock's logits wrong now and then
#: with two threads: 11 of 40 decodes of 64 tokens, none of 40 with one.
_VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0", "LP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class DevicePlacement:
    """Name a backend as runs use it."""

    backend: str = "cpu"

    @property
    def host(self) -> bool:
        """Return whether caches are in the memory of the worker."""
        return self.backend == "cpu"

    @property
    def remote(self) -> bool:
        """Return whether a run needs a server."""
        return self.backend == "rpc"

    @property
    def off_cpu(self) -> bool:
        """Return whether other kernels than those of the CPU compute; they may be wrong."""
        return self.backend not in ("cpu", "rpc")

    def model(self, name: str) -> str:
        """Return the name of the model that replaces a named one on a device."""
        twin = name + synthetic_models.WIDE
        return twin if self.off_cpu and twin in synthetic_models.SHAPES else name

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a worker needs to see the device, and to get it right."""
        if self.backend != "vulkan":
            return {}
        return {name: value for name, value in _VULKAN.items() if name not in os.environ}

    @property
    def call_timeout(self) -> float | None:
        """Return the seconds that one call may take, where the usual ones are too few."""
        # The first graphs compile hundreds of pipelines.
        return 600.0 if self.backend == "vulkan" else None

    def params(self, endpoint: str | None = None) -> ModelParams:
        """Return how a model is loaded."""
        if self.backend == "cpu":
            return ModelParams()
        return ModelParams(n_gpu_layers=ALL, rpc_servers=endpoint)

    def check(self, snapshot: Snapshot | None) -> None:
        """Raise Untestable if a cache that belongs on a device is in host memory."""
        if self.backend == "cpu" or snapshot is None:
            return
        # `host` is negative if the build cannot report it.
        if any(cells.info.host > 0 and cells.info.n_layer for cells in snapshot.streams):
            msg = f"the cache is in host memory, not on a {self.backend} device"
            raise Untestable(msg)
