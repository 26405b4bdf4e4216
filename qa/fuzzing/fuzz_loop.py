"""Fuzz a reader, and keep the inputs that reach new lines."""

from __future__ import annotations

import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from pyllamakv.errors import KvError
from pyllamakv.runtime.memory_estimate import mapped_bytes
from qa.fuzzing.line_coverage import LineCoverage
from qa.fuzzing.mutate import Bytes, words
from qa.fuzzing.target import Target, WrongAnswer

#: Seconds of CPU time after which an input is repeated, and the limit of the repeat: waiting
#: threads spin on a loaded machine, which counts as CPU time.
PATIENCE, _MORE = 2.0, 10.0
#: Findings after which a target ends: enough to fix.
MOST = 12
#: Attempts to minimize a finding, and their time limit in seconds.
_MINIMIZE_RUNS, _SHRINKING = 400, 3.0
_REFUSED = "WrongAnswer: a valid input is refused"


class InputTimeout(BaseException):
    """Raised to end an input that takes too long."""


@dataclass(frozen=True)
class FuzzFinding:
    """A defect, its location, and the input."""

    what: str
    where: str
    data: bytes


@dataclass
class FuzzLoop:
    """Run a target; ``note`` receives each input before it runs, because it may end the process.

    ``keep`` receives inputs that reached new lines and were accepted or correctly refused. Of the
    ``inputs`` some are ``accepted``, some ``refused``, and the others are findings.
    """

    target: Target
    seed: int = 1
    note: Callable[[bytes], None] = lambda _data: None
    keep: Callable[[bytes], None] = lambda _data: None
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    corpus: list[bytes] = field(default_factory=list)
    findings: dict[str, FuzzFinding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines = LineCoverage(self.target.modules)
        self._answers: set[Hashable] = set()
        self._refusal = ""
        self._chance = Random(self.seed)
        dictionary = words(self.target.seeds, self.lines.codes)
        self._mutate = self.target.mutate or Bytes(dictionary, self.target.longest)
        signal.signal(signal.SIGPROF, _hung)

    @property
    def coverage(self) -> int:
        """Count the reached lines; the distinct results if no lines are traced."""
        return self.lines.seen if self.lines.total else len(self._answers)

    @property
    def _reached(self) -> int:
        return self.lines.seen + len(self._answers)

    def run(self, until: float, kept: tuple[bytes, ...] = (), most: int = MOST) -> None:
        """Run the seeds and stored inputs, then mutations until the clock reaches ``until``.

        ``most`` findings end it earlier.
        """
        for number, data in enumerate((*self.target.seeds, *kept)):
            self.corpus.append(data)
            self.attempt(data, valid=number < len(self.target.seeds))
        while time.monotonic() < until and len(self.findings) < most:
            chance = self._chance
            # The later ones reached lines that the earlier did not.
            data, other = (
                self.corpus[max(chance.randrange(len(self.corpus)) for _ in range(2))]
                for _ in range(2)
            )
            data = self._mutate(chance, data, other)
            data = self.target.post_process(chance, data)
            before = self._reached
            sound = self.attempt(data)
            if self._reached > before:
                self.corpus.append(data)
                if sound:
                    self.keep(data)
        for key, finding in self.findings.items():
            self.findings[key] = self._minimized(finding)

    def attempt(self, data: bytes, *, valid: bool = False) -> bool:
        """Run one input and record a finding; return whether there was none.

        A ``valid`` input must be accepted.
        """
        self.note(data)
        self.inputs += 1
        finding = self.run_input(data)
        if finding is not None and finding.what.startswith("Hung"):
            finding = self.run_input(data, _MORE)
        if finding is None and valid and self._refusal:
            where = f"seed {self.target.seeds.index(data)}"
            finding = FuzzFinding(f"{_REFUSED}: {self._refusal}", where, data)
        if finding is None:
            self.accepted += not self._refusal
            self.refused += bool(self._refusal)
        else:
            key = f"{finding.what.split(':')[0]} {finding.where}"
            known = self.findings.get(key)
            if known is None or len(data) < len(known.data):
                self.findings[key] = finding
        return finding is None

    def run_input(self, data: bytes, patience: float = PATIENCE) -> FuzzFinding | None:
        """Run the target once; return the defect in its result."""
        self._refusal = ""
        signal.setitimer(signal.ITIMER_PROF, patience)
        try:
            with self.lines:
                self._answers.update(self.target.run(data))
        except KvError as error:
            self._refusal = f"{type(error).__name__}: {error}"
            return None
        except WrongAnswer as error:
            return FuzzFinding(f"WrongAnswer: {error}", _skeleton(str(error)), data)
        except InputTimeout:
            return FuzzFinding(f"Hung: more than {patience:g} s", "", data)
        except (Exception, RecursionError) as error:
            return FuzzFinding(f"{type(error).__name__}: {error}"[:300], _place(error), data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return None

    def _minimized(self, finding: FuzzFinding) -> FuzzFinding:
        """Remove parts of an input that its finding does not need, within a time limit."""
        chance, until = Random(self.seed), time.monotonic() + _SHRINKING
        for _ in range(0 if finding.what.startswith(("Hung", _REFUSED)) else _MINIMIZE_RUNS):
            if time.monotonic() > until:
                break
            smaller = self.target.post_process(chance, _without(chance, finding.data))
            if len(smaller) >= len(finding.data):
                continue
            self.note(smaller)
            found = self.run_input(smaller)
            if found is not None and found.where == finding.where:
                finding = found
        return finding


def _without(chance: Random, data: bytes) -> bytes:
    """Return an input without one of its lines or some of its bytes."""
    rows = data.splitlines(keepends=True)
    if len(rows) > 1 and chance.random() < 0.5:
        del rows[chance.randrange(len(rows))]
        return b"".join(rows)
    begin = chance.randrange(len(data) + 1)
    end = begin + 1 + chance.randrange(max(1, len(data) // chance.choice((2, 4, 16, 64))))
    return data[:begin] + data[end:]


def _hung(_signal: int, _frame: FrameType | None) -> None:
    raise InputTimeout


def _skeleton(text: str) -> str:
    return re.sub(r"-?\d+", "N", text)


def _place(error: BaseException) -> str:
    """Return the location in this package that raised or passed on an error."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [each for each in frames if "/pyllamakv/" in each.filename]
    each = (mine or frames)[-1]
    return f"{each.filename.rpartition('/pyllamakv/')[2]}:{each.lineno}"


def limit_memory(headroom: int) -> None:
    """Limit the address space of this process to its present size and ``headroom`` bytes."""
    if sys.platform == "linux":
        limit = mapped_bytes() + headroom
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
