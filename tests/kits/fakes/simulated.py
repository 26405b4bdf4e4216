"""Simulate a library: `SimulatedNative` is a `Native` over the cells of the reference ledger.

`SimulatedCells` gives each cell of a `CellLedger` an index, a pending shift, and a value in place
of K and V. Logits depend on the tokens and positions of a sequence, so that a lost or moved token
changes them. Tokens are bytes: token = byte + 3, 1 begins, 2 ends.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from pyllamakv.binding.protocol import (
    Capability,
    CellsInfo,
    ContextInfo,
    Counters,
    Device,
    LibraryInfo,
    MemoryType,
    ModelInfo,
    Pooling,
    RawCells,
    RawDefrag,
    RawMapping,
)
from pyllamakv.errors import (
    Closed,
    ContextError,
    ModelError,
    NativeError,
    NoTokenAllowed,
    Unsupported,
)
from pyllamakv.scenarios.cell_ledger import Cell, CellLedger

N_VOCAB = 259
N_LAYER = 2
N_EMBD = 32

ALL = (
    (Capability(2047) | Capability.ADAPTERS)
    & ~Capability.STREAMS & ~Capability.KV_UNIFIED & ~Capability.FLASH_AUTO
)  # fmt: skip


class SimulatedCells:
    """Place the cells of ``ledger``; ``slots`` has the cell at each index, None where it is free.

    ``rows`` (layers, cells) has a number in place of K and V, ``shift`` the pending shifts.
    """

    def __init__(self, size: int, n_seq_max: int, *, contiguous: bool, v_transposed: bool) -> None:
        self.size = size
        self.words = (n_seq_max + 63) // 64
        self.contiguous = contiguous
        self.v_transposed = v_transposed
        self.ledger = CellLedger()
        self.slots: list[Cell | None] = [None] * size
        self.shift = np.zeros(size, dtype=np.int32)
        self.rows = np.zeros((N_LAYER, size), dtype=np.float16)

    @property
    def used(self) -> list[int]:
        """Return the indexes of the cells in use."""
        return [index for index, cell in enumerate(self.slots) if cell is not None]

    def of(self, seq: int) -> list[Cell]:
        """Return the cells of a sequence, in the order of their indexes; of all for seq < 0."""
        return [cell for cell in self.slots if cell and (seq < 0 or seq in cell.seqs)]

    def positions(self) -> np.ndarray:
        """Return the position of each cell, -1 where it is free."""
        return np.array([-1 if cell is None else cell.pos for cell in self.slots], dtype=np.int32)

    def owners(self) -> np.ndarray:
        """Return the sequences of each cell, as bits (cells, words)."""
        bits = np.zeros((self.size, self.words), dtype=np.uint64)
        for index in self.used:
            for seq in self.slots[index].seqs:
                bits[index, seq // 64] |= np.uint64(1 << (seq % 64))
        return bits

    def find(self, n: int) -> list[int] | None:
        """Return ``n`` free cells, together where slots are contiguous, or None."""
        free = [index for index, cell in enumerate(self.slots) if cell is None]
        if len(free) < n:
            return None
        if not self.contiguous:
            return free[:n]
        for at in range(len(free) - n + 1):
            if not n or free[at + n - 1] == free[at] + n - 1:
                return free[at : at + n]
        return None

    def put(
        self,
        places: list[int],
        tokens: Iterable[int],
        pos: Iterable[int],
        ids: Iterable[Iterable[int]],
    ) -> list[Cell]:
        """Fill free cells, and return them."""
        first = len(self.ledger.cells)
        self.ledger.add(tokens, pos, ids)
        added = self.ledger.cells[first:]
        for place, cell in zip(places, added, strict=True):
            self.slots[place] = cell
        values = np.array([cell.token + cell.pos / 1024 for cell in added])
        # Larger positions exceed the range of a half float.
        with np.errstate(over="ignore"):
            for layer in range(N_LAYER):
                self.rows[layer, places] = values + layer / 2
        return added

    def change(self, operation: Callable[..., None], *arguments: int) -> None:
        """Run an operation of the ledger: free its lost cells, and shift what it moved."""
        before = [(index, cell, cell.pos) for index, cell in enumerate(self.slots) if cell]
        operation(*arguments)
        for index, cell, pos in before:
            if cell.seqs:
                self.shift[index] += cell.pos - pos
            else:
                self.slots[index], self.shift[index] = None, 0

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a sequence from its cells at p0 <= p < p1; seq < 0: all."""
        self.change(self.ledger.remove, seq, p0, p1)

    def discard(self, cells: Iterable[Cell]) -> None:
        """Free cells."""
        self.change(self.ledger.discard, cells)

    def compact(self) -> tuple[int, int]:
        """Move used cells from the end into holes from the start; return moves and cells."""
        used = self.used
        holes = [index for index in range(len(used)) if self.slots[index] is None]
        movers = [index for index in reversed(used) if index >= len(used)]
        for hole, mover in zip(holes, movers, strict=True):
            self.slots[hole], self.slots[mover] = self.slots[mover], None
        self.rows[:, holes] = self.rows[:, movers]
        self.shift[holes] = self.shift[movers]
        self.shift[movers] = 0
        return len(movers), len(movers)

    def save(self, seq: int) -> bytes:
        """Write a sequence as llama.cpp of 0.3.9 does."""
        cells = self.of(seq)
        parts = [struct.pack("<I", len(cells))]
        parts += [struct.pack("<iI", cell.pos, 0) for cell in cells]
        parts.append(struct.pack("<II", int(self.v_transposed), N_LAYER))
        places = [index for index in self.used if seq in self.slots[index].seqs]
        wide = [np.repeat(self.rows[i, places, None], N_EMBD, axis=1) for i in range(N_LAYER)]
        for rows in wide:
            parts += [struct.pack("<iQ", 1, 2 * N_EMBD), rows.tobytes()]
        for rows in wide:
            if self.v_transposed:
                parts += [struct.pack("<iII", 1, 2, N_EMBD), rows.T.tobytes()]
            else:
                parts += [struct.pack("<iQ", 1, 2 * N_EMBD), rows.tobytes()]
        return b"".join(parts)

    def load(self, seq: int, data: bytes, find: Callable[[int], list[int] | None]) -> int:
        """Read what `save` wrote; 0, with the sequence emptied, when it does not fit."""
        self.remove(seq)
        n = struct.unpack_from("<I", data)[0]
        size = 4 + 8 * n + 8 + 2 * N_LAYER * (12 + 2 * N_EMBD * n)
        if len(data) != size:
            return 0
        places = find(n)
        if places is None:
            return 0
        pos = [struct.unpack_from("<i", data, 4 + 8 * i)[0] for i in range(n)]
        at, values = 4 + 8 * n + 8, []
        for _layer in range(N_LAYER):
            rows = np.frombuffer(data, np.float16, n * N_EMBD, at + 12).reshape(n, N_EMBD)
            values.append(rows[:, 0])
            at += 12 + 2 * N_EMBD * n
        tokens = np.round(values[0].astype(float) - np.array(pos) / 1024).astype(np.int64)
        self.put(places, tokens.tolist(), pos, [[seq]] * n)
        self.rows[:, places] = values
        return len(data)


@dataclass
class _Context:
    params: object
    cache: SimulatedCells
    info: ContextInfo
    logits: list[np.ndarray] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    embeddings: list[np.ndarray] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    #: Adapters with their scales; K and V of a token depend on the sum of the scales.
    adapters: dict[int, float] = field(default_factory=dict)
    cancelled: bool = False
    cancel_at: int = -1
    polls: int = 0
    counters: dict = field(default_factory=lambda: dict.fromkeys(Counters.__slots__, 0))
    #: Whether a sequence was removed since the last clear.
    removed: bool = False


class SimulatedNative:
    """Simulate one library; ``heals`` defragments where no slot is found, as the patch does.

    ``unifies`` makes a unified cache whatever was asked for, as LLAMA_SET_ROWS=0 does. Unless
    ``restarts``, no sequence starts in place of a removed one before a clear, as recurrent ones
    through b5415. Unless ``rolls_back``, a decode that fails without the guard leaves its first
    micro-batches, as stock does.
    """

    def __init__(
        self,
        *,
        capabilities: Capability = ALL,
        heals: bool = False,
        contiguous: bool = True,
        partial: bool = True,
        can_shift: bool = True,
        unifies: bool = False,
        restarts: bool = True,
        rolls_back: bool = True,
        meta: dict[str, str] | None = None,
    ) -> None:
        self.about = LibraryInfo(1, "simulated", capabilities)
        self.environment: dict[str, str] = {}
        self.heals, self.contiguous = heals, contiguous
        self.partial, self.can_shift = partial, can_shift
        self.unifies, self.restarts, self.rolls_back = unifies, restarts, rolls_back
        self.meta = {"general.name": "simulated", **(meta or {})}
        self.created: list[str] = []
        self.freed: list[str] = []
        self.calls: list[str] = []
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail_next: list[int | Exception] = []
        self._objects: dict[int, object] = {}
        self._next = 1

    # the library

    def close(self) -> None:
        self.freed.append("library")
        self.closed = True

    def logs(self) -> list[tuple[int, str]]:
        return []

    def log_level(self, lowest: int) -> int:
        return 1

    def devices(self) -> list[Device]:
        return [Device("CPU", "simulated", "cpu", 0, 0)]

    # models

    def model_load(self, path: str, params: object) -> int:
        if path.endswith("refused.gguf"):
            raise ModelError("unknown model architecture")
        return self._new("model")

    def model_free(self, model: int) -> None:
        self._free(model, "model")

    def model_info(self, model: int) -> ModelInfo:
        return ModelInfo(
            n_vocab=N_VOCAB, n_ctx_train=512, n_embd=N_EMBD, n_layer=N_LAYER, n_head=1,
            n_head_kv=1, n_embd_k_gqa=N_EMBD, n_embd_v_gqa=N_EMBD, has_vocab=True, token_bos=1,
            token_eos=2, token_eot=-1, token_nl=13, add_bos=True, is_recurrent=False,
            n_params=1000, n_bytes=4000, n_cls_out=0, n_embd_out=N_EMBD,
        )  # fmt: skip

    def model_meta(self, model: int, key: str) -> str | None:
        return self.meta.get(key)

    def tokenize(
        self, model: int, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        return [1] * add_special + [byte + 3 for byte in text]

    def token_piece(self, model: int, token: int, special: bool) -> bytes:
        return bytes([token - 3]) if token >= 3 else b"</s>" if special else b""

    def token_is_eog(self, model: int, token: int) -> bool:
        return token == 2

    # adapters

    def adapter_load(self, model: int, path: str, n_pairs: int) -> int:
        self._get(model)
        return self._new("adapter")

    def adapter_free(self, adapter: int) -> None:
        self._free(adapter, "adapter")

    def adapters_set(self, context: int, adapters: list[int], scales: list[float]) -> None:
        for each in adapters:
            self._get(each)
        if len(adapters) > 2:
            raise Unsupported("no room for three adapters", "adapters")
        self._get(context).adapters = dict(zip(adapters, scales, strict=True))

    # contexts

    def context_new(self, model: int, params) -> int:
        self._get(model)
        if params.n_ctx == 13:
            raise ContextError("unlucky")
        cache = SimulatedCells(
            params.n_ctx,
            params.n_seq_max,
            contiguous=self.contiguous,
            v_transposed=not params.flash_attn,
        )
        info = ContextInfo(
            params.n_ctx, min(params.n_batch, params.n_ctx), params.n_ubatch, params.n_seq_max,
            MemoryType.ATTENTION, 1, self.can_shift, self.partial, self.contiguous,
            Capability.DEFRAG in self.about.capabilities, params.flash_attn, not params.flash_attn,
            n_streams=1 if self.unifies or params.kv_unified else params.n_seq_max,
            n_threads=params.n_threads, n_threads_batch=params.n_threads_batch,
            pooling=Pooling(max(0, params.pooling)) if params.embeddings else Pooling.MODEL,
        )  # fmt: skip
        self.created.append("context")
        return self._new(_Context(params, cache, info))

    def context_free(self, context: int) -> None:
        self._free(context, "context")

    def context_info(self, context: int) -> ContextInfo:
        return self._get(context).info

    def buffers(self, context: int) -> list:
        self._get(context)
        return []

    def threads(self, context: int, n_threads: int, n_threads_batch: int) -> None:
        c = self._get(context)
        c.info = replace(c.info, n_threads=n_threads, n_threads_batch=n_threads_batch)

    def decode(self, context: int, token, pos, seq_count, seq_id, logits) -> int:
        c, cache = self._get(context), self._get(context).cache
        self.calls.append(f"decode {len(token)}")
        c.cancelled = False  # as in the shim: a cancel is for the decode that runs
        self.entered.set()
        self.gate.wait(60)
        c.logits, c.places, c.polls = [], [], 0
        c.embeddings, c.owners = [], []
        if self.fail_next:
            what = self.fail_next.pop(0)
            if isinstance(what, Exception):
                raise what
            return what
        token, pos, seq_id = (np.asarray(part, np.int32) for part in (token, pos, seq_id))
        if c.removed and not self.restarts and (pos == 0).any():
            raise Unsupported("a sequence was removed", reason="a sequence was removed")
        counts = [1] * len(token) if seq_count is None else seq_count.tolist()
        ends = np.cumsum(counts)
        ids = [seq_id[e - n : e].tolist() for e, n in zip(ends, counts, strict=True)]
        flags = [0] * (len(token) - 1) + [1] if logits is None else [*logits]
        if c.params.embeddings:
            flags = [1] * len(token)
        if (token >= N_VOCAB).any():
            raise NativeError("invalid token", code=-1001)
        done: list[Cell] = []
        for start in range(0, len(token), c.info.n_ubatch):
            part = slice(start, min(start + c.info.n_ubatch, len(token)))
            n = part.stop - part.start
            c.polls += 1
            code = 2 if c.cancelled or 0 <= c.cancel_at < c.polls else 0
            places = None if code else self._slot(c, n)
            if places is None:
                if c.params.guard or self.rolls_back:
                    cache.discard(done)
                c.cancelled, c.logits, c.places = False, [], []
                return code or 1
            added = round(1000 * sum(c.adapters.values()))
            done += cache.put(places, (token[part] + added).tolist(), pos[part].tolist(), ids[part])
            for i in range(part.start, part.stop):
                if flags[i]:
                    c.places.append(i)
                    c.logits.append(self._row(cache, ids[i][0], int(pos[i])))
                    c.embeddings.append(c.logits[-1][:N_EMBD])
                    c.owners.append(ids[i][0])
        return 0

    def logits(self, context: int, index: int, n_vocab: int) -> np.ndarray:
        c = self._get(context)
        return c.logits[index if index < 0 else c.places.index(index)]

    def logits_all(self, context: int, n_vocab: int) -> np.ndarray:
        return np.stack(self._get(context).logits)

    def embeddings(self, context: int, index: int) -> np.ndarray:
        c = self._get(context)
        if c.info.pooling is Pooling.NONE:
            return c.embeddings[c.places.index(c.places[index] if index < 0 else index)]
        mine = [e for e, owner in zip(c.embeddings, c.owners, strict=True) if owner == index]
        if c.info.pooling is Pooling.MEAN:
            return np.mean(mine, axis=0, dtype=np.float32)
        return mine[0 if c.info.pooling is Pooling.CLS else -1]

    def cancel(self, context: int) -> None:
        self._get(context).cancelled = True

    def cancel_after(self, context: int, polls: int) -> None:
        self._get(context).cancel_at = polls

    def cancel_polls(self, context: int) -> int:
        return self._get(context).polls

    # sequences

    def clear(self, context: int, data: bool) -> None:
        c = self._get(context)
        c.cache.remove(-1)
        c.removed = False

    def seq_rm(self, context: int, seq: int, p0: int, p1: int) -> bool:
        c = self._get(context)
        own = c.cache.of(seq)
        chosen = [cell for cell in own if p0 <= cell.pos and (p1 < 0 or cell.pos < p1)]
        if not self.partial and 0 < len(chosen) < len(own):
            return False
        c.cache.remove(seq, p0, p1)
        c.removed |= bool(chosen)
        return True

    def seq_cp(self, context: int, src: int, dst: int, p0: int, p1: int) -> None:
        self._get(context).cache.ledger.copy(src, dst, p0, p1)

    def seq_keep(self, context: int, seq: int) -> None:
        cache = self._get(context).cache
        cache.change(cache.ledger.keep, seq)

    def seq_add(self, context: int, seq: int, p0: int, p1: int, delta: int) -> None:
        cache = self._get(context).cache
        cache.change(cache.ledger.shift, seq, p0, p1, delta)

    def seq_div(self, context: int, seq: int, p0: int, p1: int, divisor: int) -> None:
        cache = self._get(context).cache
        cache.change(cache.ledger.divide, seq, p0, p1, divisor)

    def seq_pos_min(self, context: int, seq: int) -> int:
        return min((cell.pos for cell in self._get(context).cache.of(seq)), default=-1)

    def seq_pos_max(self, context: int, seq: int) -> int:
        return self._get(context).cache.ledger.next(seq) - 1

    # the cache

    def defrag(self, context: int) -> RawDefrag:
        if Capability.DEFRAG not in self.about.capabilities:
            raise Unsupported("no defrag", "DEFRAG")
        moves, cells = self._get(context).cache.compact()
        return RawDefrag(1, moves, cells, cells * N_LAYER * N_EMBD * 4, 0, 1000)

    def update(self, context: int) -> None:
        self._get(context).cache.shift[:] = 0

    def cells(self, context: int, cache: int) -> RawCells:
        if Capability.CELLS not in self.about.capabilities:
            raise Unsupported("no cells", "CELLS")
        c = self._get(context).cache
        used, half = len(c.used), c.size * N_LAYER * N_EMBD * 2
        info = CellsInfo(0, False, c.size, used, 0, bool(c.shift.any()), N_LAYER, 1, 1,
                         c.v_transposed, True, half, half)  # fmt: skip
        return RawCells(info, c.positions(), c.shift.copy(), c.owners())

    def counters(self, context: int) -> Counters:
        return Counters(**self._get(context).counters)

    def mapping(self, context: int) -> RawMapping:
        raise Unsupported("on the heap", "MAPPING")

    def mapping_trim(self, context: int) -> int:
        raise Unsupported("on the heap", "MAPPING")

    # states and samplers

    def state_save(self, context: int, seq: int) -> bytes:
        return self._get(context).cache.save(seq)

    def state_load(self, context: int, seq: int, state: bytes) -> int:
        cache = self._get(context).cache
        return cache.load(seq, state, lambda n: self._find(cache, n)[0])

    def sampler_new(self, model: int, params: object) -> int:
        return self._new("sampler")

    def sampler_free(self, sampler: int) -> None:
        self._free(sampler, "sampler")

    def sampler_reset(self, sampler: int) -> None:
        self._get(sampler)

    def sample(self, sampler: int, context: int, index: int) -> int:
        self._get(sampler)
        return int(self.logits(context, index, N_VOCAB).argmax())

    def sample_logits(self, sampler: int, logits: np.ndarray) -> int:
        self._get(sampler)
        if not np.isfinite(logits).any():
            raise NoTokenAllowed("every token is excluded")
        return int(logits.argmax())

    def many(self, calls: list[tuple[str, tuple]]) -> list:
        return [getattr(self, name)(*arguments) for name, arguments in calls]

    def sampler_accept(self, sampler: int, tokens: np.ndarray) -> None:
        self._get(sampler)

    def sample_all(self, sampler: int, context: int, room: int) -> list[int]:
        self._get(sampler)
        return self.logits_all(context, N_VOCAB).argmax(axis=1).tolist()

    def run(self, sampler, context, token, pos, seq_id, steps, stop):
        rows: list[list[int]] = []
        for step in range(steps):
            places, every = [p + step for p in pos], (1,) * len(token)
            code = self.decode(context, token, places, None, seq_id, every)
            if code:
                return code, rows
            token = self.sample_all(sampler, context, len(seq_id))
            rows.append(token)
            if stop and 2 in token:
                break
        return 0, rows

    # underneath

    def _find(self, cache: SimulatedCells, n: int) -> tuple[list[int] | None, int]:
        """Return free cells, if any, and the number of defragmentations that this took."""
        places = cache.find(n)
        if places is not None or not self.heals:
            return places, 0
        cache.compact()
        return cache.find(n), 1

    def _slot(self, c: _Context, n: int) -> list[int] | None:
        places, defrags = self._find(c.cache, n)
        c.counters["slot_searches"] += 1
        c.counters["defrags"] += defrags
        c.counters["slot_failures"] += places is None
        return places

    def _row(self, cache: SimulatedCells, seq: int, pos: int) -> np.ndarray:
        total = sum(cell.token * (cell.pos + 7) for cell in cache.of(seq) if cell.pos <= pos)
        row = np.zeros(N_VOCAB, dtype=np.float32)
        row[3 + (32 + total % 90)] = 5.0
        row[3 + (32 + (total * 7 + 1) % 90)] += 4.0
        return row

    def _new(self, what: object) -> int:
        if self.closed:
            raise Closed("the library was closed")
        self._next += 1
        self._objects[self._next] = what
        return self._next

    def _get(self, handle: int):
        if handle not in self._objects:
            raise Closed(f"handle {handle} was freed: C would crash here")
        return self._objects[handle]

    def _free(self, handle: int, what: str) -> None:
        self._get(handle)
        del self._objects[handle]
        self.freed.append(what)
