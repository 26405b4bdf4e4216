"""Read and defragment the cells of a context: snapshots, statistics, rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.protocol import Capability, MemoryType
from pyllamakv.closing import NotCopied, PublicDir
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime import backing, defrag_by_restore, state_parser
from pyllamakv.runtime.snapshot import CellMap, Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.backing import KVMemory
    from pyllamakv.runtime.ggml_types import NumberType
    from pyllamakv.runtime.parts import ContextParts, SequenceParts
    from pyllamakv.runtime.snapshot import KVStats


#: How a defragmentation moved cells.
DefragMethod = Literal["none", "in-place", "restore"]


@dataclass(frozen=True, slots=True)
class DefragReport:
    """The result of one defragmentation: runs, cells and bytes moved, batches of moves, graphs.

    A field is None if the build cannot report it. ``seconds`` is wall time, and ``plan_seconds``
    the part for the plan. ``scratch`` is the maximum of bytes beyond the cache that any
    defragmentation of this context needed.

    ``method`` states how the cells moved: "none" (no cell had to move), "in-place" (the library
    moved them) or "restore" (sequences were saved, removed and restored, and ``bytes`` is the size
    of their states). ``refusal`` is the library's reason for not moving cells, None if it can.
    """

    moves: int | None
    cells: int | None
    bytes: int | None
    passes: int | None
    graphs: int | None
    seconds: float
    method: DefragMethod
    refusal: str | None = None
    plan_seconds: float | None = None
    scratch: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVRows:
    """The rows of one layer of one sequence, ordered by position.

    ``pos`` (n,) int32; ``k`` and ``v`` (n, bytes of a row) uint8 as stored (V one row per token,
    however the cache keeps it); ``v`` has no columns if the memory has no V.
    """

    pos: NDArray[np.int32]
    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
    type_k: NumberType
    type_v: NumberType | None


class KV(NotCopied, PublicDir):
    """Access the KV cache of one context."""

    _internal = frozenset(("defrag_locked", "try_snapshot"))

    def __init__(self, context: ContextParts) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<KV of {self._context!r}>"

    def snapshot(self) -> Snapshot:
        """Read all cells. Raises Unsupported if the build cannot.

        May be called from any thread: it waits until a running decode ends.
        """
        with self._context.lock.reading():
            return self._read()

    @property
    def stats(self) -> KVStats:
        """Return the present statistics of the cells. May be called from any thread."""
        return self.snapshot().stats

    def try_snapshot(self) -> Snapshot | None:
        """Read all cells, or return None if the build cannot.

        The caller holds the context's lock.
        """
        try:
            return self._read()
        except Unsupported:
            return None

    @property
    def memory(self) -> KVMemory:
        """Return the memory of the cache: reserved, committed, on disk, and per layer."""
        with self._context.lock:
            return backing.read(self._context.native, self._context.handle)

    def trim(self) -> int:
        """Return the memory above the last used cell to the system; return the number of bytes.

        After `defrag`, this frees the most. The file of a cache keeps its disk space, because a
        later write could fail without it, and a file system without hole punching frees nothing.
        Raises Unsupported for a cache on the heap.
        """
        with self._context.lock:
            return self._context.native.mapping_trim(self._context.handle)

    def flush(self) -> None:
        """Write a kept cache to its file for reuse by a later process. `Context.close` does too.

        Raises Unsupported for a cache that is not kept.
        """
        with self._context.lock:
            if self._context.kv_file is None:
                msg = "this cache is not kept: create the context with a path and kv_keep=True"
                raise Unsupported(msg, "MAPPING")
            self._context.kv_file.flush(self._context.handle)

    def defrag(self, *, fallback: bool = True) -> DefragReport:
        """Move the used cells together, so that the free cells form one hole.

        If the library cannot move cells, sequences are saved, removed and restored instead, unless
        ``fallback`` is False; ``method`` and ``refusal`` of the report state this. Raises
        Unsupported with the reason if neither is possible; the cache is unchanged then. With
        ``defrag_trim``, the freed memory is returned to the system.
        """
        fallback = arguments.flag("fallback", fallback)
        with self._context.lock:
            return self.defrag_locked(fallback=fallback)

    def defrag_locked(self, *, fallback: bool) -> DefragReport:
        """Defragment like `defrag`. The caller holds the context's lock."""
        report = self._arrange(fallback=fallback)
        if self._context.defrag_policy.trims:
            self._context.native.mapping_trim(self._context.handle)
        return report

    def _arrange(self, *, fallback: bool) -> DefragReport:
        context = self._context
        before = self.try_snapshot()
        try:
            return self._move(before)
        except Unsupported as error:
            if context.info.defrag or not fallback or before is None or not before.streams:
                raise
            refusal = str(error)
        return self._repack(before, refusal)

    def _move(self, before: Snapshot | None) -> DefragReport:
        """Let the library move the cells. Raises Unsupported with nothing changed if it cannot."""
        context = self._context
        if Capability.DEFRAG not in context.native.about.capabilities:
            msg = (
                "this build cannot defragment this memory; a patched variant can where the "
                "memory is made of key/value caches (`pyllamakv patch show` lists them)"
            )
            raise Unsupported(msg, "DEFRAG")
        raw = context.native.defrag(context.handle)
        cells, moves = _known(raw.cells), _known(raw.moves)
        if before is not None and (cells is None or moves is None):
            found = before.moves_to(self._read())
            cells = found.cells if cells is None else cells
            moves = found.runs if moves is None else moves
        return DefragReport(
            moves=moves,
            cells=cells,
            bytes=_known(raw.bytes),
            passes=_known(raw.passes),
            graphs=_known(raw.graphs),
            seconds=raw.ns / 1e9,
            method="none" if cells == 0 else "in-place",
            plan_seconds=None if raw.plan_ns < 0 else raw.plan_ns / 1e9,
            scratch=_known(raw.scratch_bytes),
        )

    @Uninterrupted()
    def _repack(self, before: Snapshot, refusal: str) -> DefragReport:
        begin = time.perf_counter()
        done = defrag_by_restore.repack(self._context, before)
        seconds = time.perf_counter() - begin
        found = before.moves_to(self._read())
        return DefragReport(
            moves=found.runs,
            cells=found.cells,
            bytes=done.bytes,
            passes=done.rounds,
            graphs=0,
            seconds=seconds,
            method="restore" if done.rounds else "none",
            refusal=refusal,
        )

    def update(self) -> None:
        """Apply pending shifts and pending copies between streams."""
        with self._context.lock:
            self._context.native.update(self._context.handle)

    def state(self, sequence: SequenceParts | int) -> state_parser.SequenceState:
        """Return the complete state that the cache stores for a sequence.

        Raises Unsupported if the build cannot save one, and StateError for an unknown layout.
        """
        context = self._context
        with context.lock:
            number = context.sequence_id(sequence)
            context.native.about.require(Capability.STATES, "save the state of a sequence")
            raw = context.native.state_save(context.handle, number)
        return state_parser.parse(raw)

    def rows(self, layer: int, sequence: SequenceParts | int, *, cache: int = 0) -> KVRows:
        """Return K and V of one layer as stored, ordered by position.

        ``cache`` 1 is the second cache of a sliding-window model, whose layers are numbered
        separately. For a hybrid model, it contains the states of the recurrent layers: one row,
        after ``pos``. Raises as `state`, and UsageError if the sequence has no such rows.
        """
        layer, cache = arguments.integer("layer", layer), arguments.integer("cache", cache)
        state = self.state(sequence)
        if not state.sections:
            msg = f"sequence {sequence!r} has no cells, so it has no rows"
            raise UsageError(msg)
        section = next((each for each in state.sections if each.cache == cache), None)
        if section is None:
            there = ", ".join(str(each.cache) for each in state.sections)
            msg = (
                f"cache {arguments.shown(cache)} has no rows of sequence {sequence!r}: expected "
                f"one of {there}"
            )
            raise UsageError(msg)
        if not 0 <= layer < len(section.layers):
            msg = (
                f"layer {arguments.shown(layer)} is out of range: this cache has "
                f"0..{len(section.layers) - 1}"
            )
            raise UsageError(msg)
        rows = section.layers[layer]
        order = np.argsort(section.pos, kind="stable")
        return KVRows(section.pos[order], rows.k[order], rows.v[order], rows.type_k, rows.type_v)

    def _read(self) -> Snapshot:
        context = self._context
        context.native.about.require(Capability.CELLS, "read the cells")
        if context.info.memory is MemoryType.OTHER and not context.info.n_caches:
            msg = "the memory of this model has a class whose cells pyllamakv cannot read"
            raise Unsupported(msg, "CELLS")
        streams = []
        for cache in range(context.info.n_caches):
            raw = context.native.cells(context.handle, cache)
            streams.append(CellMap(raw.pos, raw.shift, raw.seqs, raw.info))
        return Snapshot(tuple(streams), context.info.contiguous_slots)


def _known(n: int) -> int | None:
    return n if n >= 0 else None
