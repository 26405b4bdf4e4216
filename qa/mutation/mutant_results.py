"""Keep what came of each mutant in the home, so that hours of them need not be one run.

An answer holds as long as what gave it is the same: a catch as long as the catcher is, and no
catch as long as all of them are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pyllamakv.home import home
from pyllamakv.source.files import write_text_atomic

#: What may come of a mutant, in the order of the document.
OUTCOMES = ("compiler", "driver", "scenario", "same code", "survivor")
#: What only says how far a run came, and what a fault of the harness kept from an answer.
UNFINISHED, NOT_EVALUATED = PASSING = ("unfinished", "not judged")


@dataclass(frozen=True)
class MutantResult:
    """Say what came of a mutant: an outcome, who caught it, and what they said."""

    outcome: str
    by: str = ""
    message: str = ""

    @property
    def killed(self) -> bool:
        """Return whether somebody noticed it."""
        return self.outcome in ("compiler", "driver", "scenario")


def key(*facts: str) -> str:
    """Return the name of an answer."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def load_result(name: str, digests: dict[str, str]) -> MutantResult | None:
    """Return a kept answer, if the one who gave it has the same digest still."""
    try:
        raw = json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
        digest = raw.pop("digest")
        answer = MutantResult(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answer if digests.get(answer.by) == digest else None


def store_result(name: str, answer: MutantResult, digests: dict[str, str]) -> None:
    """Keep an answer, unless there was none."""
    if answer.outcome not in PASSING:
        _folder().mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(answer) | {"digest": digests[answer.by]}) + "\n"
        write_text_atomic(_folder() / f"{name}.json", text)


def _folder() -> Path:
    return home() / "results" / "mutants"
