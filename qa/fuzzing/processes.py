"""Start the processes of targets, and end them with the run."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from pyllamakv.errors import HarnessError


class Processes:
    """Own processes that threads wait for; at the end of the block the running ones are killed.

    Each has its own session: Ctrl-C does not reach it. SIGTERM ends the block as well.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._over = False
        self._before: Any = None

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process that writes into a log. Raises HarnessError after the end."""
        with self._lock, log.open("wb") as out:
            if self._over:
                raise HarnessError("cannot start a process: the fuzzing has ended")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
            self._running.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes]) -> resource.struct_rusage | None:
        """Return the resource usage of an ended process, None before."""
        with self._lock:  # or its number might be another's when it is killed
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if not pid:
                return None
            process.returncode = os.waitstatus_to_exitcode(status)
            self._running.remove(process)
        return used

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            for process in self._running:
                os.killpg(process.pid, signal.SIGKILL)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
