"""Implement `protocol.Native` over a library in this process: C's names appear here.

cffi releases the GIL around every call. Nothing here locks: one thread at a time per context is
what `handle.Handle` sees to. A handle that was given back is refused, whatever the order.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from pyllamakv.binding import codes, loading, structs
from pyllamakv.binding.codes import OWN, Code
from pyllamakv.binding.logs import Log, forward
from pyllamakv.binding.protocol import (
    About,
    Capability,
    CellsInfo,
    ContextHandle,
    ContextInfo,
    ContextParams,
    Counters,
    Device,
    ModelHandle,
    ModelInfo,
    ModelParams,
    RawCells,
    RawDefrag,
    SamplerHandle,
    SamplerParams,
)
from pyllamakv.errors import Closed
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

_ROOM: Final = 16384
_INT32: Final = np.dtype(np.int32)
_INT8: Final = np.dtype(np.int8)
_KINDS: Final = {0: "cpu", 1: "gpu", 2: "accelerator"}
_NULL: Final = ffi.NULL


def _struct(name: str) -> Any:
    made = ffi.new(f"{name} *")
    made.size = ffi.sizeof(name)
    return made


def _array(values: Any, dtype: Any) -> Any:
    if values.dtype is not dtype or not values.flags.c_contiguous:
        return np.ascontiguousarray(values, dtype)
    return values


class _Scratch:
    """Keep what calls on one context use again and again: one thread at a time."""

    __slots__ = ("batch", "cells", "model", "n_vocab", "words")

    def __init__(self, model: int, n_vocab: int, n_seq_max: int) -> None:
        self.model = model
        self.n_vocab = n_vocab
        self.words = max(1, (n_seq_max + 63) // 64)
        self.batch = _struct("plk_batch")
        self.cells = _struct("plk_cells_info")


class Local:
    """Speak to a library that is loaded into this process."""

    def __init__(
        self,
        path: Path,
        *,
        sink: Callable[[Iterable[tuple[int, str]]], None] = forward,
    ) -> None:
        """Load the library; raises LoadError. ``sink`` takes its log records as they are read."""
        self._lib: Any = loading.load(path)
        self._log = Log(sink)
        self._ids = itertools.count(1)
        self._models: dict[int, Any] = {}
        self._contexts: dict[int, Any] = {}
        self._scratch: dict[int, _Scratch] = {}
        self._samplers: dict[int, tuple[Any, int]] = {}
        self._draining = threading.Lock()
        self._record = (ffi.new("int32_t *"), ffi.new("char[]", _ROOM))
        self._lost = 0
        # Bound once: decode_one is called for every token.
        self._decode_one: Any = self._lib.plk_decode_one
        self._done(self._lib.plk_init(), f"start {path.name}")
        self.about = self._read_about()

    def _read_about(self) -> About:
        text = self._lib.plk_probes()
        try:
            probes = json.loads(ffi.string(text)) if text != _NULL else {}
        except ValueError:
            probes = {}
        return About(
            abi=self._lib.plk_abi(),
            variant=ffi.string(self._lib.plk_variant()).decode(),
            capabilities=Capability(self._lib.plk_capabilities()),
            probes=probes.get("groups", probes),
        )

    def close(self) -> None:
        """Free what is left: contexts and samplers before their models. May be repeated."""
        for model in list(self._models):
            self.model_free(ModelHandle(model))
        self._drain()

    # failures and logs
    def _fail(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> NoReturn:
        # The text belongs to this thread's last call: read it before anything else.
        text = self._lib.plk_last_error()
        said = ffi.string(text).decode("utf-8", "replace") if text != _NULL else ""
        self._drain()
        codes.fail(code, what, said, doing=doing, log=self._log.tail(), **more)

    def _done(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> None:
        if code < 0:
            self._fail(code, what, doing, **more)

    def _gone(self, what: str) -> NoReturn:
        raise Closed(f"this {what} was closed; make a new one")

    def _model(self, handle: int) -> Any:
        return self._models.get(handle) or self._gone("model")

    def _context(self, handle: int) -> Any:
        return self._contexts.get(handle) or self._gone("context")

    def _drain(self) -> None:
        # Not waiting: the thread that drains takes everything, and a finaliser may run inside it.
        if not self._draining.acquire(blocking=False):
            return
        try:
            level, text = self._record
            records = []
            while (length := self._lib.plk_log_read(level, text, _ROOM)) >= 0:
                line = bytes(ffi.buffer(text, min(length, _ROOM)))
                records.append((level[0], line.decode("utf-8", "replace").rstrip("\n\0")))
            lost = self._lib.plk_log_lost()
            if lost > self._lost:
                records.append((3, f"{lost - self._lost} lines of the log were lost"))
                self._lost = lost
            self._log.add(records)
        finally:
            self._draining.release()

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log."""
        self._drain()
        return self._log.take()

    def log_level(self, lowest: int) -> None:
        """Keep only records of this level and above from now on."""
        self._lib.plk_log_level(lowest)

    def devices(self) -> list[Device]:
        """List the devices."""
        found = []
        raw = _struct("plk_device")
        for index in range(self._lib.plk_device_count()):
            self._done(self._lib.plk_device_read(index, raw), f"read device {index}")
            name, description = (
                ffi.string(text).decode("utf-8", "replace") for text in (raw.name, raw.description)
            )
            kind = _KINDS.get(raw.kind, "unknown")
            found.append(Device(name, description, kind, raw.memory_free, raw.memory_total))
        return found

    def rpc_serve(self, endpoint: str, device: str | None, memory: int) -> None:
        """Serve a device to other processes at host:port; returns only when that failed."""
        named = device.encode() if device else _NULL
        self._done(self._lib.plk_rpc_serve(endpoint.encode(), named, memory), f"serve {endpoint}")

    # models
    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise ModelError."""
        raw = _struct("plk_model_params")
        alive = structs.fill(raw, params, lambda text: ffi.new("char[]", text))
        out = ffi.new("plk_model **")
        code = self._lib.plk_model_load(str(path).encode(), raw, out)
        del alive
        self._done(code, f"load {path}", "model")
        self._drain()
        handle = ModelHandle(next(self._ids))
        self._models[handle] = out[0]
        return handle

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after the contexts and samplers that live on it. May be repeated."""
        for context in [c for c, scratch in self._scratch.items() if scratch.model == model]:
            self.context_free(ContextHandle(context))
        for sampler in [s for s, (_raw, owner) in self._samplers.items() if owner == model]:
            self.sampler_free(SamplerHandle(sampler))
        raw = self._models.pop(model, None)
        if raw is not None:
            self._lib.plk_model_free(raw)

    def model_info(self, model: ModelHandle) -> ModelInfo:
        """Describe a model."""
        raw = _struct("plk_model_info")
        self._done(self._lib.plk_model_read(self._model(model), raw), "read the model", "model")
        return structs.read(ModelInfo, raw)

    def model_meta(self, model: ModelHandle, key: str) -> str | None:
        """Return a value of the model file's metadata, or None."""
        room = 1024
        while True:
            text = ffi.new("char[]", room)
            length = self._lib.plk_model_meta(self._model(model), key.encode(), text, room)
            if length < OWN:
                self._fail(length, f"read {key}", "model")
            if length < room:
                found = bytes(ffi.buffer(text, max(0, length)))
                return found.decode("utf-8", "replace") if length >= 0 else None
            room = length + 1

    def tokenize(
        self, model: ModelHandle, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the tokens of a text."""
        raw = self._model(model)
        room = len(text) + 8
        for _attempt in range(2):
            tokens = ffi.new("int32_t[]", room)
            count = self._lib.plk_tokenize(
                raw, text, len(text), tokens, room, add_special, parse_special
            )
            if count >= 0:
                return ffi.unpack(tokens, count)  # type: ignore[no-any-return]
            if count in tuple(Code) and -count <= room:
                break
            room = -count
        self._fail(count, f"tokenize {len(text)} bytes", "model")

    def token_piece(self, model: ModelHandle, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""
        raw = self._model(model)
        room = 128
        for _attempt in range(2):
            piece = ffi.new("char[]", room)
            count = self._lib.plk_token_piece(raw, token, piece, room, special)
            if count >= 0:
                return bytes(ffi.buffer(piece, count))
            if count in tuple(Code):
                break
            room = -count
        self._fail(count, f"read token {token}", "model")

    def token_is_eog(self, model: ModelHandle, token: int) -> bool:
        """Tell whether a token ends a generation."""
        code = self._lib.plk_token_is_eog(self._model(model), token)
        self._done(code, f"read token {token}", "model")
        return bool(code)
