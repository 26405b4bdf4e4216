"""Implement `protocol.Native` with a library in this process.

cffi releases the GIL around every call. This module has no locks: `owner.Lock` ensures one
thread at a time per context. A freed handle is refused. Names of C functions appear only in
`loading` and here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import numpy as np

from pyllamakv.binding import codes, loading, signal_check
from pyllamakv.binding.codes import OWN, Code
from pyllamakv.binding.logs import Log, buffers, forward
from pyllamakv.binding.protocol import (
    AdapterHandle,
    Backing,
    Buffer,
    Capability,
    CellsInfo,
    ContextHandle,
    ContextInfo,
    ContextParams,
    Counters,
    DecodeStatus,
    DefragMover,
    DefragPlan,
    Device,
    LibraryInfo,
    MappingInfo,
    MemoryType,
    ModelHandle,
    ModelInfo,
    ModelParams,
    Pooling,
    RawCells,
    RawDefrag,
    RawMapping,
    SamplerHandle,
    SamplerParams,
)
from pyllamakv.binding.signal_check import entered, forget_pending, raise_pending
from pyllamakv.errors import Closed, KvError
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pyllamakv.binding.logs import Record

T = TypeVar("T")

#: Maximum number of bytes of a log record.
_ROOM: Final = 16384
_KINDS: Final = {0: "cpu", 1: "gpu", 2: "accelerator"}
_INT32: Final = np.dtype(np.int32)
_INT8: Final = np.dtype(np.int8)
_FLOAT32: Final = np.dtype(np.float32)
NULL: Final = ffi.NULL


def struct(name: str) -> Any:
    """Return a new struct whose size field is set."""
    made = ffi.new(f"{name} *")
    made.size = ffi.sizeof(name)
    return made


def _maybe(value: int) -> bool | None:
    return None if value < 0 else bool(value)


#: Annotation of a field -> what makes its value from C's.
_READ: dict[str, Callable[[Any], Any] | None] = {
    "int": None,
    "float": None,
    "bool": bool,
    "bool | None": _maybe,
    "MemoryType": MemoryType,
    "Backing": Backing,
    "DefragPlan": DefragPlan,
    "DefragMover": DefragMover,
    "Pooling": Pooling,
}


_Plan = tuple[tuple[str, "Callable[[Any], Any] | None"], ...]
_plans: dict[type, _Plan] = {}


def _plan(kind: Any) -> _Plan:
    made = tuple((item.name, _READ[str(item.type)]) for item in dataclasses.fields(kind))
    _plans[kind] = made
    return made


def read(kind: type[T], raw: Any) -> T:
    """Return a frozen dataclass with the values of a struct whose fields have the same names."""
    return kind(
        *[
            getattr(raw, name) if convert is None else convert(getattr(raw, name))
            for name, convert in _plans.get(kind) or _plan(kind)
        ]
    )


def fill(raw: Any, values: Any) -> list[Any]:
    """Write a dataclass into a struct; return the objects that must live as long as the struct.

    None becomes -1 for a number (the library decides) and NULL for text. Arrays are left out.
    """
    alive: list[Any] = []
    for item in dataclasses.fields(values):
        value = getattr(values, item.name)
        if str(item.type).startswith(("tuple", "Mapping")):
            continue  # arrays, which the caller writes
        if str(item.type).startswith("str"):
            if value is not None:
                value = ffi.new("char[]", value.encode())
                alive.append(value)
                setattr(raw, item.name, value)
        else:
            setattr(raw, item.name, -1 if value is None else value)
    return alive


def _flat(values: Any, dtype: Any) -> Any:
    """Return an array that C can read, without a copy if possible."""
    if values.dtype is not dtype or not values.flags.c_contiguous:
        return np.ascontiguousarray(values, dtype)
    return values


class _Steps:
    """The reusable batch with one token of each of ``n`` sequences."""

    __slots__ = ("batch", "flags", "logits", "n", "pos", "seq", "seq_id", "token")

    def __init__(self, n: int) -> None:
        self.n = n
        self.token, self.pos = ffi.new("int32_t[]", n), ffi.new("int32_t[]", n)
        self.seq, self.flags = ffi.new("int32_t[]", n), ffi.new("int8_t[]", n)
        self.batch = struct("plk_batch")
        self.batch.n_tokens = n
        self.batch.token, self.batch.pos, self.batch.seq_id = self.token, self.pos, self.seq
        # What `seq` and `flags` were copied from; None is no flags.
        self.seq_id: Any = ()
        self.logits: Any = None


class Scratch:
    """Buffers that calls on one context reuse, in one thread at a time."""

    __slots__ = (
        "batch", "buffers", "cells", "model", "n_embd", "n_vocab", "place",
        "raw", "row", "rows", "steps", "tokens", "view", "words",
    )  # fmt: skip

    def __init__(self, raw: Any, model: int, n_vocab: int, n_seq_max: int) -> None:
        self.raw = raw
        self.model = model
        self.n_vocab = n_vocab
        self.words = max(1, (n_seq_max + 63) // 64)
        self.buffers: list[Buffer] = []
        self.n_embd = 0  # values of an embedding
        self.batch = struct("plk_batch")
        self.cells = struct("plk_cells_info")
        self.steps = _Steps(0)
        self.rows = ffi.new("int32_t *")
        self.tokens = ffi.new("int32_t[]", n_seq_max)
        # The last view of logits; the next ones are usually at the same address.
        self.place: Any = None
        self.view: NDArray[np.float32] = np.empty((0, n_vocab), np.float32)
        self.row: NDArray[np.float32] = np.empty(n_vocab, np.float32)

    def look(self, place: Any, n: int) -> NDArray[np.float32]:
        """Return a read-only view of ``n`` rows of logits at a place; `row` becomes the first."""
        if place != self.place or n != len(self.view):
            flat = np.frombuffer(ffi.buffer(place, 4 * n * self.n_vocab), np.float32)
            flat.flags.writeable = False
            view = flat.reshape(n, self.n_vocab)
            self.place, self.view, self.row = place, view, view[0]
        return self.view


class Local:
    """Speak to a library that is loaded into this process."""

    def __init__(
        self,
        path: Path,
        *,
        sink: Callable[[Iterable[tuple[int, str]]], None] = forward,
    ) -> None:
        """Load the library. Raises LoadError. ``sink`` receives its log records."""
        self._lib: Any = loading.load(path)
        self._log = Log(sink)
        self._draining = threading.Lock()
        self._record = (ffi.new("int32_t *"), ffi.new("char[]", _ROOM))
        self._lost = 0
        self._lowest = 1
        # Bound once: for every token.
        self._plk_decode, self._plk_logits = self._lib.plk_decode, self._lib.plk_logits
        self._done(self._lib.plk_init(), f"start {path.name}")
        signal_check.install(self._lib)
        self.about = self._read_about()
        self.environment: Mapping[str, str] = {}
        self._ids = itertools.count(1)
        self._models: dict[int, Any] = {}
        self._samplers: dict[int, tuple[Any, int]] = {}
        self._adapters: dict[int, tuple[Any, int]] = {}
        self._contexts: dict[int, Any] = {}
        self._scratch: dict[int, Scratch] = {}
        #: Contexts whose memory a child of a fork does not have.
        self._unforked: set[int] = set()
        _libraries.add(self)

    def _read_about(self) -> LibraryInfo:
        text = self._lib.plk_probes()
        try:
            probes = json.loads(ffi.string(text)) if text != NULL else {}
        except ValueError:
            probes = {}
        return LibraryInfo(
            abi=self._lib.plk_abi(),
            variant=ffi.string(self._lib.plk_variant()).decode(),
            capabilities=Capability(self._lib.plk_capabilities()),
            probes=probes.get("groups", probes),
        )

    # failures and logs
    def _error(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> KvError:
        # The text belongs to this thread's last call: read it before anything else.
        text = self._lib.plk_last_error()
        message = ffi.string(text).decode("utf-8", "replace") if text != NULL else ""
        self._drain()
        return codes.error(code, what, message, doing=doing, log=self._log.tail(), **more)

    def _done(self, code: int, what: str, doing: codes.Doing = "library", **more: Any) -> None:
        if code < 0:
            raise self._error(code, what, doing, **more)

    def _undo(self, handle: int, out: Any, free: Callable[[Any], None]) -> None:
        """Free a new object after an exception.

        It may be that of a signal handler: Python raises it as soon as a call of C has returned.
        """
        tables: tuple[dict[int, Any], ...] = (
            self._models, self._samplers, self._adapters, self._contexts, self._scratch,
        )  # fmt: skip
        for table in tables:
            table.pop(handle, None)
        if out[0] != NULL:
            free(out[0])

    def _gone(self, what: str) -> NoReturn:
        raise Closed(f"this {what} was closed; create a new one")

    def _drain(self) -> list[Record]:
        # Do not wait: the draining thread takes all records, and may run a finaliser meanwhile.
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
        """Set the minimum log level; return the previous one."""
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
        """Serve a device to other processes at host:port; returns only after a failure."""
        named = device.encode() if device else NULL
        self._done(self._lib.plk_rpc_serve(endpoint.encode(), named, memory), f"serve {endpoint}")

    def close(self) -> None:
        """Free the remaining objects, contexts and samplers before models. May be repeated."""
        for model in list(self._models):
            self.model_free(ModelHandle(model))
        self._drain()

    # models
    def _model(self, handle: int) -> Any:
        return self._models.get(handle) or self._gone("model")

    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise ModelError."""
        raw = struct("plk_model_params")
        alive = fill(raw, params)
        handle = ModelHandle(next(self._ids))
        out = ffi.new("plk_model **")
        try:
            code = self._lib.plk_model_load(str(path).encode(), raw, out)
            del alive
            self._done(code, f"load {path}", "model")
            self._drain()
            self._models[handle] = out[0]
            return handle
        except BaseException:
            self._undo(handle, out, self._lib.plk_model_free)
            raise

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after its contexts, samplers and adapters. May be repeated."""
        for context in [c for c, scratch in self._scratch.items() if scratch.model == model]:
            self.context_free(ContextHandle(context))
        for sampler in [s for s, (_raw, owner) in self._samplers.items() if owner == model]:
            self.sampler_free(SamplerHandle(sampler))
        for adapter in [a for a, (_raw, owner) in self._adapters.items() if owner == model]:
            self.adapter_free(AdapterHandle(adapter))
        raw = self._models.pop(model, None)
        if raw is not None:
            self._lib.plk_model_free(raw)

    def model_info(self, model: ModelHandle) -> ModelInfo:
        """Describe a model."""
        raw = struct("plk_model_info")
        self._done(self._lib.plk_model_read(self._model(model), raw), "read the model", "model")
        return read(ModelInfo, raw)

    def model_meta(self, model: ModelHandle, key: str) -> str | None:
        """Return a value of the model file's metadata, or None."""
        room = 1024
        while True:
            text = ffi.new("char[]", room)
            length = self._lib.plk_model_meta(self._model(model), key.encode(), text, room)
            if length < OWN:
                raise self._error(length, f"read {key}", "model")
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
            if -count <= room:
                break  # not a need but a code
            room = -count
        raise self._error(count, f"tokenize {len(text)} bytes", "model")

    def token_piece(self, model: ModelHandle, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""
        raw = self._model(model)
        room = 128
        for _attempt in range(2):
            piece = ffi.new("char[]", room)
            count = self._lib.plk_token_piece(raw, token, piece, room, special)
            if count >= 0:
                return bytes(ffi.buffer(piece, count))
            if -count <= room:
                break
            room = -count
        raise self._error(count, f"read token {token}", "model")

    def token_is_eog(self, model: ModelHandle, token: int) -> bool:
        """Return whether a token ends a generation."""
        code = self._lib.plk_token_is_eog(self._model(model), token)
        self._done(code, f"read token {token}", "model")
        return bool(code)

    # adapters
    def adapter_load(self, model: ModelHandle, path: str, n_pairs: int) -> AdapterHandle:
        """Load a LoRA adapter or raise AdapterError."""
        handle = AdapterHandle(next(self._ids))
        out = ffi.new("plk_adapter **")
        try:
            code = self._lib.plk_adapter_load(self._model(model), path.encode(), n_pairs, out)
            self._done(code, f"load {path}", capability=Capability.ADAPTERS)
            self._drain()
            self._adapters[handle] = (out[0], model)
            return handle
        except BaseException:
            self._undo(handle, out, self._lib.plk_adapter_free)
            raise

    def adapter_free(self, adapter: AdapterHandle) -> None:
        """Free an adapter. May be repeated."""
        raw, _model = self._adapters.pop(adapter, (None, 0))
        if raw is not None:
            self._lib.plk_adapter_free(raw)

    def adapters_set(
        self, context: ContextHandle, adapters: Sequence[int], scales: Sequence[float]
    ) -> None:
        """Replace the adapters of a context."""
        raw = [(self._adapters.get(each) or self._gone("adapter"))[0] for each in adapters]
        code = self._lib.plk_adapters_set(
            self._context(context), len(raw), ffi.new("plk_adapter *[]", raw),
            ffi.new("float[]", list(scales)),
        )  # fmt: skip
        self._done(code, f"set {len(raw)} adapters", capability=Capability.ADAPTERS)

    # contexts
    def _context(self, handle: int) -> Any:
        return self._contexts.get(handle) or self._gone("context")

    def context_new(self, model: ModelHandle, params: ContextParams) -> ContextHandle:
        """Create a context or raise ContextError."""
        raw = struct("plk_context_params")
        alive = fill(raw, params)
        of = self.model_info(model)
        handle = ContextHandle(next(self._ids))
        self._drain()  # earlier log lines are not about this context
        out = ffi.new("plk_context **")
        try:
            code = self._lib.plk_context_new(self._model(model), raw, out)
            del alive
            self._done(code, "make a context", "context")
            records = self._drain()
            info = self._read_context(out[0])
            scratch = Scratch(out[0], model, of.n_vocab, info.n_seq_max)
            scratch.buffers = buffers(records)
            ranks = info.pooling is Pooling.RANK
            scratch.n_embd = max(1, of.n_cls_out) if ranks else of.n_embd_out
            if params.kv_backing != Backing.HEAP or "LLAMA_KV_BACKING" in os.environ:
                self._unforked.add(handle)
            self._scratch[handle] = scratch
            self._contexts[handle] = out[0]
            return handle
        except BaseException:
            self._undo(handle, out, self._lib.plk_context_free)
            raise

    def context_free(self, context: ContextHandle) -> None:
        """Free a context. May be repeated."""
        self._scratch.pop(context, None)
        self._unforked.discard(context)
        raw = self._contexts.pop(context, None)
        if raw is not None:
            self._lib.plk_context_free(raw)

    def context_info(self, context: ContextHandle) -> ContextInfo:
        """Return the properties of a context."""
        return self._read_context(self._context(context))

    def _read_context(self, context: Any) -> ContextInfo:
        raw = struct("plk_context_info")
        self._done(self._lib.plk_context_read(context, raw), "read the context", "context")
        return read(ContextInfo, raw)

    def buffers(self, context: ContextHandle) -> list[Buffer]:
        """Return the allocations that the library logged for a context."""
        self._context(context)
        return list(self._scratch[context].buffers)

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of compute threads."""
        code = self._lib.plk_threads(self._context(context), n_threads, n_threads_batch)
        self._done(code, "set the threads")

    # sequences
    def clear(self, context: ContextHandle, data: bool) -> None:
        """Forget every sequence; with ``data`` the contents too."""
        self._done(self._lib.plk_clear(self._context(context), data), "clear", "sequence")

    def seq_rm(self, context: ContextHandle, seq: int, p0: int, p1: int) -> bool:
        """Remove positions; False when the memory refuses a partial removal."""
        code = self._lib.plk_seq_rm(self._context(context), seq, p0, p1)
        if code == Code.EREFUSED:
            return False
        self._done(code, f"remove {p0}:{p1} of sequence {seq}", "sequence")
        return True

    def seq_cp(self, context: ContextHandle, src: int, dst: int, p0: int, p1: int) -> None:
        """Share positions of one sequence with another."""
        code = self._lib.plk_seq_cp(self._context(context), src, dst, p0, p1)
        self._done(code, f"copy {p0}:{p1} of sequence {src} to {dst}", "sequence")

    def seq_keep(self, context: ContextHandle, seq: int) -> None:
        """Remove every other sequence."""
        self._done(self._lib.plk_seq_keep(self._context(context), seq), "keep one", "sequence")

    def seq_add(self, context: ContextHandle, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions by a distance."""
        code = self._lib.plk_seq_add(self._context(context), seq, p0, p1, delta)
        self._done(code, f"shift {p0}:{p1} of sequence {seq} by {delta}", "sequence")

    def seq_div(self, context: ContextHandle, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions."""
        code = self._lib.plk_seq_div(self._context(context), seq, p0, p1, divisor)
        self._done(code, f"divide {p0}:{p1} of sequence {seq} by {divisor}", "sequence")

    def seq_pos_min(self, context: ContextHandle, seq: int) -> int:
        """Return the first position of a sequence, -1 when it is empty."""
        found: int = self._lib.plk_seq_pos_min(self._context(context), seq)
        if found < OWN:
            raise self._error(found, f"read sequence {seq}", "sequence")
        return found

    def seq_pos_max(self, context: ContextHandle, seq: int) -> int:
        """Return the last position of a sequence, -1 when it is empty."""
        found: int = self._lib.plk_seq_pos_max(self._context(context), seq)
        if found < OWN:
            raise self._error(found, f"read sequence {seq}", "sequence")
        return found

    # the cache
    def defrag(self, context: ContextHandle) -> RawDefrag:
        """Defragment or raise Unsupported."""
        raw = struct("plk_defrag_report")
        code = self._lib.plk_defrag(self._context(context), raw)
        self._done(code, "defragment", "cache", capability=Capability.DEFRAG)
        return read(RawDefrag, raw)

    def update(self, context: ContextHandle) -> None:
        """Apply pending shifts and stream copies."""
        self._done(self._lib.plk_update(self._context(context)), "update the cache", "cache")

    def cells(self, context: ContextHandle, cache: int) -> RawCells:
        """Read the cells of one stream of one cache, or raise Unsupported."""
        raw = self._context(context)
        scratch = self._scratch[context]
        code = self._lib.plk_cells_info_read(raw, cache, scratch.cells)
        if code >= 0:
            info = read(CellsInfo, scratch.cells)
            n_cells = info.n_cells
            both = np.empty((2, n_cells), _INT32)
            seqs = np.empty((n_cells, scratch.words), np.uint64)
            place = ffi.from_buffer("int32_t[]", both)
            code = self._lib.plk_cells_read(
                raw,
                cache,
                n_cells,
                place,
                place + n_cells,
                ffi.from_buffer("uint64_t[]", seqs),
                scratch.words,
            )
            if code == n_cells:
                return RawCells(info, both[0], both[1], seqs)
        raise self._error(
            min(code, -1), f"read cache {cache}", "cache", capability=Capability.CELLS
        )

    def counters(self, context: ContextHandle) -> Counters:
        """Read the counters or raise Unsupported."""
        raw = struct("plk_counters")
        code = self._lib.plk_counters_read(self._context(context), raw)
        self._done(code, "read the counters", "cache", capability=Capability.COUNTERS)
        return read(Counters, raw)

    def mapping(self, context: ContextHandle) -> RawMapping:
        """Return the memory of a mapped cache. Raises Unsupported."""
        raw, handle = struct("plk_mapping"), self._context(context)
        code = self._lib.plk_mapping_read(handle, raw)
        self._done(code, "read the mapped memory", "cache", capability=Capability.MAPPING)
        info = read(MappingInfo, raw)
        rows = np.zeros((info.n_tensors, 5), np.uint64)
        place = ffi.cast("int64_t *", ffi.from_buffer("uint64_t[]", rows))
        count = self._lib.plk_mapping_tensors(handle, info.n_tensors, place)
        self._done(count, "read the mapped memory", "cache", capability=Capability.MAPPING)
        return RawMapping(info, rows[:count])

    def mapping_trim(self, context: ContextHandle) -> int:
        """Return the memory above the last used cell to the system; return its bytes."""
        count: int = self._lib.plk_mapping_trim(self._context(context))
        self._done(count, "trim the cache", "cache", capability=Capability.MAPPING)
        return count

    def mapping_flush(self, context: ContextHandle, tokens: NDArray[np.int32] | None) -> None:
        """Write a kept cache to its file, with a token for each cell of all caches."""
        n = 0 if tokens is None else len(tokens)
        place = NULL if tokens is None else ffi.from_buffer("int32_t[]", tokens)
        code = self._lib.plk_mapping_flush(self._context(context), place, n)
        self._done(code, "flush the cache", "cache", capability=Capability.MAPPING)

    def mapping_tokens(self, context: ContextHandle) -> NDArray[np.int32]:
        """Return the tokens that the last flush was given."""
        raw = struct("plk_mapping")
        code = self._lib.plk_mapping_read(self._context(context), raw)
        self._done(code, "read the mapped memory", "cache", capability=Capability.MAPPING)
        tokens = np.full(raw.n_cells, -1, _INT32)
        place = ffi.from_buffer("int32_t[]", tokens)
        count = self._lib.plk_mapping_tokens(self._context(context), len(tokens), place)
        self._done(count, "read kept tokens", "cache", capability=Capability.MAPPING)
        return tokens[:count]

    # states
    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return the complete state that the cache stores for a sequence."""
        raw = self._context(context)
        size = self._lib.plk_state_size(raw, seq)
        self._done(size, f"measure sequence {seq}", "state", capability=Capability.STATES)
        data = np.empty(size, np.uint8)
        place = ffi.from_buffer("uint8_t[]", data)
        length = self._lib.plk_state_save(raw, seq, place, size)
        self._done(length, f"save sequence {seq}", "state", capability=Capability.STATES)
        return data[:length].tobytes()

    def state_load(self, context: ContextHandle, seq: int, state: bytes | memoryview) -> int:
        """Restore a sequence; return the bytes read, 0 when the library refused."""
        place = ffi.from_buffer("uint8_t[]", state)
        length: int = self._lib.plk_state_load(self._context(context), seq, place, len(state))
        if length == Code.EREFUSED:
            return 0
        self._done(length, f"restore sequence {seq}", "state", capability=Capability.STATES)
        return length

    # decoding
    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32] | NDArray[np.float32] | list[int],
        pos: NDArray[np.int32] | list[int],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32] | tuple[int, ...],
        logits: NDArray[np.int8] | tuple[int, ...] | None,
    ) -> int:
        """Run one batch of tokens or embeddings; return llama_decode's own code.

        Lists take less time for few tokens than arrays do.
        """
        if type(token) is not list:
            return self._decode_arrays(context, token, pos, seq_count, seq_id, logits)
        scratch = self._scratch.get(context) or self._gone("context")
        steps, n = scratch.steps, len(seq_id)
        if steps.n != n:
            steps = scratch.steps = _Steps(n)
        # A copy that fails or is interrupted must leave nothing that looks current.
        if steps.seq_id is not seq_id:
            steps.seq_id = ()
            steps.seq[0:n] = seq_id
            steps.seq_id = seq_id
        if steps.logits is not logits:
            steps.logits = ...
            if logits is None:
                steps.batch.logits = NULL
            else:
                steps.flags[0:n] = logits
                steps.batch.logits = steps.flags
            steps.logits = logits
        # Both forms require the exact number of items; the first takes less time.
        if n == 1:
            (steps.token[0],), (steps.pos[0],) = token, pos
        else:
            steps.token[0:n] = token
            steps.pos[0:n] = pos
        before = len(entered)
        try:
            code: int = self._plk_decode(scratch.raw, steps.batch)
            if len(entered) > before:
                raise_pending()
        except BaseException:
            forget_pending()
            raise
        if code < OWN:
            what = f"decode a token of each of {n} sequences"
            if n == 1:
                what = f"decode token {token[0]} at {pos[0]} of sequence {seq_id[0]}"
            raise self._error(code, what, "decode")
        return code

    def _decode_arrays(
        self, context: ContextHandle, token: Any, pos: Any, seq_count: Any, seq_id: Any, logits: Any
    ) -> int:
        """Run one batch of arrays."""
        raw = self._context(context)
        batch = self._scratch[context].batch
        embeds = np.ndim(token) == 2
        inputs = _flat(token, _FLOAT32 if embeds else _INT32)
        places, seq_id = _flat(pos, _INT32), _flat(seq_id, _INT32)
        n_tokens = len(inputs)
        ids = n_tokens
        if seq_count is not None:
            seq_count = _flat(seq_count, _INT32)
            ids = int(seq_count.sum()) if len(seq_count) == n_tokens else -1
        if logits is not None:
            logits = _flat(logits, _INT8)
        # C reads the requested number of items, so a shorter array must not reach it.
        wanted = n_tokens if logits is None else len(logits)
        shaped = places.ndim == 1 + embeds and places.shape[-1] == n_tokens
        if not shaped or wanted != n_tokens or len(seq_id) != ids:
            raise self._error(
                Code.EINVAL, f"decode {n_tokens} tokens: the arrays differ in length", "decode"
            )
        keep = (
            NULL if embeds else ffi.from_buffer("int32_t[]", inputs),
            ffi.from_buffer("float[]", inputs) if embeds else NULL,
            ffi.from_buffer("int32_t[]", places),
            ffi.from_buffer("int32_t[]", seq_id),
            NULL if seq_count is None else ffi.from_buffer("int32_t[]", seq_count),
            NULL if logits is None else ffi.from_buffer("int8_t[]", logits),
        )
        batch.n_tokens = n_tokens
        batch.token, batch.embd, batch.pos, batch.seq_id, batch.seq_count, batch.logits = keep
        if embeds:
            batch.n_embd, batch.n_pos = inputs.shape[1], len(places)
        before = len(entered)
        try:
            code: int = self._lib.plk_decode(raw, batch)
            if len(entered) > before:
                raise_pending()
        except BaseException:
            forget_pending()
            raise
        if code < OWN:
            raise self._error(code, f"decode {n_tokens} tokens", "decode")
        return code

    def logits(self, context: ContextHandle, index: int, n_vocab: int) -> NDArray[np.float32]:
        """Return a read-only view (n_vocab,) of logits, valid until the next decode."""
        scratch = self._scratch.get(context) or self._gone("context")
        if not 0 < n_vocab <= scratch.n_vocab:
            raise self._error(
                Code.EINVAL, f"read {n_vocab} logits of a smaller vocabulary", "decode"
            )
        found = self._plk_logits(scratch.raw, index)
        if found != scratch.place:
            if found == NULL:
                raise self._error(
                    Code.EINVAL, f"read the logits of place {index}: there are none", "decode"
                )
            scratch.look(found, 1)
        row = scratch.row
        return row if n_vocab == scratch.n_vocab else row[:n_vocab]

    def logits_all(self, context: ContextHandle, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n, n_vocab) of every place with any: a view where that is possible."""
        scratch = self._scratch.get(context) or self._gone("context")
        if n_vocab != scratch.n_vocab:
            raise self._error(
                Code.EINVAL,
                f"read rows of {n_vocab} logits of a vocabulary of {scratch.n_vocab}",
                "decode",
            )
        found = self._lib.plk_logits_all(scratch.raw, scratch.rows)
        n = scratch.rows[0]
        if found != NULL:
            return scratch.look(found, n)
        if n <= 0:
            raise self._error(Code.EINVAL, "read the logits: there are none", "decode")
        rows = np.stack([self.logits(context, place - n, n_vocab) for place in range(n)])
        rows.flags.writeable = False
        return rows

    def embeddings(self, context: ContextHandle, index: int) -> NDArray[np.float32]:
        """Return a read-only view (n,) of an embedding, valid until the next decode."""
        scratch = self._scratch.get(context) or self._gone("context")
        found = self._lib.plk_embeddings(scratch.raw, index)
        if found == NULL:
            raise self._error(Code.EINVAL, f"read embedding {index}", "decode")
        row = np.frombuffer(ffi.buffer(found, 4 * scratch.n_embd), np.float32)
        row.flags.writeable = False
        return row

    def cancel(self, context: ContextHandle) -> None:
        """End the decode that runs; callable from any thread."""
        self._lib.plk_cancel(self._context(context))

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""
        self._lib.plk_cancel_after(self._context(context), polls)

    def cancel_polls(self, context: ContextHandle) -> int:
        """Return how often the last decode polled the abort callback."""
        return int(self._lib.plk_cancel_polls(self._context(context)))

    # samplers
    def _sampler(self, handle: int) -> Any:
        found = self._samplers.get(handle)
        return found[0] if found else self._gone("sampler")

    def sampler_new(self, model: ModelHandle, params: SamplerParams) -> SamplerHandle:
        """Create a sampler over a model's vocabulary."""
        raw = struct("plk_sampler_params")
        alive = fill(raw, params.seeded())
        bias: list[Any] = list(params.logit_bias)  # pairs, after the checks of its class
        alive += (
            ffi.new("int32_t[]", [token for token, _ in bias]),
            ffi.new("float[]", [value for _, value in bias]),
            ffi.new("char[]", "\x1f".join(params.dry_breakers).encode()),
        )
        raw.n_bias = len(bias)
        raw.bias_token, raw.bias, raw.dry_breakers = alive[-3:]
        if params.samplers is not None:
            alive.append(ffi.new("char[]", ",".join(params.samplers).encode()))
            raw.samplers = alive[-1]
        handle = SamplerHandle(next(self._ids))
        out = ffi.new("plk_sampler **")
        try:
            code = self._lib.plk_sampler_new(self._model(model), raw, out)
            del alive
            self._done(code, "make a sampler", "sampler", capability=Capability.SAMPLER)
            self._samplers[handle] = (out[0], model)
            return handle
        except BaseException:
            self._undo(handle, out, self._lib.plk_sampler_free)
            raise

    def sampler_free(self, sampler: SamplerHandle) -> None:
        """Free a sampler. May be repeated."""
        raw, _model = self._samplers.pop(sampler, (None, 0))
        if raw is not None:
            self._lib.plk_sampler_free(raw)

    def sampler_reset(self, sampler: SamplerHandle) -> None:
        """Forget the tokens that a sampler has seen."""
        self._lib.plk_sampler_reset(self._sampler(sampler))

    def sample(self, sampler: SamplerHandle, context: ContextHandle, index: int) -> int:
        """Choose a token from the logits of a place, and remember it."""
        token: int = self._lib.plk_sample(self._sampler(sampler), self._context(context), index)
        self._done(token, f"sample at place {index}", "sampler", capability=Capability.SAMPLER)
        return token

    def sample_logits(self, sampler: SamplerHandle, logits: NDArray[np.float32]) -> int:
        """Choose a token from logits of the caller, and remember it."""
        flat = _flat(logits, _FLOAT32)
        row = ffi.from_buffer("float[]", flat)
        token: int = self._lib.plk_sample_logits(self._sampler(sampler), row, len(flat))
        self._done(token, "sample", "sampler", capability=Capability.SAMPLER)
        return token

    def sampler_accept(self, sampler: SamplerHandle, tokens: NDArray[np.int32]) -> None:
        """Add tokens to the history of a sampler."""
        flat = _flat(tokens, _INT32)
        row = ffi.from_buffer("int32_t[]", flat)
        code = self._lib.plk_sampler_accept(self._sampler(sampler), row, len(flat))
        self._done(code, f"accept {len(flat)} tokens", "sampler")

    def sample_all(self, sampler: SamplerHandle, context: ContextHandle, room: int) -> list[int]:
        """Choose a token for every place with logits, in order."""
        raw, scratch = self._context(context), self._scratch[context]
        if room > len(scratch.tokens):
            scratch.tokens = ffi.new("int32_t[]", room)
        tokens = scratch.tokens
        count: int = self._lib.plk_sample_all(self._sampler(sampler), raw, tokens, room)
        self._done(count, "sample at every place", "sampler", capability=Capability.SAMPLER)
        found: list[int] = ffi.unpack(tokens, count)
        return found

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode a token of each sequence and choose the next ones, ``steps`` times in one call.

        The exception of a signal handler has the completed steps (`signal_check.take_run`).
        """
        n, done = len(seq_id), ffi.new("int32_t *")
        tokens = ffi.new("int32_t[]", (steps + 1) * n)
        tokens[0:n] = token
        code: int | None = None
        before = len(entered)
        try:
            code = self._lib.plk_run(
                self._sampler(sampler), self._context(context), n, ffi.new("int32_t[]", seq_id),
                ffi.new("int32_t[]", pos), tokens, steps, stop, done,
            )  # fmt: skip
            if len(entered) > before:
                raise_pending()
            if code < OWN and not done[0]:
                raise self._error(code, f"decode {steps} steps of {n} sequences", "decode")
            return code, _rows(tokens, done[0], n)
        except BaseException as error:
            forget_pending()
            if done[0]:
                if code is None:  # the exception was raised before the status was stored
                    code = 0 if done[0] == steps else int(DecodeStatus.ABORTED)
                signal_check.keep_run(error, code, _rows(tokens, done[0], n))
            raise


def _rows(tokens: Any, done: int, n: int) -> list[list[int]]:
    """Return the tokens that ``done`` steps of ``n`` sequences sampled."""
    flat = ffi.unpack(tokens, (done + 1) * n)
    return [flat[at : at + n] for at in range(n, len(flat), n)]


#: The open libraries of this process.
_libraries: weakref.WeakSet[Local] = weakref.WeakSet()


def _leave_parent() -> None:
    """Forget contexts in mapped memory, which stay with the parent: they are closed here."""
    for library in _libraries:
        signal_check.install(library._lib)  # the main thread is the one that forked
        for context in library._unforked:
            library._contexts.pop(context, None)
            library._scratch.pop(context, None)
        library._unforked.clear()


os.register_at_fork(after_in_child=_leave_parent)
