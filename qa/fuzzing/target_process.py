"""Run a target in a process of its own (`job`), and read its result.

Each input is stored before it runs: the last one is the input that ended a process or hung in C.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pyllamakv.errors import HarnessError
from qa.fuzzing.fuzz_loop import MOST, FuzzFinding
from qa.fuzzing.fuzz_result import SUMS, FuzzResult
from qa.fuzzing.job import HEAD, ROOM
from qa.fuzzing.processes import Processes

#: Seconds without another input after which a child is ended; also the limit of its start. Waiting
#: threads may take ten times as long on a loaded machine.
_SILENCE = 120.0
#: Waiting threads must not spin: there may be more of them than processors.
_CALM = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "2"}


def fuzz(
    target: str, seconds: float, *, folder: Path, seed: int = 1, kept: Iterable[Path] = (),
    alive: Callable[[int], None] = lambda _inputs: None, silence: float = _SILENCE,
    most: int = MOST, processes: Processes | None = None,
) -> FuzzResult:  # fmt: skip
    """Run a target, named "module:function", for some seconds; restart it when it ends.

    ``folder`` is for its files. A process without a new input for ``silence`` seconds is ended;
    after ``most`` findings the target ends. Raises HarnessError if it cannot start, or if
    ``processes`` are ended.
    """
    if processes is None:
        with Processes() as processes:
            return fuzz(target, seconds, folder=folder, seed=seed, kept=kept, alive=alive,
                        silence=silence, most=most, processes=processes)  # fmt: skip
    outcome = FuzzResult()
    began = time.monotonic()
    names = [str(path) for path in kept]
    for ends in range(most):
        left = seconds - (time.monotonic() - began)
        if left <= 0 or len(outcome.findings) >= most:
            break
        job = {"target": target, "seconds": left, "seed": seed + ends, "folder": str(folder),
               "kept": names, "most": most - len(outcome.findings)}  # fmt: skip
        finding = _Child(job, folder, outcome, alive, silence, processes).wait()
        if finding is None:
            break
        outcome.add(finding)
        # The seeds and stored inputs ran before: a mutation of them, or one of them, ended it.
        names = [name for name in names if Path(name).read_bytes() != finding.data]
    outcome.seconds = time.monotonic() - began
    return outcome


class _Child:
    def __init__(
        self, job: dict[str, Any], folder: Path, outcome: FuzzResult, alive: Callable[[int], None],
        silence: float, processes: Processes,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.place, self.report, self.log = (folder / n for n in ("last", "report.json", "log"))
        self.report.unlink(missing_ok=True)
        self.place.write_bytes(bytes(HEAD.size + ROOM))
        self.outcome, self.alive, self.silence = outcome, alive, silence
        self.processes = processes
        job |= {"place": str(self.place), "report": str(self.report)}
        command = [sys.executable, "-m", "qa.fuzzing.job", json.dumps(job)]
        self.process = processes.start(command, self.log, _CALM)

    def wait(self) -> FuzzFinding | None:
        """Wait for the end; return the reason if the process ended early."""
        with self.place.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            inputs, moved, hung = 0, time.monotonic(), False
            while not self._ended():
                time.sleep(0.05)
                count = HEAD.unpack_from(shared)[0]
                now = time.monotonic()
                if count != inputs:
                    inputs, moved = count, now
                    self.alive(self.outcome.inputs + inputs)
                if now - moved > (self.silence if inputs else max(_SILENCE, self.silence)):
                    hung = True
                    os.killpg(self.process.pid, signal.SIGKILL)
                    moved = now
            inputs, accepted, refused, length = HEAD.unpack_from(shared)
            data = shared[HEAD.size : HEAD.size + min(length, ROOM)]
        code = self.process.returncode
        if self.report.is_file():
            self._read()
            return None
        self.outcome.inputs += inputs
        self.outcome.accepted += accepted
        self.outcome.refused += refused
        if not inputs:
            raise HarnessError(f"a target cannot start (status {code}): {self._said()[-2000:]}")
        if hung:
            return FuzzFinding(f"hung: no new input for {self.silence:g} s", "", data)
        return FuzzFinding(f"died: status {code}", self._said(1), data)

    def _ended(self) -> bool:
        used = self.processes.ended(self.process)
        if used is not None:
            self.outcome.cpu += used.ru_utime + used.ru_stime
        return used is not None

    def _said(self, lines: int = 40) -> str:
        text = self.log.read_text("utf-8", "replace").strip().splitlines()
        marks = [
            line for line in text if "GGML_ASSERT" in line or "ERROR: AddressSanitizer" in line
        ]
        return "\n".join(marks[:1] if marks and lines == 1 else text[-lines:])

    def _read(self) -> None:
        found = json.loads(self.report.read_text("utf-8"))
        for each in found.pop("findings"):
            data = base64.b64decode(each.pop("data"))
            self.outcome.add(FuzzFinding(data=data, **each))
        for name, value in found.items():
            before = getattr(self.outcome, name)
            setattr(self.outcome, name, before + value if name in SUMS else max(before, value))
