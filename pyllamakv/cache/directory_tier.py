"""Write the branches of a prefix cache to a store, and load stored prefixes into the cache.

`tier` states when that happens. `prefix_store` has the files.
K and V of an attention cache are cut into pages of tokens, so that prompts share the pages of their
common prefix. Other memories (windows, states) are stored as whole sequences.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from pyllamakv.binding.protocol import Capability
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.prefix_store import PAGE_TOKENS, UNVERIFIED, PrefixStore, StoredPrefix
from pyllamakv.cache.radix_tree import TOKEN_BYTES, tokens_to_key
from pyllamakv.cache.residency import shares_cells, stores_parts
from pyllamakv.errors import (
    BudgetTooSmall,
    ModelUnverified,
    NativeError,
    PartialRemovalRefused,
    PrefixStoreBusy,
    PrefixStoreDamaged,
    PrefixStoreError,
    PrefixStoreFull,
    StateError,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime import adapter, state, state_slices

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pyllamakv.cache.allocation import Allocator
    from pyllamakv.cache.prefix_store import StoredPage
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.cache.residency import Residency
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context

LOG = logging.getLogger("pyllamakv.cache")

A = TypeVar("A")
B = TypeVar("B")
#: Number of threads that read pages.
READERS: Final = 2
#: Number of unfinished prompts whose stored state is removed once they are complete.
MAX_BACKUPS: Final = 64


def identity(context: Context, *, accept_unverified_model: bool = False) -> dict[str, str]:
    """Return what stored pages depend on, as named strings.

    The model and the adapters are identified by digests of their files, the build by its release
    and backend: the patches change no byte of a state. Numbers of cells, batches and threads do not
    matter. Raises ModelUnverified, unless an unverified model is accepted.
    """
    model, info = context.model, context.info
    try:
        digest = model.digest()
    except ModelUnverified:
        if not accept_unverified_model:
            raise
        digest = UNVERIFIED
    found = {
        "model": digest,
        "build": _build(context.native.about.variant),
        "memory": info.memory.name,
        "streams": str(info.n_streams),
        "window": f"{info.n_swa}, full" if context.params.swa_full else str(info.n_swa),
        "byte order": sys.byteorder,
    }
    # Models with two sets of RoPE factors choose one by the size of a sequence (Phi-3, MiniCPM).
    trained = model.meta(f"{model.file.architecture}.rope.scaling.original_context_length")
    if trained is not None:
        found["cells"] = f"{info.n_ctx} for {info.n_seq_max} sequences"
    applied = adapter.digest(tuple(context.adapters.items()))
    found |= {"adapters": applied} if applied else {}
    shape = state.shape(model, context.params, info)
    return found | {name: str(value) for name, value in shape.items()}


def _build(variant: str) -> str:
    """Return release and backend of a variant: its name without stock or patched, and digest."""
    parts = variant.rsplit("-", 3)
    return f"{parts[0]}-{parts[2]}" if len(parts) == 4 else variant


class DirectoryTier:
    """Keep prefixes in a directory, as a `PrefixTier`. Raises the errors of `PrefixStore`."""

    place: Final = "files"

    def __init__(
        self,
        context: Context,
        path: str | os.PathLike[str],
        budget: int | None = None,
        *,
        accept_unverified_model: bool = False,
        read_only: bool = False,
    ) -> None:
        context.native.about.require(Capability.STATES, "save the state of a sequence")
        self.context = context
        accept = accept_unverified_model
        needed = identity(context, accept_unverified_model=accept)
        self.store = PrefixStore(
            path, needed, budget=budget, accept_unverified_model=accept, read_only=read_only
        )
        for file, why in self.store.removed.items():
            LOG.warning("%s was removed: %s", file, why)
        if self.store.stuck is not None:
            LOG.warning("an unusable file remains: %s", self.store.stuck)
        #: The stored states of unfinished prompts, by the prompt and its salt.
        self._backups: dict[tuple[bytes, bytes], StoredPage] = {}
        #: Totals, as in `PrefixStats`.
        self.stored_tokens = self.loaded_tokens = 0
        self.damaged = len(self.store.removed)
        #: Whether states are cut into pages; False once a state has more than one cache.
        self.cuts = stores_parts(context)

    @property
    def read_only(self) -> bool:
        """Return whether nothing is written."""
        return self.store.read_only

    @property
    def size(self) -> int:
        """Return the bytes of all pages."""
        return self.store.size

    @property
    def count(self) -> int:
        """Return the number of pages."""
        return len(self.store.pages)

    def close(self) -> None:
        """Release the lock of the store. A second call does nothing."""
        self.store.close()

    # Writing...

    def flush(self, branches: Residency) -> int:
        """Write all decoded tokens that are not stored; return their number.

        The branch used last is written last. If a branch exceeds the budget alone, or one of its
        files cannot be written, the error is raised after the others were written; that of a full
        disk is raised at once. Raises UsageError if the store is only read.
        """
        self.store.check_owned()
        late: BudgetTooSmall | PrefixStoreError | None = None
        count = 0
        for node, sequence in sorted(_sequences(branches), key=lambda found: found[0].last_used):
            try:
                count += self.write(node.key, node.salt, sequence)
            except (PrefixStoreFull, PrefixStoreBusy):
                raise
            except (BudgetTooSmall, PrefixStoreError) as error:
                late = late or error
        self.store.sync()
        if late is not None:
            raise late
        self.stored_tokens += count
        return count

    def keep(self, key: bytes, salt: bytes, sequence: runtime.Sequence) -> None:
        """Write a sequence that is about to be closed.

        A failure is logged: the cache needs the room, and the tokens can be decoded again. Nothing
        is written to a store that is only read.
        """
        if self.read_only:
            return
        try:
            self.stored_tokens += self.write(key, salt, sequence)
        except WorkerDied:
            raise
        except (NativeError, Unsupported, UsageError, PrefixStoreError, MemoryError) as error:
            LOG.warning("%d tokens are not stored: %s", len(key) // TOKEN_BYTES, error)

    def replace_backup(self, prompt: bytes, salt: bytes, saved: bytes) -> None:
        """Write the saved state of an unfinished prompt in place of its former one; empty: none.

        A failure is logged, and the former one stays. States that were stored otherwise are never
        removed.
        """
        if self.read_only or not self.store.owned:
            return
        if saved:
            content = state.unpack(saved)
            key = content.tokens.tobytes()
            known = self.store.find(key, salt, len(key) // TOKEN_BYTES, exact=True)
            if known.length * TOKEN_BYTES == len(key):
                self.store.touch(known.pages)
                return
            try:
                page = self.store.add("state", salt, None, 0, key, content.raw)
            except (BudgetTooSmall, PrefixStoreError) as error:
                LOG.warning("%d tokens are not stored: %s", len(key) // TOKEN_BYTES, error)
                return
            self.stored_tokens += len(content.tokens)
        former = self._backups.pop((prompt, salt), None)
        if former is not None:
            self.store.replace(former)
        if saved:
            if len(self._backups) >= MAX_BACKUPS:
                del self._backups[next(iter(self._backups))]  # its page stays, as others do
            self._backups[prompt, salt] = page

    def write(self, key: bytes, salt: bytes, sequence: runtime.Sequence) -> int:
        """Write the tokens of a sequence that are not stored; return their number."""
        self.store.check_owned()
        length = len(key) // TOKEN_BYTES
        parts = stores_parts(self.context)
        found = self.store.find(key, salt, length, exact=not parts)
        if not length or found.length == length:
            self.store.touch(found.pages)
            return 0
        with self.context.lock:
            raw = self.context.native.state_save(self.context.handle, sequence.id)
        if self.cuts:
            try:
                cells = state_slices.read(raw)
                return self._write_cells(key, salt, cells, found)
            except StateError as error:
                LOG.info("a state is stored as a whole: %s", error)
                self.cuts = False
        self.store.add("state", salt, None, 0, key, raw)
        for page in found.pages if parts else ():
            if page.kind == "state" and page.end == found.length:
                self.store.replace(page)
        return length - found.length

    def _write_cells(
        self, key: bytes, salt: bytes, cells: state_slices.CellState, found: StoredPrefix
    ) -> int:
        store, length = self.store, len(key) // TOKEN_BYTES
        order = np.argsort(cells.positions, kind="stable")
        if cells.positions[order].tolist() != list(range(length)):
            raise StateError("the cells of the sequence have other positions than its tokens")
        chain = list(found.pages)
        start, last = found.length, chain[-1] if chain else None
        if last is not None and last.end == start < last.start + PAGE_TOKENS:
            # The last page is not full: a longer one replaces it.
            start = last.start
            chain.pop()
        ranges = [(a, min(a + PAGE_TOKENS, length)) for a in range(start, length, PAGE_TOKENS)]
        new = sum(store.file_size(b - a, cells.size(b - a)) for a, b in ranges)
        store.check_budget(new + sum(page.size for page in chain))
        for first, end in ranges:
            content = cells.cut(order[first:end]).to_bytes()
            tokens = key[first * TOKEN_BYTES : end * TOKEN_BYTES]
            above = chain[-1] if chain else None
            chain.append(store.add("cells", salt, above, first, tokens, content, chain))
        if last is not None and last not in chain:
            store.replace(last)
        store.touch(chain)
        return length - found.length

    # Reading...

    def load(
        self,
        allocator: Allocator,
        key: bytes,
        salt: bytes,
        groups: Sequence[Group] = (),
        *,
        exact: bool = False,
    ) -> None:
        """Add the longest stored prefix of a prompt to the cache, if the cache has a shorter one.

        It does not end inside one of ``groups``. ``exact``: only whole sequences are used, of the
        store and of the cache. A damaged page is removed, and the prefix ends before it. Without
        room for the prefix, or if it cannot be read or restored, nothing changes.
        """
        if not self.store.owned:
            return
        try:
            self.store.refresh()
        except PrefixStoreError as error:
            LOG.warning("new pages of a store are not found: %s", error)
        limit = len(key) // TOKEN_BYTES - 1  # one token is left to decode
        while True:
            found = self.store.find(key, salt, limit, exact=exact)
            if grouping.around(groups, found.length):
                limit = grouping.floor(groups, found.length)
                continue
            if found.length <= _known(allocator.branches, key, salt, limit, exact=exact):
                return
            try:
                covered = self._make_room(allocator, key, salt, found)
                if covered is None:
                    return
                if any(page.name not in self.store.pages for page in found.pages):
                    continue  # branches evicted for it took its place in the budget of the store
                self.loaded_tokens += self._restore(allocator, key, salt, found, covered)
                return
            except PrefixStoreDamaged as error:
                gone = error.path is not None and not error.path.exists()
                if self.read_only and gone:
                    LOG.info("%s: its writer has removed it", error)
                else:
                    LOG.warning("%s; it is not used, nor the pages that follow it", error)
                    self.damaged += 1
                self.store.discard(
                    next(page for page in found.pages if self.store.path(page) == error.path)
                )
            except WorkerDied:
                raise
            except PartialRemovalRefused as error:
                LOG.info("a stored sequence is not used in part: %s", error)
                exact = True
            except (
                NativeError, Unsupported, UsageError, PrefixStoreError, MemoryError,
            ) as error:  # fmt: skip
                LOG.warning("a stored prefix of %d tokens is not used: %s", found.length, error)
                return

    def _restore(
        self, allocator: Allocator, key: bytes, salt: bytes, found: StoredPrefix, covered: int
    ) -> int:
        """Restore a prefix into a new branch, whose first ``covered`` tokens the cache has."""
        branches, length = allocator.branches, found.length
        sequence = branches.new()
        try:
            if found.pages[0].kind == "state":
                self._restore_state(sequence, found.pages[0])
                sequence.trim(length)
            else:
                self._restore_cells(sequence, key, found, covered)
            node = _resident(branches, key[: covered * TOKEN_BYTES], salt)[0]
            if covered:
                sequence.share(branches.source(node), 0, covered)
            assert tokens_to_key(sequence.tokens) == key[: length * TOKEN_BYTES]
        except BaseException:
            branches.close(sequence)
            raise
        node = branches.tree.insert(key[: length * TOKEN_BYTES], salt)
        branches.keep(node, sequence)
        branches.tree.touch(node)
        branches.tidy(node)
        self.store.touch(found.pages)
        return length - covered

    def _restore_state(self, sequence: runtime.Sequence, page: StoredPage) -> None:
        """Restore a whole sequence."""
        raw = self.store.read(page)
        state.load(sequence, self._saved(page.tokens, 0, raw))

    def _restore_cells(
        self, sequence: runtime.Sequence, key: bytes, found: StoredPrefix, covered: int
    ) -> None:
        """Restore the positions from ``covered`` on. The next pages are read meanwhile."""
        ranges = (found.used_range(index) for index in range(len(found.pages)))
        wanted = [
            (page, slice(max(begin, covered) - page.start, end - page.start))
            for page, (begin, end) in zip(found.pages, ranges, strict=True)
            if end > covered
        ]
        context, tokens = self.context, key[covered * TOKEN_BYTES : found.length * TOKEN_BYTES]
        if len(wanted) == 1 or not context.vacant or not shares_cells(context):
            raw = state_slices.join(list(read_ahead(self._read_cells, wanted)))
            state.load(sequence, self._saved(tokens, covered, raw))
            return
        # Nothing is joined, and only the next pages are in memory.
        with (
            context.sequence() as spare,
            closing(read_ahead(lambda each: self._read_cells(each).to_bytes(), wanted)) as parts,
        ):
            state.load_parts(sequence, spare, self._saved(tokens, covered), parts)

    def _saved(
        self, tokens: bytes, start: int, raw: bytes | memoryview = b""
    ) -> state.SavedSequence:
        numbers = np.frombuffer(tokens, np.int32)
        positions = np.arange(start, start + len(numbers), dtype=np.int32)
        return state.SavedSequence(numbers, positions, raw)

    def _read_cells(self, wanted: tuple[StoredPage, slice]) -> state_slices.CellState:
        """Return some cells of a page."""
        page, cells = wanted
        content = self.store.read(page)
        try:
            return state_slices.read(content).cut(cells)
        except StateError as error:
            msg = f"the page {page.name} has no state of cells: {error}"
            raise PrefixStoreDamaged(msg, self.store.path(page)) from error

    def _make_room(
        self, allocator: Allocator, key: bytes, salt: bytes, found: StoredPrefix
    ) -> int | None:
        """Free a sequence and cells; return how many tokens the cache has then, None without room.

        The room is for the whole prompt, so that a prompt that is refused evicts nothing. The
        resident part of the prefix is kept if possible, and given up otherwise: the store has it.
        """
        branches = allocator.branches
        cells = found.pages[0].kind == "cells"
        end, at = branches.tree.match(key[: found.length * TOKEN_BYTES], salt)
        # A state between a prefix and other branches stays there, and the prompt gets a copy.
        copied = at == found.length and (end.end > at or end.children or end.pins)
        # With one sequence, it can only take the place of those branches.
        sequences = min(2 if copied else 1, branches.limit)
        n = len(key) // TOKEN_BYTES if cells else max(len(key) // TOKEN_BYTES, found.pages[0].end)
        for keeps in (True, False):
            covered = -1
            while True:
                node, known = _resident(branches, key, salt)
                before = covered
                covered = min(branches.shareable(known), found.length - 1) if cells else 0
                if covered == before:
                    return covered
                kept = node.path if keeps else []
                if not allocator.make_sequence_room(sequences, n - covered, kept):
                    break
        return None


def _sequences(branches: Residency) -> Iterator[tuple[Node, runtime.Sequence]]:
    """Yield the sequences of entries and leases whose tokens are those of their node."""
    for node in branches.tree.walk():
        if node.entry is not None:
            yield node, node.entry
        for lease in node.leases:
            if tokens_to_key(lease.ledger.tokens) == node.key:
                yield node, lease.sequence


def _resident(branches: Residency, key: bytes, salt: bytes) -> tuple[Node, int]:
    """Return the longest prefix of a key that sequences have, without pages of parked leases."""
    node, length = branches.tree.match(key, salt)
    while node.parent is not None and not node.ref_count:
        node = node.parent
        length = node.end
    return node, length


def _known(branches: Residency, key: bytes, salt: bytes, limit: int, *, exact: bool) -> int:
    """Return how many tokens of a key the cache can reuse without the store."""
    node, length = branches.tree.match(key, salt)
    if not exact:
        return min(length, limit)
    # Without a page tier, pages are those of parked leases.
    pages = branches.tier is not None
    ends = (
        each.end
        for each in node.path
        if each.entry is not None or each.leases or (pages and each.page is not None)
    )
    return max((end for end in ends if end <= min(length, limit)), default=0)


def read_ahead(read: Callable[[A], B], items: Sequence[A]) -> Generator[B]:
    """Yield ``read(item)`` for each item. Threads read the next `READERS` items meanwhile."""
    if len(items) < 2:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[Callable[[], B]] = deque()
        for item in items:
            try:
                waiting.append(pool.submit(read, item).result)
            except RuntimeError:  # no thread can be started
                waiting.append(partial(read, item))
            if len(waiting) > READERS:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
