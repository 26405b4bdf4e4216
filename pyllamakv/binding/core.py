"""Hold a library that is loaded into this process: what it is, its log, its failures, devices."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyllamakv.binding import codes, loading
from pyllamakv.binding.logs import Log, forward
from pyllamakv.binding.protocol import About, Capability, Device
from pyllamakv.errors import Closed, KvError
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pyllamakv.binding.logs import Record

#: How much of one record is kept, in bytes.
_ROOM: Final = 16384
_KINDS: Final = {0: "cpu", 1: "gpu", 2: "accelerator"}
NULL: Final = ffi.NULL


def struct(name: str) -> Any:
    """Return a new struct that knows its size."""
    made = ffi.new(f"{name} *")
    made.size = ffi.sizeof(name)
    return made


class Core:
    """Own the loaded library; its subclasses speak to models and contexts."""

    def __init__(
        self,
        path: Path,
        *,
        sink: Callable[[Iterable[tuple[int, str]]], None] = forward,
    ) -> None:
        """Load the library; raises LoadError. ``sink`` takes its log records as they are read."""
        self._lib: Any = loading.load(path)
        self._log = Log(sink)
        self._draining = threading.Lock()
        self._record = (ffi.new("int32_t *"), ffi.new("char[]", _ROOM))
        self._lost = 0
        self._lowest = 1
        self._done(self._lib.plk_init(), f"start {path.name}")
        self.about = self._read_about()
        self.environment: Mapping[str, str] = {}

    def _read_about(self) -> About:
        text = self._lib.plk_probes()
        try:
            probes = json.loads(ffi.string(text)) if text != NULL else {}
        except ValueError:
            probes = {}
        return About(
            abi=self._lib.plk_abi(),
            variant=ffi.string(self._lib.plk_variant()).decode(),
            capabilities=Capability(self._lib.plk_capabilities()),
            probes=probes.get("groups", probes),
        )

    # failures and logs
    def _error(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> KvError:
        # The text belongs to this thread's last call: read it before anything else.
        text = self._lib.plk_last_error()
        said = ffi.string(text).decode("utf-8", "replace") if text != NULL else ""
        self._drain()
        return codes.error(code, what, said, doing=doing, log=self._log.tail(), **more)

    def _done(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> None:
        if code < 0:
            raise self._error(code, what, doing, **more)

    def _gone(self, what: str) -> NoReturn:
        raise Closed(f"this {what} was closed; make a new one")

    def _drain(self) -> list[Record]:
        # Not waiting: the thread that drains takes everything, and a finaliser may run inside it.
        if not self._draining.acquire(blocking=False):
            return []
        try:
            level, text = self._record
            records: list[Record] = []
            while (length := self._lib.plk_log_read(level, text, _ROOM)) >= 0:
                line = bytes(ffi.buffer(text, min(length, _ROOM)))
                records.append((level[0], line.decode("utf-8", "replace").rstrip("\n\0")))
            lost = self._lib.plk_log_lost()
            if lost > self._lost:
                records.append((3, f"{lost - self._lost} lines of the log were lost"))
                self._lost = lost
            self._log.add(records)
            return records
        finally:
            self._draining.release()

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log."""
        self._drain()
        return self._log.take()

    def log_level(self, lowest: int) -> int:
        """Keep only records of this level and above from now on; return the level before."""
        before, self._lowest = self._lowest, lowest
        self._lib.plk_log_level(lowest)
        return before

    def devices(self) -> list[Device]:
        """List the devices."""
        found = []
        raw = struct("plk_device")
        for index in range(self._lib.plk_device_count()):
            self._done(self._lib.plk_device_read(index, raw), f"read device {index}")
            name, description = (
                ffi.string(text).decode("utf-8", "replace") for text in (raw.name, raw.description)
            )
            kind = _KINDS.get(raw.kind, "unknown")
            found.append(Device(name, description, kind, raw.memory_free, raw.memory_total))
        return found

    def many(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Run operations, each (name, arguments), in order; the first error ends it."""
        return [getattr(self, name)(*arguments) for name, arguments in calls]

    def rpc_serve(self, endpoint: str, device: str | None, memory: int) -> None:
        """Serve a device to other processes at host:port; returns only when that failed."""
        named = device.encode() if device else NULL
        self._done(self._lib.plk_rpc_serve(endpoint.encode(), named, memory), f"serve {endpoint}")
