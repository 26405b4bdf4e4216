"""Start the process that renders chat templates, and exchange requests with it.

One process serves all models of a program. It is started by the first render, and again after a
template exceeded a limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from functools import cache
from typing import Any, Final
from weakref import finalize

from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.process import environment
from pyllamakv.errors import Busy, ChatTemplateError, WorkerDied

#: Limits of one render: seconds of CPU time, and bytes of address space. Templates of current
#: models take about a millisecond.
CPU_SECONDS: Final = 1.0
ADDRESS_SPACE: Final = 1 << 30
#: Arguments of the interpreter; the limits follow.
PROGRAM: Final = ("-P", "-m", "pyllamakv.runtime.template_worker")


class TemplateProcess:
    """Render templates in a process that is started on demand. Thread-safe."""

    def __init__(
        self, cpu_seconds: float = CPU_SECONDS, address_space: int = ADDRESS_SPACE
    ) -> None:
        self._limits = (cpu_seconds, address_space)
        # Reentrant, because a signal handler may render a template.
        self._lock = threading.RLock()
        self._rendering = False
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: Any = None

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Return the text of a template with JSON values as variables.

        Raises ChatTemplateError with the line, WorkerDied if the process cannot work, and Busy in a
        signal handler that interrupted another call.
        """
        try:
            request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        except RecursionError:
            msg = "the values for the chat template are nested too deeply"
            raise ChatTemplateError(msg) from None
        with self._lock:
            if self._rendering:
                raise Busy(
                    "a chat template is being rendered by the call that this one interrupted"
                )
            with Uninterrupted():  # a process whose start a handler interrupts would remain
                child = self._running()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                self._rendering = True
                child.stdin.write(request)
                child.stdin.flush()
                reply = child.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:
                # After Ctrl-C, the answer would be taken for that of the next request.
                self.close()
                raise
            finally:
                self._rendering = False
            # A process that was killed may have written a part of its answer.
            if not reply.endswith(b"\n"):
                raise self._failure(child)
        found = json.loads(reply)
        if "error" in found:
            line = int(found["line"])
            place = f" (line {line} of the template)" if line else ""
            raise ChatTemplateError(found["error"] + place, line=line)
        text: str = found["text"]
        return text

    def close(self) -> None:
        """End the process; the next render starts another one."""
        if self._end is not None:
            self._end()
        self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        # A fork of the program must not use the pipes of the process that its parent started.
        if self._child is None or self._owner != os.getpid():
            if not sys.executable:
                raise WorkerDied(
                    "chat templates need sys.executable, which this program does not set"
                )
            command = [sys.executable, *PROGRAM]
            try:
                self._child = subprocess.Popen(
                    [*command, *map(str, self._limits)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # a terminal's Ctrl-C is for the program
                    env=environment({}),
                )
            except (OSError, ValueError) as error:
                raise WorkerDied(
                    f"cannot start {command[0]!r} for chat templates: {error}"
                ) from error
            self._owner = os.getpid()
            self._end = finalize(self, _end, self._child, self._owner)
        return self._child

    def _failure(self, child: subprocess.Popen[bytes]) -> Exception:
        status = child.wait()
        self.close()
        if status == -signal.SIGPROF:
            return ChatTemplateError(
                f"the chat template did not end within {self._limits[0]:g} seconds of CPU time"
            )
        return WorkerDied(f"the process for chat templates ended with status {status}")


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue


@cache
def shared() -> TemplateProcess:
    """Return the process of this program."""
    return TemplateProcess()


# Another thread may hold the lock during a fork; in the child, nothing would release it.
os.register_at_fork(after_in_child=shared.cache_clear)
