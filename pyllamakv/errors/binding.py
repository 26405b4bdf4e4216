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


class KVFileError(ContextError):
    """Stand above what is wrong with the file behind a cache; the file is left as it is."""


class KVFileFull(KVFileError):
    """Report that there is no room on disk for a cache, before anything is computed."""


class KVFileBusy(KVFileError):
    """Report a file that is the cache of another context or process."""


class KVFileDirty(KVFileError):
    """Report a kept cache whose last owner wrote to it and ended before it could flush."""


class KVFileForeign(KVFileError):
    """Report a file that is no kept cache, or that of another model, release or shape."""


class KVFileDamaged(KVFileError):
    """Report a kept cache whose checksum does not match."""


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
