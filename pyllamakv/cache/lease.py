"""Lease the sequences of a prefix cache to prompts, park leases, and resume them.

A lease is one prompt's use of a sequence. `PrefixCache.acquire` creates it with the longest cached
prefix of the prompt. Its node in the tree follows the tokens of the sequence, so that other prompts
find them, and eviction spares them. A release keeps the tokens. A parked lease has no sequence, but
its content is not dropped until it is resumed or closed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from pyllamakv.binding import arguments
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.cache import defrag_retry
from pyllamakv.cache.interface import PARKED_LATE
from pyllamakv.cache.radix_tree import TOKEN_BYTES, key_to_tokens, tokens_to_key
from pyllamakv.closing import NotCopied
from pyllamakv.errors import Cancelled, StateError, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.prefix_states import PrefillBackup, PrefillBackups, StatePoints
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.sequence import Sequence

LOG = logging.getLogger("pyllamakv.cache")

P = ParamSpec("P")
R = TypeVar("R")

#: Maximum number of tokens for which cells are reserved in advance; that evicts nothing.
LOOKAHEAD_TOKENS = 64


def exclusive(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Let one thread at a time change the tree, and complete the change before Ctrl-C is raised.

    Other threads get Busy, with nothing changed. ``method`` is one of a cache, or of an object that
    has one.
    """

    @wraps(method)
    def run(self: Any, /, *given: P.args, **options: P.kwargs) -> R:
        cache: Any = getattr(self, "cache", self)
        with cache.context.lock, Uninterrupted():
            return method(self, *given, **options)

    return run


class SequenceLease(NotCopied, ABC):
    """A prompt's use of a sequence, with the states that are due in it: what managers share.

    ``key`` and ``salt`` identify the prompt, ``ledger`` has the tokens of the sequence, and
    ``points`` the positions of states; None: the memory needs none. ``backup`` is the state after a
    micro-batch of the prompt, if a cancelled decode loses states, and one of ``backups``.
    """

    key: bytes
    salt: bytes
    sequence: Sequence
    ledger: Ledger
    points: StatePoints | None
    backups: PrefillBackups
    backup: PrefillBackup | None

    def limit_batch(self, n: int) -> int:
        """Return how many of the next ``n`` tokens to decode before `checkpoint` is called."""
        if type(n) is not int or not 0 <= n <= arguments.INT32:
            n = arguments.integer("n", n, 0, arguments.INT32)
        return n if self.points is None else self.points.limit(len(self.ledger.tokens), n)

    def add_checkpoint(self, length: int) -> None:
        """Keep the state after ``length`` tokens as well, if the sequence gets there."""
        length = arguments.integer("length", length, 0, arguments.INT32)
        if self.points is not None:
            self.points.add(length, len(self.ledger.tokens))

    def checkpoint(self) -> None:
        """Keep the state after the present tokens, if one is due here. Never fails a prompt."""
        here = len(self.ledger.tokens)
        if self.points is not None and self.points.due(here):
            self._keep_state()
        if self.backup is None:
            return
        left = len(self.key) // TOKEN_BYTES - here
        if left <= 0:
            self._drop_backup()
        elif left > 1:
            self._save_backup(self.backup)

    @exclusive
    def _save_backup(self, backup: PrefillBackup) -> None:
        """Save the state of an unfinished prompt, if that is due."""
        self.backups.update(self, backup)

    @exclusive
    def _drop_backup(self) -> None:
        """Drop the saved state of a prompt that is complete."""
        self.backup = None
        self.backups.complete(self)

    @abstractmethod
    def _keep_state(self) -> None:
        """Keep the state after the present tokens, if that is possible."""

    @abstractmethod
    def release(self) -> None:
        """Release the sequence. Its tokens stay cached. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()


class PrefixLease(SequenceLease):
    """A lease of a sequence from `PrefixCache.acquire`, which a ``with`` block releases.

    ``cached`` is the number of the prompt's tokens that the sequence has already, and ``rest`` are
    the tokens to decode.
    """

    def __init__(
        self,
        cache: PrefixCache,
        sequence: Sequence,
        key: bytes,
        salt: bytes,
        cached: int,
        points: StatePoints | None,
        groups: tuple[Group, ...],
    ) -> None:
        self.cache = cache
        self.sequence = sequence
        self.cached = cached
        self.rest = key_to_tokens(key[cached * TOKEN_BYTES :])
        self.key, self.salt = key, salt
        self._groups = groups
        #: Reserved length of the sequence, and the length that was requested. The difference is
        #: reserved in advance, and may be released again.
        self.granted = self.asked = self._prompt = len(key) // TOKEN_BYTES
        self.points = points
        self.backups = cache.backups
        self.backup = cache.backups.new(key, salt, cached)
        self.ledger = sequence.ledger
        self._seen: tuple[int, ...] = ()
        self._whole = True
        branches = cache.branches
        self.node = branches.tree.insert(key[: cached * TOKEN_BYTES], salt)
        branches.lease(self.node, self)
        branches.tree.touch(self.node, again=True)
        branches.tidy(self.node)
        cache.leases.append(self)

    @property
    def released(self) -> bool:
        """Return whether this was released."""
        return self not in self.cache.leases

    @property
    def evaluated(self) -> int:
        """Return how many tokens of the sequence were not cached."""
        return max(0, len(self.ledger) - self.cached)

    @property
    def reserved(self) -> int:
        """Return how many tokens can be decoded without another `make_room`."""
        return max(0, self.granted - len(self.ledger))

    def prefill(self, *, logits: bool = True) -> None:
        """Decode the rest of the prompt in micro-batches. Those before a failure remain.

        A second call continues, or restarts after the last saved state if the failure emptied the
        sequence. If the memory cannot return to earlier positions, states are saved on the way.
        """
        logits = arguments.flag("logits", logits)
        prompt, context = self._prompt, self.cache.context
        cancels, size = context.cancels, context.info.n_ubatch
        if not len(self.ledger) and self.cache.branches.loses_all:
            self._restore_state()
        end = self.ledger.marks[-1:]
        while (here := len(self.ledger)) < prompt:
            if context.cancels != cancels:
                msg = f"cancelled with {prompt - here} tokens left; the others remain"
                raise Cancelled(msg, code=2)
            self.sequence.check_end(end, f"{prompt - here} tokens of the prompt are left")
            stop = here + self.limit_batch(min(size, prompt - here))
            tokens = key_to_tokens(self.key[here * TOKEN_BYTES : stop * TOKEN_BYTES])
            self._decode(tokens, logits=logits and stop == prompt)
            self.checkpoint()
            end = self.ledger.marks[-1:]

    @exclusive
    def _restore_state(self) -> None:
        """Continue after the last saved state, if a cancelled decode emptied the sequence."""
        self.cache.sync()
        try:
            if saved := self.backups.longest(self, self._groups):
                self.sequence.restore(saved)
        except (StateError, Unsupported, MemoryError) as error:
            LOG.warning("the prompt is evaluated from its start: %s", error)
            if self.backup is not None:
                self.backup.restart(0)

    @exclusive
    def _keep_state(self) -> None:
        self.cache.sync()
        self.cache.allocator.keep_state(self)
        self.cache.enforce(0)

    def _decode(self, tokens: list[int], *, logits: bool) -> None:
        """Decode tokens; other leases may have taken the hole that was there for them."""
        context, sequence, start = self.cache.context, self.sequence, len(self.ledger)

        def go_on() -> None:
            sequence.prefill(tokens[len(self.ledger) - start :], logits=logits)

        counts = {sequence.id: len(tokens)}
        defrag_retry.decode_with_defrag(context, go_on, counts, self.cache.relieve)

    def make_room(self, n: int) -> None:
        """Free cells for ``n`` more tokens; others are paged out or dropped for it.

        Raises KVCacheFull when it cannot, with nothing changed.
        """
        if type(n) is not int or not 0 <= n <= arguments.INT32:
            n = arguments.integer("n", n, 0, arguments.INT32)
        self.asked = asked = len(self.ledger.tokens) + n
        if asked > self.granted:
            self._grow(n)

    def yield_room(self) -> None:
        """Drop cells that were granted in advance, because others need them."""
        self.granted = min(self.granted, max(self._prompt, self.asked))

    @exclusive
    def _grow(self, n: int) -> None:
        cache = self.cache
        cache.sync()
        self.checkpoint()
        here, longest = len(self.ledger), cache.max_sequence_tokens
        wanted = n + LOOKAHEAD_TOKENS
        if longest is not None:
            wanted = max(n, min(wanted, longest - here))
        if not cache.allocator.certainly_fits(wanted, self):
            # Reading the cells is slow, so a read grants more than ``n``; not all that are free,
            # because the next lease would take them back.
            spare = max(0, -cache.allocator.shortage(n, self))
            wanted = min(wanted, n + spare // len(cache.leases))
        cache.allocator.make_cells(wanted, self)
        self.granted = max(self.granted, here + wanted)
        cache.enforce(n)

    def sync_node(self) -> None:
        """Move to the node of the sequence's present last token."""
        ledger, branches = self.ledger, self.cache.branches
        count = len(ledger) if self.sequence.open else 0
        seen = (count, ledger.next, ledger.marks[-1] if count else -1, ledger.moved)
        if seen == self._seen:
            return
        self._seen = seen
        # Shifted tokens, or tokens with a gap, are not a prefix of a prompt.
        self._whole = self.sequence.open and ledger.next == count and not ledger.moved
        before = self.node
        self.node = branches.tree.insert(
            tokens_to_key(ledger.tokens) if self._whole and count else b"", self.salt
        )
        if self.node is not before:
            branches.lease(self.node, self)
            branches.unlease(before, self)
            branches.tidy(before)
        branches.tidy(self.node)

    def park(self) -> ParkedPrefix:
        """Release the sequence; its branch is paged out if others need cells, and never dropped.

        Raises UsageError if it was released.
        """
        if self.released:
            raise UsageError(PARKED_LATE)
        parked: ParkedPrefix | None = None
        try:
            with self.cache.context.lock, Uninterrupted():
                self.cache.sync()
                parked = ParkedPrefix(self.cache, self.node, self.salt, self._groups, self.points)
                self.release()
        except BaseException:
            if parked is not None:
                parked.close()
            raise
        self.cache.counts.add("parks")
        self.cache.counts.add("parked_tokens", self.node.end)
        return parked

    def release(self) -> None:
        """Release the sequence. Its tokens stay cached. A second call does nothing."""
        if not (self.cache.closed or self.cache.context.closed or self.released):
            self._release()

    @exclusive
    def _release(self) -> None:
        cache = self.cache
        cache.note_emptied()
        self.sync_node()
        branches, node = cache.branches, self.node
        cache.counts.add("evaluated_tokens", self.evaluated)
        cache.leases.remove(self)
        branches.unlease(node, self)
        # Another branch may have decoded the same tokens; a longer one contains these too.
        if node.parent is None or not self._whole or branches.has(node):
            branches.close(self.sequence)
        else:
            branches.keep(node, self.sequence)
        branches.tree.touch(node)
        branches.tidy(node)
        cache.enforce(0)

    def __repr__(self) -> str:
        state = "released" if self.released else f"sequence {self.sequence.id}"
        return f"<PrefixLease {state}, {self.cached} cached, {len(self.rest)} to decode>"


class ParkedPrefix(NotCopied):
    """A branch of a prefix cache that is kept for a lease. `PrefixLease.park` creates it."""

    def __init__(
        self,
        cache: PrefixCache,
        node: Node,
        salt: bytes,
        groups: tuple[Group, ...],
        points: StatePoints | None,
    ) -> None:
        self.cache = cache
        self.key, self.salt = node.key, salt
        self.groups, self.points = groups, points
        self.closed = False
        #: The node that has the tokens; None: nothing was decoded.
        self.node = node if node.parent is not None else None
        if self.node is not None:
            self.node.park()

    def resume(self, tokens: Iterable[int]) -> PrefixLease:
        """Return a lease for the parked tokens and at least one more: see `Parked.resume`."""
        return self.cache.resume(self, tokens)

    def close(self) -> None:
        """Allow the eviction of the branch. A second call does nothing."""
        if not self.closed:
            if self.node is not None and not (self.cache.closed or self.cache.context.closed):
                self._unpark(self.node)
            self.closed = True

    @exclusive
    def _unpark(self, node: Node) -> None:
        self.cache.branches.unpark(node)
        self.cache.enforce(0)
