"""Run a step once in a child process with one fault, and return how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pyllamakv.errors import KvError
from pyllamakv.runtime.memory_estimate import mapped_bytes
from qa.faults import preload

#: Timeout of a step in seconds; no step takes one second.
PATIENCE: Final = 60.0

Ending = Literal["done", "error", "killed", "hung"]


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``kind`` is "kill" (all processes), "one" (the process that makes the change, git for example),
    "full" (disk full since then), "once" (disk full once), "eio", "stop" (pause, run a second
    process, continue), "clock", "memory", "room" (limit of the disk) or "fsize" (limit of a file);
    "none" only counts. ``at`` is the index of the change; ``amount`` are the seconds that the clock
    jumps, or the bytes of the limit.
    """

    kind: str = "none"
    at: int = 0
    amount: int = 0

    def __str__(self) -> str:
        amount = f" by {self.amount}" if self.amount else ""
        return f"{self.kind}{amount} at change {self.at}"


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt, or its error and whether that is an error type of this package."""

    ending: Ending
    result: Any = None
    error: str = ""
    typed: bool = True


class Child:
    """A child process that runs a step, from its fork until it is reaped."""

    def __init__(self, work: Callable[[], Any], fault: Fault, root: Path, counter: Path) -> None:
        self._result_fd, result_fd = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._result_fd)
            _run(work, fault, root, counter, result_fd)
        os.close(result_fd)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)
        self._status: int | None = None

    def wait(self, seconds: float) -> bool:
        """Return whether the child ended within some seconds."""
        until = time.monotonic() + seconds
        pause = 0.001
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() > until:
                return False
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
        return True

    def end(self, seconds: float = PATIENCE) -> AttemptResult:
        """Wait for the child, kill its remaining processes, and return the result."""
        in_time = self.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(PATIENCE)
        # A surviving grandchild would keep the pipe open; the child's result has arrived.
        os.set_blocking(self._result_fd, False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._result_fd, 1 << 16):
                data += piece
        os.close(self._result_fd)
        if not in_time:
            return AttemptResult("hung", error=f"no end after {seconds:.0f} s")
        if self._status == 0 and data:
            return AttemptResult(**json.loads(data))
        return AttemptResult("killed", error=f"status {self._status}")


def _run(work: Callable[[], Any], fault: Fault, root: Path, counter: Path, result_fd: int) -> None:
    """Run the step in the child; never returns."""
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        words = {"PLF_ROOT": str(root), "PLF_SHARED": str(counter), "PLF_AT": str(fault.at)}
        if fault.kind == "clock":
            words["PLF_CLOCK"] = str(fault.amount)
        elif fault.kind == "memory":
            _limit(resource.RLIMIT_AS, mapped_bytes() + fault.amount)
        elif fault.kind == "fsize":
            _limit(resource.RLIMIT_FSIZE, fault.amount)
        elif fault.kind not in ("none", "room"):
            words["PLF_DO"] = fault.kind
        preload.arm({**words, "PLF_GROUP": str(os.getpid())})
        outcome: dict[str, Any]
        try:
            outcome = {"ending": "done", "result": work()}
        except BaseException as error:
            _unlimited()  # Reporting the error needs memory as well.
            typed = isinstance(error, KvError | MemoryError)
            if fault.kind == "memory":
                # Without memory, the interpreter ends an import with its own message.
                lacks = isinstance(error, OSError) and error.errno == errno.ENOMEM
                typed = typed or lacks or isinstance(error, ImportError | SystemError)
            where = traceback.extract_tb(error.__traceback__)
            last = f"{Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
            text = f"{type(error).__name__}: {error} ({last})"
            outcome = {"ending": "error", "error": text, "typed": typed}
        preload.arm({})
        _unlimited()
        os.write(result_fd, json.dumps(outcome).encode())
    finally:
        os._exit(0)


def _unlimited() -> None:
    for what in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        _limit(what, resource.RLIM_INFINITY)


def _limit(what: int, size: int) -> None:
    """Limit the resources of this process and its children; the limit can be removed."""
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))
