"""Apply patches strictly to a tree in memory: no fuzz, all or nothing, with reasons.

Where both accept a hunk, git finds the same place. This applier is stricter, because a place must
be certain, and reports for each hunk its place or what it found instead. Nothing is written until a
caller stores the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from pyllamakv.errors import PatchConflict, PatchFormatError
from pyllamakv.patching import headings, hunk_locator
from pyllamakv.source.tree_export import blob_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyllamakv.patching.hunks import FilePatch, Hunk, Patch

FILE = "100644"

State = Literal[
    "exact",
    "offset",
    "conflict",
    "line-ends",
    "ambiguous",
    "already",
    "function",
    "missing",
    "exists",
    "mode",
]
APPLIED_STATES: frozenset[str] = frozenset({"exact", "offset"})
#: Why a hunk has no place, in words.
STATE_MESSAGES = {
    "conflict": "the expected lines do not exist; fuzz is not used",
    "line-ends": "the line ends of the patch and the file differ; convert those of the patch",
    "ambiguous": "the expected lines exist at several places; give the hunk more context",
    "already": "the change is already applied",
    "function": "the expected lines are in another function than the hunk's",
    "missing": "the file does not exist",
    "exists": "the file already exists",
    "mode": "the file has another mode",
}


@dataclass(frozen=True)
class Placement:
    """The result of one hunk; hunk 0 is the file as a whole.

    ``line`` is where the patch expects it, and ``offset`` its distance from there (None: not
    found).
    """

    file: str
    hunk: int
    line: int
    state: State
    offset: int | None = None
    expected: str = ""
    found: str = ""
    at: int = 0

    @property
    def good(self) -> bool:
        """Return whether the hunk has its place."""
        return self.state in APPLIED_STATES


@dataclass(frozen=True)
class DraftEntry:
    """One file of a tree: content and git mode."""

    data: bytes
    mode: str = FILE


class Tree(Protocol):
    """Read a tree, such as a commit of the store."""

    def entry(self, path: str) -> DraftEntry | None:
        """Return the file, or None."""

    def paths(self) -> Iterable[str]:
        """Return the paths of all files."""


@dataclass
class TreeOverlay:
    """A tree with changes laid over it; a change of None is a deletion."""

    base: Tree
    changes: dict[str, DraftEntry | None] = field(default_factory=dict)

    def entry(self, path: str) -> DraftEntry | None:
        """Return the file with all changes so far."""
        return self.changes[path] if path in self.changes else self.base.entry(path)

    def below(self, path: str) -> str:
        """Return a file below a path that is a directory; nothing if there is none."""
        start = f"{path}/"
        there = (name for name in (*self.base.paths(), *self.changes) if name.startswith(start))
        return next((name for name in there if self.entry(name) is not None), "")

    def copy(self) -> TreeOverlay:
        """Return a copy of the draft."""
        return TreeOverlay(self.base, dict(self.changes))

    def dry_run(self, patch: Patch) -> tuple[Placement, ...]:
        """Find the place of every hunk, and change nothing."""
        return self._place(patch)[0]

    def apply(self, patch: Patch, name: str = "patch") -> tuple[Placement, ...]:
        """Apply the complete patch or nothing.

        Raises PatchConflict for the first hunk without a certain place, with the patch, the file,
        the hunk, the line, the expected lines and the present ones.
        """
        placements, changes = self._place(patch)
        bad = next((placement for placement in placements if not placement.good), None)
        if bad is not None:
            raise conflict(bad, placements, name)
        self.changes.update(changes)
        return placements

    def _place(self, patch: Patch) -> tuple[tuple[Placement, ...], dict[str, DraftEntry | None]]:
        trial = self.copy()
        parts: list[list[Placement]] = []
        for file in patch.files:
            found, changes = _file(trial, file)
            if file is patch.files[-1] and not patch.signed and all(p.good for p in found):
                _check_last_blob(trial, file, changes)
            parts.append(found)
            trial.changes.update(changes)
        # Only now: git writes a file before it deletes the folder that was in its place.
        for number, file in enumerate(patch.files):
            below = trial.below(file.path) if file.new not in (None, file.old) else ""
            if below:
                parts[number] = _all(file, "exists", expected="no folder", found=f"a file {below}")
        return tuple(placement for part in parts for placement in part), trial.changes


def _check_last_blob(
    draft: TreeOverlay, file: FilePatch, changes: Mapping[str, DraftEntry | None]
) -> None:
    """Refuse the last part of a patch if hunks at its end are missing.

    That shows only in a file with exactly the content that the patch was made for: the result must
    have the id that the patch states.
    """
    before = draft.entry(file.old) if file.old else None
    after = changes.get(file.path)
    if file.blobs is None or after is None or (file.old and before is None):
        return
    old, new = file.blobs
    same = set(old) == {"0"} if before is None else blob_id(before.data).startswith(old)
    if same and not blob_id(after.data).startswith(new):
        msg = (
            f"the part of {file.path} is cut off: it makes blob {blob_id(after.data)[:12]}, "
            f"expected {new[:12]}. Get the patch again; if you edited it, remove its `index` line."
        )
        raise PatchFormatError(msg, file.path, file.line)


def conflict(bad: Placement, placements: tuple[Placement, ...], name: str) -> PatchConflict:
    """Create the error for a hunk that has no certain place."""
    where = f"{bad.file}, hunk {bad.hunk} (line {bad.line})" if bad.hunk else bad.file
    present = [p for p in placements if p.state == "already"]
    message = f"{name} does not apply to {where}: {STATE_MESSAGES[bad.state]}."
    if bad.state == "missing":
        message += f" There is {bad.found}."
    elif bad.expected or bad.found:
        expected, found = (text or "(an empty line)" for text in (bad.expected, bad.found))
        message += f"\n  expected: {expected}\n  found:    {found}"
    if bad.state == "function":
        message += (
            "\nCheck where the code of that function is now. `pyllamakv patch rebase` carries the "
            "patch over by merging; a hunk that belongs here needs this function in its @@ line."
        )
    if present and len(present) == len(placements):
        message += "\nThe whole patch is already applied, or upstream contains it."
    elif present:
        parts = ", ".join(f"{p.file}#{p.hunk}" for p in present)
        message += (
            f"\nThe tree is partly patched: it already contains {parts} of this patch."
            " Start from the unchanged release."
        )
    return PatchConflict(
        message,
        patch=name,
        file=bad.file,
        hunk=bad.hunk,
        line=bad.line,
        expected=bad.expected,
        found=bad.found,
        half_applied=0 < len(present) < len(placements),
        contained=len(present) == len(placements),
    )


def _file(
    draft: TreeOverlay, file: FilePatch
) -> tuple[list[Placement], dict[str, DraftEntry | None]]:
    if file.old is None:
        return _create(draft, file)
    there = draft.entry(file.old)
    if there is None:
        return _all(file, "missing", found=f"no file {file.old}"), {}
    if file.old_mode and file.old_mode not in (file.new_mode, there.mode):
        return _all(file, "mode", expected=file.old_mode, found=there.mode), {}
    moves = file.new is not None and file.new != file.old
    taken = _above(draft, file.path) if moves else ""
    if moves and (taken or draft.entry(file.path) is not None):
        return _all(file, "exists", found=f"a file {taken or file.path}"), {}
    placements, data = place(there.data, file)
    if file.new is None and all(p.good for p in placements) and data:
        left = data.split(b"\n", 1)[0]
        return _all(file, "conflict", expected="the end of the file", found=_shown(left)), {}
    changes: dict[str, DraftEntry | None] = {}
    if moves and not file.copied:
        changes[file.old] = None
    mode = file.new_mode if file.new_mode != file.old_mode and file.new_mode else there.mode
    changes[file.path] = None if file.new is None else DraftEntry(data, mode)
    return placements or _all(file, "exact"), changes


def _create(
    draft: TreeOverlay, file: FilePatch
) -> tuple[list[Placement], dict[str, DraftEntry | None]]:
    data = b"".join(line for hunk in file.hunks for line in hunk.new)
    there = draft.entry(file.path)
    above = _above(draft, file.path)
    if above:
        return _all(file, "exists", expected="a folder", found=f"{above}, a file or link"), {}
    if there is None:
        return _all(file, "exact"), {file.path: DraftEntry(data, file.new_mode or FILE)}
    state: State = "already" if there.data == data else "exists"
    return _all(
        file, state, expected="no such file", found=f"a file of {len(there.data)} bytes"
    ), {}


def _above(draft: TreeOverlay, path: str) -> str:
    """Return the file in the place of a directory that a path needs; git would replace it."""
    parts = path.split("/")
    names = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return next((name for name in names if draft.entry(name) is not None), "")


def _all(file: FilePatch, state: State, *, expected: str = "", found: str = "") -> list[Placement]:
    offset = 0 if state == "exact" else None
    hunks = [(number, hunk.old_start) for number, hunk in enumerate(file.hunks, 1)] or [(0, 0)]
    return [
        Placement(file.path, number, line, state, offset, expected, found, line)
        for number, line in hunks
    ]


def place(data: bytes, file: FilePatch) -> tuple[list[Placement], bytes]:
    """Find the place of every hunk of a file in its content; return them and the new content.

    The content is the old one where a hunk has no place.
    """
    lines = hunk_locator.lines_of(data)
    index = hunk_locator.LineIndex(lines)
    found = _Search(file, index)
    placements: list[Placement] = []
    out: list[bytes] = []
    done = 0
    straight = True  # Every hunk so far was at its expected position.
    for number, hunk in enumerate(file.hunks, 1):
        placement = found.place(number, done, straight=straight)
        placements.append(placement)
        straight = straight and placement.state == "exact"
        if placement.good:
            start = placement.at - 1 if hunk.old_count else placement.at
            out += lines[done:start]
            out += hunk.new
            done = start + len(hunk.old)
    if not all(placement.good for placement in placements):
        return placements, data
    return placements, b"".join([*out, *lines[done:]])


class _Search:
    """Find the places of the hunks of one file."""

    def __init__(self, file: FilePatch, index: hunk_locator.LineIndex) -> None:
        self.file = file
        self.index = index
        self.headings = headings.Headings(index.lines)
        self.old = [index.find(hunk.old, hunk) for hunk in file.hunks]
        self.offsets = [
            found[0] - hunk_locator.start_of(hunk) if len(found) == 1 else None
            for hunk, found in zip(file.hunks, self.old, strict=True)
        ]

    def place(self, number: int, done: int, *, straight: bool) -> Placement:
        """Return the placement of a hunk (counted from 1), after the lines that are in use."""
        hunk = self.file.hunks[number - 1]
        start = hunk_locator.start_of(hunk)
        found = [at for at in self.old[number - 1] if at >= done]
        if start in found and straight:
            return self._certain(number, hunk, start)
        if len(found) == 1:
            return self._certain(number, hunk, found[0])
        if found:
            where = "the same lines at " + ", ".join(str(at + 1) for at in found)
            return self._bad(number, hunk, "ambiguous", "one place with these lines", where)
        if hunk.new and self.index.find(hunk.new, hunk):
            gone = _shown(hunk.removed[0]) if hunk.removed else "the unchanged lines"
            return self._bad(number, hunk, "already", gone, "the changed lines")
        bare = hunk_locator.LineIndex([*map(_unix, self.index.lines)])
        if bare.find([*map(_unix, hunk.old)], hunk):
            ends = _line_ends(hunk.old), _line_ends(self.index.lines)
            return self._bad(number, hunk, "line-ends", *ends)
        nearest, expected, seen = self.index.nearest(hunk.old, start)
        return self._bad(number, hunk, "conflict", _shown(expected), _shown(seen), nearest + 1)

    def _certain(self, number: int, hunk: Hunk, at: int) -> Placement:
        """Return the placement at the only match of the old lines, or the reason to refuse it."""
        offset = at - hunk_locator.start_of(hunk)
        head = headings.expected(hunk, self.file.old or self.file.path)
        other = self.headings.differs(head, at)
        present = self._present(number, hunk, head, at, elsewhere=bool(other))
        if present is not None:
            expected = f"the unchanged lines near line {hunk.old_start}"
            found = f"the changed lines at {present + 1}, the unchanged ones only at {at + 1}"
            return self._bad(number, hunk, "already", expected, found, present + 1)
        if other:
            expected, found = f"a place in `{_shown(head)}`", f"line {at + 1} in `{_shown(other)}`"
            return self._bad(number, hunk, "function", expected, found, at + 1)
        state: State = "offset" if offset else "exact"
        line = hunk.old_start
        return Placement(self.file.path, number, line, state, offset, at=line + offset)

    def _present(
        self, number: int, hunk: Hunk, head: bytes, at: int, *, elsewhere: bool
    ) -> int | None:
        """Return where the new lines are at the hunk's original place, if ``at`` is another one.

        The original place is the line in the patch, moved by the offset of a neighbouring hunk. If
        the hunk names its function, it is any line of that function that is nearer than ``at``.
        """
        start = hunk_locator.start_of(hunk)
        if at == start or not hunk.new or not (hunk.added or hunk.removed):
            return None
        moved = self._moved(number)
        if at - start in moved and not elsewhere:
            return None
        own = {line + by for line in (start, hunk.new_start - 1) for by in (0, *moved)}
        for there in self.index.find(hunk.new, hunk):
            if there < at + len(hunk.old) and at < there + len(hunk.new):
                continue  # the lines overlap: this is one place
            if head and not self.headings.same(head, there):
                continue
            far = min(abs(there - line) for line in own)
            if far == 0 or (head and (elsewhere or far < abs(at - start))):
                return there
        return None

    def _moved(self, number: int) -> set[int]:
        """Return the offsets of the nearest hunks before and after one that match only once."""
        sides = range(number - 2, -1, -1), range(number, len(self.offsets))
        near = (
            next((o for n in side if (o := self.offsets[n]) is not None), None) for side in sides
        )
        return {offset for offset in near if offset is not None}

    def _bad(
        self, number: int, hunk: Hunk, state: State, expected: str, found: str, at: int = 0
    ) -> Placement:
        return Placement(self.file.path, number, hunk.old_start, state, None, expected, found, at)


def _unix(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _line_ends(lines: Iterable[bytes]) -> str:
    """Return the line ends in use: ``LF``, ``CRLF``, or ``CRLF and LF``."""
    ends = {"CRLF" if line.endswith(b"\r\n") else "LF" for line in lines}
    return " and ".join(sorted(ends))


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode("utf-8", "replace")
