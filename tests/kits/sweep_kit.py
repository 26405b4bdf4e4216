"""Call every public function and method with wrong arguments, one argument at a time.

Run as a program, this module is the worker of `test_arguments_sweep`: its arguments are a variant's
spec and the number of the first call. It prints a line before each call, so that a call that ends
the process is identified. Introspection of ``pyllamakv.__all__`` finds the calls; a new public
method needs no entry here if the names and annotations of its parameters are known.

Public attributes that are internal objects (a context's lock, defrag policy, outputs and ledgers, a
cache's branches and rings, `Native`) are not called.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import os
import resource
import sys
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from adapter_kit import AdapterFile

import pyllamakv as kv
from pyllamakv.errors import DecodeError, KvError, ReprocessNeeded

Kept = TypeVar("Kept")

#: Classes whose constructor a caller does not use, by the reason. A class that is not named here
#: and that `__all__` has is constructed with wrong arguments.
NOT_CONSTRUCTED = {
    "made by Model.context": ("Context",),
    "made by Model.load_adapter": ("Adapter",),
    "made by OpenLibrary.load_model": ("Model",),
    "made by pyllamakv.open": ("OpenLibrary",),
    "made by Context.kv": ("KV",),
    "made by Context.sequence and Sequence.fork": ("Sequence",),
    "made by Context.logits and Context.logits_all": ("Logits", "LogitsRows"),
    "made by Context.embedding and Sequence.embedding": ("Embedding",),
    "made by Batcher.submit": ("Generation",),
    "made by Sequence.generate and Context.chat": ("TextStream", "Usage"),
    "made by AsyncBatcher.submit": ("AsyncGeneration",),
    "made by pyllamakv.record": ("Recording",),
    "a record that the package returns and never reads": (
        "CellMap", "ContextCacheStats", "ContextInfo",
        "Counters", "DefragReport", "Device", "KVMemory",
        "KVStats", "LayerMemory", "MemoryBreakdown", "ModelInfo", "Moves", "PrefixStats",
        "Snapshot", "TokenLogprobs",
    ),
    "a protocol": ("Cache", "CacheManager", "Lease"),
    "an enumeration: Python's own lookup by value": (
        "Backing", "Capability", "DecodeStatus", "DefragMover", "DefragPlan", "MemoryType",
        "Pooling",
    ),
}  # fmt: skip

#: Methods that are not for callers, although their name has no underscore, and functions whose
#: arguments need no check, by the reason.
NOT_CALLED = {
    "what the batcher asks of its generation": (
        "Generation.begin", "Generation.sample", "Generation.keep_sample",
        "Generation.accept_sample", "Generation.end",
        "Generation.accept_token", "Generation.is_end", "Generation.reuse",
        "Generation.park", "Generation.queue", "Generation.yield_turn",
        "Generation.common_with", "Generation.wait_for",
    ),
    "what a task asks of its generation": ("Generation.parts",),
    "what a context asks of its sampler": (
        "Sampler.keep_ahead", "Sampler.take_ahead",
        "NumpySampler.keep_ahead", "NumpySampler.take_ahead",
    ),
    "what a batcher asks of a sampler, with the context's lock held": (
        "Sampler.sample_locked", "NumpySampler.sample_locked",
    ),
    "what a generation asks of its sampler": ("Sampler.begin",),
    "what leases, also parked ones, ask of their cache": (
        "SlotCache.discard", "SlotCache.release_slot", "SlotCache.reserve",
        "SlotCache.keep_state", "SlotCache.park", "SlotCache.restore",
        "PrefixCache.resume", "SlotCache.resume",
    ),
    "what a sequence and a decode ask of their context": (
        "Context.release_sequence", "Context.new_marks", "Context.use_threads",
    ),
    "what a model asks of its context": ("Context.start_adapters", "Context.start_policy"),
    "what a sequence asks of its context": ("Context.need_pooling",),
    "what a prefill asks of its sequence": ("Sequence.check_end",),
    "what a policy asks of the cells, with the context's lock held": ("KV.defrag_locked",),
    "a coroutine, whose arguments Batcher.submit checks": ("AsyncBatcher.submit",),
    "a coroutine that calls the function it is given": ("AsyncBatcher.call",),
    "what the window asks of its screen": ("Screen.show",),
}  # fmt: skip

#: Where a number of 2 or more is valid and takes long, and why; it is left out.
SLOW = {
    "measure_defrag_costs(rounds=)": "measures that often",
    "measure_defrag_costs(cells=)": "fills a cache of that size",
    "RpcServer.wait(timeout=)": "waits that long",
}

#: Calls that keep what they did before a failure, as their documentation says.
KEEPING = ("Context.advance", "Sequence.prefill", "Sequence.generate")

#: Parameters for which a whole number of 2**31 or more is valid: beyond all there is, "all".
ENDLESS = [
    *("keep", "begin", "end", "p0", "p1", "n_tokens", "length", "position", "target", "max_tokens"),
    *("budget", "size", "interval", "first", "divisor", "n", "tokens", "memory", "stream"),
    *("sequence", "rounds", "seed", "paging"),
]
#: Calls in which those names mean something that ends.
ENDING = (
    "SlotCache(size=)", "Context.sequence_id(sequence=)", "KV.rows(sequence=)",
    "KV.state(sequence=)", "SamplerParams(seed=)?", "SlotLease.make_room(n=)",
    "PrefixLease.make_room(n=)",
)  # fmt: skip
#: Parameters for which a negative number is valid.
NEGATIVE = {
    "delta": "shifts to lower positions",
    "keep": "all of the prompt",
    "priority": "later than others",
    "pooling": "that of the model file",
    "index": "counts from the last place",
    "axis": "counts from the last axis",
    "top_k": "-1 is off",
    "defrag_thold": "never",
    "token": "Batch.add: checked by the decode, which knows the vocabulary",
    "pos": "Batch.add: checked by the decode",
    "sequences": "Batch: checked by the decode",
    "tokens": "Batch.of: checked by the decode",
    "positions": "Batch.of: checked by the decode",
}
#: The texts of annotations that are names of choices.
CHOICES = {
    "LogitsChoice": ("last", "all", "none"),
    "Policy": ("longest", "best"),
    "Plan": ("fewest", "ordered"),
    "Mover": ("auto", "host", "gather", "graph", "staged"),
    "PolicyName": ("never", "on_failure", "threshold", "always"),
    "EvictionPolicyName": ("lru", "adaptive"),
    "PoolingName": ("none", "mean", "cls", "last", "rank"),
    "Literal['on', 'off']": ("on", "off"),
}


def values(world: CallObjects) -> list[Any]:
    """Return the wrong arguments; what is right for a parameter is right there."""
    numbers = [
        *(0, 1, 2, 3, 7, 40, 1000, 10**6, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**5000),
        *(-1, -2, -(2**31), -(2**31) - 1, -(2**63), -(10**30)),
        *(True, False, np.True_, np.False_),
        *(0.0, 1.0, 2.0, 2.5, -1.5, 1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
        *(np.float32(1), np.float64("nan"), np.float16(2), 1j, 10**400),
        *(np.int64(1), np.int8(-1), np.uint8(2), np.uint64(2**63), np.int32(3)),
    ]
    texts = [
        *("", "abc", "auto", "on", "off", "fresh", "\0", "a\0b", "\ud800", "x" * 10_000),
        *(b"", b"abc", bytearray(b"abc"), memoryview(b"abc")),
    ]
    arrays = [
        *(np.array(1), np.array([1, 2]), np.array([1.5]), np.array([]), np.array([[1]])),
        *(np.array([True]), np.array(["a"]), np.array([None]), np.zeros(3, np.int8)),
    ]
    lists = [
        *([], [None], [1.5], [2.0], ["a"], [[1]], [10**30], [-1], [True], [1, 2], (1, 2), {1}),
        *({1: 2}, {"a": 1}, range(3), range(2**62), [object()], [b"a"], [float("nan")]),
        *([(1, 2)], [(2, 1)], [(0, 10**30)], [(1,)], [1, [2]]),
    ]
    others = [
        *(None, object(), int, len, Ellipsis, NotImplemented, Path("nowhere")),
        *(world.closed, world.foreign, world.away, [world.closed], [world.foreign], [world.away]),
        *(kv.SamplerParams(), kv.CheckpointSchedule(), kv.DefragCosts(0.0, 0.0)),
    ]
    return [*numbers, *texts, *arrays, *lists, *others]


@dataclass
class CallObjects:
    """The objects of one call, to detect changes."""

    lib: Any
    model: Any
    contexts: list[kv.Context] = field(default_factory=list)
    more: list[Any] = field(default_factory=list)
    #: Further state that must not change.
    looks: list[Callable[[], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.away = self.context()
        self.foreign = self.away.sequence()
        self.foreign.prefill([1, 2, 3])
        self.ctx = self.context()
        self.seq, self.other = self.ctx.sequence(), self.ctx.sequence()
        self.closed = self.ctx.sequence()
        self.other.prefill([4, 5, 6, 7])
        self.fork = self.other.fork()
        self.closed.close()
        self.seq.prefill([1, 2, 3, 4, 5, 6])
        self.values = values(self)

    def context(self, **options: Any) -> Any:
        """Make a context that is watched and closed with the world."""
        words = {"n_ctx": 64, "n_batch": 16, "n_ubatch": 8, "n_seq_max": 6, **options}
        made = self.model.context(**words)
        self.contexts.append(made)
        return made

    def keep(self, one: Kept) -> Kept:
        """Close an object before the contexts."""
        self.more.append(one)
        return one

    def states(self) -> list[bytes]:
        """Return K and V of every sequence of the first two contexts."""
        found = []
        for each in (self.ctx, self.away):
            with each.lock as handle:
                if kv.Capability.STATES in each.native.about.capabilities:
                    lanes = [n for n, own in enumerate(each.ledgers) if len(own)]
                    found += [each.native.state_save(handle, n) for n in lanes]
        return found

    def picture(self) -> list[Any]:
        """Return all state that a refused call must not change."""
        found: list[Any] = [look() for look in self.looks]
        for each in self.contexts:
            if each.closed:
                found.append("closed")
                continue
            with each.lock:
                snapshot = each.kv.try_snapshot()
            cells = () if snapshot is None else snapshot.streams
            found += [(one.pos.tobytes(), one.seqs.tobytes(), one.shift.tobytes()) for one in cells]
            found.append(
                [(o.tokens.copy(), o.positions.copy(), o.next, o.first_moved) for o in each.ledgers]
            )
            found.append(sorted(each._taken))
        return found

    def close(self) -> None:
        """Close everything but the model and the library."""
        for one in (*self.more, *self.contexts):
            with contextlib.suppress(KvError):
                one.close()


# What is called on what...


def _snapshot(world: CallObjects) -> Any:
    return world.ctx.kv.snapshot()


def _batch(world: CallObjects) -> Any:
    made = kv.Batch()
    world.looks.append(lambda: len(made))
    return made


def _context_cache(world: CallObjects) -> Any:
    cache = world.keep(kv.ContextCache(world.context()))
    cache.start_forward([1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 0, 0])
    world.looks.append(lambda: [cache.length(n) for n in range(cache.max_sequences)])
    world.looks.append(lambda: [ring.positions for ring in cache.rewinder.rings])
    return cache


def _lockstep(world: CallObjects) -> Any:
    both = world.keep(kv.LockstepCache([_context_cache(world), kv.ContextCache(world.context())]))
    both.remove(0, 0)
    both.start_forward([1, 2, 3], [0, 1, 2], [0, 0, 0])
    return both


def _slots(world: CallObjects) -> Any:
    cache = world.keep(kv.SlotCache(world.context(), 2))
    with cache.acquire([1, 2, 3, 4]) as lease:
        lease.decode()
    world.looks.append(lambda: [(s.tokens, s.lease is None, s.groups) for s in cache._slots])
    return cache


def _slot_lease(world: CallObjects) -> Any:
    lease = _slots(world).acquire([1, 2, 9, 9])
    lease.decode()
    return lease


def _prefixes(world: CallObjects) -> Any:
    cache = world.keep(kv.PrefixCache(world.context(), entries=3, paging="memory"))
    with cache.acquire([1, 2, 3, 4]) as lease:
        lease.prefill()
    cache.pin("kept", [1, 2])
    tree = cache.branches.tree
    world.looks.append(lambda: [tree.tokens, tree.held_tokens, tree.nodes, sorted(cache.pins)])
    world.looks.append(lambda: [cache.branches.taken, cache.branches.pages.size])
    return cache


def _prefix_lease(world: CallObjects) -> Any:
    return _prefixes(world).acquire([1, 2, 9, 9])


def _batcher(world: CallObjects) -> Any:
    batcher = world.keep(kv.Batcher(_slots(world)))
    world.looks.append(lambda: (len(batcher._queue.waiting), len(batcher._queue.active)))
    return batcher


def _recording(world: CallObjects) -> Any:
    block = kv.record(world.ctx, Path(f"trace-{next(_NUMBERS)}.jsonl"))
    made = block.__enter__()
    world.more.append(types.SimpleNamespace(close=lambda: block.__exit__(None, None, None)))
    return made


def _embedding_context(world: CallObjects) -> Any:
    context = world.context(embeddings=True, pooling="none")
    context.sequence().prefill([1, 2, 3])
    return context


def _adapter_path(world: CallObjects) -> Path:
    return AdapterFile(names=("blk.0.attn_k.weight",)).write(Path("adapter.gguf"))


_NUMBERS = itertools.count()

#: The class of an object, by its name, and how a live one is had.
LIVE: dict[str, Callable[[CallObjects], Any]] = {
    "OpenLibrary": lambda world: world.lib,
    "Model": lambda world: world.model,
    "Context": lambda world: world.ctx,
    "Sequence": lambda world: world.seq,
    "KV": lambda world: world.ctx.kv,
    "Snapshot": _snapshot,
    "CellMap": lambda world: _snapshot(world).streams[0],
    "PerSequence": lambda world: _snapshot(world).stats.per_sequence,
    "Moves": lambda world: _snapshot(world).moves_to(_snapshot(world)),
    "Logits": lambda world: world.ctx.logits(),
    "Batch": _batch,
    "Sampler": lambda world: world.keep(world.model.sampler()),
    "NumpySampler": lambda world: kv.NumpySampler(),
    "ContextCache": _context_cache,
    "LockstepCache": _lockstep,
    "SlotCache": _slots,
    "SlotLease": _slot_lease,
    "PrefixCache": _prefixes,
    "PrefixLease": _prefix_lease,
    "Batcher": _batcher,
    "Recording": _recording,
    "RpcServer": lambda world: world.keep(kv.serve_rpc(world.lib.path.parent)),
}

#: The object of single calls, if it is not that of the other calls of the class.
TARGETS: dict[str, Callable[[CallObjects], Any]] = {
    "Context.embed": lambda world: world.context(embeddings=True, pooling="mean"),
    "Context.embedding": _embedding_context,
}

#: A right argument, by call and parameter or by parameter alone.
RIGHT: dict[str, Callable[[CallObjects], Any]] = {
    "Batch.of.positions": lambda world: [0, 1, 2],
    "Batch.of.sequences": lambda world: 0,
    "Batch.of.counts": lambda world: None,
    "Batch.add.sequences": lambda world: 0,
    "AsyncBatcher.manager": lambda world: kv.SlotCache(world.context(), 2),
    "Batcher.manager": lambda world: kv.SlotCache(world.context(), 2),
    "Batcher.submit.prompt": lambda world: [1, 2, 3],
    "Context.chat.template": lambda world: "x",
    "Model.load_adapter.path": _adapter_path,
    "Model.apply_chat_template.template": lambda world: "x",
    "Model.tokenize_chat.template": lambda world: "x",
    "Batcher.interrupt.generation": lambda world: _batcher(world).submit([1, 2]),
    "CellMap.has.sequence": lambda world: 0,
    "Sequence.step.token": lambda world: 1,
    "Context.step_all.tokens": lambda world: [1, 2],
    "Context.advance.tokens": lambda world: [1, 2],
    "Context.advance.sampler": lambda world: world.keep(world.model.sampler()),
    "Sequence.generate.sampler": lambda world: None,
    "Context.sequence.number": lambda world: 5,
    "Context.logits.index": lambda world: -1,
    "ContextCache.context": lambda world: world.context(),
    "LockstepCache.caches": lambda world: [kv.ContextCache(world.context())],
    "PrefixCache.context": lambda world: world.context(),
    "PrefixCache.unpin.name": lambda world: "kept",
    "PrefixCache.pin.tokens": lambda world: [1, 2],
    "PrefixCache.page_out.tokens": lambda world: [1, 2, 3, 4],
    "PrefixCache.page_in.tokens": lambda world: [1, 2, 3, 4],
    "PrefixCache.check_budget.tokens": lambda world: 1,
    "PrefixCache.enforce.tokens": lambda world: 1,
    "Sampler.model": lambda world: world.model,
    "LockstepCache.start_forward.positions": lambda world: [3, 4, 5],
    "Sampler.params": lambda world: kv.SamplerParams(),
    "RpcServer.wait.timeout": lambda world: 0.0,
    "SlotLease.decode.tokens": lambda world: [1, 2],
    "Sequence.check.context": lambda world: world.ctx,
    "Sequence.copy_to.other": lambda world: world.fork,
    "Sequence.share.other": lambda world: world.other,
    "Sequence.share.p0": lambda world: 10,
    "Sequence.share.p1": lambda world: 12,
    "Sequence.shift.p0": lambda world: 4,
    "Sequence.shift.p1": lambda world: None,
    "Sequence.divide.p1": lambda world: None,
    "SlotCache.context": lambda world: world.context(),
    "Snapshot.fits.stream": lambda world: None,
    "Snapshot.fits.contiguous": lambda world: None,
    "Snapshot.moves_to.other": _snapshot,
    "memory_breakdown.context": lambda world: world.ctx,
    "metrics.aligned.rows": lambda world: [("a", "b")],
    "watch.console": lambda world: _console(),
    "record.path": lambda world: Path(f"trace-{next(_NUMBERS)}.jsonl"),
    "measure_defrag_costs.cells": lambda world: 768,
    "open.spec": lambda world: world.lib.path.parent,
    "open.backend": lambda world: "cpu",
    "OpenLibrary.open.where": lambda world: world.lib.path.parent,
    "OpenLibrary.load_model.path": lambda world: world.model.path,
    "serve_rpc.spec": lambda world: world.lib.path.parent,
    "serve_rpc.memory": lambda world: 0,
    "RpcServer.where": lambda world: world.lib.path.parent,
    "NumpySampler.sample_logits.logits": lambda world: np.array([0.0, 1.0], np.float32),
    # by the parameter alone
    "add_special": lambda world: True,
    "attend": lambda world: 0.0,
    "backend": lambda world: "cpu",
    "begin": lambda world: 1,
    "budget": lambda world: None,
    "cache": lambda world: 0,
    "caches": lambda world: [],
    "capacity": lambda world: 32,
    "adapters": lambda world: {},
    "checkpoints": lambda world: None,
    "claim": lambda world: "",
    "context": lambda world: world.ctx,
    "contiguous": lambda world: True,
    "counters": lambda world: None,
    "delta": lambda world: 2,
    "divisor": lambda world: 1,
    "dtype": lambda world: "f16",
    "end": lambda world: 2,
    "found": lambda world: [],
    "generation": lambda world: None,
    "index": lambda world: -1,
    "inputs": lambda world: [[1, 2]],
    "key": lambda world: "general.architecture",
    "labels": lambda world: {"host": "a"},
    "layer": lambda world: 0,
    "n_tokens": lambda world: 2,
    "logits": lambda world: inspect.Parameter.empty,
    "managers": lambda world: None,
    "max_batch": lambda world: 16,
    "max_sequences": lambda world: 2,
    "max_tokens": lambda world: 2,
    "messages": lambda world: [{"role": "user", "content": "a"}],
    "missing_ok": lambda world: True,
    "model": lambda world: world.model,
    "move": lambda world: 0.0,
    "n": lambda world: 1,
    "n_batch": lambda world: 16,
    "n_ctx": lambda world: 64,
    "n_threads": lambda world: 1,
    "n_ubatch": lambda world: 8,
    "name": lambda world: "kept",
    "other": lambda world: world.other,
    "p0": lambda world: 1,
    "p1": lambda world: 2,
    "parts": lambda world: [],
    "pos": lambda world: 0,
    "position": lambda world: 2,
    "positions": lambda world: [4, 5, 6],
    "prompt": lambda world: [1, 2, 3],
    "rounds": lambda world: 1,
    "rows": lambda world: [],
    "saved": lambda world: world.seq.save(),
    "sequence": lambda world: world.seq,
    "sequences": lambda world: [world.seq, world.other],
    "source": lambda world: 0,
    "stats": lambda world: None,
    "steps": lambda world: 2,
    "target": lambda world: 1,
    "text": lambda world: "ab",
    "token": lambda world: 1,
    "tokens": lambda world: [1, 2, 3],
    "work": lambda world: world.seq.feed([1, 2]),
}
#: In the managers, sequences are numbers.
NUMBERED = ("ContextCache", "LockstepCache")


def _console() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO(), width=80)


@dataclass(frozen=True)
class Call:
    """A call: ``owner`` "" for a function, ``method`` "" for a constructor."""

    owner: str
    method: str
    function: Any
    parameters: tuple[inspect.Parameter, ...]

    @property
    def name(self) -> str:
        """Return a short name."""
        return f"{self.owner}.{self.method}".strip(".")


def excluded(table: dict[str, tuple[str, ...]]) -> set[str]:
    """Return all names of a table of exclusions."""
    return {name for names in table.values() for name in names}


def _parameters(function: Any, *, bound: bool) -> tuple[inspect.Parameter, ...]:
    found = tuple(inspect.signature(function).parameters.values())
    return found[1:] if bound else found


def methods(owner: type) -> list[Call]:
    """Return the public methods of a class that take arguments, of this package's own."""
    found = []
    for name, _ in inspect.getmembers(owner, callable):
        raw = inspect.getattr_static(owner, name)
        plain = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        if name.startswith("_") or not isinstance(plain, types.FunctionType):
            continue
        if not plain.__module__.startswith("pyllamakv."):
            continue
        parameters = _parameters(plain, bound=not isinstance(raw, staticmethod))
        if parameters and f"{owner.__name__}.{name}" not in excluded(NOT_CALLED):
            found.append(Call(owner.__name__, name, None, parameters))
    return found


def classes() -> dict[str, type]:
    """Return the public classes, and those whose objects public calls return."""
    from pyllamakv.cache.lease import PrefixLease
    from pyllamakv.cache.slot_cache import SlotLease
    from pyllamakv.runtime.snapshot import PerSequence
    from pyllamakv.view.screen import Screen

    found = {name: getattr(kv, name) for name in kv.__all__}
    public = {name: each for name, each in found.items() if isinstance(each, type)}
    public |= {each.__name__: each for each in (PrefixLease, SlotLease, Screen, PerSequence)}
    return {n: each for n, each in public.items() if not issubclass(each, BaseException)}


def calls() -> list[Call]:
    """Return everything that is called, in a fixed order."""
    found: list[Call] = []
    protocols = set(NOT_CONSTRUCTED["a protocol"])
    for name, owner in sorted(classes().items()):
        if name in kv.__all__ and name not in excluded(NOT_CONSTRUCTED):
            found.append(Call(name, "", owner, _parameters(owner, bound=False)))
        found += [] if name in protocols else methods(owner)
    for name in sorted(kv.__all__):
        one = getattr(kv, name)
        if isinstance(one, types.FunctionType):
            found.append(Call("", name, one, _parameters(one, bound=False)))
    for name in sorted(kv.metrics.__all__):
        one = getattr(kv.metrics, name)
        if isinstance(one, types.FunctionType):
            found.append(Call("", f"metrics.{name}", one, _parameters(one, bound=False)))
    return found


def right(call: Call, parameter: inspect.Parameter, world: CallObjects) -> Any:
    """Return a right argument for a parameter; ``empty``: leave it out."""
    one = RIGHT.get(f"{call.name}.{parameter.name}")
    if one is None and call.owner in NUMBERED and parameter.name == "sequences":
        return [0, 0, 0]
    if one is None and call.owner in NUMBERED and parameter.name == "sequence":
        return 0
    if one is None and parameter.default is not inspect.Parameter.empty:
        return inspect.Parameter.empty
    one = one or RIGHT.get(parameter.name)
    if one is not None:
        return one(world)
    # For an unknown parameter, guess a value from its annotation.
    guesses = {"int": 1, "float": 1.0, "str": "a", "bool": True}
    return guesses.get(str(parameter.annotation))


# What may be accepted...


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        return bool(np.isfinite(value))
    return _whole(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _tokens(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and (not value.size or value.dtype.kind in "iu")
    if isinstance(value, str | bytes | bytearray | memoryview | dict | set | frozenset):
        return False
    return _iterable(value) and all(map(_whole, value))


def _positions(value: Any) -> bool:
    return _tokens(list(value) if isinstance(value, set | frozenset) else value)


def _ordered(value: Any) -> bool:
    return isinstance(value, list | tuple | range | np.ndarray) and _tokens(value)


def _iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, type)


def _flags(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and (not value.size or value.dtype.kind in "biu")
    if isinstance(value, str | bytes | bytearray | memoryview | dict):
        return False
    return _iterable(value) and all(_flag(each) or _whole(each) for each in value)


def _path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and "\0" not in value)


def _one_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _empty(value: Any) -> bool:
    return _iterable(value) and not isinstance(value, str | bytes | dict) and not len(value)


#: What an annotation accepts.
ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "int": _whole,
    "float": _number,
    "bool": _flag,
    "str": _one_of(str),
    "None": lambda value: value is None,
    "bytes": _one_of(bytes, bytearray, memoryview),
    "os.PathLike[str]": _path,
    "PathLike[str]": _path,
    "Path": _path,
    "Iterable[int]": _tokens,
    "Sequence[int]": _tokens,
    "Sequence[bool]": _flags,
    "Iterable[str | Iterable[int]]": lambda value: (
        _iterable(value)
        and not isinstance(value, str)
        and all(isinstance(each, str) or _tokens(each) for each in value)
    ),
    "Iterable[tuple[int, int]]": lambda value: _empty(value) or value == [(1, 2)],
    "Iterable[str]": lambda value: _iterable(value) and all(isinstance(v, str) for v in value),
    "Sequence": _one_of(kv.Sequence),
    "Iterable[Sequence]": lambda value: False,
    "SequenceParts": _one_of(kv.Sequence),
    "Context": _one_of(kv.Context),
    "Model": _one_of(kv.Model),
    "Snapshot": _one_of(kv.Snapshot),
    "SamplerParams": _one_of(kv.SamplerParams),
    "CheckpointSchedule": _one_of(kv.CheckpointSchedule),
    "DefragCosts": _one_of(kv.DefragCosts),
    "TokenSampler": _one_of(kv.Sampler, kv.NumpySampler),
    "Mapping[str, str]": lambda value: isinstance(value, dict) and value == {},
    "FlashAttn": lambda value: _flag(value) or value is None or value in ("auto", "on", "off"),
    "KeepName": lambda value: value == "fresh",
    "Work": lambda value: False,
    "Console": lambda value: False,
    "CellStats": lambda value: False,
    "Counters": lambda value: False,
    "Mapping[str, ManagerStats]": lambda value: isinstance(value, dict) and value == {},
    "Iterable[Metric]": _empty,
    "Iterable[tuple[str, str]]": _empty,
    "Sequence[Moves]": _empty,
    "CacheManager": lambda value: False,
    "PromptCache": _one_of(kv.PrefixCache),
    "LoadedModel": _one_of(kv.Model),
    "Generation": lambda value: False,
    "Sampler": _one_of(kv.Sampler),
    "Iterable[ContextCache]": lambda value: False,
    "Callable[[], None] | None": lambda value: value is None or callable(value),
    "Callable[[str, int, int | None], None] | None": lambda value: value is None or callable(value),
    "NDArray[np.float32]": lambda value: isinstance(value, np.ndarray) and value.dtype.kind == "f",
    "tuple[str, str]": lambda value: False,
    "Mapping[str, Any]": _one_of(dict),
    "Iterable[Mapping[str, Any]]": _empty,
    "Iterable[LogitsProcessor]": _empty,
    "Mapping[Adapter, float]": lambda value: isinstance(value, dict) and value == {},
    "Mapping[int, float]": lambda value: isinstance(value, dict) and value == {1: 2},
    "tuple[tuple[int, float], ...]": lambda value: _empty(value) or value in ([(1, 2)], [(2, 1)]),
    "tuple[str, ...]": lambda value: not isinstance(value, str) and ACCEPTS["Iterable[str]"](value),
}

#: What parameters accept whose annotation is ``Any``.
ANY: dict[str, Callable[[Any], bool]] = {
    "tokens": _tokens,
    "positions": _tokens,
    "counts": lambda value: value is None or _tokens(value),
    "sequences": lambda value: _whole(value) or _tokens(value),
    "logits": lambda value: value is None or _flags(value),
    # Any other argument is a variable of a chat template.
    "options": lambda value: True,
    "variables": lambda value: True,
}


#: What parameters of single calls accept, besides what their annotation says.
BY_CALL: dict[str, Callable[[Any], bool]] = {
    "ContextParams.flash_attn": ACCEPTS["FlashAttn"],
    "Batcher.submit.checkpoints": _positions,
    "PrefixCache.acquire.checkpoints": _positions,
    "SlotCache.acquire.checkpoints": _positions,
    "Sequence.feed.tokens": _ordered,
    "Sequence.prefill.tokens": _ordered,
}


def _holds(rule: Callable[[Any], Any], value: Any) -> bool:
    """Return whether a rule accepts a value; an array is not equal to any single one."""
    try:
        return bool(rule(value))
    except ValueError:
        return False


def accepts(call: Call, parameter: inspect.Parameter, value: Any) -> str:
    """Return why a value must not be accepted for a parameter; "" where it may be."""
    annotation, name = str(parameter.annotation), parameter.name
    own = BY_CALL.get(f"{call.name}.{name}")
    if own is not None:
        return "" if own(value) else "the type is wrong"
    if annotation == "Any":
        rule = ANY.get(name)
        if rule is None:
            return f"no rule for {name}: Any; add one to ANY in tests/sweep_kit.py"
        return "" if rule(value) else "the type is wrong"
    known = ACCEPTS.get(annotation) or _choice(annotation)
    parts = [annotation] if known else [each.strip() for each in annotation.split(" | ")]
    rules = [ACCEPTS.get(part) or _choice(part) for part in parts]
    if not all(rules):
        return f"no rule for the annotation {annotation}; add one to ACCEPTS in tests/sweep_kit.py"
    if not any(_holds(rule, value) for rule in rules if rule is not None):
        return "the type is wrong"
    if not _whole(value) or "float" in parts:
        return ""
    where = f"{call.name}({name}=)"
    if value < 0 and name not in NEGATIVE:
        return "it is negative"
    if value >= 2**31 and (name not in ENDLESS or where in ENDING):
        return "it is larger than anything it could count"
    return ""


def _choice(part: str) -> Callable[[Any], bool] | None:
    names = CHOICES.get(part.replace('"', "'"))
    if names is None:
        return None
    return lambda value: isinstance(value, str) and value in names


# The worker...


class Worker:
    """Make the calls of a variant, one after the other."""

    def __init__(self, spec: str, first: int, part: int, every: int) -> None:
        from pyllamakv.scenarios import synthetic_models

        self.lib = kv.open(spec)
        self.path = synthetic_models.model("bytes")
        self.model = self.lib.load_model(self.path)
        self.first, self.part, self.every = first, part, every
        self.world: CallObjects | None = None
        self.target: Any = None
        self.before: list[bytes] = []
        self.count = 0
        self.classes = classes()
        self.counts = {"calls": 0, "refused": 0, "accepted": 0, "right": 0}
        self.number = -1
        self.failing: list[str] = []

    def run(self) -> None:
        """Make all calls, and print the results."""
        with contextlib.closing(CallObjects(self.lib, self.model)) as world:
            self.count = len(world.values)
        for call in calls():
            self._drop()
            if call.owner and call.method and call.owner not in LIVE:
                say("!", f"{call.name}: no live {call.owner}; add one to LIVE in sweep_kit.py")
                continue
            self._right(call)
            for parameter in call.parameters:
                for place in range(self.count):
                    self.number += 1
                    drawn = zlib.crc32(b"%d" % self.number) % self.every == self.part
                    if self.number >= self.first and drawn:
                        self._wrong(call, parameter, place)
        self._drop()
        say("=", json.dumps({**self.counts, "peak_mib": peak_mib(), "failing": self.failing}))

    def _world(self, call: Call) -> CallObjects:
        if self.world is None:
            if self.lib.closed or self.model.closed:
                self.lib = kv.open(self.lib.path.parent)
                self.model = self.lib.load_model(self.path)
            self.world = CallObjects(self.lib, self.model)
            self.target = None
            if call.owner and call.method:
                self.target = TARGETS.get(call.name, LIVE[call.owner])(self.world)
            self.before = self.world.states()
        return self.world

    def _drop(self) -> None:
        if self.world is not None:
            self.world.close()
        self.world = None

    def _arguments(self, call: Call) -> dict[str, Any]:
        """Return the right arguments of a call."""
        world = self._world(call)
        found = {}
        for parameter in call.parameters:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            value = right(call, parameter, world)
            if value is not inspect.Parameter.empty:
                found[parameter.name] = value
        return found

    def _right(self, call: Call) -> None:
        """Make the call with valid arguments: a refusal would hide invalid ones."""
        self.number += 1
        if self.number < self.first:
            return
        say(">", f"{self.number} {call.name} with right arguments")
        try:
            self._make(call, self._arguments(call))
            self.counts["right"] += 1
        except (KvError, TypeError) as error:
            self.failing.append(f"{call.name}: {type(error).__name__}: {error}"[:200])
        self._drop()

    def _wrong(self, call: Call, parameter: inspect.Parameter, place: int) -> None:
        if self.world is not None and len(self.world.contexts) > 12:
            self._drop()
        world, words = self._world(call), self._arguments(call)
        now = world.picture()
        value = world.values[place]
        where = f"{call.name}({parameter.name}=)"
        what = f"{where[:-1]}{show(value)})"
        if where in SLOW and (value is None or (_number(value) and value >= 2)):
            return
        say(">", f"{self.number} {what}")
        name = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            name = "n_ctx_of_nothing"
        elif parameter.kind is parameter.VAR_POSITIONAL:
            return
        words[name] = value
        self.counts["calls"] += 1
        try:
            self._make(call, words)
        except (KvError, TypeError) as error:
            self.counts["refused"] += 1
            part = call.name in KEEPING and isinstance(error, DecodeError)
            if part or isinstance(error, ReprocessNeeded):
                self._drop()  # the report has the change
                return
            named = isinstance(error, KvError) or name in str(error) or "argument" in str(error)
            if not named:
                say("!", f"{what}: {type(error).__name__} does not name the argument: {error}")
            self._same(what, now)
        except BaseException as error:
            say("!", f"{what}: {type(error).__name__}: {error}"[:300])
            self._drop()
        else:
            self.counts["accepted"] += 1
            why = accepts(call, parameter, value)
            if why:
                say("!", f"{what} was accepted: {why}")
            self._drop()

    def _same(self, what: str, before: list[Any]) -> None:
        assert self.world is not None
        changed = self.world.picture() != before
        if not changed and self.counts["refused"] % 16 == 0:
            changed = self.world.states() != self.before
        if changed:
            say("!", f"{what} was refused and changed something")
            self._drop()

    def _make(self, call: Call, words: dict[str, Any]) -> None:
        one = call.function
        if one is None:
            one = getattr(
                self.classes[call.owner] if self.target is None else self.target, call.method
            )
        positional = [words.pop(p.name) for p in call.parameters
                      if p.kind is p.POSITIONAL_ONLY and p.name in words]  # fmt: skip
        found = one(*positional, **words)
        if isinstance(found, contextlib.AbstractContextManager) and not hasattr(found, "close"):
            with found:
                pass
        elif isinstance(found, types.GeneratorType | kv.TextStream):
            with contextlib.closing(found):
                next(found, None)
        elif found is not self.target and callable(getattr(found, "close", None)):
            found.close()


def show(value: Any) -> str:
    """Return a value in printable form."""
    from pyllamakv.binding.arguments import shown

    return shown(value).encode("ascii", "backslashreplace").decode().replace("\n", " ")


def peak_mib() -> int:
    """Return the most memory that this process has held, in MiB.

    From the address space, because ``ru_maxrss`` still counts that of the process which started
    this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "VmHWM":
            return int(size.split()[0]) >> 10
    raise LookupError("/proc/self/status has no VmHWM")


def say(mark: str, text: str) -> None:
    """Print a line at once: the next call may end the process."""
    line = text.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    os.write(1, f"{mark} {line}\n".encode())


def main() -> None:
    """Run the worker: SPEC FIRST PART EVERY; it makes the calls of one of so many parts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Worker(sys.argv[1], *map(int, sys.argv[2:5])).run()


if __name__ == "__main__":
    main()
