"""Implement `protocol.Native` over a library in this process.

cffi releases the GIL around every call. Nothing here locks: one thread at a time per context is
what `handle.Handle` sees to. A handle that was given back is refused, whatever the order. C's
names appear in `loading`, `core`, `models`, `decodes` and here, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pyllamakv.binding import logs, structs
from pyllamakv.binding.codes import OWN, Code
from pyllamakv.binding.core import NULL, struct
from pyllamakv.binding.decodes import Decodes, Scratch
from pyllamakv.binding.mapped import MappingInfo, RawMapping
from pyllamakv.binding.protocol import (
    Buffer,
    Capability,
    CellsInfo,
    ContextHandle,
    ContextInfo,
    ContextParams,
    Counters,
    ModelHandle,
    RawCells,
    RawDefrag,
)
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT32: Final = np.dtype(np.int32)


class Local(Decodes):
    """Speak to a library that is loaded into this process."""

    def close(self) -> None:
        """Free what is left: contexts and samplers before their models. May be repeated."""
        for model in list(self._models):
            self.model_free(ModelHandle(model))
        self._drain()

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after the contexts and samplers that live on it. May be repeated."""
        for context in [c for c, scratch in self._scratch.items() if scratch.model == model]:
            self.context_free(ContextHandle(context))
        super().model_free(model)

    # contexts
    def context_new(self, model: ModelHandle, params: ContextParams) -> ContextHandle:
        """Make a context or raise ContextError."""
        raw = struct("plk_context_params")
        alive = structs.fill(raw, params, lambda text: ffi.new("char[]", text))
        out = ffi.new("plk_context **")
        self._drain()  # what was said before is not about this context
        code = self._lib.plk_context_new(self._model(model), raw, out)
        del alive
        self._done(code, "make a context", "context")
        said = self._drain()
        handle = ContextHandle(next(self._ids))
        n_vocab = self.model_info(model).n_vocab
        self._contexts[handle] = out[0]
        n_seq_max = self.context_info(handle).n_seq_max
        self._scratch[handle] = Scratch(out[0], model, n_vocab, n_seq_max)
        self._scratch[handle].buffers = logs.buffers(said)
        return handle

    def context_free(self, context: ContextHandle) -> None:
        """Free a context. May be repeated."""
        self._scratch.pop(context, None)
        raw = self._contexts.pop(context, None)
        if raw is not None:
            self._lib.plk_context_free(raw)

    def context_info(self, context: ContextHandle) -> ContextInfo:
        """Describe a context as it was made."""
        raw = struct("plk_context_info")
        code = self._lib.plk_context_read(self._context(context), raw)
        self._done(code, "read the context", "context")
        return structs.read(ContextInfo, raw)

    def buffers(self, context: ContextHandle) -> list[Buffer]:
        """Return what the library said that it allocated for a context."""
        self._context(context)
        return list(self._scratch[context].buffers)

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set how many threads compute from now on."""
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
        return structs.read(RawDefrag, raw)

    def update(self, context: ContextHandle) -> None:
        """Apply what is pending: shifts and stream copies."""
        self._done(self._lib.plk_update(self._context(context)), "update the cache", "cache")

    def cells(self, context: ContextHandle, cache: int) -> RawCells:
        """Read the cells of one stream of one cache, or raise Unsupported."""
        raw = self._context(context)
        scratch = self._scratch[context]
        code = self._lib.plk_cells_info_read(raw, cache, scratch.cells)
        if code >= 0:
            info = structs.read(CellsInfo, scratch.cells)
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
        return structs.read(Counters, raw)

    def mapping(self, context: ContextHandle) -> RawMapping:
        """Read what mapped memory takes, or raise Unsupported."""
        raw, handle = struct("plk_mapping"), self._context(context)
        code = self._lib.plk_mapping_read(handle, raw)
        self._done(code, "read the mapped memory", "cache", capability=Capability.MAPPING)
        info = structs.read(MappingInfo, raw)
        rows = np.zeros((info.n_tensors, 5), np.uint64)
        place = ffi.cast("int64_t *", ffi.from_buffer("uint64_t[]", rows))
        count = self._lib.plk_mapping_tensors(handle, info.n_tensors, place)
        self._done(count, "read the mapped memory", "cache", capability=Capability.MAPPING)
        return RawMapping(info, rows[:count])

    def mapping_trim(self, context: ContextHandle) -> int:
        """Give the memory behind the last used cell back; return how many bytes."""
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
        """Return everything that the cache holds of a sequence."""
        raw = self._context(context)
        size = self._lib.plk_state_size(raw, seq)
        self._done(size, f"measure sequence {seq}", "state", capability=Capability.STATES)
        data = np.empty(size, np.uint8)
        place = ffi.from_buffer("uint8_t[]", data)
        length = self._lib.plk_state_save(raw, seq, place, size)
        self._done(length, f"save sequence {seq}", "state", capability=Capability.STATES)
        return data[:length].tobytes()

    def state_load(self, context: ContextHandle, seq: int, state: bytes) -> int:
        """Restore a sequence; return the bytes read, 0 when the library refused."""
        place = ffi.from_buffer("uint8_t[]", state)
        length: int = self._lib.plk_state_load(self._context(context), seq, place, len(state))
        if length == Code.EREFUSED:
            return 0
        self._done(length, f"restore sequence {seq}", "state", capability=Capability.STATES)
        return length
