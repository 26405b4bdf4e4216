"""Run cases in a process of their own, because a crash or hang of the library is a finding."""

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

#: Timeout of a case in seconds. The slowest, with a transposed V behind RPC, took 91 on two
#: processors with a load of four.
PATIENCE = 600.0

Make = Callable[[Path], CaseSession]


class CaseProcess:
    """Own the process that runs cases on the variant in a directory; a dead one is replaced."""

    def __init__(
        self, folder: Path, environment: dict[str, str], make: Make = CaseSession, *,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._arguments = (folder, environment, make)
        self._patience = patience
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def play(self, task: CaseTask) -> Played:
        """Run a case; if the process ends or times out, that is the failure."""
        try:
            pipe = self._pipe or self._start()
            pipe.send(task)
            if pipe.poll(self._patience):
                played: Played = pipe.recv()
                return played
            kind, why = "hang", f"no reply within {self._patience:g} seconds"
        except (EOFError, OSError):
            kind, why = "crash", f"the process of the library ended with {self._ended()}"
        self.close()
        evidence = {"script": [], "done": len(task.operations), "proven": 0}
        return Played(failed=ScenarioFailed(why, failure=kind, evidence=evidence))

    def close(self) -> None:
        """End the process; the next case starts another."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            # A busy process does not read its pipe.
            self._process.join(2.0)
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Connection:
        # A fork would share the libraries and threads of this process.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()
        # The process reports when it has started, so that the start does not count.
        self._pipe.recv()
        return self._pipe

    def _ended(self) -> str:
        assert self._process is not None
        self._process.join(5.0)
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def serve(pipe: Connection, folder: Path, environment: dict[str, str], make: Make) -> None:
    """Run cases until the other end of the pipe is closed."""
    os.environ.update(environment)
    # The message of an abort bypasses the parent; a recording contains those lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with make(folder) as stage:
        pipe.send(None)
        while True:
            try:
                task = pipe.recv()
            except (EOFError, OSError):
                return
            pipe.send(stage.play(task))
