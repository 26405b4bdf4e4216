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

#: What a run can do worse than not keeping its claim.
HARM = ("data", "crash", "hang", "lost")
FAILURES = (*HARM, "claim")


@dataclass(frozen=True)
class Outcome:
    """Hold how one run of a scenario ended.

    ``status`` is "pass", "fail", "absent" (the capability does not exist there), "skip" (the
    setting cannot be judged there) or "fault" (of the harness). ``failure`` is empty or one of
    "data" (K, V or logits wrong), "crash", "hang", "lost" (tokens lost or ghosts left), "claim";
    that of a skipped run is what kept it from being judged.
    """

    status: Status
    failure: str = ""
    message: str = ""

    @property
    def failed(self) -> bool:
        """Tell whether the run broke the claim of its scenario."""
        return self.status == "fail"


def classify(error: Exception) -> Outcome:
    """Return the outcome that an exception of a run stands for."""
    text = str(error)
    match error:
        case ScenarioFailed():
            return Outcome("fail", error.failure, text)
        case Untestable():
            return Outcome("skip", error.failure, text)
        case WorkerTimeout():
            return Outcome("fail", "hang", text)
        case WorkerDied():
            return Outcome("fail", "crash", text)
        case Unsupported() | PartialRemovalRefused():
            # What a memory cannot do at all: to 0.3.6 for example shift quantized keys.
            return Outcome("absent", "", text)
        case DecodeError() | NativeError():
            return Outcome("fail", "claim", f"{type(error).__name__}: {text}")
        case KvError():
            return Outcome("fault", "", f"{type(error).__name__}: {text}")
        case _:
            where = traceback.format_exception(error)
            return Outcome("fault", "", "".join(where).strip())
