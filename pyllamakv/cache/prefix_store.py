"""Store decoded prefixes in a directory, so that a later process can reuse them.

The directory contains `store.json` (format and identity), `lock`, and one file per page. A page has
a range of tokens and what the cache stores for them. Its name is a digest of its content's origin:
identity, kind, parent, position and tokens. docs/prefix-store.md describes the format and the
recovery rule. One `PrefixStore` is the writer; others, and `scan`, read without the lock. This
module knows files and tokens; `directory_tier` connects a store with a cache.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import time
import zlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import filelock
import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.cache.radix_tree import TOKEN_BYTES, common
from pyllamakv.content_digest import is_digest
from pyllamakv.errors import (
    BudgetTooSmall,
    PrefixStoreBusy,
    PrefixStoreDamaged,
    PrefixStoreError,
    PrefixStoreForeign,
    PrefixStoreFull,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from io import BufferedReader

#: Version of the format; a store of another version is refused.
VERSION: Final = 1
#: Maximum number of tokens of a page of cells. A flush rewrites at most one page that is not full.
PAGE_TOKENS: Final = 256
#: The model of an identity if its digest is unknown.
UNVERIFIED: Final = "unverified"
SUFFIX: Final = ".page"
PART: Final = ".part"
_STORE, _LOCK = "store.json", "lock"
_FORMAT: Final = "pyllamakv prefix store"
_MAGIC: Final = b"PLKPFX1\n"
#: Magic, bytes of the header, checksum of the header, bytes of the content, its checksum.
_HEAD: Final = struct.Struct("<8sIIQI")
#: The numbers of the head that the checksum of the header includes.
_SIZES: Final = struct.Struct("<IQI")
#: Age in nanoseconds from which on the time of a directory differs from that of its next change.
_RECENT_NS: Final = 100_000_000
#: errno values of a full disk, an exceeded quota, and the size limit of a file.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: errno values of a place that has something else than a file.
_NO_FILE: Final = (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)
#: errno values of a file that cannot be read. With others, such as too many open files or a missing
#: permission, the file may be intact.
_UNREADABLE: Final = (*_NO_FILE, errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO))

#: "cells": K and V of the tokens ``start`` to ``end``, which follow a part of the parent page.
#: "state": a whole sequence from position 0, of a memory that cannot be cut.
Kind = Literal["cells", "state"]
Identity = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class StoredPage:
    """One page: tokens ``start`` to ``end`` after those of ``parent``.

    ``parent`` is the name of a page, or that of a salt for a page at 0 (empty without a salt).
    ``size`` is that of the file in bytes, and ``used`` the time of the last use in nanoseconds.
    """

    name: str
    kind: Kind
    parent: str
    start: int
    tokens: bytes
    size: int
    used: int = 0

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The first ``length`` tokens of a prompt, in pages from the root down.

    Each page is used up to the start of the next one, or up to ``length``.
    """

    length: int
    pages: tuple[StoredPage, ...] = ()

    def used_range(self, index: int) -> tuple[int, int]:
        """Return the positions that the page with an index contributes."""
        pages = self.pages
        end = pages[index + 1].start if index + 1 < len(pages) else self.length
        return pages[index].start, end


@dataclass(slots=True)
class StoreContents:
    """The pages of a store by name, and its unusable files with the reasons."""

    identity: Identity
    pages: dict[str, StoredPage] = field(default_factory=dict)
    unusable: dict[Path, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return the bytes of all pages."""
        return sum(page.size for page in self.pages.values())


# Files...


def scan(
    folder: Path, *, contents: bool = False, known: Mapping[str, StoredPage] = MappingProxyType({})
) -> StoreContents:
    """Read the headers of all pages, and with ``contents`` all bytes. Needs no lock.

    Files of ``known`` pages are not read again. Raises PrefixStoreForeign, PrefixStoreDamaged
    (`store.json`), or PrefixStoreError, also for a page that cannot be read now, but may be intact.
    """
    found = StoreContents(read_identity(folder))
    digest = _digest(found.identity)
    read: list[StoredPage] = []
    for path in sorted(_entries(folder)):
        if path.suffix == PART:
            found.unusable[path] = "it was not completed"
        if path.suffix != SUFFIX:
            continue
        if path.stem in known:
            read.append(known[path.stem])
            continue
        try:
            page = _read_page(path, digest, contents=contents)[0]
        except FileNotFoundError:
            continue  # the writer has removed it since
        except PrefixStoreDamaged as error:
            found.unusable[path] = str(error)
        else:
            read.append(page)
    # Parents start before their children.
    for page in sorted(read, key=lambda page: page.start):
        parent = found.pages.get(page.parent)
        if page.start == 0 or (parent and parent.start < page.start <= parent.end):
            found.pages[page.name] = page
        elif (path := folder / (page.name + SUFFIX)).exists():
            # Otherwise, the writer has removed both since, this one first.
            found.unusable[path] = "the page before it is missing"
    return found


def read_identity(folder: Path) -> Identity:
    """Return the identity of a store.

    Raises PrefixStoreForeign if the directory is no store or has another format, and
    PrefixStoreDamaged.
    """
    path = folder / _STORE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        msg = f"{folder} is not a prefix store: it has no {_STORE}"
        raise PrefixStoreForeign(msg, folder) from error
    except OSError as error:
        raise _failed(path, error) from error
    damaged = f"{path} is damaged; delete the directory {folder} and decode the prompts again"
    try:
        found = json.loads(text)
        known, version = found.get("format"), found.get("version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise PrefixStoreDamaged(damaged, path) from error
    if known != _FORMAT:
        raise PrefixStoreForeign(f"{folder} is not a prefix store", folder)
    if version != VERSION:
        msg = f"{folder} has format {version!r} and this version reads {VERSION}; use another path"
        raise PrefixStoreForeign(msg, folder, ("version",))
    try:
        pairs = tuple((str(name), str(value)) for name, value in found["identity"])
        right = zlib.crc32(_canonical(pairs)) == found["checksum"]
    except (ValueError, TypeError, KeyError) as error:
        raise PrefixStoreDamaged(damaged, path) from error
    if not right:
        raise PrefixStoreDamaged(damaged, path)
    return pairs


def _canonical(identity: Identity) -> bytes:
    return json.dumps(identity, separators=(",", ":")).encode()


def _digest(identity: Identity) -> str:
    return blake2b(_canonical(identity), digest_size=16).hexdigest()


def _first_parent(salt: bytes) -> str:
    """Return the parent of pages at position 0."""
    return f"salt {salt.hex()}" if salt else ""


def _page_name(digest: str, kind: Kind, parent: str, start: int, tokens: bytes) -> str:
    about = json.dumps([digest, kind, parent, start]).encode()
    return blake2b(about + tokens, digest_size=16).hexdigest()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise _failed(folder, error) from error


def _failed(path: Path, error: OSError) -> PrefixStoreError:
    if error.errno in _FULL:
        msg = f"{path} cannot be written: {error.strerror}; free disk space, or lower the budget"
        return PrefixStoreFull(msg, path)
    remedy = "name a directory that can be read and written"
    if error.errno in _NO_FILE:
        remedy = "move it away, or use another path"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close files, or raise the limit (ulimit -n)"
    return PrefixStoreError(f"{path}: {error.strerror or error}; {remedy}", path)


def _pack(digest: str, page: StoredPage, content: bytes | memoryview) -> bytes:
    """Return head and header of a page's file."""
    facts = {
        "identity": digest,
        "kind": page.kind,
        "parent": page.parent,
        "start": page.start,
        "tokens": len(page.tokens) // TOKEN_BYTES,
    }
    header = json.dumps(facts).encode() + page.tokens
    sizes = (len(header), len(content), zlib.crc32(content))
    return _HEAD.pack(_MAGIC, sizes[0], _header_checksum(sizes, header), *sizes[1:]) + header


def _header_checksum(sizes: Sequence[int], header: bytes) -> int:
    return zlib.crc32(header, zlib.crc32(_SIZES.pack(*sizes)))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_content(file: BufferedReader, size: int) -> memoryview:
    """Read up to ``size`` bytes."""
    # NumPy asks for huge pages: the page faults of many megabytes take longer than their copy.
    content = np.empty(size, np.uint8).data
    return content[: file.readinto(content)]


def _read_page(path: Path, digest: str, *, contents: bool) -> tuple[StoredPage, memoryview]:
    """Return a page and its content (empty unless ``contents``).

    Raises PrefixStoreDamaged with the reason, FileNotFoundError, and PrefixStoreError for a page
    that may be intact.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise PrefixStoreDamaged("it is not a file", path)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MAGIC):
                raise PrefixStoreDamaged("it does not start as a page does", path)
            _, n_header, checksum, n_content, content_checksum = _HEAD.unpack(head)
            if facts.st_size != _HEAD.size + n_header + n_content:
                msg = f"it has {facts.st_size} bytes instead of {_HEAD.size + n_header + n_content}"
                raise PrefixStoreDamaged(msg, path)
            header = file.read(n_header)
            content = _read_content(file, n_content) if contents else memoryview(b"")
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise _failed(path, error) from error
        raise PrefixStoreDamaged(f"it cannot be read: {error.strerror or error}", path) from error
    if _header_checksum((n_header, n_content, content_checksum), header) != checksum:
        raise PrefixStoreDamaged("the checksum of its header does not match", path)
    if contents and zlib.crc32(content) != content_checksum:
        raise PrefixStoreDamaged("the checksum of its content does not match", path)
    try:
        about, end = json.JSONDecoder().raw_decode(header.decode("latin-1"))
        page = StoredPage(
            path.stem,
            about["kind"],
            about["parent"],
            about["start"],
            header[end:],
            facts.st_size,
            facts.st_mtime_ns,
        )
        same = about["identity"] == digest and about["tokens"] * TOKEN_BYTES == len(page.tokens)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PrefixStoreDamaged("its header cannot be read", path) from error
    if not same or path.stem != _page_name(digest, page.kind, page.parent, page.start, page.tokens):
        raise PrefixStoreDamaged("it belongs to another store, or was renamed", path)
    return page, content


# The store...


class PrefixStore:
    """Write and read the pages of one directory. One object at a time has the lock.

    With ``read_only``, the store must exist and is not changed, whether or not another process
    writes to it: `refresh` finds new pages, and pages that the writer removed are no longer used.

    ``identity`` names what the pages depend on; None accepts that of an existing store. With
    ``accept_unverified_model``, the model may differ if one of both is not a digest. ``budget``
    limits the bytes of all pages. Opening removes unusable files, and pages beyond the budget.
    Raises PrefixStoreBusy, PrefixStoreForeign, PrefixStoreDamaged or PrefixStoreError, with the
    store unchanged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Mapping[str, str] | None,
        *,
        budget: int | None = None,
        accept_unverified_model: bool = False,
        read_only: bool = False,
    ) -> None:
        self.folder = folder = arguments.path("store", path).absolute()
        self.read_only = read_only
        self._process = os.getpid()
        self.budget = arguments.whole_or_none("budget", budget, 0)
        wanted = None if identity is None else tuple(identity.items())
        self._prepare(new=wanted is not None and not read_only)
        self._lock = None if read_only else self._locked()
        try:
            self._identity = self._check_identity(wanted, accept=accept_unverified_model)
            self._digest = _digest(self._identity)
            found = StoreContents(self._identity) if read_only else scan(folder)
        except BaseException:
            self.close()
            raise
        self.pages: dict[str, StoredPage] = {}
        self.size = 0
        #: Parent -> position and first token -> pages that start there.
        self._below: defaultdict[str, dict[tuple[int, bytes], list[StoredPage]]] = defaultdict(dict)
        #: Pages of kind "state" by their number of tokens, then by their parent and tokens.
        self._states: defaultdict[int, dict[tuple[str, bytes], StoredPage]] = defaultdict(dict)
        self._unsynced = False
        #: Time of the last change of the directory that was read, for a store that is only read.
        self._seen: int | None = None
        #: Names of damaged pages, which only a writer can remove.
        self._refused: set[str] = set()
        for page in found.pages.values():
            self._index(page)
        self.refresh()
        self._clock = max((page.used for page in self.pages.values()), default=0)
        #: The error of the first file that could not be removed.
        self.stuck: PrefixStoreError | None = None
        #: Unusable files that were removed, with the reasons.
        self.removed = {
            path: why
            for path, why in found.unusable.items()
            if self._unlink(path) and path.suffix == SUFFIX
        }
        if not read_only:
            self._evict(0, ())

    def _locked(self) -> filelock.BaseFileLock:
        """Return the lock of the only writer."""
        path = self.folder / _LOCK
        lock = filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            msg = (
                f"{self.folder} is in use by another process or cache; close it, use another path, "
                "or read it only (store_read_only=True)"
            )
            raise PrefixStoreBusy(msg, self.folder) from error
        except OSError as error:
            raise _failed(path, error) from error
        return lock

    def refresh(self) -> None:
        """Find the pages that the writer has added and removed, if the store is only read.

        Raises as `scan` does. Takes one system call if nothing has changed.
        """
        if not self.read_only:
            return
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError as error:
            raise _failed(self.folder, error) from error
        if changed == self._seen:
            return
        found = scan(self.folder, known=self.pages)
        # A change of the same instant would have the same time.
        self._seen = changed if time.time_ns() - changed > _RECENT_NS else None
        for name in self.pages.keys() - found.pages.keys():
            self._remove(self.pages[name])
        self._refused.intersection_update(found.pages)
        for name, page in found.pages.items():
            # Parents come first: what follows a damaged page is refused with it.
            if name in self._refused or page.parent in self._refused:
                self._refused.add(name)
            elif name not in self.pages:
                self._index(page)

    def _prepare(self, *, new: bool) -> None:
        """Create the directory; refuse one with other content before anything is written."""
        try:
            if new:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A crash may leave the unfinished `store.json` of a new store.
            unfinished = Path(_STORE).with_suffix(PART).name
            names = {path.name for path in self.folder.iterdir()} - {unfinished}
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            msg = f"{self.folder} is not a directory; name a new one, or a prefix store"
            raise PrefixStoreForeign(msg, self.folder) from error
        except OSError as error:
            raise _failed(self.folder, error) from error
        if _STORE not in names and (names - {_LOCK} or not new):
            msg = f"{self.folder} is not a prefix store and has files: name a new directory"
            raise PrefixStoreForeign(msg, self.folder)

    def _check_identity(self, wanted: Identity | None, *, accept: bool) -> Identity:
        new = wanted is not None and not os.path.lexists(self.folder / _STORE)
        if new and not self.read_only:
            assert wanted is not None
            facts = {
                "format": _FORMAT,
                "version": VERSION,
                "identity": wanted,
                "checksum": zlib.crc32(_canonical(wanted)),
            }
            self._write(self.folder / _STORE, json.dumps(facts, indent=1).encode())
            self.sync()
            return wanted
        found = read_identity(self.folder)
        if wanted is None or found == wanted:
            return found
        there, here = dict(found), dict(wanted)
        # Earlier stores name the variant too: 0.3.9-patched-cpu instead of 0.3.9-cpu.
        if "build" in there:
            there["build"] = re.sub(r"-(stock|patched)-(?=[^-]*$)", "-", there["build"])
        if there == here:
            return found
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        verified = is_digest(there.get("model")) and is_digest(here.get("model"))
        if accept and names == ["model"] and not verified:
            return found
        shown = ", ".join(f"{name} {there.get(name)} (here {here.get(name)})" for name in names)
        msg = f"{self.folder} belongs to another model, build or shape: {shown}; use another path"
        if not verified and names == ["model"]:
            msg += (
                ", or, if the model is the same and only unverified, pass "
                "accept_unverified_model=True"
            )
        raise PrefixStoreForeign(msg, self.folder, names)

    # Search...

    def find(self, key: bytes, salt: bytes, limit: int, *, exact: bool = False) -> StoredPrefix:
        """Return the longest prefix of a key that was stored with a salt, up to ``limit`` tokens.

        ``exact``: only a state that ends where the prefix does can be used.
        """
        root = _first_parent(salt)
        whole = self._find_state(key, root, limit, exact=exact)
        cells = StoredPrefix(0) if exact else self._find_cells(key, root, limit)
        return cells if cells.length >= whole.length else whole

    def _find_cells(self, key: bytes, root: str, limit: int) -> StoredPrefix:
        best: StoredPage | None = None
        length = 0
        waiting = [(root, 0, 0)]
        while waiting:
            parent, low, high = waiting.pop()
            below = self._below.get(parent, {})
            for start in {start for start, _ in below if low <= start <= high}:
                first = key[start * TOKEN_BYTES : (start + 1) * TOKEN_BYTES]
                for each in below.get((start, first), ()):
                    end = start + common(each.tokens, key, start * TOKEN_BYTES)
                    waiting.append((each.name, start + 1, end))
                    # Of equal matches, the shortest page has the fewest bytes to read.
                    shorter = best is None or len(each.tokens) < len(best.tokens)
                    if end > length or (end == length and shorter):
                        best, length = each, end
        length = min(length, limit)
        chain: list[StoredPage] = []
        above = best
        while above is not None:
            if above.start < length:
                chain.insert(0, above)
            above = self.pages.get(above.parent)
        return StoredPrefix(length, tuple(chain)) if chain else StoredPrefix(0)

    def _find_state(self, key: bytes, root: str, limit: int, *, exact: bool) -> StoredPrefix:
        best = StoredPrefix(0)
        for end in sorted(self._states, reverse=True):
            page = self._states[end].get((root, key[: end * TOKEN_BYTES]))
            if page is not None and end <= limit:
                best = StoredPrefix(end, (page,))
                break
        if exact:
            return best
        for pages in self._states.values():
            for page in pages.values():
                if page.parent != root:
                    continue
                length = min(limit, common(page.tokens, key))
                if length > best.length:
                    best = StoredPrefix(length, (page,))
        return best

    def read(self, page: StoredPage) -> memoryview:
        """Return the content of a page.

        Raises PrefixStoreDamaged, or PrefixStoreError if it may be intact.
        """
        path = self.path(page)
        try:
            found, content = _read_page(path, self._digest, contents=True)
        except FileNotFoundError as error:
            raise PrefixStoreDamaged(f"the page {path} is missing", path) from error
        except PrefixStoreDamaged as error:
            raise PrefixStoreDamaged(f"the page {path} cannot be used: {error}", path) from error
        assert found.tokens == page.tokens, "the name of a page is a digest of its tokens"
        return content

    def touch(self, pages: Iterable[StoredPage]) -> None:
        """Record that pages were used now."""
        self._clock = max(self._clock + 1, time.time_ns())
        for page in pages:
            page.used = self._clock
            if self.read_only:
                continue
            # A lost time of use costs no more than an earlier eviction.
            with suppress(OSError):
                os.utime(self.path(page), ns=(page.used, page.used))

    # Changes...

    def file_size(self, tokens: int, content: int) -> int:
        """Return the upper limit of a page file's bytes, for a number of tokens and content."""
        return _HEAD.size + 256 + tokens * TOKEN_BYTES + content

    def add(
        self,
        kind: Kind,
        salt: bytes,
        parent: StoredPage | None,
        start: int,
        tokens: bytes,
        content: bytes | memoryview,
        keep: Collection[StoredPage] = (),
    ) -> StoredPage:
        """Write a page that follows the tokens of ``parent`` before ``start``, or begins a prompt.

        Pages used least recently are removed for it, except ``keep``. `sync` completes the write.
        Raises BudgetTooSmall or PrefixStoreFull; complete pages remain.
        """
        above = parent.name if parent else _first_parent(salt)
        name = _page_name(self._digest, kind, above, start, tokens)
        if name in self.pages:
            return self.pages[name]
        page = StoredPage(name, kind, above, start, tokens, 0)
        head = _pack(self._digest, page, content)
        page.size = len(head) + len(content)
        self._evict(page.size, [*keep, *self._ancestors(page)])
        self._write(self.path(page), head, content)
        self._index(page)
        self.touch([page])
        return page

    def check_budget(self, needed: int) -> None:
        """Raise BudgetTooSmall if the budget is below a number of bytes."""
        if self.budget is not None and needed > self.budget:
            msg = (
                f"this branch takes {needed} bytes in {self.folder} and the budget is "
                f"{self.budget}; increase the budget"
            )
            raise BudgetTooSmall(msg, needed=needed, budget=self.budget)

    def set_budget(self, budget: int | None) -> None:
        """Change the budget, and remove the pages beyond it."""
        self.budget = arguments.whole_or_none("budget", budget, 0)
        self._evict(0, ())

    def discard(self, page: StoredPage) -> None:
        """Remove a page and all that follow it.

        A store that is only read refuses them until its writer removes them, unless the writer has
        removed the page already, and may write it again.
        """
        doomed = [page]
        for each in doomed:
            doomed += [low for pages in self._below.get(each.name, {}).values() for low in pages]
        if self.read_only and os.path.lexists(self.path(page)):
            self._refused.update(each.name for each in doomed)
        # Children first: at any time, each page that remains has its parent.
        for each in reversed(doomed):
            self._remove(each)

    def replace(self, page: StoredPage) -> None:
        """Remove a page whose tokens a longer page contains, unless others follow it."""
        if page.name in self.pages and not self._below.get(page.name):
            self._remove(page)

    def sync(self) -> None:
        """Write the directory to the disk, so that new pages survive a power failure."""
        if not self._unsynced:
            return
        try:
            handle = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise _failed(self.folder, error) from error
        self._unsynced = False

    @property
    def owned(self) -> bool:
        """Return whether this process may use the store, not that from which it was forked."""
        return self.read_only or os.getpid() == self._process

    def check_owned(self) -> None:
        """Raise PrefixStoreBusy in a forked process, and UsageError if the store is only read."""
        if self.read_only:
            raise UsageError(f"{self.folder} was opened to read it only; nothing is written")
        if not self.owned:
            msg = (
                f"{self.folder} is in use by process {self._process}, from which this one was "
                "forked; create a cache here, with another path"
            )
            raise PrefixStoreBusy(msg, self.folder)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._lock is not None and self.owned:
            self._lock.release()

    def path(self, page: StoredPage) -> Path:
        """Return the file of a page."""
        return self.folder / (page.name + SUFFIX)

    # Details...

    def _ancestors(self, page: StoredPage) -> list[StoredPage]:
        found = []
        above = self.pages.get(page.parent)
        while above is not None:
            found.append(above)
            above = self.pages.get(above.parent)
        return found

    def _index(self, page: StoredPage) -> None:
        self.pages[page.name] = page
        self.size += page.size
        if page.kind == "state":
            self._states[page.end][page.parent, page.tokens] = page
        else:
            place = (page.start, page.tokens[:TOKEN_BYTES])
            self._below[page.parent].setdefault(place, []).append(page)

    def _remove(self, page: StoredPage) -> None:
        if not self.read_only:
            self._unlink(self.path(page))
        del self.pages[page.name]
        self.size -= page.size
        if page.kind == "state":
            del self._states[page.end][page.parent, page.tokens]
            if not self._states[page.end]:
                del self._states[page.end]
            return
        below = self._below[page.parent]
        place = (page.start, page.tokens[:TOKEN_BYTES])
        below[place].remove(page)
        if not below[place]:
            del below[place]
        if not below:
            del self._below[page.parent]

    def _evict(self, needed: int, keep: Collection[StoredPage]) -> None:
        """Remove the pages used least recently until ``needed`` bytes fit into the budget."""
        if self.budget is None or self.size + needed <= self.budget:
            return
        kept = {page.name for page in keep}
        self.check_budget(needed + sum(self.pages[name].size for name in kept))
        while self.size + needed > self.budget:
            ends = (
                page
                for page in self.pages.values()
                if page.name not in kept and not self._below.get(page.name)
            )
            self._remove(min(ends, key=lambda page: (page.used, -page.end)))

    def _unlink(self, path: Path) -> bool:
        """Remove a file, and return whether that succeeded; the next scan finds it otherwise."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.stuck = self.stuck or _failed(path, error)
            return False
        return True

    def _write(self, path: Path, *pieces: bytes | memoryview) -> None:
        """Write a file under a temporary name, to the disk, and rename it."""
        part = path.with_suffix(PART)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o600), "wb") as out:
                for piece in pieces:
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
            part.replace(path)
        except BaseException as error:
            self._unlink(part)
            if isinstance(error, OSError):
                raise _failed(path, error) from error
            raise
        self._unsynced = True


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The number of removed pages, and the pages and bytes that are left."""

    removed: int
    pages: int
    size: int


def prune(path: Path, budget: int | None = None) -> PruneResult:
    """Remove pages that cannot be used, and those used least recently beyond a budget in bytes.

    Raises the errors of `PrefixStore`, and PrefixStoreError if a file cannot be read or removed.
    """
    store = PrefixStore(path, None)
    try:
        before = len(store.pages) + len(store.removed)
        for page in list(store.pages.values()):
            try:
                if page.name in store.pages:
                    store.read(page)
            except PrefixStoreDamaged:
                store.discard(page)
        store.set_budget(budget)
        if store.stuck is not None:
            raise store.stuck
        return PruneResult(before - len(store.pages), len(store.pages), store.size)
    finally:
        store.close()
