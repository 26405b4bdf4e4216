"""Serve a device of this machine to contexts elsewhere: `serve`."""

from __future__ import annotations

import os

from pyllamakv.binding.server import Server
from pyllamakv.runtime.opening import located


def serve(
    spec: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    device: str | None = None,
    memory: int = 0,
    threads: int | None = None,
    backend: str = "cpu",
) -> Server:
    """Serve a device of a built variant over RPC; ``.endpoint`` goes into ``rpc_servers``.

    The server lives until it is closed or this process ends. Clients must be of the same release.
    The protocol has no authentication: a ``host`` other than loopback is open to everybody who can
    reach it. ``backend`` names the variant to serve from: ``cuda`` for a GPU, whose first one is
    served unless ``device`` names another. Raises NotBuilt, LoadError (also where a variant for a
    GPU finds none), UsageError, or DeviceLost when the server ends at once.
    """
    where = located(spec, backend=backend)
    return Server(where, host=host, port=port, device=device, memory=memory, threads=threads)
