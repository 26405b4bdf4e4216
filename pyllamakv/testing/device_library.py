"""Open a library for tests, with models and caches on the tested device."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.rpc_server import RpcServer
from pyllamakv.open_variant import OpenLibrary
from pyllamakv.runtime.model import Model
from pyllamakv.scenarios.device_placement import DevicePlacement

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from pyllamakv.runtime.context import Context


class DeviceModel(Model):
    """A model whose caches must be on the tested device."""

    place: DevicePlacement = DevicePlacement()

    def context(self, *args: Any, **options: Any) -> Context:
        """Create a context as `Model.context` does; raises Untestable for a cache in host memory.

        A test may request that with ``n_gpu_layers=0`` or ``offload_kqv=False``.
        """
        made = super().context(*args, **options)
        if not self.on_host and options.get("offload_kqv", True):
            try:
                with made.lock:
                    self.place.check(made.kv.try_snapshot())
            except BaseException:
                made.close()
                raise
        return made


class DeviceLibrary(OpenLibrary):
    """An opened library for one device; for RPC, it owns a server."""

    model_type = DeviceModel
    place: DevicePlacement = DevicePlacement()
    _server: RpcServer | None = None

    @classmethod
    def at(
        cls,
        place: DevicePlacement,
        folder: Path,
        *,
        isolated: bool,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> DeviceLibrary:
        """Open a variant; on a device it always runs in a worker. Raises LoadError."""
        found = cls.open(
            folder,
            isolated=isolated or place.backend != "cpu",
            env={**place.environment, **(env or {})},
            timeout=timeout,
        )
        found.place = place
        return found

    def load_model(self, path: str | os.PathLike[str], **options: Any) -> Model:
        """Load a model as `OpenLibrary.load_model` does, all of it onto the device.

        ``n_gpu_layers`` and ``rpc_servers`` of the caller have priority.
        """
        if not options.keys() & {"n_gpu_layers", "rpc_servers"}:
            params = self.place.params(self._endpoint())
            options |= {"n_gpu_layers": params.n_gpu_layers, "rpc_servers": params.rpc_servers}
        found = super().load_model(path, **options)
        assert isinstance(found, DeviceModel)
        found.place = self.place
        return found

    def close(self) -> None:
        """Close contexts, models, the library, and its server at last."""
        with ExitStack() as last:
            if self._server is not None:
                last.callback(self._server.close)
            super().close()

    def _endpoint(self) -> str | None:
        if not self.place.remote:
            return None
        # One of its own: a server takes one client, and would keep the next one waiting.
        if self._server is None:
            self._server = RpcServer(self.path, threads=1)
        return self._server.endpoint
