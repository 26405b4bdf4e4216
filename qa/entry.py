"""The result of one stress test: what it ran, how often, and the defects found."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qa.bench.figure import commit, machine

#: Progress callback; called with a description of the current work.
Tick = Callable[[str], None]


def strip_directories(text: str) -> str:
    """Return a text with paths reduced to their last part, without the user's directories."""
    return re.sub(r"/[^\s:;,]*/", "", text)


@dataclass(frozen=True)
class StressOptions:
    """The limits and the random seed of a run.

    ``seconds`` limits each section, ``seed`` is its random seed, and ``only`` names the entries of
    a section to run (all, if it is empty). Random operations continue until there are
    ``operations``, without a time limit.
    """

    seconds: float = 60.0
    seed: int = 1
    only: tuple[str, ...] = ()
    operations: int = 0

    def wants(self, name: str) -> bool:
        """Return whether an entry should run."""
        return not self.only or name in self.only

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of `python -m qa stress` that repeat the run."""
        usual = StressOptions()
        seed = ("--seed", str(self.seed)) if self.seed != usual.seed else ()
        least = ("--operations", str(self.operations)) if self.operations else ()
        only = [word for name in self.only for word in ("--only", name)]
        return ("--seconds", f"{self.seconds:g}", *least, *seed, *only)

    def shared(self, among: int) -> StressOptions:
        """Return the options for one of several parts that run one after the other."""
        return replace(self, seconds=self.seconds / max(among, 1))


@dataclass(frozen=True)
class Entry:
    """The result of one test.

    ``section`` is its table and ``name`` the tested subject; ``row`` has a text per further column.
    ``defects`` has one sentence per defect; without any, the entry passed. ``data`` are the raw
    numbers, ``seed`` repeats the run. ``skip_reason`` states why an entry without defects
    proves nothing, such as "too few operations".
    """

    section: str
    name: str
    row: dict[str, str] = field(default_factory=dict)
    defects: tuple[str, ...] = ()
    seed: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    hardware: str = ""
    date: str = ""
    commit: str = ""
    command: str = ""
    skip_reason: str = ""

    @property
    def ran(self) -> bool:
        """Return whether the entry ran; if not, ``skip_reason`` has the reason."""
        return bool(self.data or self.defects or not self.skip_reason)

    @property
    def passed(self) -> bool:
        """Return whether the entry ran without defects."""
        return not self.defects

    def dated(self, command: str) -> Entry:
        """Return the entry with date, machine, commit and command."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return replace(self, date=today, hardware=machine(), commit=commit(), command=command)


def skipped_entry(section: str, name: str, reason: str) -> Entry:
    """Return an entry for a test that cannot run here: without defects or measurements.

    Paths in the reason are reduced to their last part, because results are published.
    """
    return Entry(section, name, {}, skip_reason=f"skipped: {strip_directories(reason)}")
