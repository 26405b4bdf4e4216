"""Know where a sequence can be taken up again, and take it back there.

The answer comes from what the cells hold and from our own record of positions. llama.cpp's last
position of a sequence is that of its sliding-window cache, which is wrong after a partial removal
(llama.cpp #29045), and its first one says nothing about gaps. Where a memory cannot go back, a
checkpoint can: a save of the whole sequence, kept on the host.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.checkpoints import Checkpoint, Ring
from pyllamakv.cache.room import no_room
from pyllamakv.errors import NativeError, PartialRemovalRefused, StateError, Unsupported
from pyllamakv.runtime import state, windows

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from pyllamakv.cache.checkpoints import Schedule
    from pyllamakv.runtime.sequence import Sequence

LOGGER = logging.getLogger("pyllamakv.cache")


def going_back(sequence: Sequence, position: int) -> str | None:
    """Return why the memory cannot keep the positions below ``position`` alone; None: it can."""
    ledger, info = sequence.ledger, sequence.context.info
    if position > ledger.next:
        return f"sequence {sequence.id} ends at position {ledger.next}"
    if position in (0, ledger.next):
        return None
    if info.memory.keeps_states or info.can_remove_partly is False:
        return "this memory keeps one state per sequence, and no earlier ones"
    return _window(sequence, ledger.without(position, None))


def closing_gap(sequence: Sequence, begin: int, end: int) -> str | None:
    """Return why positions from ``end`` on cannot move to ``begin``; None: they can."""
    info = sequence.context.info
    if info.memory.keeps_states or info.can_remove_partly is False:
        return "this memory keeps one state per sequence, of which no part can be removed"
    if not info.can_shift:
        return "this context's memory cannot shift positions"
    return _window(sequence, sequence.ledger.without(begin, end))


def _window(sequence: Sequence, positions: list[int]) -> str | None:
    context = sequence.context
    if not context.info.n_swa or not positions:
        return None
    with context.turn:
        if context.kv.peek() is None:
            return "this build cannot show what its sliding-window cache still holds"
        try:
            windows.check(context, sequence.id, positions, "removing them")
        except PartialRemovalRefused as refusal:
            return str(refusal)
    return None


class Past:
    """Take the sequences of a context back, by their memory or by checkpoints.

    The context must be empty: it is tried out, where its memory keeps states.
    """

    def __init__(self, lanes: Many[Sequence], schedule: Schedule | None) -> None:
        self._lanes = lanes
        self._context = lanes[0].context
        info = self._context.info
        self.rings = tuple(Ring(schedule) for _ in lanes)
        wanted = self.rings[0].schedule.size > 0 and Capability.STATES in (
            self._context.native.about.capabilities
        )
        #: Whether sequences are saved now and then, since their memory cannot always go back.
        forgets = info.n_swa > 0 and not self._context.params.swa_full
        self.saves = wanted and (info.memory.keeps_states or forgets)
        #: Whether a removed sequence leaves a state behind with which the next one would begin.
        self._leaves = info.memory.keeps_states and self._try_to_restart()
        self._left = False

    def can_resume(self, lane: Sequence, position: int) -> bool:
        """Tell whether `go_back` to a position works."""
        if position == 0 and self._leaves:
            others = any(len(each) for each in self._lanes if each is not lane)
            return not others or (not len(lane) and not self._left)
        if going_back(lane, position) is None:
            return True
        return self.rings[lane.id].at(position - 1) is not None

    def latest(self, lane: Sequence, target: int) -> int:
        """Return the last position up to ``target`` that `can_resume`, 0 where there is none."""
        if self.can_resume(lane, target):
            return target
        best = self.rings[lane.id].best(target)
        end = lane.next_pos
        return max(best.pos + 1 if best else 0, end if end < target else 0)

    def kept(self, lane: Sequence, position: int) -> Checkpoint | None:
        """Return the checkpoint of exactly the positions below ``position``, or None."""
        return self.rings[lane.id].at(position - 1)

    def restore(self, lane: Sequence, checkpoint: Checkpoint) -> None:
        """Put a checkpoint into a sequence, or raise KVCacheFull with nothing changed.

        Raises StateError for a damaged one.
        """
        state.unpack(checkpoint.saved)
        try:
            lane.restore(checkpoint.saved)
        except StateError as error:
            raise no_room(lane, checkpoint.pos + 1, error) from error
        self.rings[lane.id].prune(checkpoint.pos)
        self._left |= self._leaves

    def empty(self, lane: Sequence) -> None:
        """Remove a whole sequence, which always works."""
        self._left |= self._leaves and len(lane) > 0
        lane.remove()
        self.rings[lane.id].prune(-1)
        self._forget()

    def failed(self) -> None:
        """Take note that a decode failed: it may have emptied sequences."""
        self._left |= self._leaves and bool(self._context.emptied)
        self._forget()

    def passed(self, lane: Sequence, more: int) -> None:
        """Take note of ``more`` tokens of a sequence, and save it if it is time to."""
        ring, pos = self.rings[lane.id], lane.ledger.next - 1
        if ring.newest > pos - more:
            # Left by what a failure emptied, and of other tokens than these.
            ring.prune(pos - more)
        if pos < ring.due:
            return
        try:
            ring.put(Checkpoint(pos, lane.save()))
        except (NativeError, Unsupported, MemoryError) as error:
            LOGGER.info("no checkpoints are kept: %s", error)
            self.saves = False
            for each in self.rings:
                each.prune(-1)
            return
        LOGGER.debug("checkpoint of sequence %d at %d, %d bytes", lane.id, pos, ring.bytes)

    def _forget(self) -> None:
        if self._left and not any(map(len, self._lanes)):
            self._context.clear()
            self._left = False

    def _try_to_restart(self) -> bool:
        lane = self._lanes[0]
        try:
            for _ in range(2):
                # Two tokens: of one, some releases say that there is none.
                self._context.decode(lane.feed([0, 0]))
                lane.remove()
        except Unsupported:
            return True
        finally:
            self._context.clear()
        return False
