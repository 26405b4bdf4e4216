"""Repeat a player's operations on a larger context without defragmentation, and compare logits.

The reference runs on the same library, in the same worker, and repeats successful operations only:
no defragmentation, no failed decode. Its cache is so large that every slot search succeeds.

When a removal restarts llama.cpp's slot search, cells outside of every window are reused, even in a
cache of full size, unless two sequences share them. Therefore, in the reference of a sliding-window
model, a spare sequence shares all cells. Where each sequence has a stream of cells, they cannot be
shared; a sequence whose window the reference has lost is not compared. Logits are never compared
across libraries, because kernels differ between releases.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import ContextHandle, DecodeStatus
from pyllamakv.errors import HarnessError, NativeError, ScenarioFailed, Unsupported, WorkerDied
from pyllamakv.runtime import ggml_types as types

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.context import Context
    from pyllamakv.scenarios.batch_composition import BatchRows
    from pyllamakv.scenarios.player import Player, Step

#: Maximum number of cells of a reference; a scenario that exceeds it is an internal error.
LIMIT = 1 << 17


@dataclass(frozen=True)
class Tolerance:
    """Bound the difference of two logits that a correct cache may show.

    Correct defragmentations differ by up to 6e-3; with flash attention and an f16 V by up to 5e-2,
    because its f16 accumulators see the cells in another order; in a quantized cache by up to 3e-2,
    where the last bit of one layer turns into another step of the next layer's keys. A damaged
    cache shows 0.3 to 11.
    """

    exact: float = 0.02
    rounded: float = 0.2

    def of(self, player: Player | Context) -> float:
        """Return the bound for a context."""
        whole = {types.number_type(name).number for name in ("f32", "f16", "bf16")}
        coarse = player.info.flash_attn or player.params.type_k not in whole
        return self.rounded if coarse else self.exact


#: The tolerance on CUDA, which sums attention in f16 also without flash attention: on an H100,
#: correct caches of 0.3.9 differ by up to 0.023.
CUDA = Tolerance(exact=0.1)


class Reference:
    """Follow a player operation by operation; `catch_up` compares the logits of all new decodes."""

    def __init__(self, player: Player, tolerance: Tolerance | None = None) -> None:
        self.player = player
        self.bound = (tolerance or Tolerance()).of(player)
        self.worst = 0.0
        info = player.info
        windows = info.n_swa > 0 and info.n_caches > 1
        self._spares = windows and not player.ledger.streams
        # Sequences in separate streams cannot share cells with a spare one: llama.cpp reuses cells
        # that a window has passed, and after a cut a sequence would see them again.
        self._may_lose = windows and player.ledger.streams
        #: Sequences, and saves, without a part of their window: their logits are not compared.
        self._lost: set[int | str] = set()
        self._room = 1
        self._context: ContextHandle | None = None
        self._done = 0
        self._saved: dict[str, bytes] = {}

    def close(self) -> None:
        """Release the reference's context."""
        if self._context is not None:
            self.player.native.context_free(self._context)
            self._context = None

    def catch_up(self) -> None:
        """Repeat the player's latest operations. Raises ScenarioFailed if logits differ."""
        while not self._advance():
            self._grow()

    def check_next(self) -> None:
        """Decode one more token of every sequence on both sides, compare, and remove it again.

        If the memory keeps states, the token stays: states cannot be rolled back, and in one
        release a removal drops the sequence.
        """
        player = self.player
        stays = player.info.memory.keeps_states
        for seq in player.ledger.sequences:
            start = player.ledger.next(seq)
            player.decode({seq: 1})
            self.catch_up()
            if not stays:
                player.remove(seq, start, start + 1)
        self.catch_up()

    def _advance(self) -> bool:
        if self._context is None:
            self._context = self._open()
        steps = self.player.steps
        while self._done < len(steps):
            if not self._repeat(steps[self._done]):
                return False
            self._done += 1
        return True

    def _open(self) -> ContextHandle:
        player = self.player
        tokens = sum(len(s.arguments[0].token) for s in player.steps if s.op == "decode")
        cells = self._room * -(-(tokens + player.info.n_ctx) // 256) * 256
        if cells > LIMIT:
            msg = f"the reference would need {cells} cells; make the scenario smaller"
            raise HarnessError(msg)
        # In heap memory, so that neither mapped memory nor a file lock affects it.
        params = replace(
            player.params, n_ctx=cells, swa_full=True, kv_backing=0, kv_path=None, kv_keep=0
        )
        if self._spares or self._may_lose:
            # In one micro-batch: between two, no other sequence owns the cells of the first one,
            # and the slot of the second one may remove what the first one sees.
            params = replace(params, n_ubatch=params.n_batch)
        if self._spares:
            params = replace(params, n_seq_max=params.n_seq_max + 1)
        return player.native.context_new(player.model, params)

    def _grow(self) -> None:
        self.close()
        self._room *= 2
        self._done = 0
        self._saved.clear()
        self._lost.clear()

    def _keep_windows(self, context: ContextHandle) -> None:
        """Copy the content of all sequences to the last, spare one."""
        native, spare = self.player.native, self.player.info.n_seq_max
        native.seq_rm(context, spare, -1, -1)
        for seq in range(spare):
            native.seq_cp(context, seq, spare, -1, -1)

    def _repeat(self, step: Step) -> bool:
        native, context = self.player.native, self._context
        assert context is not None
        if self._spares and step.op in ("decode", "restore"):
            self._keep_windows(context)
        match step.op:
            case "decode":
                feed = step.arguments[0]
                if self._may_lose:
                    self._find_lost(context, feed)
                status = feed.run(native, context)
                if status == DecodeStatus.NO_SLOT:
                    return False
                if status != DecodeStatus.OK:
                    msg = f"the reference's decode ended with status {status}"
                    raise HarnessError(msg)
                self._compare(step, feed.read(native, context, self.player.n_vocab))
            case "remove":
                native.seq_rm(context, *step.arguments)
                seq, start, end = step.arguments
                if start <= 0 and end < 0:
                    self._lost.discard(seq)
            case "copy":
                native.seq_cp(context, *step.arguments)
                self._inherit(step.arguments[1], step.arguments[0])
            case "keep":
                native.seq_keep(context, *step.arguments)
                self._lost -= {*range(self.player.info.n_seq_max)} - {*step.arguments}
            case "shift":
                native.seq_add(context, *step.arguments)
            case "divide":
                native.seq_div(context, *step.arguments)
            case "clear":
                native.clear(context, True)
                self._lost -= {*range(self.player.info.n_seq_max)}
            case "update":
                with suppress(Unsupported):
                    native.update(context)
            case "save":
                seq, name = step.arguments
                self._saved[name] = native.state_save(context, seq)
                self._inherit(name, seq)
            case "restore":
                seq, name = step.arguments
                self._inherit(seq, name)
                # The reference has no pending shift at a restore.
                with suppress(Unsupported):
                    native.update(context)
                try:
                    return native.state_load(context, seq, self._saved[name]) > 0
                except WorkerDied:
                    raise
                except NativeError:
                    return False
            case _:
                msg = f"the reference does not know the operation {step.op!r}"
                raise HarnessError(msg)
        return True

    def _inherit(self, heir: int | str, of: int | str) -> None:
        if of in self._lost:
            self._lost.add(heir)
        else:
            self._lost.discard(heir)

    def _find_lost(self, context: ContextHandle, feed: BatchRows) -> None:
        """Find the sequences of a batch of which this context lost cells that they would see."""
        info, native = self.player.info, self.player.native
        firsts: dict[int, int] = {}
        for pos, owners in zip(feed.pos.tolist(), feed.owners, strict=True):
            firsts[owners[0]] = min(pos, firsts.get(owners[0], pos))
        there: dict[tuple[int, bool], set[int]] = defaultdict(set)
        for cache in range(info.n_caches):
            cells = native.cells(context, cache)
            there[cells.info.stream, cells.info.swa].update(cells.pos.tolist())
        for seq, first in firsts.items():
            seen = {pos for pos in there[seq, False] if first - info.n_swa < pos < first}
            if not seen - {-1} <= there[seq, True]:
                self._lost.add(seq)

    def _compare(self, step: Step, logits: dict[int, NDArray[np.float32]]) -> None:
        for place, seen in step.logits.items():
            if step.arguments[0].owners[place][0] in self._lost:
                continue
            difference = distance(seen, logits[place])
            self.worst = max(self.worst, difference)
            if difference > self.bound:
                owners = step.arguments[0].owners[place]
                pos = int(step.arguments[0].pos[place])
                msg = (
                    f"logits at position {pos} of sequence {owners[0]} differ from the "
                    f"reference by {difference:.3g}, allowed {self.bound:g}"
                )
                evidence = {"difference": difference, "sequence": owners[0], "position": pos}
                raise ScenarioFailed(msg, failure="data", evidence=evidence)


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference of two rows of logits; infinity where one is not a number."""
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(one - other))) if len(one) else 0.0
    return largest if np.isfinite(largest) else float("inf")
