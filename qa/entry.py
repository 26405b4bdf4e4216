"""Hold what one trial did, how often, and what it found."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qa.bench.figure import machine

#: Called now and then with what is being done, so that somebody who waits sees it move.
Tick = Callable[[str], None]


def strip_directories(text: str) -> str:
    """Return a text with the last part alone of each path: where a home lies is nobody's matter."""
    return re.sub(r"/[^\s:;,]*/", "", text)


@dataclass(frozen=True)
class StressOptions:
    """Describe how much is to be tried: a sized run for CI, or the long one.

    ``seconds`` bound each section, ``seed`` is where its chance starts, and ``only`` names the
    entries of a section to run, all of them where it is empty. Schedules go on, however long it
    takes, until there are ``operations``.
    """

    seconds: float = 60.0
    seed: int = 1
    only: tuple[str, ...] = ()
    jobs: int = 1
    operations: int = 0

    def wants(self, name: str) -> bool:
        """Return whether an entry is to be run."""
        return not self.only or name in self.only

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of `python -m qa stress` that try the same again."""
        usual = StressOptions()
        seed = ("--seed", str(self.seed)) if self.seed != usual.seed else ()
        jobs = ("--jobs", str(self.jobs)) if self.jobs != usual.jobs else ()
        least = ("--operations", str(self.operations)) if self.operations else ()
        only = [word for name in self.only for word in ("--only", name)]
        return ("--seconds", f"{self.seconds:g}", *least, *seed, *jobs, *only)

    def shared(self, among: int) -> StressOptions:
        """Return the effort of one of several parts that are run one after the other."""
        return replace(self, seconds=self.seconds / max(among, 1))


@dataclass(frozen=True)
class Entry:
    """One line of qa/results/reliability.md.

    ``section`` is its table and ``name`` what was tried; ``row`` has a text per further column.
    ``defects`` tell what was lost or wrong, one sentence each: without any it passed. ``data`` are
    the raw numbers, ``seed`` what starts the same again. ``skip_reason`` says why an entry without
    defects does not prove that nothing was lost, such as "too few operations". ``notes`` are listed
    below the table.
    """

    section: str
    name: str
    row: dict[str, str]
    defects: tuple[str, ...] = ()
    seed: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    skip_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        """Return whether the entry ran; if not, ``skip_reason`` has the reason."""
        return bool(self.data or self.defects or not self.skip_reason)

    @property
    def passed(self) -> bool:
        """Return whether nothing was lost and nothing wrong."""
        return not self.defects

    def dated(self, command: str) -> Entry:
        """Return the entry with day, machine and command filled in."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return replace(self, measured=f"{today}, {machine()}, `{command}`")


def skipped_entry(section: str, name: str, reason: str) -> Entry:
    """Return the line of what cannot be tried here: no defect, and no measurement either."""
    return Entry(section, name, {}, skip_reason=f"not tried: {reason}")
