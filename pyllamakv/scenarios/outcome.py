"""Define how a run of a scenario can end, and classify the exceptions that end one."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from pyllamakv.errors import (
    DecodeError,
    KvError,
    NativeError,
    PartialRemovalRefused,
    ScenarioFailed,
    Unsupported,
    Untestable,
    WorkerDied,
    WorkerTimeout,
)

Kind = Literal["fix", "guard", "feature"]
Status = Literal["pass", "fail", "absent", "skip", "fault"]

#: Failure classes that are worse than a claim that does not hold.
HARM = ("data", "crash", "hang", "lost")
FAILURES = (*HARM, "claim")


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a scenario.

    ``status`` is "pass", "fail", "absent" (the build lacks the capability), "skip" (the setting
    cannot be verified) or "fault" (an internal error). ``failure`` is empty or one of "data" (K, V
    or logits wrong), "crash", "hang", "lost" (tokens lost, or stray cells) and "claim". For a
    skipped run, it is the reason.
    """

    status: Status
    failure: str = ""
    message: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the run broke the claim of its scenario."""
        return self.status == "fail"


def classify(error: Exception) -> Outcome:
    """Return the outcome for an exception of a run."""
    text = str(error)
    match error:
        case ScenarioFailed():
            return Outcome("fail", error.failure, text)
        case Untestable():
            return Outcome("skip", error.failure, text)
        case WorkerTimeout():
            # Omit the hint: it names an argument of the library, and `check` has --timeout.
            return Outcome("fail", "hang", text.partition("; ")[0])
        case WorkerDied():
            return Outcome("fail", "crash", text)
        case Unsupported() | PartialRemovalRefused():
            # The memory lacks this feature: through 0.3.6, for example, quantized keys cannot be
            # shifted.
            return Outcome("absent", "", text)
        case DecodeError() | NativeError():
            return Outcome("fail", "claim", f"{type(error).__name__}: {text}")
        case KvError():
            return Outcome("fault", "", f"{type(error).__name__}: {text}")
        case _:
            where = traceback.format_exception(error)
            return Outcome("fault", "", "".join(where).strip())
