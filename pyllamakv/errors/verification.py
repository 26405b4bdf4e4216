"""What the harness reports: its own faults, and claims that were not met."""

from __future__ import annotations

from typing import Any

from pyllamakv.errors.base import KvError


class HarnessError(KvError):
    """Report a fault of the harness itself, never of what it judges."""

    exit_code = 128


class Untestable(KvError):
    """Say why a release, patch or scenario cannot be judged here.

    ``failure`` is "crash" where the process ended before there was anything to judge.
    """

    exit_code = 125

    def __init__(self, message: str, *, failure: str = "") -> None:
        super().__init__(message)
        self.failure = failure


class ScriptError(KvError):
    """Report a decode script that cannot be read or run, with its line."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class TraceMismatch(ScriptError):
    """Refuse a trace that was recorded on another model, or by another version of the format."""

    def __init__(self, message: str, line: int = 0, *, expected: str = "", found: str = "") -> None:
        super().__init__(message, line)
        self.expected = expected
        self.found = found


class ScenarioFailed(KvError):
    """Report a claim that a run did not meet: class of failure, what was expected and seen."""

    exit_code = 1

    def __init__(self, message: str, *, failure: str = "claim", evidence: Any = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.evidence = evidence
