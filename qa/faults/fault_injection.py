"""Inject faults into a step, one by one; after each, a repeat must succeed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

from qa.faults import preload
from qa.faults.attempt import PATIENCE, AttemptResult, Child, Fault
from qa.faults.step import FaultTarget

#: Faults of files, at any change.
FILES: Final = ("kill", "one", "full", "once", "eio")
_YEAR: Final = 365 * 86400
#: Clock jumps: daylight saving time, a day and more, years, in both directions.
_JUMPS: Final = (3600, -3600, 2 * 86400, -2 * 86400, 10 * _YEAR, -10 * _YEAR)
#: Limits in bytes: of address space beyond the present use, of disk space, of one file.
_AMOUNTS: Final = {
    "memory": tuple(1 << 20 << n for n in range(8)),
    "room": tuple(n << 12 for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)),
    "fsize": tuple(1 << n for n in range(6, 17)),
}
#: Timeout of the second process while the first is stopped.
_BESIDE: Final = 0.4


@dataclass
class InjectionRecord:
    """The faults of one kind that were tried on one step, and the defects found.

    ``struck`` counts those of ``tried`` that had an effect: a change failed, the wrong clock was
    read, a limit was reached. ``repeated`` counts the successful repeats after these. ``places`` is
    the number of possible faults: changes of files, times the kinds of failure of each.
    """

    step: str
    kind: str
    places: int = 0
    tried: int = 0
    struck: int = 0
    repeated: int = 0
    seconds: float = 0.0
    #: How often each class of error was raised.
    errors: Tally[str] = field(default_factory=Tally)
    defects: list[str] = field(default_factory=list)


class FaultInjector:
    """Try faults on one step in a directory of its own."""

    def __init__(self, step: FaultTarget, folder: Path) -> None:
        self.step = step
        self.records: dict[str, InjectionRecord] = {}
        self._fresh, self.place, self._filler = folder / "fresh", folder / "run", folder / "filler"
        self._fresh.mkdir(parents=True)
        self._counter = preload.Counter(folder / "counter")
        os.environ["PYLLAMAKV_HOME"] = str(self.place / "home")
        step.prepare(self._fresh)
        self._begin()
        self.expected = self._attempt(Fault())
        self.points = self._counter.changes
        self.files = step.files(self.place)
        if self.expected.ending != "done":
            error, record = self.expected.error, self._record("none")
            if not (step.optional and error.startswith("Unsupported: ")):
                record.defects.append(f"{step.name} fails without a fault: {error}")

    def _record(self, kind: str) -> InjectionRecord:
        return self.records.setdefault(kind, InjectionRecord(self.step.name, kind))

    def faults(self, kinds: tuple[str, ...], seed: int) -> Iterator[Fault]:
        """Yield every fault of some kinds once: kinds alternate, each in random order."""
        chance = random.Random(seed)
        of_kinds = [self._all(kind) for kind in kinds if kind not in self.step.without]
        for found in of_kinds:
            chance.shuffle(found)
        for together in zip_longest(*of_kinds):
            yield from (fault for fault in together if fault is not None)

    def _all(self, kind: str) -> list[Fault]:
        points = range(1, self.points + 1)
        if kind == "clock":
            return [Fault(kind, at, jump) for at in points for jump in _JUMPS]
        if kind in _AMOUNTS:
            return [Fault(kind, 0, size) for size in _AMOUNTS[kind]]
        return [Fault(kind, at) for at in points]

    def walk(self, kinds: tuple[str, ...], seed: int, seconds: float) -> Iterator[Fault]:
        """Try faults until the time is up or all were tried; yield each.

        At least one is tried, and the first ``kinds`` come first. A kind without possible faults is
        a defect, because it would test nothing.
        """
        until = time.monotonic() + seconds
        if "none" in self.records:
            return
        for kind in kinds:
            if kind in self.step.without:
                continue
            record = self._record(kind)
            record.places = len(self._all(kind))
            if not record.places:
                record.defects.append(f"{self.step.name}, {kind}: the step changed no file")
        for fault in self.faults(kinds, seed):
            if time.monotonic() >= until and any(each.tried for each in self.records.values()):
                break
            self.try_one(fault)
            yield fault

    def try_one(self, fault: Fault) -> None:
        """Try one fault on a fresh copy, repeat, and record defects."""
        begin = time.monotonic()
        self._begin()
        endings = self._two(fault) if fault.kind == "stop" else [self._attempt(fault)]
        struck = self._counter.hits > 0 or any(map(self._otherwise, endings))
        record = self._record(fault.kind)
        problems: list[str] = []
        for ending in endings:
            if ending.ending == "error":
                record.errors[ending.error.partition(":")[0]] += 1
            problems += self._judge(fault, ending)
            problems += self.step.check_interrupted(self.place, ending, self.expected.result)
        repeat = self._attempt(Fault())
        if repeat.ending != "done":
            problems.append(f"the repeat failed: {repeat.error}")
        elif repeat.result != self.expected.result:
            problems.append(f"the repeat returned {_short(repeat.result)}")
        else:
            record.repeated += struck
        left = sorted(self.step.files(self.place) - self.files)
        if left:
            problems.append(f"left behind after the repeat: {', '.join(left[:4])}")
        problems += self.step.check_completed(self.place)
        if problems:
            record.defects.append(f"{self.step.name}, {fault}: {'; '.join(problems)}")
        record.tried += 1
        record.struck += struck
        record.seconds += time.monotonic() - begin

    def _otherwise(self, ending: AttemptResult) -> bool:
        """Return whether an attempt ended differently from one without a fault."""
        return ending.ending != "done" or ending.result != self.expected.result

    def _judge(self, fault: Fault, ending: AttemptResult) -> Iterator[str]:
        if ending.ending == "hung":
            yield ending.error
        if ending.ending == "done" and self._otherwise(ending):
            yield f"with the fault it returned {_short(ending.result)}"
        if ending.ending == "error":
            if not ending.typed:
                yield f"not an error of pyllamakv.errors: {ending.error}"
            elif fault.kind == "clock" or (
                fault.kind == "stop"
                and not ending.error.startswith(self.step.allowed_errors or "-")
            ):
                yield f"it failed: {ending.error}"
        if ending.ending == "killed" and fault.kind not in ("kill", "one"):
            yield f"it was ended: {ending.error}"

    def _attempt(self, fault: Fault) -> AttemptResult:
        self._counter.reset()
        with self._filled(fault):
            return self._child(fault).end()

    @contextlib.contextmanager
    def _filled(self, fault: Fault) -> Iterator[None]:
        """Fill the file system except for the bytes that a fault leaves."""
        if fault.kind != "room":
            yield
            return
        facts = os.statvfs(self.place)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_bsize - fault.amount)
        try:
            yield
        finally:
            self._filler.unlink()

    def _child(self, fault: Fault) -> Child:
        def work() -> object:
            return self.step.run(self.place)

        return Child(work, fault, self.place, self._counter.path)

    def _two(self, fault: Fault) -> list[AttemptResult]:
        """Stop a first run at one change, run a second one, and continue the first."""
        self._counter.reset()
        first = self._child(fault)
        until = time.monotonic() + PATIENCE
        while not self._counter.stopped and not first.wait(0.002) and time.monotonic() < until:
            pass
        second = self._child(Fault())
        second.wait(_BESIDE)
        if self._counter.stopped:
            os.kill(self._counter.stopped, signal.SIGCONT)
        return [first.end(), second.end()]

    def _begin(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self._fresh), str(self.place)], check=True)


def _short(result: object) -> str:
    text = repr(result)
    return text if len(text) < 200 else text[:200] + "…"
