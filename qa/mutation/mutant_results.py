"""Store the result of each mutant, so that hours of testing can be split into several runs.

A result is valid while its detector is unchanged; the result of an undetected mutant, while all
are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pyllamakv.home import home
from pyllamakv.source.files import write_text_atomic

#: Outcomes, in the order of the document.
OUTCOMES = ("compiler", "driver", "scenario", "same code", "survivor")
#: Outcomes without a result: not reached, and failures of the harness.
UNFINISHED, NOT_EVALUATED = PASSING = ("unfinished", "not judged")


@dataclass(frozen=True)
class MutantResult:
    """The result for a mutant: outcome, detector, and message."""

    outcome: str
    by: str = ""
    message: str = ""

    @property
    def killed(self) -> bool:
        """Return whether the mutant was detected."""
        return self.outcome in ("compiler", "driver", "scenario")


def key(*facts: str) -> str:
    """Return the file name of a result."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def load_result(name: str, digests: dict[str, str]) -> MutantResult | None:
    """Return a stored result if its detector has the same digest."""
    try:
        raw = json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
        digest = raw.pop("digest")
        answer = MutantResult(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answer if digests.get(answer.by) == digest else None


def store_result(name: str, answer: MutantResult, digests: dict[str, str]) -> None:
    """Store a result, unless there was none."""
    if answer.outcome not in PASSING:
        _folder().mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(answer) | {"digest": digests[answer.by]}) + "\n"
        write_text_atomic(_folder() / f"{name}.json", text)


def _folder() -> Path:
    return home() / "results" / "mutants"
