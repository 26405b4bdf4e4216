"""Use the machines of a dask scheduler as an executor that places each cell on a suitable worker.

A worker with a device declares it at its start: ``dask worker ADDRESS --resources CUDA=1``. Each
worker has its own data directory, into which it fetches and builds.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import ToolMissing, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Maximum number of retries of a cell after its worker is lost.
_RETRIES = 2
#: Seconds to wait for the scheduler.
_PATIENCE = 30


class Cluster(Executor):
    """Submit cells to a dask client, each to a worker with the device of its backend."""

    def __init__(self, client: Any, address: str = "ADDRESS") -> None:
        self._client = client
        self._address = address
        self._executors: dict[str, Executor] = {}

    def submit(  # type: ignore[override]
        self, work: Callable[..., Any], raw: dict[str, Any], /, *args: Any
    ) -> Future[Any]:
        """Submit a cell's work; ``raw`` is the cell's spec as JSON."""
        backend = str(raw["backend"])
        if backend not in self._executors:
            needs = _resources(backend)
            wants = {"resources": needs} if needs else {}
            # Not pure: --fresh must run again, and this package caches results itself.
            self._executors[backend] = self._client.get_executor(
                pure=False, retries=_RETRIES, **wants
            )
        return self._executors[backend].submit(work, raw, *args)

    def lacking(self, backends: Iterable[str]) -> list[str]:
        """Return, for each backend that no worker serves now, the command that starts one."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        commands = []
        for backend in sorted(backends):
            needs = _resources(backend)
            if not any(needs.keys() <= worker["resources"].keys() for worker in workers):
                more = "".join(f" --resources {name}={count}" for name, count in needs.items())
                commands.append(f"dask worker {self._address}{more}")
        return commands

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Release the workers."""
        for executor in self._executors.values():
            executor.shutdown(wait=wait and not cancel_futures)


def _resources(backend: str) -> dict[str, int]:
    return {} if backend == "cpu" else {backend.upper(): 1}


@contextlib.contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to the scheduler at an address, ``tcp://host:8786``.

    Raises ToolMissing without distributed, UsageError when nothing answers there.
    """
    try:
        from distributed import Client
    except ImportError as error:
        hint = "pip install 'pyllamakv[cluster]'"
        msg = f"--scheduler needs the package distributed; run: {hint}"
        raise ToolMissing(msg, tool="distributed", hint=hint) from error
    try:
        client = Client(address, timeout=_PATIENCE)
    except (OSError, ValueError) as error:
        msg = f"no scheduler responds at {address}: {error}; start one with `dask scheduler`"
        raise UsageError(msg) from error
    with client, Cluster(client, address) as cluster:
        yield cluster
