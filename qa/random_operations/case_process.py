"""Play schedules in a process of its own, where a library may crash or hang: that is a finding."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from pyllamakv.errors import ScenarioFailed
from qa.random_operations.case_session import CaseSession
from qa.random_operations.task import CaseTask, Played

#: Seconds after which a schedule hangs. The slowest, with a transposed V behind RPC, took 91 on two
#: processors that had twice as much to do.
PATIENCE = 600.0

Make = Callable[[Path], CaseSession]


class CaseProcess:
    """Own the process that plays on the variant in a folder; it is replaced when it is lost."""

    def __init__(
        self, folder: Path, environment: dict[str, str], make: Make = CaseSession, *,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._arguments = (folder, environment, make)
        self._patience = patience
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def play(self, task: CaseTask) -> Played:
        """Play a task; a process that ends or is silent over it is how the task failed."""
        try:
            pipe = self._pipe or self._start()
            pipe.send(task)
            if pipe.poll(self._patience):
                played: Played = pipe.recv()
                return played
            kind, why = "hang", f"it said nothing for {self._patience:g} seconds"
        except (EOFError, OSError):
            kind, why = "crash", f"the process of the library ended with {self._ended()}"
        self.close()
        evidence = {"script": [], "done": len(task.operations), "proven": 0}
        return Played(failed=ScenarioFailed(why, failure=kind, evidence=evidence))

    def close(self) -> None:
        """End the process; the next task starts another."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            # What is at work does not look at its pipe.
            self._process.join(2.0)
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Connection:
        # A fork would share the libraries and threads that are here.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()
        # It says so when it is there: to start takes what it takes.
        self._pipe.recv()
        return self._pipe

    def _ended(self) -> str:
        assert self._process is not None
        self._process.join(5.0)
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def serve(pipe: Connection, folder: Path, environment: dict[str, str], make: Make) -> None:
    """Play tasks until the other end is closed."""
    os.environ.update(environment)
    # What an abort says goes past whoever waits; a recording of it has those lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with make(folder) as stage:
        pipe.send(None)
        while True:
            try:
                task = pipe.recv()
            except (EOFError, OSError):
                return
            pipe.send(stage.play(task))
