"""Compare the changes of a merge with those of the port that was merged, function by function.

A function is identified by its file and its name. The sources are compared by text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pyllamakv.patching import cpp_lines, headings, hunk_locator, token_merge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyllamakv.patching.hunks import FilePatch, Patch

#: Return the content of a file of a tree by its path; empty for a file that does not exist.
Reader = Callable[[str], bytes]

#: A file, and a function or type in it; the name is empty outside of functions.
Place = tuple[str, str]
#: The changes of a function in order: lines of one block each, or tokens.
Changes = dict[Place, list[tuple[str, ...]]]
#: The lines of functions and types.
Bodies = dict[Place, set[bytes]]

_T = TypeVar("_T")


def difference(
    one: Patch,
    read_one: Reader,
    other: Patch,
    read_other: Reader,
    *,
    tokens: Mapping[str, str] | None = None,
) -> str:
    """Return how the changes of two patches differ, or nothing if they are the same.

    The readers return the content of a patched file, or nothing if the tree has no such file. The
    same lines must be added and removed, each block of lines in the function of the same name and
    file; spacing, comments and line numbers may differ. Added files must be equal. With ``tokens``,
    the same tokens must be added and removed in each function, in the same order; other tokens of a
    line may differ, and ``tokens`` are names of the first patch that may have another name in the
    second. A file has been renamed if each of its names exists on one side only. A function has
    been renamed if each of its names exists on one side only, its changes are the same, and half of
    its lines. Its class has been renamed if each of the qualified names exists on one side only.
    """
    first, second = _added_files(one), _added_files(other)
    if first != second:
        names = sorted(name for name in first | second if first.get(name) != second.get(name))
        return f"the merge changes the added file {names[0]}"
    moved = _renamed_files(one, read_one, other, read_other)
    changes = _blocks if tokens is None else _tokens
    before, after = _moved(changes(one, read_one), moved), changes(other, read_other)
    for old, new in (tokens or {}).items():
        before, after = (_replaced(side, f"+{old}", f"+{new}") for side in (before, after))
    bodies = _moved(_functions(one, read_one), moved), _functions(other, read_other)
    renamed = _renamed(before, bodies[0], after, bodies[1])
    before = {renamed.get(place, place): parts for place, parts in before.items()}
    return _difference(before, after, in_order=tokens is not None)


def _difference(before: Changes, after: Changes, *, in_order: bool) -> str:
    """Return how the changes of two patches differ, or nothing if they are the same."""
    if in_order:
        differing = (place for place in before | after if before.get(place) != after.get(place))
        place = next(differing, None)
        return "" if place is None else f"the merge changes other tokens {_place(place)}"
    blocks, found = _counted(before), _counted(after)
    lost, gained = blocks - found, found - blocks
    for where, lines in (*lost, *gained):
        others = [there for there, same in (*gained, *lost) if same == lines and there != where]
        if others:
            to = _place(others[0]).removeprefix("in ")
            return f"the merge moves lines {_place(where)} to {to}: {lines[0]}"
        what = "loses" if (where, lines) in lost else "adds"
        return f"the merge {what} lines {_place(where)}: {lines[0]}"
    return ""


def _moved(found: dict[Place, _T], files: Mapping[str, str]) -> dict[Place, _T]:
    """Return places with other names of files."""
    return {(files.get(file, file), name): value for (file, name), value in found.items()}


def _renamed_files(
    one: Patch, read_one: Reader, other: Patch, read_other: Reader
) -> dict[str, str]:
    """Return the changed files that upstream renamed: old path -> new path.

    Of several new files, the one with the most lines in common is taken.
    """
    old = {path: read for path in _changed_files(one) if not read_other(path)
           and (read := set(hunk_locator.lines_of(read_one(path))))}  # fmt: skip
    new = {path: read for path in _changed_files(other) if not read_one(path)
           and (read := set(hunk_locator.lines_of(read_other(path))))}  # fmt: skip
    found = {
        path: max(new, key=lambda each: len(lines & new[each]))
        for path, lines in old.items()
        if new
    }
    counts = Counter(found.values())
    return {path: name for path, name in found.items() if counts[name] == 1}


def _replaced(changes: Changes, old: str, new: str) -> Changes:
    return {
        place: [(new,) if each == (old,) else each for each in tokens]
        for place, tokens in changes.items()
    }


def _place(place: Place) -> str:
    file, name = place
    return f"in `{name}` of {file}" if name else f"outside of functions of {file}"


def _counted(changes: Changes) -> Counter[tuple[Place, tuple[str, ...]]]:
    return Counter((place, lines) for place, blocks in changes.items() for lines in blocks)


def _renamed(before: Changes, old: Bodies, after: Changes, new: Bodies) -> dict[Place, Place]:
    """Return the functions that upstream renamed in a file: old place -> new place."""
    found = {}
    for place, changes in before.items():
        if not place[1] or place in new:
            continue
        others = [
            each
            for each, same in after.items()
            if same == changes
            and each[0] == place[0]
            and each not in old
            and _similar(old.get(place, set()), new.get(each, set()))
        ]
        others = others or [each for each in new.keys() - old.keys() if _same_member(place, each)]
        if len(others) == 1:
            found[place] = others[0]
    # The changes of two functions would hide a change that the merge lost.
    counts = Counter(found.values())
    return {place: other for place, other in found.items() if counts[other] == 1}


def _same_member(one: Place, other: Place) -> bool:
    """Return whether two names are those of one member in two classes of a file."""
    (first, _, name), (second, _, same) = one[1].rpartition("::"), other[1].rpartition("::")
    return one[0] == other[0] and name == same and bool(first and second)


def _similar(one: set[bytes], other: set[bytes]) -> bool:
    """Return whether two functions have half of their lines in common."""
    return 2 * len(one & other) >= max(len(one), len(other)) > 0


def _changed_files(patch: Patch) -> list[str]:
    return [file.path for file in patch.files if file.old is not None and file.new is not None]


def _functions(patch: Patch, read: Reader) -> Bodies:
    """Return the lines of the functions and types in the changed files."""
    return {
        (path, name): lines
        for path in _changed_files(patch)
        for name, lines in headings.bodies(hunk_locator.lines_of(read(path))).items()
    }


def _added_files(patch: Patch) -> dict[str, bytes]:
    return {
        file.path: b"".join(line for hunk in file.hunks for line in hunk.added)
        for file in patch.files
        if file.old is None
    }


def _tokens(patch: Patch, read: Reader) -> Changes:
    found: Changes = {}
    for place, removed, added in _changed(patch, read):
        old, new = (token_merge.split(_text(lines)) for lines in (removed, added))
        for edit in token_merge.edits(old, new):
            gone = [f"-{token.text}" for token in old[edit.first : edit.last]]
            made = [f"+{token.text}" for token in edit.tokens]
            found.setdefault(place, []).extend((each,) for each in (*gone, *made))
    return found


def _blocks(patch: Patch, read: Reader) -> Changes:
    found: Changes = {}
    for place, *sides in _changed(patch, read):
        lines = [
            sign + cpp_lines.normalize(line)
            for sign, side in zip("-+", sides, strict=True)
            for line in side
            if cpp_lines.is_significant(line)
        ]
        if lines:
            found.setdefault(place, []).append(tuple(sorted(lines)))
    return found


def _changed(patch: Patch, read: Reader) -> Iterator[tuple[Place, list[bytes], list[bytes]]]:
    """Yield the function, the removed and the added lines of each block of changed lines."""
    for file in patch.files:
        if file.old is not None and file.new is not None:
            for name, removed, added in _changed_lines(file, read(file.path)):
                yield (file.path, name), removed, added


def _changed_lines(file: FilePatch, data: bytes) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    found = headings.Headings(hunk_locator.lines_of(data))
    for hunk in file.hunks:
        at = where = hunk.new_start - 1
        removed: list[bytes] = []
        added: list[bytes] = []
        for line in (*hunk.lines, b" "):
            sign = line[:1]
            if sign in (b"+", b"-"):
                if not removed and not added:
                    where = at
                (added if sign == b"+" else removed).append(line[1:])
            elif removed or added:
                yield headings.name(found.enclosing(where)), removed, added
                removed, added = [], []
            at += sign in (b"+", b" ")


def _text(lines: Sequence[bytes]) -> str:
    return b"".join(lines).decode("utf-8", "surrogateescape")
