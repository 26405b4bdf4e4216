"""Measure the cells of a load test; a cell that was measured before is read from its file."""

from __future__ import annotations

import datetime
import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyllamakv
from pyllamakv.building import variant
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.server import server_client, server_lab, server_process
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_lab import ServerLab
from pyllamakv.source.files import write_text_atomic
from qa.bench.figure import machine
from qa.load import batcher_load, request_schedule, server_load
from qa.load.load_result import LoadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyllamakv.server.server_artifact import BuiltServer

#: What answers the requests by default: llama-server, or `Batcher` with the libraries of the
#: patched server.
DEFAULT_SYSTEMS: Final = ("stock", "patched", "batcher")
#: The same, and `pyllamakv serve` with these libraries.
SYSTEMS: Final = (*DEFAULT_SYSTEMS, "serve")


@dataclass(frozen=True)
class LoadPlan:
    """The options of a load test; each combination of the first four, in each round, is a cell."""

    releases: tuple[str, ...]
    workloads: tuple[str, ...]
    clients: tuple[int, ...]
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    requests: int = 1000
    rate: float = 20.0
    rounds: int = 1
    threads: int = 1
    model: str = synthetic_models.TEST
    trace: Path | None = None

    @cached_property
    def model_file(self) -> Path:
        """Return the path of the model. Raises Untestable or NotFetched without one."""
        return synthetic_models.model(self.model)

    def rounds_of_cells(self) -> Iterator[list[LoadCell]]:
        """Yield a cell per system for each round. Systems alternate their order."""
        for release in self.releases:
            for workload in self.workloads:
                for clients in self.clients:
                    for number in range(self.rounds):
                        yield [
                            LoadCell(self, release, workload, clients, system, number)
                            for system in self.systems[:: -1 if number % 2 else 1]
                        ]

    def check(self) -> None:
        """Check all cells before the first one is measured.

        Raises UsageError, NotBuilt, NotFetched or Untestable.
        """
        for workload in self.workloads:
            request_schedule.schedule(workload, self.requests, self.rate, trace=self.trace)
            for clients in self.clients:
                request_schedule.cells(workload, clients)
        _ = self.model_file
        for release in self.releases:
            for system in self.systems:
                _ = LoadCell(self, release, self.workloads[0], 1, system, 0).built


@dataclass(frozen=True)
class LoadCell:
    """One run: the requests of a workload, answered by a system with a slot per client."""

    plan: LoadPlan
    release: str
    workload: str
    clients: int
    system: str
    round: int

    def __str__(self) -> str:
        return f"{self.release} {self.system}, {self.workload}, {self.clients} clients"

    @cached_property
    def built(self) -> BuiltServer:
        """Return the server, or the one whose libraries the batcher uses. Raises NotBuilt."""
        return find_server(f"{self.release}+{'stock' if self.system == 'stock' else 'patched'}")

    @property
    def file(self) -> Path:
        """Return the file of the result, named for all that determines it."""
        plan, trace = self.plan, self.plan.trace
        facts: list[Any] = [
            machine(),
            self.system,
            self.built.id,
            self.workload,
            self.clients,
            self.round,
            plan.requests,
            plan.rate,
            plan.threads,
            synthetic_models.identity(plan.model),
            _digest(trace) if trace and self.workload == "trace" else "",
        ]
        code = [__file__, request_schedule.__file__, server_lab.__file__]
        if self.system in ("batcher", "serve"):
            facts.append(_library_code())
        if self.system == "batcher":
            code.append(batcher_load.__file__)
        else:
            code += [server_load.__file__, server_client.__file__, server_process.__file__]
        facts += [_digest(Path(each)) for each in code]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return home() / "results" / "load" / f"{name}.json"

    def read(self) -> LoadResult | None:
        """Return the stored result, or None."""
        try:
            return LoadResult.from_json(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def measure(self, tick: Callable[[int], None]) -> LoadResult:
        """Run the cell and store its result; ``tick`` gets the number of requests that ended."""
        plan = self.plan
        requests = request_schedule.schedule(
            self.workload, plan.requests, plan.rate, trace=plan.trace
        )
        cells = request_schedule.cells(self.workload, self.clients)
        if self.system == "batcher":
            found = batcher_load.serve(
                self.built.variant.folder,
                plan.model_file,
                requests,
                self.clients,
                plan.threads,
                tick,
                cells=cells,
            )
        elif self.system == "serve":
            start = partial(self._serve, cells)
            found = server_load.send(start, requests, self.clients, tick, openai=True)
        else:
            lab = ServerLab(self.built, slots=self.clients)
            # Found before the run, so that it starts no other process.
            _ = lab.sharing
            threads = str(plan.threads)
            found = server_load.send(
                partial(
                    lab.server, "-t", threads, "-tb", threads, *_heap_layout(self.round),
                    shift=self.workload == "shift", model=plan.model_file, cells=cells,
                ),
                requests, self.clients, tick,
            )  # fmt: skip
        found = replace(found, day=_today())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.file, json.dumps(found.to_json()))
        return found

    def _serve(self, cells: int | None) -> server_process.ServerProcess:
        """Return a running `pyllamakv serve`, with the sizes of a llama-server."""
        cells = cells or self.clients * server_lab.SLOT
        return server_load.start_serve(
            self.built.variant.folder, self.plan.model_file, cells, self.clients, self.plan.threads
        )


def _heap_layout(number: int) -> tuple[str, str]:
    """Return arguments that allocate up to a page, so that each round places caches elsewhere.

    The distances of buffers within a page depend on all that a program allocates before them. With
    576 bytes more, graphs of stock b11549 took 1.04 times as long. Both systems of a round get the
    same name of a model (Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously
    Wrong!, ASPLOS 2009).
    """
    return "--alias", "x" * random.Random(number).randint(1, 4096)


def _library_code() -> str:
    """Return a digest of the Python code that a batcher runs, which the id of a build lacks."""
    package = Path(pyllamakv.__file__).parent
    return variant.files_digest(package / name for name in ("binding", "cache", "runtime", "serve"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def stored(cells: Sequence[LoadCell]) -> dict[LoadCell, LoadResult]:
    """Return the stored results of a round, which are compared with each other.

    If some are missing or of another day, only those of today are returned: the others are measured
    now.
    """
    found = {cell: result for cell in cells if (result := cell.read())}
    if len(found) == len(cells) and len({result.day for result in found.values()}) == 1:
        return found
    return {cell: result for cell, result in found.items() if result.day == _today()}


def describe(cell: LoadCell) -> dict[str, Any]:
    """Return what a result is of, as JSON values."""
    raw = asdict(cell)
    del raw["plan"]
    options = {name: getattr(cell.plan, name) for name in ("requests", "rate", "threads")}
    return raw | options | {"model": cell.plan.model_file.name}
