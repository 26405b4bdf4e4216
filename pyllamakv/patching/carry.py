"""Carry a patch to a release that no port fits: a three-way merge from the nearest port.

Git merges two trees that have a common ancestor: the base release of a port with the earlier
patches of the series. One tree adds the port, the other is the target with the same patches. The
merge happens in the store, without a work tree. A merge is accepted only if its changes, compared
function by function, are those of the port: git can merge without a conflict and still lose a hunk,
or put it into another function. A change that upstream made as well, to the same lines of the base,
is left out of the port first.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from pyllamakv.errors import GitError, NotFetched, PatchConflict, UnknownRelease
from pyllamakv.patching import (
    carry_comparison,
    cpp_lines,
    headings,
    hunk_locator,
    hunks,
    mail_header,
    port_choice,
    token_merge,
    trees,
    used_names,
)
from pyllamakv.patching.port_choice import AppliedPort, Manual, MergeConflict
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import git_command, lockfile
from pyllamakv.source.releases import ARCHIVE_KINDS
from pyllamakv.source.store import translate_disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyllamakv.patching.carry_comparison import Reader
    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.hunks import FilePatch, Patch
    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: Number of ports that are tried, nearest first.
TRIED = 3

#: Options of git that determine the changes of a merged tree; the same as for exported patches.
_DIFF = ("--no-renames", "--full-index", "--unified=3", "--no-ext-diff", "--no-textconv")
#: A marked conflict: the lines of the target, of the base, and of the patch.
CONFLICT = re.compile(
    rb"^<{7} [^\n]*\n(.*?)^\|{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n", re.DOTALL | re.MULTILINE
)
#: Exit status of git for arguments that it does not know.
_USAGE_ERROR = 129
_UNMERGED = re.compile(rb"[0-7]{6} [0-9a-f]{40} ([123])\t(.*)", re.DOTALL)


class Carrier:
    """Carry patches of a series to one release.

    ``bases`` are the releases of the ports by base (default: the lock files).
    """

    def __init__(
        self,
        store: Store,
        release: Release,
        series: Series,
        *,
        bases: Mapping[str, Release] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._store = store
        self._release = release
        self._series = series
        self._bases = lockfile.bases(series.lock) if bases is None else bases
        self._progress = progress

    def ports(self, definition: Definition) -> tuple[Port, ...]:
        """Return the ports to carry from, those with the nearest base first.

        The releases of package indexes are compared by date. A commit of a fork or a directory may
        be newer than the llama.cpp in it: its bases are ordered by the content of the files that a
        port changes, as far as the store has them.
        """
        found = [port for port in definition.ports if port.base in self._bases]
        found.sort(key=lambda port: self._distance(self._bases[port.base]))
        if self._release.kind not in ARCHIVE_KINDS:
            found.sort(key=self._lost)
        return tuple(found[:TRIED])

    def _lost(self, port: Port) -> float:
        """Return the part of the base's lines that the release lacks in the changed files."""
        base = self._bases[port.base]
        if not self._store.has(base):
            return 1.0
        paths = (file.old for file in port.patch.files if file.old)
        stock = self._store.tree_of(self._release)
        return trees.lost_share(self._store, self._store.tree_of(base), stock, paths)

    def covers(self, definition: Definition) -> bool:
        """Return whether a patch is meant for the release, compared by date.

        A bound of the patch's releases that is not among the bases is ignored.
        """
        date = self._date
        for bound in SpecifierSet(definition.releases):
            base = self._bases.get(bound.version)
            if base is None or not date:
                continue
            outside = {
                ">=": date < base.date,
                ">": date <= base.date,
                "<=": date > base.date,
                "<": date >= base.date,
            }
            if outside.get(bound.operator):
                return False
        return True

    def carry(
        self, definition: Definition, draft: TreeOverlay, applied: Sequence[str]
    ) -> AppliedPort | tuple[Manual, ...]:
        """Carry a patch onto a draft of the release, or return the reason for each port.

        ``applied`` are the ids of the patches that the draft contains. The draft is changed only if
        the patch was carried. The result has the reasons for ports that were tried before. A base
        release that has nothing to fetch it from is one of the reasons. Raises SourceError if
        fetching or git fails: another attempt may give another result.
        """
        if not self.covers(definition):
            return ()
        reasons: list[Manual] = []
        for port in self.ports(definition):
            found = self._from(port, definition, draft, applied)
            if isinstance(found, AppliedPort):
                return replace(found, manual=tuple(reasons))
            reasons.append(found)
        return tuple(reasons)

    @functools.cached_property
    def _date(self) -> str:
        """Return the date by which the release is compared with bounds.

        A commit of a fork or a directory has the date of the nearest base by content: it may be
        newer than the llama.cpp in it.
        """
        if self._release.kind in ARCHIVE_KINDS:
            return self._release.date
        ports = [p for each in self._series for p in each.ports if p.base in self._bases]
        near = [port for port in ports if self._store.has(self._bases[port.base])]
        if not near:
            return self._release.date
        paths = {file.old for port in near for file in port.patch.files if file.old}
        stock = self._store.tree_of(self._release)

        def lost(base: Release) -> tuple[float, float]:
            tree = self._store.tree_of(base)
            share = trees.lost_share(self._store, tree, stock, paths)
            return share, self._distance(base)[0]

        return min((self._bases[port.base] for port in near), key=lost).date

    def _distance(self, base: Release) -> tuple[float, bool]:
        days = abs(_days(base.date) - _days(self._release.date))
        return days, base.order > self._release.order

    def _from(
        self, port: Port, definition: Definition, draft: TreeOverlay, applied: Sequence[str]
    ) -> AppliedPort | Manual:
        lacking = [id_ for id_ in port.requires if id_ not in applied]
        if lacking:
            reason = f"requires {lacking[0]}, which is not applied here"
            return Manual(port.base, reason, lacks=lacking[0])
        if self._progress:
            self._progress(f"merging {port.name} into {self._release.name}", 0, None)
        try:
            before, after = self._based(port, definition, applied)
        except (NotFetched, UnknownRelease) as error:
            return Manual(port.base, f"release {port.base} is not available: {error}")
        except PatchConflict as error:
            return Manual(port.base, f"the port does not apply to its own base: {error}")
        store = self._store
        stock = store.tree_of(self._release)
        ours = trees.write(store, stock, draft)
        merged = _merge_changes(store, before, ours, after)
        if merged.tree == ours:
            return Manual(port.base, f"{self._release.name} contains every change of the patch")
        if merged.changes is None:
            return Manual(port.base, merged.problem, merged.conflicts)
        folders = used_names.folders(merged.changes)
        base = store.tree_of(self._bases[port.base])
        sides = (_sources(store, tree, folders) for tree in (base, stock))
        if lost := used_names.lost(merged.changes, *sides):
            return Manual(port.base, f"the patch uses {lost}, which {self._release.name} lacks")
        carried = replace(
            port,
            base=self._release.key,
            carried_from=port.base,
            era=self._release.era,
            markers=(),
            path=None,
        )
        head = mail_header.write(definition, carried)
        carried = replace(carried, patch=replace(merged.changes, header=head))
        trial = draft.copy()
        try:
            placements = trial.apply(carried.patch, carried.name)
        except PatchConflict as error:
            return Manual(port.base, f"the merged changes do not apply: {error}")
        if trees.write(store, stock, trial) != merged.tree:
            return Manual(port.base, "the merged changes do not reproduce the merged tree")
        draft.changes.update(trial.changes)
        return AppliedPort(carried, placements, merged.conflicts, merged.contained)

    def _based(self, port: Port, definition: Definition, applied: Sequence[str]) -> tuple[str, str]:
        """Return the trees of a port's base release before and after the port.

        The tree before has the patches of ``applied`` that have a port for that release: then both
        sides of the merge have them.
        """
        store = self._store
        base = trees.ensure_fetched(store, self._bases[port.base], self._progress)
        stock = store.tree_of(base)
        tree = trees.cached(store, stock)
        tree.fetch(path for each in self._series for one in each.ports for path in one.patch.paths)
        draft = TreeOverlay(tree)
        done: list[str] = []
        for earlier in self._series:
            if earlier.id == definition.id:
                break
            if earlier.id in applied:
                found = port_choice.choose(earlier, draft, tree, base.name, done)
                if isinstance(found, AppliedPort):
                    done.append(earlier.id)
        before = trees.write(store, stock, draft)
        draft.apply(port.patch, port.name)
        return before, trees.write(store, stock, draft)


@dataclass(frozen=True)
class _Merged:
    """A merged tree with the changes of the port, or the reason why there is none.

    The conflicts are those that git found; ``contained`` are the places of changes that upstream
    made as well.
    """

    tree: str = ""
    changes: Patch | None = None
    problem: str = ""
    conflicts: tuple[MergeConflict, ...] = ()
    contained: tuple[str, ...] = ()


@functools.lru_cache(maxsize=100)
def _merge_changes(store: Store, before: str, ours: str, after: str) -> _Merged:
    """Merge the change from one tree to another into a third one, and compare the changes."""
    after, contained = _without_contained(store, before, ours, after)
    try:
        tree, conflicts = _merge(store, before, ours, after)
    except GitError as error:
        if error.code != _USAGE_ERROR:
            raise
        reason = "git cannot merge without a work tree; git 2.38 and later can"
        return _Merged(problem=f"{reason}: {error}")
    renamed = None
    if conflicts:
        resolved = _by_tokens(store, tree, conflicts)
        if resolved is None:
            return _Merged(problem="; ".join(map(str, conflicts)), conflicts=conflicts)
        tree, renamed = resolved
    if tree == ours:
        return _Merged(tree)
    changes = _diff(store, ours, tree)
    # The lines of the port itself can have moved: earlier patches are applied before it.
    port = _diff(store, before, after)
    sides = port, _reader(store, after), changes, _reader(store, tree)
    problem = carry_comparison.difference(*sides, tokens=renamed)
    return _Merged(tree, None if problem else changes, problem, conflicts, contained)


def _without_contained(
    store: Store, before: str, ours: str, after: str
) -> tuple[str, tuple[str, ...]]:
    """Return the patched tree without the changes that upstream made as well, and their places.

    Two changes are the same if they replace the same lines of the base by the same tokens: blanks
    and comments may differ. Git merges equal lines as one change, and the comparison would then
    miss the lines of the patch.
    """
    port = _diff(store, before, after)
    files = [file for file in port.files if file.old is not None and file.new is not None]
    if not files:
        return after, ()
    upstream = {
        file.path: {edit.replaced: edit for edit in _edits(file)}
        for file in _diff(store, before, ours, *(file.path for file in files)).files
        if file.new is not None
    }
    read = _reader(store, after)
    draft = TreeOverlay(trees.StoreTree(store, after))
    contained: list[str] = []
    for file in files:
        same = [
            (edit, there)
            for edit in _edits(file)
            if (there := upstream.get(file.path, {}).get(edit.replaced)) and edit.equals(there)
        ]
        lines = list(hunk_locator.lines_of(read(file.path)))
        for edit, _ in reversed(same):
            lines[edit.at : edit.at + len(edit.added)] = edit.removed
        if same and (entry := draft.entry(file.path)):
            draft.changes[file.path] = replace(entry, data=b"".join(lines))
            contained += (f"{file.path}:{there.at + 1}" for _, there in same)
    return (trees.write(store, after, draft) if contained else after), tuple(contained)


@dataclass(frozen=True)
class _Edit:
    """A block of changed lines: the lines of the base it replaces, and its first new line."""

    replaced: tuple[int, int]
    at: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    def equals(self, other: _Edit) -> bool:
        """Return whether both have the same tokens, and a line of code."""
        code = any(map(cpp_lines.is_significant, (*self.removed, *self.added)))
        return code and _texts(self.added) == _texts(other.added)


def _edits(file: FilePatch) -> Iterator[_Edit]:
    """Yield the blocks of changed lines; a file without a line feed at a changed end has none."""
    if any(line[:1] == b"\\" for hunk in file.hunks for line in hunk.lines):
        return
    for hunk in file.hunks:
        old, new = hunk.old_start - 1, hunk.new_start - 1
        removed: list[bytes] = []
        added: list[bytes] = []
        for line in (*hunk.lines, b" "):
            if line[:1] in (b"-", b"+"):
                (removed if line[:1] == b"-" else added).append(line[1:])
                continue
            if removed or added:
                last, end = old + len(removed), new + len(added)
                yield _Edit((old, last), new, tuple(removed), tuple(added))
                old, new, removed, added = last, end, [], []
            old, new = old + 1, new + 1


def _texts(lines: Sequence[bytes]) -> list[str]:
    text = b"".join(lines).decode("utf-8", "surrogateescape")
    return [token.text for token in token_merge.split(text)]


@functools.lru_cache(maxsize=4)
def _sources(store: Store, tree: str, folders: frozenset[str]) -> used_names.Sources:
    source = trees.StoreTree(store, tree)
    paths = [path for path in source.paths() if used_names.is_source(path, folders)]
    source.fetch(paths)
    entries = {path: source.entry(path) for path in paths}
    return used_names.Sources(
        {path: entry.data.decode("utf-8", "replace") for path, entry in entries.items() if entry}
    )


def _diff(store: Store, old: str, new: str, *paths: str) -> Patch:
    words = ("diff-tree", "-p", "-r", *_DIFF, old, new, "--", *paths)
    data = git_command.git_bytes(store.path, *words)
    return hunks.parse(data, "merge.patch") if data else hunks.Patch(b"", ())


def _reader(store: Store, tree: str) -> Reader:
    source = trees.StoreTree(store, tree)

    def read(path: str) -> bytes:
        entry = source.entry(path)
        return entry.data if entry else b""

    return read


def _merge(
    store: Store, base: str, ours: str, theirs: str
) -> tuple[str, tuple[MergeConflict, ...]]:
    """Merge two trees with a common ancestor; return the tree and its conflicts."""
    root = store.commit_tree(base, [], "base")
    sides = [store.commit_tree(tree, [root], "side") for tree in (ours, theirs)]
    words = ("merge-tree", "--write-tree", "-z", "--no-messages", *sides)
    with translate_disk_errors(store.path):
        done = git_command.run(store.path, *words)
        if done.returncode not in (0, 1):
            output = (done.stderr or done.stdout).decode("utf-8", "replace")
            raise GitError(["git", *words], done.returncode, output)
    tree, *records = done.stdout.split(b"\0")
    merged = tree.decode("ascii")
    if done.returncode == 0:
        return merged, ()
    stages: dict[str, set[bytes]] = {}
    for record in records:
        match = _UNMERGED.fullmatch(record)
        if match:
            stages.setdefault(match[2].decode("utf-8", "surrogateescape"), set()).add(match[1])
    read, read_theirs = _reader(store, merged), _reader(store, theirs)
    marked = {file.path: file for file in _diff(store, ours, merged).files}
    found: list[MergeConflict] = []
    for path, those in stages.items():
        if those >= {b"2", b"3"} and path in marked:
            found += _conflicts(path, read(path), marked[path], read_theirs(path))
        else:
            found.append(MergeConflict(path, 0))
    return merged, tuple(found) or (MergeConflict("", 0),)


def _conflicts(
    path: str, data: bytes, marked: FilePatch, patched: bytes
) -> Iterator[MergeConflict]:
    """Yield the marked places of a file; lines are counted as in the target's file.

    ``marked`` is the difference between the target's file and the merged one, ``patched`` the file
    of the base with the patch.
    """
    index = hunk_locator.LineIndex(hunk_locator.lines_of(patched))
    found = headings.Headings(index.lines)
    for line, match in zip(_marker_lines(marked), CONFLICT.finditer(data), strict=False):
        sides = [_lines(match[number]) for number in (1, 2, 3)]
        changed = next((n for n, each in enumerate(sides[2]) if each not in sides[1]), 0)
        places = index.matches(hunk_locator.lines_of(match[3])) if match[3] else []
        function = headings.name(found.enclosing(places[0] + changed)) if places else ""
        yield MergeConflict(path, line, sides[0], sides[1], sides[2], function)


def _marker_lines(marked: FilePatch) -> Iterator[int]:
    """Yield the number of the target's line after each mark that starts a conflict."""
    for hunk in marked.hunks:
        at = hunk.old_start
        for line in hunk.lines:
            if line.startswith(b"+<<<<<<< "):
                yield at
            at += line[:1] in (b" ", b"-")


def _by_tokens(
    store: Store, merged: str, conflicts: Sequence[MergeConflict]
) -> tuple[str, dict[str, str]] | None:
    """Merge each conflict of a tree token by token; return None if one cannot be merged.

    Returns the tree, and the names in the changes of the patch that upstream renamed.
    """
    renamed: dict[str, str] = {}
    read = _reader(store, merged)
    draft = TreeOverlay(trees.StoreTree(store, merged))
    for path in dict.fromkeys(conflict.file for conflict in conflicts):
        if any(not conflict.line for conflict in conflicts if conflict.file == path):
            return None
        out: list[bytes] = []
        done = 0
        data = read(path)
        for match in CONFLICT.finditer(data):
            sides = [match[number].decode("utf-8", "surrogateescape") for number in (1, 2, 3)]
            found = token_merge.merge(*sides)
            if found is None:
                return None
            renamed |= found.renamed
            out += (data[done : match.start()], found.text.encode("utf-8", "surrogateescape"))
            done = match.end()
        entry = draft.entry(path)
        assert entry is not None  # git wrote the conflict into it
        draft.changes[path] = replace(entry, data=b"".join([*out, data[done:]]))
    return trees.write(store, merged, draft), renamed


def _lines(data: bytes) -> tuple[str, ...]:
    return tuple(data.decode("utf-8", "replace").splitlines())


def _days(date: str) -> float:
    try:
        return datetime.fromisoformat(date.replace("Z", "+00:00")).timestamp() / 86400
    except ValueError:  # a directory without history: the newest port is the nearest
        return 1e6
