"""Cache decoded prefixes, and start each prompt after its longest cached prefix.

`PrefixCache` serves one or many conversations. It stores a tree of token runs over the sequences of
a context. A prompt gets a sequence with the longest prefix that any of them has.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.cache import defrag_retry, eviction_policy, prefix_states, residency
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.allocation import Allocator, cell_stats
from pyllamakv.cache.directory_tier import DirectoryTier
from pyllamakv.cache.interface import salt_digest
from pyllamakv.cache.lease import ParkedPrefix, PrefixLease, exclusive
from pyllamakv.cache.prefix_states import PrefillBackups
from pyllamakv.cache.radix_tree import TOKEN_BYTES, key_to_tokens
from pyllamakv.cache.reuse_counts import DepthCounts
from pyllamakv.cache.tier import host_bytes, page_tier
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    BudgetTooSmall,
    Closed,
    NoSlotAvailable,
    PagingError,
    PromptTooLong,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.batch import as_int32, first_out_of_range
from pyllamakv.runtime.context import Context

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from pyllamakv.cache.checkpoints import CheckpointSchedule
    from pyllamakv.cache.eviction_policy import EvictionPolicyName
    from pyllamakv.cache.radix_tree import Node

LOG = logging.getLogger("pyllamakv.cache")


class PrefixCache(ClosedOnExit):
    """Manage the sequences of a context as branches of a prefix tree, in one thread at a time.

    A second thread gets Busy, with nothing changed.

    ``entries`` is the maximum number of sequences (None: all; 1: each prompt truncates and reuses
    the only one). ``budget`` limits the bytes of resident and paged branches, and those of the
    store. ``paging`` is the storage of evicted branches: at most this number of bytes of host
    memory, "memory" without a limit, or a directory; 0 drops them, except states. None: 1 GiB per
    cache, or the ``store`` if evictions write to it. That is a directory that keeps decoded
    prefixes for later processes: `flush`, `close` and evictions write to it; with ``paging`` as
    well, it is read if no page has the prefix. A store is of one model, which the digest of its
    files identifies; with ``accept_unverified_model``, a store of an unverified model, or of an
    earlier version, is used as well, and by a model that cannot be verified. With
    ``store_read_only``, another process may write to the store, and nothing is written here. Raises
    PrefixStoreError, or a subclass that names the reason, and ModelUnverified. ``policy`` selects
    what is evicted first: "adaptive" or "lru" (docs/prefix-cache.md). Saved states are evicted by
    their own value.

    A memory that cannot return to every position continues after saved states. ``checkpoints``
    defines their interval, their number and their bytes in all, which ``paging`` does not increase;
    without ``paging`` and ``store``, they are in host memory. None: every 512 tokens, up to 1 GiB.
    """

    def __init__(
        self,
        context: Context,
        *,
        entries: int | None = None,
        budget: int | None = None,
        paging: int | str | PathLike[str] | None = None,
        store: str | PathLike[str] | None = None,
        checkpoints: CheckpointSchedule | None = None,
        policy: EvictionPolicyName = eviction_policy.DEFAULT,
        accept_unverified_model: bool = False,
        store_read_only: bool = False,
    ) -> None:
        arguments.instance("context", context, Context, "a Context")
        accept = arguments.flag("accept_unverified_model", accept_unverified_model)
        reads = arguments.flag("store_read_only", store_read_only)
        if reads and store is None:
            raise UsageError("store_read_only=True needs store=, the directory of a store")
        policy = eviction_policy.checked(policy)
        entries = arguments.whole_or_none("entries", entries)
        budget = arguments.whole_or_none("budget", budget, 0)
        most = context.info.n_seq_max
        if entries is not None and not 1 <= entries <= most:
            msg = f"entries must be 1 to {most} (n_seq_max), not {arguments.shown(entries)}"
            raise UsageError(msg)
        self.context = context
        schedule = prefix_states.checked_schedule(checkpoints)
        keep = None if store is None or reads else self._store_branch
        self.policy = policy
        ranks = eviction_policy.make(policy)
        kind = residency.kind_of(context)
        host = host_bytes(paging, stored=store is not None and not reads)
        self.branches = kind(
            context, entries or most, page_tier(paging), schedule, keep, ranks, host
        )
        self.budget = budget
        self._pins: dict[str, Node] = {}
        self._emptyings = context.decoder.emptyings
        self.closed = False
        self.counts = PrefixCounts()
        #: Number of hits by the depth of the prefix.
        self.depths = DepthCounts()
        self.stored: DirectoryTier | None = None
        try:
            self.check_budget(1)
            if store is not None:
                self.stored = DirectoryTier(
                    context, store, budget, accept_unverified_model=accept, read_only=reads
                )
        except BaseException:
            self.branches.pages.close()
            raise
        self.allocator = Allocator(context, self.branches, self.counts, self.stored)
        #: Maximum number of tokens of a sequence; None: no limit.
        self.max_sequence_tokens = self.allocator.max_sequence_tokens
        self.leases: list[PrefixLease] = self.allocator.leases
        #: The states of unfinished prompts, which are used after a cancel.
        self.backups: PrefillBackups = PrefillBackups(
            self.branches, lambda: self.leases, self.stored
        )
        context.keepers.add(self)

    # Prompts...

    def acquire(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        checkpoints: Iterable[int] = (),
        salt: str | None = None,
    ) -> PrefixLease:
        """Return a lease for a prompt, with its longest cached prefix.

        Only prompts with the same ``salt`` (None: none) share prefixes. At least one token is left
        to decode. The prefix does not end inside one of ``groups``, disjoint ranges of the prompt.
        ``checkpoints`` are lengths of the prompt after which a state is kept, if the memory cannot
        return there. Raises UsageError, PromptTooLong, BudgetTooSmall, NoSlotAvailable,
        KVCacheFull, or PagingError if a branch cannot be paged out; the cache is unchanged then.
        """
        key, secret = self.key(tokens), salt_digest(salt)
        prompt = len(key) // TOKEN_BYTES
        together = grouping.checked(groups, prompt, prompt)
        named = prefix_states.checked_positions(checkpoints, prompt)
        self.check_budget(prompt)
        lease: PrefixLease | None = None
        with self.context.lock:
            try:
                with Uninterrupted():
                    self.sync()
                    if self.stored is not None:
                        self.branches.load_stored(
                            self.stored, self.allocator, key, secret, together
                        )
                    diverging = self.branches.diverging(key, secret, self.leases)
                    sequence, cached = self.allocator.fork_longest_prefix(key, secret, together)
                    points = self.branches.points(prompt, cached, diverging, named, together)
                    lease = PrefixLease(self, sequence, key, secret, cached, points, together)
                    self._make_room(lease, prompt - cached)
            except BaseException:  # also Ctrl-C, so that the caller never gets the lease
                if lease is not None:
                    lease.release()
                raise
        self._count(prompt, cached)
        return lease

    @exclusive
    def cached_length(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        salt: str | None = None,
    ) -> int:
        """Return how many tokens of a prompt `acquire` finds in the cache; changes nothing.

        The store counts as far as it was read. Raises UsageError as `acquire` does.
        """
        key, secret = self.key(tokens), salt_digest(salt)
        prompt = len(key) // TOKEN_BYTES
        together = grouping.checked(groups, prompt, prompt)
        self.sync()
        return self.branches.longest_prefix(key, secret, together)[1]

    def _make_room(self, lease: PrefixLease, n: int) -> None:
        """Evict branches for ``n`` more tokens of a lease. Raises KVCacheFull."""
        self.allocator.make_cells(n, lease)
        self.enforce(n)

    def resume(self, parked: ParkedPrefix, tokens: Iterable[int]) -> PrefixLease:
        """Return a lease that continues a parked one, for `ParkedPrefix.resume`."""
        arguments.instance("parked", parked, ParkedPrefix, "a parked lease of this cache")
        if parked.cache is not self or parked.closed:
            msg = "this lease is not parked in this cache; acquire its tokens instead"
            raise UsageError(msg)
        key = self.key(tokens)
        if not key.startswith(parked.key) or len(key) == len(parked.key):
            msg = "the tokens do not continue the parked ones: give these and at least one more"
            raise UsageError(msg)
        salt, groups, points = parked.salt, parked.groups, parked.points
        lease: PrefixLease | None = None
        with self.context.lock:
            self._make_way(parked.node)
            try:
                with Uninterrupted():
                    self.sync()
                    diverging = self.branches.diverging(key, salt, self.leases)
                    sequence, cached = self.allocator.fork_longest_prefix(
                        key, salt, groups, parked.node
                    )
                    if points is not None:
                        for position in diverging:
                            points.add(position, cached)
                    lease = PrefixLease(self, sequence, key, salt, cached, points, groups)
                    self._make_room(lease, len(key) // TOKEN_BYTES - cached)
            except BaseException:
                if lease is not None:
                    lease.release()
                raise
            parked.close()
        self.counts.add("resumes")
        self.counts.add("resumed_tokens", cached)
        return lease

    @exclusive
    def _make_way(self, node: Node | None) -> None:
        """Make room for the pages of a branch, or raise KVCacheFull while others have leases."""
        if node is None or node.page is None or not self.leases:
            return
        if not self.branches.has(node) and not self.allocator.make_page_room(node):
            raise self.allocator.full(node.end)

    def _count(self, prompt: int, length: int) -> None:
        counts = self.counts
        counts.add("hits" if length else "misses")
        self.depths.add(length)
        counts.add("reused_tokens", length)
        counts.add("prompt_tokens", prompt)
        if LOG.isEnabledFor(logging.INFO):
            stats = self.stats()
            LOG.info(
                "%s: %d of %d tokens cached, %d to decode; %d branches, %d paged out, %d cells, "
                "%d bytes",
                *("hit" if length else "miss", length, prompt, prompt - length),
                *(stats.resident, stats.paged, stats.cells, stats.bytes),
            )

    @exclusive
    def sync(self) -> None:
        """Add the tokens decoded with leases since the last call to the tree."""
        self._check_open()
        for lease in self.leases:
            lease.sync_node()
        self.note_emptied()

    def note_emptied(self) -> None:
        """Forget what a cancelled decode has emptied, also sequences outside of its batch.

        The saved state of an unfinished prompt becomes a page. The caller holds the context's lock.
        """
        if self.context.decoder.emptyings == self._emptyings:
            return
        self._emptyings = self.context.decoder.emptyings
        self.branches.forget_emptied()
        self.backups.keep_emptied()

    # The store...

    def flush(self) -> int:
        """Write all decoded tokens to the store, also those of leases; return the number of new.

        After it returns, a later process can reuse them, even if this one is killed. Raises
        UsageError without a store and with one that is only read, PrefixStoreFull,
        PrefixStoreError, or BudgetTooSmall if a branch alone exceeds the budget; the store keeps
        its complete pages then.
        """
        self._check_open()
        with self.context.lock:
            self.sync()
            if self.stored is None:
                msg = "this cache has no store; create it with store=PATH"
                raise UsageError(msg)
            return self.stored.flush(self.branches)

    def _store_branch(self, node: Node) -> None:
        if self.stored is not None:
            self.stored.keep(node.key, node.salt, node.entry)

    # What stays...

    def pin(self, name: str, tokens: Iterable[int], *, salt: str | None = None) -> None:
        """Protect a cached prefix from eviction until `unpin`; it may be paged out.

        ``salt`` is that of its prompt. A name that is pinned already moves. If the memory kept no
        state after the prefix, the tokens since the last state are evaluated again, as those of a
        prompt. Raises UsageError if it is not cached, and as `acquire` and `PrefixLease.prefill`
        do.
        """
        arguments.text("name", name)
        key, secret = self.key(tokens), salt_digest(salt)
        try:
            self._pin(name, key, secret)
        except Unsupported:
            try:
                lease = self.acquire(key_to_tokens(key), salt=salt)
            except NoSlotAvailable as error:
                n = len(key) // TOKEN_BYTES
                msg = (
                    f"no sequence is free to evaluate the {n} tokens of this pin again: release a "
                    f"lease, or give their prompt checkpoints=[{n}], so that their state is kept"
                )
                raise NoSlotAvailable(msg, slots=error.slots) from error
            with lease:
                lease.prefill(logits=False)
            self._pin(name, key, secret)

    @exclusive
    def _pin(self, name: str, key: bytes, secret: bytes) -> None:
        """Pin a prefix. Raises Unsupported if the memory has no state after it."""
        self.sync()
        branches = self.branches
        node, length = branches.tree.match(key, secret)
        if length * TOKEN_BYTES < len(key):
            cached = f"{length} of {len(key) // TOKEN_BYTES}"
            msg = f"only {cached} tokens are in the cache; decode the others first"
            raise UsageError(msg)
        if not branches.resumes(node, length):
            self.allocator.pin_state(node, length)
        self._drop_pin(name)
        node = branches.tree.insert(key, secret)
        node.pins.add(name)
        self._pins[name] = node
        self.enforce(0)

    @property
    def pins(self) -> dict[str, Node]:
        """The pinned nodes by name, without those that lost their content."""
        return {name: node for name, node in self._pins.items() if name in node.pins}

    @exclusive
    def unpin(self, name: str, *, missing_ok: bool = False) -> None:
        """Allow the eviction of a pinned prefix. Raises UsageError if it is not pinned."""
        arguments.text("name", name)
        missing_ok = arguments.flag("missing_ok", missing_ok)
        if name not in self.pins and not missing_ok:
            msg = (
                f"nothing is pinned as {arguments.shown(name)}; pinned are: "
                f"{', '.join(self.pins) or 'none'}"
            )
            raise UsageError(msg)
        self._drop_pin(name)
        self.enforce(0)

    def _drop_pin(self, name: str) -> None:
        node = self._pins.pop(name, None)
        if node is not None:
            node.pins.discard(name)
            self.branches.drop_unneeded_pages(node)

    @exclusive
    def page_out(self, tokens: Iterable[int], *, salt: str | None = None) -> None:
        """Page the branch of these tokens, and of a salt, out.

        Raises UsageError if it is not cached, is leased, or is part of a branch. Raises PagingError
        with the cache unchanged.
        """
        node = self._branch(tokens, salt)
        if self.branches.tier is None:
            msg = "this cache has no paging; create it with paging=BYTES, 'memory' or a folder"
            raise UsageError(msg)
        if node.page is None or node.entry is not None:
            if not self.branches.removable(node, frees_id=True):
                msg = f"{node} cannot be paged out: it is leased, or has children"
                raise UsageError(msg)
            if self.branches.storage(node) is None:
                raise self.branches.too_large(node, self.branches.page_bytes(node))
            self.allocator.evict(node)
            self.enforce(0)

    @exclusive
    def page_in(self, tokens: Iterable[int], *, salt: str | None = None) -> None:
        """Page the branch of these tokens, and of a salt, in.

        Raises PagingError with the cache unchanged.
        """
        node = self._branch(tokens, salt)
        # A branch of a memory that cannot be trimmed may have both.
        if node.page is not None and node.entry is None:
            if not self.allocator.make_page_room(node):
                msg = (
                    f"no free cells for a branch of {node.end} tokens: release leases or unpin "
                    f"others"
                )
                raise PagingError(msg)
            self.branches.page_in(node)
            self.counts.add("paged_in")
            self.counts.add("evictions", self.branches.drop_surplus())

    def _branch(self, tokens: Iterable[int], salt: str | None) -> Node:
        key, secret = self.key(tokens), salt_digest(salt)
        self.sync()
        node, length = self.branches.tree.match(key, secret)
        if length * TOKEN_BYTES < len(key) or length < node.end:
            msg = f"no branch has just these {len(key) // TOKEN_BYTES} tokens"
            raise UsageError(msg)
        return node

    @exclusive
    def relieve(self) -> bool:
        """Free cells after a decode found none: see `CacheManager.relieve`.

        Evicts the tokens that the policy chooses, else copies cells of a sliding window.
        """
        self.sync()
        node = self.allocator.next_evicted((), frees_id=False)
        if node is None:
            leased = (lease.sequence for lease in self.leases)
            return defrag_retry.copy_shared_window(self.context, leased)
        try:
            self.allocator.evict(node)
        except PagingError as error:
            LOG.warning("%s", error)
            return False
        self.enforce(0)
        return True

    @exclusive
    def evict(self) -> bool:
        """Drop the tokens that the policy chooses. Returns False if all are leased or pinned."""
        self.sync()
        node = self.branches.next_dropped(self.leases)
        if node is not None:
            self.branches.drop(node)
            self.counts.add("evictions")
        return node is not None

    @exclusive
    def clear(self) -> None:
        """Drop all branches that are neither leased nor pinned."""
        while self.evict():
            pass

    # A change of the adapters, for `Context.set_adapters`...

    def droppable_sequences(self) -> set[int]:
        """Return the ids of all sequences; UsageError if a branch must stay, or with a store."""
        if self.closed:
            return set()
        self.sync()
        if self.stored is not None:
            msg = (
                "a prefix store keeps K and V of one choice of adapters: close the prefix cache "
                "first, and use another directory with other adapters"
            )
            raise UsageError(msg)
        if self.leases or any(node.protected for node in self.branches.tree.walk()):
            msg = "the prefix cache has leases or pinned prefixes: release and unpin them first"
            raise UsageError(msg)
        return {each.id for each in self.branches.sequences()}

    def drop_prefixes(self) -> None:
        """Drop all branches."""
        if not self.closed:
            self.clear()

    # Itself...

    def check_budget(self, tokens: int) -> None:
        """Raise BudgetTooSmall if this number of tokens alone exceeds the budget."""
        tokens = arguments.integer("tokens", tokens, 0)
        needed = self.branches.bytes_of(tokens)
        if self.budget is not None and needed > self.budget:
            msg = (
                f"{tokens} tokens take {needed} bytes and the budget is {self.budget}; increase "
                f"the budget, or "
                "use smaller cache types"
            )
            raise BudgetTooSmall(msg, needed=needed, budget=self.budget)

    def enforce(self, tokens: int) -> None:
        """Evict branches that would exceed the budget after this number of further tokens."""
        tokens = arguments.integer("tokens", tokens, 0)
        branches, budget = self.branches, self.budget
        while budget is not None and (short := self.size + branches.bytes_of(tokens) - budget) > 0:
            node = branches.next_dropped(self.leases)
            if node is None:
                break
            branches.drop_tail(node, -(-short // max(1, branches.cell_bytes)))
            self.counts.add("evictions")
        self.counts.add("evictions", branches.drop_surplus())

    @property
    def size(self) -> int:
        """Return the bytes of all branches, resident and paged."""
        return self.branches.resident_bytes + self.branches.pages.size

    def key(self, tokens: Iterable[int]) -> bytes:
        """Check tokens and return them as a key of the tree."""
        self._check_open()
        numbers = as_int32(tokens, "tokens")
        if not len(numbers):
            msg = "expected a prompt of at least one token; an empty one has nothing to decode"
            raise UsageError(msg)
        bad = first_out_of_range(numbers, self.context.n_vocab)
        if bad is not None:
            msg = (
                f"token {bad} is out of range: this model has tokens 0..{self.context.n_vocab - 1}"
            )
            raise UsageError(msg)
        longest = self.max_sequence_tokens
        if longest is not None and len(numbers) > longest:
            msg = (
                f"the prompt has {len(numbers)} tokens, and a sequence at most {longest}: shorten "
                "it, or create the context with more"
            )
            raise PromptTooLong(msg, needed=len(numbers), available=longest)
        return numbers.tobytes()

    def stats(self) -> PrefixStats:
        """Return the statistics and totals."""
        return measure(self)

    def dump(self) -> str:
        """Return the tree as text, one line per node."""
        return draw(self)

    def check(self) -> None:
        """Raise AssertionError with the invariant that does not hold."""
        check(self)

    def _check_open(self) -> None:
        self.context.check()
        if self.closed:
            msg = "this cache was closed; create a new one"
            raise Closed(msg)

    def close(self) -> None:
        """Flush, and close the sequences, also leased ones. A second call does nothing.

        Raises the errors of `flush` after everything was closed, and Busy with nothing closed while
        another thread uses the context.
        """
        with ExitStack() as stack:
            with suppress(Closed):
                stack.enter_context(self.context.lock)
            self._close()

    def _close(self) -> None:
        if self.closed:
            return
        try:
            # A worker that has ended has nothing to write.
            with suppress(WorkerDied):
                stored = self.stored
                if stored is not None and not stored.read_only and not self.context.closed:
                    self.flush()
        finally:
            with Uninterrupted():
                self.closed = True
                if self.stored is not None:
                    self.stored.close()
                for sequence in list(self.branches.sequences()):
                    sequence.close()
                self.branches.pages.close()

    def __enter__(self) -> PrefixCache:
        self._check_open()
        return self

    def __repr__(self) -> str:
        return f"<PrefixCache {'closed' if self.closed else self.stats()}>"


#: Counters that change with each event.
COUNTED = (
    *("hits", "misses", "reused_tokens", "prompt_tokens", "evaluated_tokens"),
    *("evictions", "paged_out", "paged_in", "damaged"),
    *("parks", "resumes", "parked_tokens", "resumed_tokens"),
)


class PrefixCounts(dict[str, int]):
    """The totals of a prefix cache, by the names in `COUNTED`."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTED, 0))

    def add(self, name: str, n: int = 1) -> None:
        """Count something that happened ``n`` times."""
        self[name] += n


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The statistics of a prefix cache.

    ``resident`` branches have a sequence, ``paged`` ones are stored outside of the cache, and
    ``leased`` sequences are in use. ``tokens`` are in the tree, and ``cells`` of them in the cache,
    each counted once. ``reused_tokens`` of all ``prompt_tokens`` were cached; ``evaluated_tokens``
    of prompts and text were decoded. ``evictions`` counts dropped branches, and ``damaged`` pages
    that could not be read, or were removed when the store was opened. ``stored_tokens`` were
    written to the store and ``loaded_tokens`` read from it; it has ``stored_pages`` of
    ``stored_bytes``. Leases were parked ``parks`` times.
    ``hits_by_depth`` counts prompts by the number of their cached tokens (see `DepthCounts`),
    ``bytes_by_tier`` the bytes in cells and states, in host memory and in files, also of the store.
    ``bytes`` are those of branches, pages, and states saved for unfinished prompts.
    ``digest_bytes`` are for the digests of evicted blocks, in addition.
    """

    resident: int
    paged: int
    leased: int
    pinned: int
    nodes: int
    tokens: int
    cells: int
    resident_bytes: int
    paged_bytes: int
    bytes: int
    budget_bytes: int | None
    hits: int
    misses: int
    reused_tokens: int
    prompt_tokens: int
    evictions: int
    paged_out: int
    paged_in: int
    damaged: int
    stored_tokens: int
    loaded_tokens: int
    stored_pages: int
    stored_bytes: int
    evaluated_tokens: int
    evicted_tokens: int
    paged_out_tokens: int
    paged_in_tokens: int
    parks: int
    resumes: int
    parked_tokens: int
    resumed_tokens: int
    hits_by_depth: dict[str, int]
    bytes_by_tier: dict[str, int]
    digest_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)


def measure(cache: PrefixCache) -> PrefixStats:
    """Return the statistics of a cache."""
    branches = cache.branches
    tree = branches.tree
    resident, pages, stored = branches.resident_bytes, branches.pages, cache.stored
    counts = PrefixCounts()
    counts.update(cache.counts)
    counts.add("evictions", cache.backups.evicted)
    for lease in cache.leases:
        counts.add("evaluated_tokens", lease.evaluated)
    by_tier = {"cells": resident, "memory": 0, "files": 0}
    by_tier[pages.place] += pages.size
    backups = cache.backups.size
    by_tier["memory"] += backups
    if stored is not None:
        by_tier[stored.place] += stored.size
        counts.add("damaged", stored.damaged)
    return PrefixStats(
        resident=branches.taken - len(cache.leases),
        paged=pages.count,
        leased=len(cache.leases),
        pinned=len(cache.pins),
        nodes=tree.nodes,
        tokens=tree.tokens,
        cells=branches.cells,
        resident_bytes=resident,
        paged_bytes=pages.size,
        bytes=resident + pages.size + backups,
        budget_bytes=cache.budget,
        stored_tokens=stored.stored_tokens if stored else 0,
        loaded_tokens=stored.loaded_tokens if stored else 0,
        stored_pages=stored.count if stored else 0,
        stored_bytes=stored.size if stored else 0,
        evicted_tokens=branches.evicted_tokens,
        paged_out_tokens=branches.paged_out_tokens,
        paged_in_tokens=branches.paged_in_tokens,
        hits_by_depth=dict(cache.depths),
        bytes_by_tier=by_tier,
        digest_bytes=tree.policy.digest_bytes,
        **counts,
    )


def draw(cache: PrefixCache) -> str:
    """Return the tree as text: positions, owners of each node, last use."""
    lines = [repr(cache.stats())]
    waiting: list[tuple[Node, int]] = [(cache.branches.tree.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if node.parent is not None:
            lines.append("  " * depth + " ".join(_facts(node)))
        children = sorted(node.children.items(), reverse=True)
        waiting += [(child, depth + 1) for _, child in children]
    return "\n".join(lines)


def _facts(node: Node) -> list[str]:
    facts = [f"{node.start}..{node.end}"]
    if node.salt and not node.start:
        facts.append(f"salt {node.salt.hex()[:8]}")
    if node.entry is not None:
        facts.append(f"sequence {node.entry.id}")
    facts += [f"leased {lease.sequence.id}" for lease in node.leases]
    if node.page is not None:
        facts.append(f"page {node.page.start}..{node.page.end}")
    facts += [f"pinned {name}" for name in sorted(node.pins)]
    facts += [f"parked {node.parked}"] if node.parked else []
    return [*facts, f"used {node.last_used}"]


def check(cache: PrefixCache) -> None:
    """Raise AssertionError with the broken invariant, which is a defect of this package."""
    cache.sync()
    branches = cache.branches
    tree = branches.tree
    tree.check()
    nodes = list(tree.walk())
    for node in nodes:
        branches.check(node)
    sequences = list(branches.sequences())
    assert branches.taken == len(sequences), f"{len(sequences)} sequences, {branches.taken} counted"
    assert len({each.id for each in sequences}) == len(sequences), "a sequence is at two nodes"
    pages = {id(node.page): node.page for node in nodes if node.page is not None}
    size, counted = sum(page.size for page in pages.values()), branches.pages.size
    assert counted == size, f"pages of {size} bytes, {counted} counted"
    pinned = {name: node for node in nodes for name in node.pins}
    assert pinned == cache.pins, f"pinned are {pinned}, not {cache.pins}"
    _check_cells(cache)


def _check_cells(cache: PrefixCache) -> None:
    branches, context = cache.branches, cache.context
    stats = cell_stats(context)
    if cache.leases or stats is None:
        return
    ours = {each.id for each in branches.sequences()}
    if {i for i, ledger in enumerate(context.ledgers) if len(ledger)} <= ours:
        branches.check_cells(stats.used)
