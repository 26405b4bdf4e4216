"""Open the objects of a combination, and run cases on them, in a process of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyllamakv
from pyllamakv.binding.rpc_server import RpcServer
from pyllamakv.errors import (
    KvError,
    ModelError,
    ScenarioFailed,
    Unsupported,
    WorkerDied,
)
from pyllamakv.scenarios.device_placement import ALL
from pyllamakv.scenarios.outcome import classify
from qa.random_operations import failure_trace
from qa.random_operations.operation_cases import CaseRunner
from qa.random_operations.task import CaseTask, Played

if TYPE_CHECKING:
    from pyllamakv.runtime.model import Model
    from qa.random_operations.combination import Combination
    from qa.random_operations.manager_operations import ManagerOperations
    from qa.random_operations.operations import Operations

#: Opens a library, in a worker or in this process, which is a child process already.
Open = Callable[[Path, "Combination", bool], Any]


class CaseSession:
    """Own the libraries, models and servers of one variant, and run cases on them."""

    def __init__(self, folder: Path, opening: Open | None = None) -> None:
        self._folder = folder
        self._opening = opening or open_library
        self._opened: dict[tuple[str, bool], tuple[ExitStack, Any, dict[str, Any]]] = {}
        self._models: dict[tuple[str, bool, str], Model] = {}
        self._files = tempfile.TemporaryDirectory(prefix="pyllamakv-schedules-")

    def close(self) -> None:
        """Close everything."""
        for key in list(self._opened):
            self._drop(key)
        self._files.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, task: CaseTask) -> Played:
        """Run the case of a task, and return its counts and its failure."""
        key = (task.combination.device, bool(task.trace))
        works: list[Operations | ManagerOperations] = []
        try:
            ground = self._ground(key, task)
            if task.trace:
                failed = failure_trace.record(ground, task, works.append)
            else:
                failed = ground.play(task.operations, works.append)
        except Exception as error:
            if isinstance(error, (ModelError, Unsupported)) and not works:
                # A feature that the release lacks is no failure of its patches.
                return Played(absent=str(error))
            # Any error counts, not only the library's refusals: a defect of this package must not
            # look like a missing feature.
            failed, works = _fault(error), []
        if failed is not None and isinstance(failed.__cause__, WorkerDied):
            self._drop(key)
        if failed is not None and task.combination.device != "cpu":
            # On a new server: one that the case has crashed must not count as absent.
            if key in self._opened:
                self._drop(key)
            why = self._wrong(key, task)
            if why:
                return Played(absent=why, device_failed=True)
        return Played.of(works[0] if works else None, failed)

    def _wrong(self, key: tuple[str, bool], task: CaseTask) -> str:
        """Return why a device cannot fill such a cache at all, "" if it can."""
        try:
            with self._ground(key, task).opener() as context:
                context.sequence().prefill(range(1, 41))
        except KvError as error:
            self._drop(key)
            return f"{task.combination.device}, {task.combination.cache}: {type(error).__name__}"
        return ""

    def _ground(self, key: tuple[str, bool], task: CaseTask) -> CaseRunner:
        model = self._model(key, task.combination)
        options = task.combination.options
        file = Path(self._files.name) / "kept.kv"
        backings: dict[str, dict[str, Any]] = {
            "heap": {},
            "mmap": {"kv_backing": "mmap"},
            "file": {"kv_backing": file.parent},
            "kept": {"kv_backing": file, "kv_keep": "fresh"},
        }
        backing = backings[task.combination.backing]
        again = None
        if task.combination.backing == "kept":
            again = partial(model.context, **options, kv_backing=file, kv_keep=True)
        other = dict(options)
        if task.combination.manager != "none":
            # Fresh evaluations need one micro-batch; their logits are compared with a tolerance.
            other["n_ubatch"] = options["n_batch"]
        return CaseRunner(
            partial(model.context, **options, **backing),
            partial(model.context, **other),
            again,
            watched=task.watched,
            manager=task.combination.manager,
            seed=task.seed,
        )

    def _model(self, key: tuple[str, bool], combination: Combination) -> Model:
        if key not in self._opened:
            stack = ExitStack()
            options: dict[str, Any] = {}
            if combination.device == "rpc":
                server = stack.enter_context(RpcServer(self._folder, threads=1))
                options = {"n_gpu_layers": ALL, "rpc_servers": server.endpoint}
            library = stack.enter_context(self._opening(self._folder, combination, key[1]))
            self._opened[key] = stack, library, options
        _, library, options = self._opened[key]
        found = self._models.get((*key, combination.model))
        if found is None:
            found = library.load_model(combination.model_file, **options)
            self._models[*key, combination.model] = found
        return found

    def _drop(self, key: tuple[str, bool]) -> None:
        stack, _, _ = self._opened.pop(key)
        self._models = {name: each for name, each in self._models.items() if name[:2] != key}
        # A dead process has nothing to free.
        with suppress(KvError):
            stack.close()


def open_library(folder: Path, combination: Combination, apart: bool) -> Any:
    """Open a library; with ``apart`` in a worker, so that a recording survives a crash."""
    if apart or combination.device == "rpc":
        return pyllamakv.open(folder, isolated=True, env=combination.environment)
    library = pyllamakv.open(folder)
    # This process runs cases only, so that a crash affects nothing else.
    library.isolated = True
    return library


def _fault(error: Exception) -> ScenarioFailed:
    outcome = classify(error)
    failed = ScenarioFailed(outcome.message, failure=outcome.failure or "fault")
    failed.evidence = {"script": [], "done": 0, "proven": 0}
    failed.__cause__ = error
    return failed
