"""What goes wrong in or around the native library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors.base import KvError

if TYPE_CHECKING:
    from collections.abc import Sequence


class NativeError(KvError):
    """Stand above what goes wrong in the native library; carries its last log lines."""

    def __init__(self, message: str, *, code: int = 0, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.log = tuple(log)


class LoadError(NativeError):
    """Report a library that cannot be loaded here: file, ABI, manifest, CPU flags or driver."""


class ModelError(NativeError):
    """Report a model file that cannot be loaded, and why."""


class ContextError(NativeError):
    """Report a context that cannot be made, and which parameter is at fault."""


class NotEnoughMemory(ContextError):
    """Report that a context would not fit, before anything was allocated."""

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class Closed(KvError, RuntimeError):
    """Refuse to use something that was closed."""


class Busy(KvError, RuntimeError):
    """Refuse a second thread on a context that is at work."""


class StaleLogits(KvError, RuntimeError):
    """Refuse to read logits that a later decode has overwritten."""


class WorkerDied(NativeError):
    """Report a worker that ended: exit status or signal, and its last lines."""

    def __init__(
        self, message: str, *, signal: int = 0, exitcode: int | None = None, log: Sequence[str] = ()
    ) -> None:
        super().__init__(message, log=log)
        self.signal = signal
        self.exitcode = exitcode


class WorkerTimeout(WorkerDied):
    """Report a worker that did not answer in time and was ended."""


class DeviceLost(WorkerDied):
    """Report a device or server that went away under a context."""
