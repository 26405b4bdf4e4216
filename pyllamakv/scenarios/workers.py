"""Keep the workers of a bench: one per library and environment, with what is loaded there.

Where caches lie behind RPC, each worker has a server of its own: a server takes one client.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.server import Server
from pyllamakv.errors import HarnessError, KvError, ModelError, Untestable
from pyllamakv.scenarios import synthetic

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ModelHandle
    from pyllamakv.scenarios.device_placement import Place

#: Opens the library at a path with an environment, in a worker.
Opener = Callable[[Path, dict[str, str]], Any]
#: A library and the environment of its worker.
Key = tuple[str, tuple[tuple[str, str], ...]]


class Workers:
    """Open workers when they are first needed, and end those that a run spoiled."""

    def __init__(self, opener: Opener, place: Place) -> None:
        self._opener = opener
        self._place = place
        self._open: dict[Key, Any] = {}
        self._servers: dict[Key, Server] = {}
        self._models: dict[tuple[Key, str], ModelHandle] = {}

    def open(self, key: Key) -> Any:
        """Return the library of a worker."""
        library = self._open.get(key)
        if library is None:
            library = self._open[key] = self._opener(Path(key[0]), dict(key[1]))
            if self._place.patience is not None:
                library.native.timeout = self._place.patience
        return library

    def model(self, key: Key, name: str) -> ModelHandle:
        """Return a named model in a worker; raises Untestable where it cannot be loaded."""
        name = self._place.model(name)
        found = self._models.get((key, name))
        if found is None:
            path = synthetic.model(name)
            params = self._place.params(self._endpoint(key))
            try:
                found = self.open(key).native.model_load(str(path), params)
            except ModelError as error:
                if "RPC server" in str(error):
                    msg = f"{name} cannot be loaded: {error}"
                    raise HarnessError(msg) from error
                # An architecture that came later: nothing that a patch could be judged by.
                msg = f"the model {name} cannot be loaded here: {error}"
                raise Untestable(msg) from error
            self._models[key, name] = found
        return found

    def drop(self, key: Key) -> None:
        """End a worker and its server; the next run gets others."""
        library, server = self._open.pop(key, None), self._servers.pop(key, None)
        self._models = {k: v for k, v in self._models.items() if k[0] != key}
        if library is not None:
            _close(library)
        if server is not None:
            server.close()

    def cut(self) -> None:
        """End the workers under runs that are at work in other threads."""
        for library in list(self._open.values()):
            library.native.close()

    def close(self) -> None:
        """End all."""
        for key in list(self._open):
            self.drop(key)

    def _endpoint(self, key: Key) -> str | None:
        if not self._place.remote:
            return None
        server = self._servers.get(key)
        if server is None:
            # One thread: as many runs as processors are at work, and threads spin while they wait.
            try:
                server = self._servers[key] = Server(Path(key[0]), threads=1)
            except KvError as error:
                msg = f"no RPC server for {key[0]}: {error}"
                raise HarnessError(msg) from error
        return server.endpoint


def _close(library: Any) -> None:
    try:
        library.close()
    except KvError:
        # A worker that died has nothing left to give back.
        return
