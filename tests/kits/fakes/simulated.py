"""Stand in for a library: `SimulatedNative` is a `Native` over a cache of numpy arrays.

Logits depend on the tokens and positions that a sequence has, so that a lost or moved token shows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np
from fakes.simulated_cache import N_EMBD, N_LAYER, Cache
from fakes.simulated_model import N_VOCAB, SimulatedModels

from pyllamakv.binding.protocol import (
    Capability,
    CellsInfo,
    ContextInfo,
    Counters,
    Device,
    LibraryInfo,
    MemoryType,
    Pooling,
    RawCells,
    RawDefrag,
    RawMapping,
)
from pyllamakv.errors import Closed, ContextError, NativeError, NoTokenAllowed, Unsupported

ALL = (
    (Capability(2047) | Capability.ADAPTERS)
    & ~Capability.STREAMS & ~Capability.KV_UNIFIED & ~Capability.FLASH_AUTO
)  # fmt: skip


@dataclass
class _Context:
    params: object
    cache: Cache
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


class SimulatedNative(SimulatedModels):
    """Simulate one library; ``heals`` defragments inside a failing decode, as the patch does.

    ``unifies`` makes a unified cache whatever was asked for, as LLAMA_SET_ROWS=0 does. Unless
    ``restarts``, no sequence starts in place of a removed one before a clear, as recurrent ones
    through b5415.
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
        meta: dict[str, str] | None = None,
    ) -> None:
        self.about = LibraryInfo(1, "simulated", capabilities)
        self.environment: dict[str, str] = {}
        self.heals, self.contiguous = heals, contiguous
        self.partial, self.can_shift = partial, can_shift
        self.unifies, self.restarts = unifies, restarts
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
        cache = Cache(
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
        if c.removed and not self.restarts and (np.asarray(pos) == 0).any():
            raise Unsupported("a sequence was removed", reason="a sequence was removed")
        counts = [1] * len(token) if seq_count is None else seq_count.tolist()
        ends = np.cumsum(counts)
        ids = [seq_id[e - n : e].tolist() for e, n in zip(ends, counts, strict=True)]
        flags = [0] * (len(token) - 1) + [1] if logits is None else logits.tolist()
        if c.params.embeddings:
            flags = [1] * len(token)
        if (np.asarray(token) >= N_VOCAB).any():
            raise NativeError("invalid token", code=-1001)
        done: list[np.ndarray] = []
        for start in range(0, len(token), c.info.n_ubatch):
            part = slice(start, min(start + c.info.n_ubatch, len(token)))
            n = part.stop - part.start
            c.polls += 1
            code = 2 if c.cancelled or 0 <= c.cancel_at < c.polls else 0
            cells = None if code else self._slot(c, n)
            if cells is None:
                if c.params.guard:
                    for each in done:
                        cache.seqs[each] = 0
                    cache.free_unused()
                c.cancelled, c.logits, c.places = False, [], []
                return code or 1
            added = round(1000 * sum(c.adapters.values()))
            cache.put(cells, (token[part] + added).tolist(), pos[part].tolist(), ids[part])
            done.append(cells)
            for i in range(part.start, part.stop):
                if flags[i]:
                    c.places.append(i)
                    c.logits.append(self._row(cache, ids[i][0], int(pos[i])))
                    c.embeddings.append(c.logits[-1][:N_EMBD])
                    c.owners.append(ids[i][0])
        return 0

    def decode_one(self, context: int, token: int, pos: int, seq_id: int) -> int:
        one = [np.array([n], dtype=np.int32) for n in (token, pos, seq_id)]
        return self.decode(context, one[0], one[1], None, one[2], np.ones(1, dtype=np.int8))

    def decode_each(self, context: int, token, pos, seq_id) -> int:
        arrays = [np.array(part, dtype=np.int32) for part in (token, pos, seq_id)]
        flags = np.ones(len(token), dtype=np.int8)
        return self.decode(context, arrays[0], arrays[1], None, arrays[2], flags)

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
        c.cache.drop(c.cache.has(-1), -1)
        c.removed = False

    def seq_rm(self, context: int, seq: int, p0: int, p1: int) -> bool:
        cache = self._get(context).cache
        chosen = cache.ranged(seq, p0, p1)
        if not self.partial and chosen.any() and not (chosen == cache.has(seq)).all():
            return False
        cache.drop(chosen, seq)
        self._get(context).removed |= bool(chosen.any())
        return True

    def seq_cp(self, context: int, src: int, dst: int, p0: int, p1: int) -> None:
        cache = self._get(context).cache
        cache.seqs[cache.ranged(src, p0, p1), dst // 64] |= np.uint64(1 << (dst % 64))

    def seq_keep(self, context: int, seq: int) -> None:
        cache = self._get(context).cache
        mine = cache.has(seq)
        cache.seqs[:] = 0
        cache.seqs[mine, seq // 64] = np.uint64(1 << (seq % 64))
        cache.free_unused()

    def seq_add(self, context: int, seq: int, p0: int, p1: int, delta: int) -> None:
        cache = self._get(context).cache
        chosen = cache.ranged(seq, p0, p1)
        cache.pos[chosen] += delta
        cache.shift[chosen] += delta

    def seq_div(self, context: int, seq: int, p0: int, p1: int, divisor: int) -> None:
        cache = self._get(context).cache
        chosen = cache.ranged(seq, p0, p1)
        cache.pos[chosen] //= divisor

    def seq_pos_min(self, context: int, seq: int) -> int:
        cache = self._get(context).cache
        return int(
            cache.pos[cache.has(seq)].min(initial=-1 if not cache.has(seq).any() else 1 << 30)
        )

    def seq_pos_max(self, context: int, seq: int) -> int:
        cache = self._get(context).cache
        return int(cache.pos[cache.has(seq)].max(initial=-1))

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
        used, half = int((c.pos >= 0).sum()), c.size * N_LAYER * N_EMBD * 2
        info = CellsInfo(0, False, c.size, used, 0, bool(c.shift.any()), N_LAYER, 1, 1,
                         c.v_transposed, True, half, half)  # fmt: skip
        return RawCells(info, c.pos.copy(), c.shift.copy(), c.seqs.copy())

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
        return self._get(context).cache.load(seq, state)

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
            code = self.decode_each(context, token, [p + step for p in pos], seq_id)
            if code:
                return code, rows
            token = self.sample_all(sampler, context, len(seq_id))
            rows.append(token)
            if stop and 2 in token:
                break
        return 0, rows

    # underneath

    def _slot(self, c: _Context, n: int) -> np.ndarray | None:
        c.counters["slot_searches"] += 1
        cells = c.cache.find(n)
        if cells is None and self.heals:
            c.cache.compact()
            c.counters["defrags"] += 1
            cells = c.cache.find(n)
        c.counters["slot_failures"] += cells is None
        return cells

    def _row(self, cache: Cache, seq: int, pos: int) -> np.ndarray:
        seen = cache.has(seq) & (cache.pos <= pos)
        total = int((cache.token[seen] * (cache.pos[seen] + 7)).sum())
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
