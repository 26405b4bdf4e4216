"""Choose where a run's cache is placed: in host memory, on a device, or behind an RPC server.

Scenarios are independent of the placement. The model is loaded with every layer, and its K and V,
on the device. A run whose cache is in host memory nevertheless is untestable.
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

#: More layers than any model has: all layers are offloaded.
ALL = 999

#: Environment for Vulkan, unless the user sets it. Later releases ignore CPU devices unless they
#: are named. With two threads, Mesa's CPU device (llvmpipe) computes wrong logits on stock in 11 of
#: 40 decodes of 64 tokens; with one thread in none of 40.
_VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0", "LP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class DevicePlacement:
    """A backend, its models, and the environment of its workers."""

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
        """Return whether a device's kernels compute; these may be wrong."""
        return self.backend not in ("cpu", "rpc")

    def model(self, name: str) -> str:
        """Return the name of the model that replaces a named one on a device."""
        wide = name + synthetic_models.WIDE
        return wide if self.off_cpu and wide in synthetic_models.SHAPES else name

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a worker needs to see the device and compute correctly."""
        if self.backend != "vulkan":
            return {}
        return {name: value for name, value in _VULKAN.items() if name not in os.environ}

    @property
    def call_timeout(self) -> float | None:
        """Return the timeout of one call in seconds, or None for the default."""
        # On Vulkan, the first graphs compile hundreds of pipelines. Other devices start slowly too,
        # and behind RPC every row is a message.
        return 600.0 if self.backend == "vulkan" else None if self.host else 120.0

    def params(self, endpoint: str | None = None) -> ModelParams:
        """Return the parameters for loading a model."""
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
