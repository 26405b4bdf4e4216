"""Decide when to defragment a cache: never, after a failure, when it pays, or always.

Attention visits every cell up to the highest used one, in steps of 256. The cost of cells that a
compact cache would not visit is summed over decodes. When the sum reaches the cost of moving, the
cells are moved. The threshold therefore spends at most as much on moves as was lost before, and
leaves caches alone that are soon emptied or filled. A move restarts the sum.

Two constants, in seconds per byte of K and V, define the costs: attending to an unnecessary cell in
a decode of one token, and moving a cell. `measure_defrag_costs` measures them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.owner import LoadedModel
from pyllamakv.closing import NotCopied
from pyllamakv.errors import Unsupported
from pyllamakv.runtime import decode_failure

if TYPE_CHECKING:
    from pyllamakv.runtime.parts import ContextParts, SequenceParts
    from pyllamakv.runtime.snapshot import CellMap, Snapshot

PolicyName = Literal["never", "on_failure", "threshold", "always"]

#: llama.cpp pads the cells that attention visits to a multiple of this.
ATTENTION_PADDING = 256

#: Cost of saving and restoring a byte, relative to moving it.
RESTORE_COST_FACTOR = 4.0

#: Decodes between two reads of the cells. A read takes about as long as a decode of a tiny model.
LOOK_INTERVAL = 32


def checked(policy: str) -> PolicyName:
    """Return the name of a policy, or raise UsageError."""
    return cast("PolicyName", arguments.choice("defrag_policy", policy, get_args(PolicyName)))


@dataclass(frozen=True, slots=True)
class DefragCosts:
    """The costs that the threshold compares, in seconds per byte of K and V.

    ``attend`` is the cost of attending to one unnecessary byte when decoding a token. ``move`` is
    the cost of moving one byte.
    """

    attend: float
    move: float

    def __post_init__(self) -> None:
        for name in ("attend", "move"):
            value = arguments.number(name, getattr(self, name), 0.0)
            object.__setattr__(self, name, value)


#: Measured by `measure_defrag_costs` on one core of an AMD EPYC, with 16 layers of 8 heads of 64
#: values, f16, and 4096 and 8192 cells. Flash attention skips masked cells at little cost.
FLASH_ATTN_COSTS = DefragCosts(attend=0.013e-9, move=0.19e-9)
STANDARD_COSTS = DefragCosts(attend=0.23e-9, move=0.6e-9)


class DefragPolicy(NotCopied):
    """Watch one context and defragment it by a policy.

    In every call, the caller holds the context's lock.
    """

    def __init__(
        self,
        context: ContextParts,
        policy: PolicyName,
        costs: DefragCosts | None = None,
        *,
        trims: bool = False,
    ) -> None:
        self.policy: PolicyName = policy
        #: Whether a defragmentation releases the freed memory.
        self.trims = trims
        self.costs = costs or (STANDARD_COSTS if context.info.v_transposed else FLASH_ATTN_COSTS)
        #: Whether cells may have been freed since the cache was last seen to be compact.
        self.dirty = False
        self._context = context
        self._watches = policy in ("threshold", "always")
        self._rest()

    def freed(self) -> None:
        """Record that cells were freed."""
        self.dirty = self._watches
        self._next_look = 0

    def before_decode(self) -> None:
        """Defragment if the policy requires it. Call this while `dirty`."""
        if self.policy == "always":
            self._defrag()
            return
        self._wasted += self._rate
        self._next_look -= 1
        if self._next_look <= 0:
            self._look()
        if self._wasted >= self._price:
            self._defrag()

    def defrag_after_failure(
        self, ids: list[int] | tuple[int, ...], n_tokens: int | None = None
    ) -> bool:
        """Defragment after a decode that found no cells; True when it may be tried again.

        The arguments are those of `decode_failure.failure`.
        """
        if self.policy == "never":
            return False
        error = decode_failure.failure(self._context, 1, ids, n_tokens)
        return getattr(error, "cause", "") == "fragmented" and self._defrag()

    def _look(self) -> None:
        self._next_look = LOOK_INTERVAL
        seen = self._context.kv.try_snapshot()
        if seen is None:
            # Without readable cells, no cost can be computed.
            self._watches = False
            self._rest()
            return
        excess, moving = wasted_and_moved_bytes(seen)
        self._rate = excess * self.costs.attend
        self._price = moving * self.costs.move
        if not self._context.info.defrag:
            self._price *= RESTORE_COST_FACTOR
        if not excess:
            self._rest()

    def _defrag(self) -> bool:
        self._rest()
        try:
            return bool(self._context.kv.defrag_locked(fallback=True).cells)
        except Unsupported:
            # Forks may prevent it until the next removal.
            return False

    def _rest(self) -> None:
        self.dirty = False
        self._wasted = self._rate = 0.0
        self._price = float("inf")
        self._next_look = 0


def wasted_and_moved_bytes(snapshot: Snapshot) -> tuple[int, int]:
    """Return the bytes of K and V that attention reads in vain, and those that a move copies."""
    excess = moving = 0
    for each in snapshot.streams:
        cell = _bytes_per_cell(each)
        stats = each.stats
        excess += (_attended(stats.used_max_p1) - _attended(stats.used)) * cell
        moving += int(each.used[stats.used :].sum()) * cell
    return excess, moving


def _attended(cells: int) -> int:
    return -(-cells // ATTENTION_PADDING) * ATTENTION_PADDING


def _bytes_per_cell(stream: CellMap) -> int:
    info = stream.info
    return (info.bytes_k + info.bytes_v) // max(1, info.n_cells) if info is not None else 0


def measure_defrag_costs(
    model: LoadedModel, *, cells: int = 4096, rounds: int = 15, **options: Any
) -> DefragCosts:
    """Measure both costs on this machine, in a temporary context of ``cells`` cells.

    ``options`` are those of `Model.context`. The measurement decodes a few tokens near the end of
    the cache, moves them to its start, decodes there, and repeats. Raises Unsupported if the
    library does not defragment.
    """
    arguments.instance("model", model, LoadedModel, "a Model")
    # The filler leaves one step of cells for the other sequence, and one to spare.
    cells = arguments.integer("cells", cells, 3 * ATTENTION_PADDING, arguments.INT32)
    rounds = arguments.integer("rounds", rounds, 1)
    near: list[float] = []
    far: list[float] = []
    moved: list[float] = []
    excess = moving = 1
    made: Any = model  # which creates contexts; its module imports this one
    with made.context(n_ctx=cells, n_batch=512, n_ubatch=512, n_seq_max=2, **options) as context:
        filler, live = context.sequence(), context.sequence()
        filler.prefill([1] * (cells - 2 * ATTENTION_PADDING))
        live.prefill([1] * (ATTENTION_PADDING - 64))
        below, above = filler.save(portable=False), live.save(portable=False)
        for _ in range(rounds):
            context.clear()
            filler.restore(below)
            live.restore(above)
            filler.remove()
            excess, moving = wasted_and_moved_bytes(context.kv.snapshot())
            far.append(_seconds(live))
            moved.append(context.kv.defrag(fallback=False).seconds)
            near.append(_seconds(live))
    lost = float(np.median([a - b for a, b in zip(far, near, strict=True)]))
    return DefragCosts(max(lost, 0.0) / max(1, excess), float(np.median(moved)) / max(1, moving))


def _seconds(sequence: SequenceParts) -> float:
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        sequence.step(1)
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
