"""Run the native code under the address, undefined-behaviour and thread sanitizers.

Every kind of sanitizer must first report faults planted in the library. A short run instruments the
shim and libllama, the long one ggml as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyllamakv.errors import KvError
from pyllamakv.source.releases import TEST_RELEASE
from qa.entry import Entry, StressOptions, Tick
from qa.sanitizers import instrument, reports, sanitized_process, sanitizer_targets

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from qa.sanitizers.reports import Report
    from qa.sanitizers.sanitized_process import ProcessResult

#: From this time limit in seconds, everything is instrumented, and every scenario runs in every
#: setting.
LONG = 900.0
#: Scenarios that a short run starts with: those that map, trim and restore memory.
FIRST = (
    "mmap-environment",
    "fail-between-ubatches",
    "restore-fragmented",
    "mmap-trim",
    "abort-mid-shift",
    "retry-between-ubatches",
    "restore-after-shift",
    "mmap-clear",
    "quantized-defrag",
    "fork-then-defrag",
    "shift-then-defrag",
)
PLANTED = {"address": ("heap", "overflow", "shift"), "thread": ("race",)}
#: Required text in the report of each planted fault.
SAYS = {
    "heap": "heap-buffer-overflow",
    "overflow": "signed integer overflow",
    "shift": "shift exponent",
    "race": "data race",
}


@dataclass
class SanitizerRun:
    """The counts, reports and errors of one part."""

    ran: int = 0
    of: str = "runs"
    found: list[Report] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, found: Iterable[Report]) -> None:
        """Add new reports."""
        known = {report.key for report in self.found}
        for report in found:
            if report.key not in known:
                known.add(report.key)
                self.found.append(report)

    def take(self, what: str, ended: ProcessResult) -> None:
        """Add the reports of a program, and its failure."""
        self.add(ended.found)
        if ended.code:
            self.wrong.append(f"{what} ended with status {ended.code}: {ended.output}")


def names() -> tuple[str, ...]:
    """Return the names of all parts."""
    return tuple(PARTS)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run the selected parts, within about ``effort.seconds`` in addition to builds.

    The planted faults for a kind of sanitizer run with every part that uses it.
    """
    work = SanitizerBuilds(effort, tick)
    kinds = {kind for name, (kind, _) in PARTS.items() if effort.wants(name)}
    return [
        _entry(name, work.scope if kind else "headers", part, work)
        for name, (kind, part) in PARTS.items()
        if effort.wants(name) or (name.startswith("planted") and kind in kinds)
    ]


def _entry(name: str, scope: str, part: Part, work: SanitizerBuilds) -> Entry:
    trial = SanitizerRun()
    built = work.building
    start = time.monotonic()
    try:
        part(work, trial)
    except KvError as error:
        trial.wrong.append(f"it could not run: {error}")
    spent = time.monotonic() - start - (work.building - built)
    ours, theirs = reports.split(trial.found)
    if not trial.ran and not trial.wrong:
        trial.wrong.append("no test ran")
    row = {
        "scope": scope,
        "ran": f"{trial.ran} {trial.of}",
        "reports": str(len(ours)),
        "upstream's own": str(len(theirs)),
        "seconds": f"{spent:.0f}",
    }
    data = {
        "reports": [[str(report), report.text] for report in trial.found],
        "building": round(work.building - built, 1),
        "scope": scope,
    }
    defects = [*trial.wrong, *(str(report) for report in ours)]
    return Entry("sanitizers", name, row, tuple(defects), work.effort.seed, data)


class SanitizerBuilds:
    """Run the parts; a library is built when it is first needed."""

    def __init__(self, effort: StressOptions, tick: Tick) -> None:
        self.effort = effort
        self.tick = tick
        #: Seconds of builds, which happen once.
        self.building = 0.0
        self._built: dict[tuple[str, str], Variant] = {}

    @property
    def long(self) -> bool:
        """Return whether everything is instrumented and run."""
        return self.effort.seconds >= LONG

    @property
    def scope(self) -> str:
        """Return the instrumented part of the library: all of it, or the shim and libllama."""
        return "whole" if self.long else "core"

    def library(self, side: str, kind: str) -> Variant:
        """Return the instrumented library of a side."""
        if (side, kind) not in self._built:
            start = time.monotonic()
            instrument.runtimes(kind)
            self._built[side, kind] = instrument.instrumented(
                f"{TEST_RELEASE}+{side}", kind, self.scope, tell=self.tick
            )
            self.building += time.monotonic() - start
        return self._built[side, kind]

    def plant(self, trial: SanitizerRun, kind: str) -> None:
        """Load the library with each planted fault: one that is not reported is a defect."""
        trial.of = "planted faults reported"
        library = self.library("patched", kind).library
        for fault in PLANTED[kind]:
            self.tick(f"planted {fault}")
            seen = sanitized_process.planted(kind, library, fault)
            if any(SAYS[fault] in report.what for report in seen):
                trial.ran += 1
            else:
                trial.wrong.append(f"the sanitizer does not report a planted {fault}")
        clean = sanitized_process.planted(kind, library, "nothing")
        trial.add(clean)

    def drive(self, trial: SanitizerRun) -> None:
        """Run the tests of the patches' headers, without llama.cpp."""
        trial.of = "test groups"
        for name, group, ended in sanitizer_targets.headers(self.tick):
            trial.ran += bool(group)
            trial.take(f"{name} {group}".strip(), ended)
            if not group and not ended.out.split():
                trial.wrong.append(f"{name} lists no test groups")

    def smoke(self, trial: SanitizerRun) -> None:
        """Run the C program with both libraries."""
        trial.of = "runs"
        for side in ("patched", "stock"):
            made = self.library(side, "address")
            for settings, ended in sanitizer_targets.smoke(made, self.tick):
                trial.ran += 1
                trial.take(f"smoke on {side} ({settings})", ended)

    def threads(self, trial: SanitizerRun) -> None:
        """Use the log ring, cancel and several contexts from several threads."""
        trial.of = "rounds"
        # ggml's own threads are excluded if ggml is not instrumented: its synchronization would be
        # invisible, and all its accesses would look like races.
        threads, rounds = (3, 20) if self.long else (1, 8)
        made = self.library("patched", "thread")
        trial.ran += rounds
        trial.take("the driver", sanitizer_targets.threads(made, threads, rounds, self.tick))

    def play(self, trial: SanitizerRun, side: str) -> None:
        """Run scenarios in a worker under the sanitizer, within the time limit."""
        trial.of = "runs of scenarios"
        made = self.library(side, "address")
        seconds = self.effort.seconds / (2 if self.effort.only else 4)
        for name, setting, outcome, found in self._runs(made, seconds):
            trial.ran += outcome.status not in ("skip", "absent")
            # An assertion of the C++ library that ends a worker is only in its last output.
            trial.add([*found, *reports.parse(outcome.message)])
            # Stock may fail fix scenarios, and may be unable to start a run.
            if outcome.status == "fault" or (side == "patched" and outcome.failed):
                trial.wrong.append(f"{name} [{setting}]: {outcome.failure} {outcome.message}")

    def _runs(self, made: Variant, seconds: float) -> Iterator[sanitizer_targets.Played]:
        until = time.monotonic() + seconds
        for played in sanitizer_targets.scenarios(made, FIRST, self.tick, whole=self.long):
            yield played
            if time.monotonic() > until:
                return


Part = Callable[[SanitizerBuilds, SanitizerRun], None]
#: The parts by the name of their entry, with the kind of library , if any.
PARTS: Final[dict[str, tuple[str, Part]]] = {
    "planted, address and undefined": ("address", lambda work, t: work.plant(t, "address")),
    "planted, threads": ("thread", lambda work, t: work.plant(t, "thread")),
    "native drivers": ("", SanitizerBuilds.drive),
    "C program": ("address", SanitizerBuilds.smoke),
    "threads": ("thread", SanitizerBuilds.threads),
    "scenarios, patched": ("address", lambda work, t: work.play(t, "patched")),
    "scenarios, stock": ("address", lambda work, t: work.play(t, "stock")),
}
