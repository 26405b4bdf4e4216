"""Keep several caches in lockstep, for a draft and its target model: all or none change.

The caches may belong to different models and releases; each has the same tokens at the same
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.cache.checkpoints import Checkpoint
from pyllamakv.cache.context_cache import ContextCache, checked_pass, lengths
from pyllamakv.cache.interface import check_range
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import KvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LockstepCache(ClosedOnExit):
    """Implement `Cache` over several caches, which it closes."""

    def __init__(self, caches: Iterable[ContextCache]) -> None:
        expected = "caches (ContextCache), one or more"
        self.caches: tuple[ContextCache, ...] = tuple(arguments.items("caches", caches, expected))
        for each in self.caches:
            arguments.instance("an item of caches", each, ContextCache, "a ContextCache")
        if not self.caches or len(set(map(id, self.caches))) != len(self.caches):
            msg = f"expected one or more caches, each of them once, not {len(self.caches)}"
            raise UsageError(msg)
        self.max_sequences = min(each.max_sequences for each in self.caches)
        self.capacity = min(each.capacity for each in self.caches)
        self.max_batch = min(each.max_batch for each in self.caches)
        # Caches that cannot be rewound come last: after they succeed, no other cache can fail.
        self._order = sorted(self.caches, key=_keeps_no_past)

    def __repr__(self) -> str:
        return f"<LockstepCache of {', '.join(map(repr, self.caches))}>"

    def length(self, sequence: int) -> int:
        """Return the position of the sequence's next token."""
        return self.caches[0].length(self._checked(sequence))

    def start_forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Decode in all caches or in none: see `Cache.start_forward`.

        Memory that cannot remove tokens is saved first, except that of the last cache. If its
        decode fails and loses a state, all caches return to its last checkpoint, or are emptied.
        """
        tokens, positions, sequences = checked_pass(tokens, positions, sequences)
        numbers = tuple(lengths([self._checked(each) for each in sequences]))
        if len(tokens) > self.max_batch:
            msg = f"the batch has {len(tokens)} tokens; the smallest cache takes {self.max_batch}"
            raise UsageError(msg)
        undo: list[_Undo] = []
        with ExitStack() as stack:
            for cache in self.caches:
                stack.enter_context(cache.context.lock)
            try:
                for cache in self._order:
                    undo.append(_Undo(cache, numbers, last=cache is self._order[-1]))
                    cache.start_forward(tokens, positions, sequences, logits)
            except BaseException:
                for step in reversed(undo):
                    step.run()
                # In a memory with states, a failure also empties sequences outside of the batch.
                for number in range(self.max_sequences):
                    self._align(number)
                raise

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Share a prefix in all caches or in none.

        If one fails after all were checked, the target is emptied in all caches.
        """
        source, target = self._checked(source), self._checked(target)
        length = arguments.integer("length", length, 0)
        with ExitStack() as stack:
            for cache in self.caches:
                stack.enter_context(cache.context.lock)
            for cache in self.caches:
                cache.check_copy(source, target, length)
            with self._in_step(target, 0):
                return max([cache.copy_prefix(source, target, length) for cache in self.caches])

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return whether all caches can resume there."""
        sequence = self._checked(sequence)
        return all(cache.can_resume(sequence, position) for cache in self.caches)

    def prepare_restore(self, sequence: int, target: int) -> int:
        """Return the last position up to ``target`` from which all caches can be resumed."""
        sequence = self._checked(sequence)
        target = arguments.integer("target", target, 0)
        while not self.can_resume(sequence, target):
            lower = min(cache.prepare_restore(sequence, target) for cache in self.caches)
            if lower >= target:
                return 0  # a memory that cannot even begin again, until others have ended
            target = lower
        return target

    def remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> None:
        """Remove positions in all caches or in none.

        If one fails after all were checked, all caches drop the positions from ``begin``.
        """
        sequence = self._checked(sequence)
        begin, end = check_range(begin, end)
        with ExitStack() as stack:
            for cache in self.caches:
                stack.enter_context(cache.context.lock)
            for cache in self.caches:
                cache.check_remove(sequence, begin, end, unshare=unshare)
            with self._in_step(sequence, begin):
                for cache in self.caches:
                    cache.remove(sequence, begin, end, unshare=unshare)

    def check(self) -> None:
        """Raise AssertionError unless each cache agrees with its cells and with the others."""
        for cache in self.caches:
            cache.check()
        for number in range(self.max_sequences):
            ends = {cache.length(number) for cache in self.caches}
            if len(ends) != 1:
                msg = f"sequence {number} has {ends} positions in caches that must have equal ones"
                raise AssertionError(msg)

    def close(self) -> None:
        """Close every cache."""
        for cache in self.caches:
            cache.close()

    @contextmanager
    def _in_step(self, number: int, low: int) -> Iterator[None]:
        """Truncate a sequence to ``low`` in every cache if the block raises an exception."""
        before = self._contents(number)
        try:
            yield
        except BaseException as error:
            # Ctrl-C may arrive after the library has copied and before the ledger is updated.
            if not isinstance(error, KvError) or self._contents(number) != before:
                self._cut(number, low)
            raise

    def _contents(self, number: int) -> list[tuple[list[int], list[int]]]:
        sequences = (cache.sequences[number] for cache in self.caches)
        return [(sequence.tokens, sequence.positions) for sequence in sequences]

    def _align(self, number: int) -> None:
        """Rewind a sequence to a length that every cache supports."""
        ends = {cache.length(number) for cache in self.caches}
        if len(ends) > 1:
            self._cut(number, max(ends))

    def _cut(self, number: int, target: int) -> None:
        """Rewind every cache to ``target``, or to an earlier position that all support."""
        try:
            target = self.prepare_restore(number, target)
            for cache in self.caches:
                cache.remove(number, target)
        except KvError:
            for cache in self.caches:
                cache.remove(number, 0)

    def _checked(self, sequence: int) -> int:
        sequence = arguments.integer("sequence", sequence)
        if not 0 <= sequence < self.max_sequences:
            msg = (
                f"sequence {arguments.shown(sequence)} is out of range: there are "
                f"0..{self.max_sequences - 1}"
            )
            raise UsageError(msg)
        return sequence


class _Undo:
    """Record the changes of a forward pass in a cache, and undo them on request."""

    def __init__(self, cache: ContextCache, numbers: tuple[int, ...], *, last: bool) -> None:
        self._cache = cache
        self._ends = {number: cache.length(number) for number in numbers}
        self._saved: dict[int, bytes] = {}
        if _keeps_no_past(cache) and not last:
            self._saved = {
                i: cache.sequences[i].save(portable=False) for i, end in self._ends.items() if end
            }

    def run(self) -> None:
        for number, end in self._ends.items():
            if self._cache.length(number) == end:
                continue
            if number in self._saved:
                kept = Checkpoint(end - 1, self._saved[number])
                self._cache.rewinder.restore(self._cache.sequences[number], kept)
            elif self._cache.length(number) > end:
                self._cache.remove(number, end)


def _keeps_no_past(cache: ContextCache) -> bool:
    info = cache.context.info
    return info.memory.keeps_states or info.n_swa > 0
