"""Keep content that has no sequence any more: the tiers of a prefix cache, and when they are used.

There are two kinds. A `PageTier` returns a page for each branch, and the node in the tree keeps it:
`MemoryTier` in host memory, `FileTier` in files of one cache object. A `PrefixTier` finds content
by its tokens, also that of earlier processes: `directory_tier.DirectoryTier`, the crash-safe store.
A cache has at most one of each.

Content is evicted, and goes to a tier, in these cases only:

- Sequences or cells are short. `Allocator.evict` takes the branch that the policy ranks first. The
  prefix tier stores the branch; then the page tier writes it (`Residency.page_out`). Without a page
  tier it is dropped, and its tokens are in the prefix tier or lost. The default is host memory of
  `HOST_BYTES`, or the prefix tier alone, if it is written.
- A parked lease loses its sequence. The same happens, with a `MemoryTier` if there is no page tier.
- A memory that cannot go back reaches a position where a state is due (`Allocator.keep_state`). The
  sequence stays, and both tiers get the state.
- The bytes exceed the budget, pages in host memory their limit, or states their schedule
  (`PrefixCache.enforce`). A branch is dropped
  that the policy or the value of states ranks first, also a page. The prefix tier stores it first
  if it has a sequence; a page was stored when it was written. It has a budget of its own.
- A damaged page is found. It is dropped with the branches that need it.
- `flush` and `close`: the prefix tier stores all branches that have a sequence. Pages end with the
  cache.

Content returns when a prompt begins with it. `PrefixCache.acquire` loads a stored prefix if the
tree has a shorter one, then reads the page in which the prefix ends, if no sequence has it.

A new tier implements `PageTier`, and `page_tier` creates it from the argument ``paging``; or it
implements `PrefixTier`, and `PrefixCache` creates it as ``stored``. `size` and `count` must be
exact after each call: budgets, statistics and `check` use them. Only tiers, and `prefix_store` for
the directory, read and write files.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol
from weakref import WeakSet, finalize

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.errors import PagingError

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from pyllamakv.cache.allocation import Allocator
    from pyllamakv.cache.residency import Residency
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime.sequence import Sequence

_MAGIC = b"PLKPAGE1"
_HEAD = struct.Struct("<8sIQI")
SUFFIX = ".kvpage"

#: Bytes of host memory for evicted branches in a cache that names no paging and writes no store.
HOST_BYTES = 1 << 30


class Page(Protocol):
    """The page of a branch's tokens ``start`` to ``end``; ``refs`` nodes need it."""

    start: int
    end: int
    size: int
    refs: int

    def add_ref(self) -> None:
        """Count a node that needs the page."""

    def drop_ref(self) -> int:
        """Count a node less; return how many are left."""

    def read(self) -> bytes:
        """Return the saved sequence. Raises PagingError."""

    def drop(self) -> None:
        """Free the bytes."""


class Tier(Protocol):
    """What all tiers have in common."""

    @property
    def place(self) -> Literal["memory", "files"]:
        """Where the bytes are, as in `PrefixStats.bytes_by_tier`."""

    @property
    def size(self) -> int:
        """The bytes of all pages."""

    @property
    def count(self) -> int:
        """The number of pages."""

    def close(self) -> None:
        """Drop what a later process cannot use, and release the rest. A second call is allowed."""


class PageTier(Tier, Protocol):
    """Store branches as pages, which the nodes of the tree keep."""

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Store the saved tokens ``start`` to ``end`` of a branch; the page is complete at return.

        Raises PagingError with nothing stored. The branch then keeps its sequence, unless it was
        parked.
        """


class PrefixTier(Tier, Protocol):
    """Store branches by salt and tokens. ``stored_tokens``, ``loaded_tokens``, ``damaged``: totals.

    Nothing is stored twice. A second process, and a fork of this one, must not write.
    """

    stored_tokens: int
    loaded_tokens: int
    damaged: int

    def keep(self, key: bytes, salt: bytes, sequence: Sequence) -> None:
        """Store the tokens of a sequence that is about to be closed. A failure is only logged.

        Nothing that was stored before is changed by a failure. Raises WorkerDied.
        """

    def replace_backup(self, prompt: bytes, salt: bytes, saved: bytes) -> None:
        """Store the saved state of an unfinished prompt in place of its former one; empty: none.

        A failure is only logged, and the former state stays. Other content is never removed.
        """

    def load(
        self,
        allocator: Allocator,
        key: bytes,
        salt: bytes,
        groups: Many[Group] = (),
        *,
        exact: bool = False,
    ) -> None:
        """Make the longest stored prefix of a prompt a branch, if the tree has a shorter one.

        ``exact``: only whole sequences are used. A failure is logged, and leaves the tree unchanged
        except for branches evicted for the prefix; damaged content is removed. Raises WorkerDied.
        """

    def flush(self, branches: Residency) -> int:
        """Store the tokens of all sequences; return the number of new ones.

        After it returns, they survive the end of the process. Raises PrefixStoreError or
        BudgetTooSmall; what is complete stays stored.
        """


class CountedPage:
    """Count the nodes that need a page."""

    def __init__(self) -> None:
        self.refs = 0

    def add_ref(self) -> None:
        """Count a node that needs the page."""
        self.refs += 1

    def drop_ref(self) -> int:
        """Count a node less; return how many are left."""
        self.refs -= 1
        return self.refs


class CountedPages:
    """The number of a tier's pages, and of their bytes."""

    def __init__(self) -> None:
        self.size = self.count = 0
        # Weak, because a page refers to its tier, which is finalized with the last reference.
        self._pages: WeakSet[MemoryPage | FilePage] = WeakSet()

    def add(self, page: MemoryPage | FilePage) -> None:
        """Count a page."""
        self._pages.add(page)
        self.size += page.size
        self.count += 1

    def remove(self, page: MemoryPage | FilePage) -> None:
        """Count a page less, once."""
        if page in self._pages:
            self._pages.remove(page)
            self.size -= page.size
            self.count -= 1


class MemoryPage(CountedPage):
    """A page in host memory."""

    def __init__(self, tier: MemoryTier, saved: bytes, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end, self.size = start, end, len(saved)
        self._tier, self._saved = tier, saved
        tier.add(self)

    def read(self) -> bytes:
        """Return the saved sequence."""
        return self._saved

    def drop(self) -> None:
        """Free the bytes. A second call does nothing."""
        self._tier.remove(self)
        self._saved = b""


class MemoryTier(CountedPages):
    """Store pages in host memory."""

    place: Final = "memory"

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Store a saved sequence as a page. Raises PagingError without memory for it."""
        return MemoryPage(self, saved, start, end)

    def close(self) -> None:
        """Drop all pages; the nodes of a closed cache keep them until they are collected."""
        for page in list(self._pages):
            page.drop()


class FilePage(CountedPage):
    """A page in a file."""

    def __init__(self, tier: FileTier, path: Path, start: int, end: int, size: int) -> None:
        super().__init__()
        self.start, self.end, self.size = start, end, size
        self.path = path
        self._tier = tier
        tier.add(self)

    def read(self) -> bytes:
        """Return the saved sequence. PagingError names a missing, foreign or damaged file."""
        return read(self.path, self._tier.owner, self.start, self.end)

    def drop(self) -> None:
        """Remove the file, if it exists. A second call does nothing."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._tier.remove(self)


class FileTier(CountedPages):
    """Store pages as files in a new directory inside of ``folder``.

    A file is written under a temporary name and renamed, so it is complete or absent. It starts
    with a header (owner, start and end of the branch) and a checksum of the rest. The directory is
    removed with the cache object.
    """

    place: Final = "files"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.owner = uuid.uuid4().hex
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="prefixes-", dir=folder))
        except OSError as error:
            msg = f"cannot store pages in {folder}: {error.strerror}; name a writable directory"
            raise PagingError(msg, folder) from error
        # Also for a cache that is never closed. Pages can be large.
        self._remove = finalize(self, _remove, self.folder, os.getpid())

    def write(self, saved: bytes, start: int, end: int) -> Page:
        """Write a saved sequence atomically. PagingError leaves no file."""
        path = self.folder / f"{self._written}{SUFFIX}"
        self._written += 1
        about = json.dumps({"owner": self.owner, "start": start, "end": end}).encode()
        checksum = zlib.crc32(saved, zlib.crc32(about))
        head = _HEAD.pack(_MAGIC, len(about), len(saved), checksum) + about
        unfinished = path.with_suffix(".part")
        try:
            with unfinished.open("wb") as file:
                file.write(head)
                file.write(saved)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            msg = (
                f"the branch could not be written to {path}: {error.strerror or error}; the cache "
                f"is unchanged: free "
                "disk space, or evict() instead"
            )
            raise PagingError(msg, path) from error
        return FilePage(self, path, start, end, len(head) + len(saved))

    def close(self) -> None:
        """Remove the directory with its content."""
        self._remove()
        for page in list(self._pages):
            self.remove(page)


def _remove(folder: Path, owner: int) -> None:
    """Remove a directory, unless this is a fork of the process that uses it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def read(path: Path, owner: str, start: int, end: int) -> bytes:
    """Return the content of a page file. Raises PagingError with the reason."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}") from error
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise _unusable(path, "it is not a page of a cache")
    _, n_about, n_saved, checksum = _HEAD.unpack_from(content)
    if len(content) != _HEAD.size + n_about + n_saved:
        expected = _HEAD.size + n_about + n_saved
        raise _unusable(path, f"it has {len(content)} bytes instead of {expected}")
    body = memoryview(content)[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise _unusable(path, "its checksum does not match")
    expected_about = {"owner": owner, "start": start, "end": end}
    about = json.loads(bytes(body[:n_about]))
    if about != expected_about:
        raise _unusable(path, "it belongs to another branch or another cache")
    return bytes(body[n_about:])


def host_bytes(paging: int | str | os.PathLike[str] | None, *, stored: bool) -> int:
    """Return the limit of pages in host memory; 0: none are there, or without a limit.

    ``stored``: what is evicted goes to a store.
    """
    if paging is None:
        return 0 if stored else HOST_BYTES
    return arguments.integer("paging", paging, 0) if isinstance(paging, int | np.integer) else 0


def page_tier(where: int | str | os.PathLike[str] | None) -> PageTier | None:
    """Return the tier for pages that a cache names: memory, a directory, or None."""
    if where is None or isinstance(where, int | np.integer):
        return None
    return (
        MemoryTier()
        if isinstance(where, str) and where == "memory"
        else FileTier(arguments.path("paging", where))
    )


def _unusable(path: Path, why: str) -> PagingError:
    return PagingError(f"the page {path} cannot be used: {why}; decode its tokens again", path)
