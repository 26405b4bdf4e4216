"""Join drafts and the store: read a tree of the store, write a draft back as a tree."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

from pyllamakv.patching.strict_apply import DraftEntry
from pyllamakv.source import git_command
from pyllamakv.source.store import translate_disk_errors
from pyllamakv.source.tree_export import blob_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyllamakv.patching.strict_apply import TreeOverlay
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

_ABSENT = "0" * 40
#: The trees that this process has written, by store, original tree and changes; at most `_KEPT`.
_WRITTEN: dict[tuple[object, ...], str] = {}
_KEPT = 1000


class StoreTree:
    """Read one tree of the store; every file is read once."""

    def __init__(self, store: Store, tree: str) -> None:
        self.store = store
        self.tree = tree
        self._read: dict[str, DraftEntry | None] = {}

    @functools.cached_property
    def modes(self) -> dict[str, str]:
        """Return the mode of every file."""
        return {entry.path: entry.mode for entry in self.store.entries(self.tree)}

    def entry(self, path: str) -> DraftEntry | None:
        """Return a file, or None."""
        if path not in self._read:
            self.fetch([path])
        return self._read[path]

    def paths(self) -> Iterable[str]:
        """Return the paths of all files."""
        return self.modes

    def fetch(self, paths: Iterable[str]) -> None:
        """Read several files with one call of git."""
        wanted = [path for path in dict.fromkeys(paths) if path not in self._read]
        there = [path for path in wanted if path in self.modes]
        self._read.update(dict.fromkeys(wanted))
        found = self.store.read_many(self.tree, there) if there else {}
        for path, data in found.items():
            if data is not None:
                self._read[path] = DraftEntry(data, self.modes[path])


@functools.lru_cache(maxsize=16)
def cached(store: Store, tree: str) -> StoreTree:
    """Return a reader of a tree that keeps the files of the trees that were read last."""
    return StoreTree(store, tree)


def lost_share(store: Store, old: str, new: str, paths: Iterable[str]) -> float:
    """Return the part of the lines in some files of a tree that another tree lacks, 0 to 1."""
    return _lost_share(store, old, new, frozenset(paths))


@functools.lru_cache(maxsize=10_000)
def _lost_share(store: Store, old: str, new: str, paths: frozenset[str]) -> float:
    if old == new:
        return 0.0
    sides = cached(store, old), cached(store, new)
    total = kept = 0
    for side in sides:
        side.fetch(paths)
    for path in paths:
        before, after = (
            Counter(entry.data.split(b"\n") if entry else ())
            for entry in (side.entry(path) for side in sides)
        )
        total += before.total()
        kept += (before & after).total()
    return 1 - kept / total if total else 1.0


def ensure_fetched(store: Store, release: Release, progress: Progress | None = None) -> Release:
    """Return the release once the store has it; it is fetched when it is absent."""
    if store.has(release):
        return release
    from pyllamakv.source import fetch

    return fetch.fetch(release, progress=progress)


def write(store: Store, tree: str, draft: TreeOverlay) -> str:
    """Write a tree with the changes of a draft to the store; return its id.

    The same draft is written once: its objects stay in the store.
    """
    if not draft.changes:
        return tree
    changes = {
        path: (entry.mode, blob_id(entry.data)) if entry else ("0", _ABSENT)
        for path, entry in sorted(draft.changes.items())
    }
    key = (str(store.path), tree, tuple(changes.items()))
    if key not in _WRITTEN:
        if len(_WRITTEN) >= _KEPT:
            _WRITTEN.clear()
        _WRITTEN[key] = _write(store, tree, draft, changes)
    return _WRITTEN[key]


def _write(
    store: Store, tree: str, draft: TreeOverlay, changes: Mapping[str, tuple[str, str]]
) -> str:
    with translate_disk_errors(store.path), store.scratch() as folder:
        names = ""
        for number, entry in enumerate(entry for entry in draft.changes.values() if entry):
            (folder / str(number)).write_bytes(entry.data)
            names += f"{folder.name}/{number}\n"
        words = ("hash-object", "-w", "-t", "blob", "--no-filters", "--stdin-paths")
        git_command.git(store.path, *words, input=names)
        env = {"GIT_INDEX_FILE": str(folder / "index")}
        git_command.git(store.path, "read-tree", tree, env=env)
        lines = [f"{mode} {blob}\t{path}\0" for path, (mode, blob) in changes.items()]
        git_command.git(
            store.path, "update-index", "-z", "--index-info", input="".join(lines), env=env
        )
        return git_command.git(store.path, "write-tree", env=env)
