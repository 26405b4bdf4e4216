"""Compare two ports of one patch, for two bases, and list what the second one lacks.

A port may apply and build without the hunk that matters. Lines move and change between bases, so
hunks are matched by the lines that they add, wherever these are, calls and classes of lines are
counted over the whole port, and the lines of a function that differ are listed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal

from pyllamakv.patching import cpp_lines, headings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.hunks import FilePatch, Hunk, Patch

#: "identical": the same hunks at the same places; "context": the same lines added and removed,
#: other lines around them or other places; "content": other lines.
Change = Literal["identical", "context", "content"]
What = Literal["file", "hunk", "call", "class", "lines"]

#: A hunk is lost when less than this part of what it adds is anywhere in the other port.
_KEPT = 0.4
#: Minimum similarity of a line and the one that upstream made of it.
_CHANGED = 0.6
#: Classes of lines, and statements, whose loss changes where a function continues.
_CONTROL = ("return", "throw", "assert", "condition")
_JUMPS = ("break", "continue", "goto", "case ", "default:")


_VERBS = {
    "preprocessor": "are preprocessor directives",
    "log": "log",
    "assert": "assert",
    "throw": "throw",
    "return": "return",
    "loop": "loop",
    "condition": "branch",
    "call": "call",
    "statement": "are other statements",
}


@dataclass(frozen=True)
class PortDifference:
    """One difference between two ports: a count that is higher in one of them.

    ``name`` is the file, the hunk's number, the function or the class of lines. ``function`` is the
    function around the hunk. ``before`` and ``after`` are counts in the two ports. ``lines`` are
    those that the hunk adds, or, for "lines", those of a function that only one port adds, with
    ``-`` or ``+``.
    """

    what: What
    name: str
    file: str = ""
    function: str = ""
    before: int = 1
    after: int = 0
    lines: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Return whether one port has nothing of it."""
        return min(self.before, self.after) == 0

    def __str__(self) -> str:
        if self.what == "file":
            return f"file {self.name}"
        if self.what == "lines":
            return f"{self.file}, {self.function or 'outside of functions'}"
        if self.what == "hunk":
            where = f" ({self.function})" if self.function else ""
            return f"{self.file}, hunk {self.name}{where}"
        what = (
            f"calls of {self.name}()" if self.what == "call" else f"lines that {_VERBS[self.name]}"
        )
        return f"{what}: {self.before} -> {self.after}"

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {**self.__dict__, "lines": list(self.lines), "whole": self.whole}


@dataclass(frozen=True)
class PortComparison:
    """Describe how the port for one base differs from that for another.

    ``one`` and ``other`` are the bases, or the files of ports without a base.
    """

    id: str
    one: str
    other: str
    change: Change
    lost: tuple[PortDifference, ...] = ()
    gained: tuple[PortDifference, ...] = ()
    changed: tuple[PortDifference, ...] = ()

    @property
    def missing(self) -> tuple[PortDifference, ...]:
        """Return what is missing completely, which a person must check."""
        return tuple(loss for loss in self.lost if loss.whole)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "patch": self.id,
            "from": self.one,
            "to": self.other,
            "change": self.change,
            "lost": [loss.as_json() for loss in self.lost],
            "gained": [loss.as_json() for loss in self.gained],
            "changed": [each.as_json() for each in self.changed],
        }


def compare(one: Port, other: Port) -> PortComparison:
    """Compare the port for one base with that for another."""
    change = change_of(one.patch, other.patch)
    first, second = (port.base or (port.path.name if port.path else "") for port in (one, other))
    if change != "content":
        return PortComparison(one.id, first, second, change)
    return PortComparison(
        one.id,
        first,
        second,
        change,
        lost=missing_parts(one.patch, other.patch),
        gained=tuple(
            replace(each, before=each.after, after=each.before)
            for each in missing_parts(other.patch, one.patch)
        ),
        changed=changed_lines(one.patch, other.patch),
    )


def changed_lines(one: Patch, other: Patch) -> tuple[PortDifference, ...]:
    """Return the lines that only one of two ports changes, for each function that both change.

    Functions are matched by their names without classes, in added files also by file, and lines
    without their spacing. A removed line begins with ``removed:``. If the lines are the same in
    another order, those that moved are returned.
    """
    first, second = _by_function(one), _by_function(other)
    found = []
    for place, (file, lines) in second.items():
        if place not in first:
            continue
        name, old = place[1], first[place][1]
        gone, new = Counter(old) - Counter(lines), Counter(lines) - Counter(old)
        shown = [f"- {line}" for line in old if gone[line]]
        shown += [f"+ {line}" for line in lines if new[line]]
        if not shown and old != lines:
            gone, new = Counter(), Counter()
            for tag, at, end, to, last in SequenceMatcher(None, old, lines, False).get_opcodes():
                gone.update(old[at:end] if tag != "equal" else ())
                new.update(lines[to:last] if tag != "equal" else ())
            shown = [f"- {line}" for line in gone.elements()]
            shown += [f"+ {line}" for line in new.elements()]
        if shown:
            found.append(
                PortDifference(
                    "lines", name, file, name, sum(gone.values()), sum(new.values()), tuple(shown)
                )
            )
    return tuple(found)


def _by_function(patch: Patch) -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Return file and changed lines of each function, in the order of the port.

    The key is the added file, if it is one, and the name.
    """
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    marks = {b"+": "", b"-": "removed: "}
    for file in patch.files:
        added = [line for hunk in file.hunks for line in hunk.added] if file.old is None else []
        index = headings.Headings(added)
        for at, line in enumerate(added):
            if cpp_lines.is_significant(line):
                key = file.path, headings.name(index.enclosing(at)).rpartition("::")[2]
                found.setdefault(key, (file.path, []))[1].append(cpp_lines.normalize(line))
        for hunk in file.hunks if file.old is not None else ():
            key = "", heading(hunk).rpartition("::")[2].split(" ")[-1]
            found.setdefault(key, (file.path, []))[1].extend(
                marks[line[:1]] + cpp_lines.normalize(line[1:])
                for line in hunk.lines
                if line[:1] in marks and cpp_lines.is_significant(line[1:])
            )
    return found


def change_of(one: Patch, other: Patch) -> Change:
    """Return the class of the change between two ports."""
    if _body(one) == _body(other):
        return "identical"
    return "context" if _changes(one) == _changes(other) else "content"


def missing_parts(one: Patch, other: Patch) -> tuple[PortDifference, ...]:
    """Return what the first port has and the second lacks, or has less of."""
    found: list[PortDifference] = []
    there = {file.path for file in other.files}
    same, pool = _paired(one, other)
    for file in one.files:
        gone = [
            (n, hunk)
            for n, hunk in enumerate(file.hunks, 1)
            if not next(same) and not pool.has(hunk)
        ]
        # a file that moved is no loss, one whose every hunk is missing is
        if file.path not in there and len(gone) == len(file.hunks):
            found.append(PortDifference("file", file.path, before=max(len(file.hunks), 1)))
        found += [_hunk(file, number, hunk) for number, hunk in gone]
    found += _counted("call", _calls(one), _calls(other))
    found += _counted("class", _classes(one), _classes(other))
    return tuple(found)


def _paired(one: Patch, other: Patch) -> tuple[Iterator[bool], _Pool]:
    """Match hunks that change the same lines; return matched ones, and the rest of the other port.

    Each hunk can match only once, because two hunks of a patch are often similar.
    """
    theirs = Counter(_changed_lines(hunk) for file in other.files for hunk in file.hunks)
    found = []
    for hunk in (hunk for file in one.files for hunk in file.hunks):
        changed = _changed_lines(hunk)
        found.append(theirs[changed] > 0)
        theirs[changed] -= 1
    rest = []
    for hunk in (hunk for file in other.files for hunk in file.hunks):
        if theirs[_changed_lines(hunk)] > 0:
            rest.append(hunk)
            theirs[_changed_lines(hunk)] -= 1
    return iter(found), _Pool(rest)


def _changed_lines(hunk: Hunk) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(map(cpp_lines.normalize, hunk.removed)), tuple(
        map(cpp_lines.normalize, hunk.added)
    )


class _Pool:
    """An index of added and removed lines, to look up hunks of another port."""

    def __init__(self, hunks: Sequence[Hunk]) -> None:
        added = [line for hunk in hunks for line in hunk.added if cpp_lines.is_significant(line)]
        removed = [
            line for hunk in hunks for line in hunk.removed if cpp_lines.is_significant(line)
        ]
        self.added = set(map(cpp_lines.normalize, added))
        self.removed = set(map(cpp_lines.normalize, removed))
        self.names = cpp_lines.names(added)
        self.by_function: dict[str, set[str]] = {}
        for hunk in hunks:
            lines = filter(cpp_lines.is_significant, hunk.added)
            self.by_function.setdefault(heading(hunk), set()).update(
                map(cpp_lines.normalize, lines)
            )

    def has(self, hunk: Hunk) -> bool:
        """Return whether most of a hunk is present."""
        added = [cpp_lines.normalize(line) for line in hunk.added if cpp_lines.is_significant(line)]
        if not added:
            removed = [
                cpp_lines.normalize(line) for line in hunk.removed if cpp_lines.is_significant(line)
            ]
            # Lines that the other base never had need no removal; any remaining line is enough.
            return not removed or any(line in self.removed for line in removed)
        # A resolution often changes a line of its hunk.
        near = self.by_function.get(heading(hunk), ())
        same = sum(
            line in self.added or any(_similar(line, each) for each in near) for line in added
        ) / len(added)
        if same >= _KEPT:
            return True
        fresh = set(cpp_lines.names(hunk.added)) - set(cpp_lines.names(hunk.old))
        known = sum(name in self.names for name in fresh)
        # a port may spell every line anew, yet it uses the same names
        return len(fresh) > 2 and known / len(fresh) > 1 - _KEPT and same > 0


def _hunk(file: FilePatch, number: int, hunk: Hunk) -> PortDifference:
    lines = tuple(
        cpp_lines.normalize(line) for line in hunk.added if cpp_lines.is_significant(line)
    )
    return PortDifference("hunk", str(number), file.path, heading(hunk), len(lines) or 1, 0, lines)


def heading(hunk: Hunk) -> str:
    """Return the function in a hunk's header, without its arguments."""
    return headings.written(hunk).decode("utf-8", "replace").split("(", 1)[0].strip()


def _counted(what: What, one: Counter[str], other: Counter[str]) -> Iterable[PortDifference]:
    for name, count in sorted(one.items()):
        if other[name] < count:
            yield PortDifference(what, name, before=count, after=max(other[name], 0))


def _calls(patch: Patch) -> Counter[str]:
    """Count the calls that a port adds, without those that it only moves."""
    return cpp_lines.calls(_lines(patch, b"+")) - cpp_lines.calls(_lines(patch, b"-"))


def _classes(patch: Patch) -> Counter[str]:
    added, removed = (
        Counter(cpp_lines.kind(line) for line in _lines(patch, mark)) for mark in (b"+", b"-")
    )
    found = added - removed
    del found[""]
    return found


def _lines(patch: Patch, mark: bytes) -> list[bytes]:
    hunks = (hunk for file in patch.files for hunk in file.hunks)
    return [line for hunk in hunks for line in (hunk.added if mark == b"+" else hunk.removed)]


def _body(patch: Patch) -> list[tuple[object, ...]]:
    return [
        (
            file.old,
            file.new,
            file.new_mode,
            [(hunk.old_start, hunk.new_start, hunk.lines) for hunk in file.hunks],
        )
        for file in patch.files
    ]


def _changes(patch: Patch) -> list[tuple[object, ...]]:
    return [
        (
            file.old,
            file.new,
            [line for hunk in file.hunks for line in hunk.lines if line[:1] in (b"+", b"-")],
        )
        for file in patch.files
    ]


def deletions(old: Patch, new: Patch) -> tuple[str, ...]:
    """Describe each line that the second of two ports deletes and the first one does not.

    Such a line is usually upstream's, and was lost in the resolution of a conflict. Equal lines are
    counted: one ``return false;`` that the first port deletes or adds explains one of the second
    port. A line that the second port adds elsewhere was moved. A line that is similar to one that
    only the first port deletes, or that the same lines replace, was changed by upstream. Lines that
    leave a function or a loop, or check something, come first.
    """
    before = [block for _, _, block in _blocks(old)]
    after = list(_blocks(new))
    gone, deleted, made, moved = (
        Counter(line for block in blocks for line in block[side])
        for side in (0, 1)
        for blocks in (before, [block for _, _, block in after])
    )
    excess = deleted - gone - (moved - made)
    changed = [*(gone - deleted).elements()]
    replaced = {added: removed for removed, added in before if added}
    found: list[tuple[bool, str]] = []
    for path, start, (removed, added) in after:
        lines = []
        for line in removed:
            if not excess[line]:
                continue
            excess[line] -= 1
            former = next((each for each in changed if _similar(line, each)), None)
            if former is None:
                lines.append(line)
            else:
                changed.remove(former)
        if len(lines) <= len(replaced.get(added, ())):
            continue
        for line in lines:
            leaves = cpp_lines.kind(line.encode()) in _CONTROL or line.startswith(_JUMPS)
            found.append((leaves, f"{path}, near line {start}: {line}"))
    found.sort(key=lambda each: not each[0])
    return tuple(
        f"deletes {'a check or a jump' if leaves else 'a line'} of upstream, which the port before "
        f"keeps: {text}"
        for leaves, text in found
    )


_Block = tuple[tuple[str, ...], tuple[str, ...]]


def _blocks(patch: Patch) -> Iterator[tuple[str, int, _Block]]:
    """Yield the removed and added lines of code of each block of changed lines."""
    for file in patch.files:
        for hunk in file.hunks if file.old is not None and file.new is not None else ():
            sides: dict[bytes, list[str]] = {b"-": [], b"+": []}
            for line in (*hunk.lines, b" "):
                if line[:1] in sides:
                    if cpp_lines.is_significant(line[1:]):
                        sides[line[:1]].append(cpp_lines.normalize(line[1:]))
                elif any(sides.values()):
                    yield file.path, hunk.new_start, (tuple(sides[b"-"]), tuple(sides[b"+"]))
                    sides = {b"-": [], b"+": []}


def _similar(one: str, other: str) -> bool:
    return SequenceMatcher(None, one, other, autojunk=False).ratio() >= _CHANGED
