"""Say which class of failure an exception of a run stands for."""

from __future__ import annotations

import traceback

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
from pyllamakv.verification.verdict import Outcome


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
            # What a memory cannot do at all: to 0.3.6 for example shift quantised keys.
            return Outcome("absent", "", text)
        case DecodeError() | NativeError():
            return Outcome("fail", "claim", f"{type(error).__name__}: {text}")
        case KvError():
            return Outcome("fault", "", f"{type(error).__name__}: {text}")
        case _:
            where = traceback.format_exception(error)
            return Outcome("fault", "", "".join(where).strip())
