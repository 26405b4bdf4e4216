"""Compare the changes of a merge with those of the port that was merged, function by function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyllamakv.patching import cpp_lines, headings, hunk_locator, token_merge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyllamakv.patching.hunks import FilePatch, Patch

#: Return the content of a file of a tree by its path; empty for a file that does not exist.
Reader = Callable[[str], bytes]

#: The changes of a function in order: lines of one block each, or tokens.
Changes = dict[str, list[tuple[str, ...]]]
#: The lines of functions and types, by name.
Bodies = dict[str, set[bytes]]


def difference(
    one: Patch,
    read_one: Reader,
    other: Patch,
    read_other: Reader,
    *,
    tokens: Mapping[str, str] | None = None,
) -> str:
    """Return how the changes of two patches differ, or nothing if they are the same.

    The readers return the content of a patched file. The same lines must be added and removed, each
    block of lines in the function of the same name; spacing, comments and line numbers may differ.
    Added files must be equal. With ``tokens``, the same tokens must be added and removed in each
    function, in the same order; other tokens of a line may differ, and ``tokens`` are names of the
    first patch that may have another name in the second. A function has been renamed if each of its
    names exists on one side only, its changes are the same, and half of its lines. Its class has
    been renamed if each of the qualified names exists on one side only.
    """
    first, second = _added_files(one), _added_files(other)
    if first != second:
        names = sorted(name for name in first | second if first.get(name) != second.get(name))
        return f"the merge changes the added file {names[0]}"
    changes = _blocks if tokens is None else _tokens
    before, after = changes(one, read_one), changes(other, read_other)
    for old, new in (tokens or {}).items():
        before, after = (_replaced(side, f"+{old}", f"+{new}") for side in (before, after))
    renamed = _renamed(before, _functions(one, read_one), after, _functions(other, read_other))
    before = {renamed.get(name, name): parts for name, parts in before.items()}
    if tokens is not None:
        differing = (name for name in before | after if before.get(name) != after.get(name))
        name = next(differing, None)
        return "" if name is None else f"the merge changes other tokens {_place(name)}"
    blocks, found = _counted(before), _counted(after)
    lost, gained = blocks - found, found - blocks
    for where, lines in (*lost, *gained):
        moved = [there for there, same in (*gained, *lost) if same == lines and there != where]
        if moved:
            return f"the merge moves lines {_place(where)} to `{moved[0]}`: {lines[0]}"
        what = "loses" if (where, lines) in lost else "adds"
        return f"the merge {what} lines {_place(where)}: {lines[0]}"
    return ""


def _replaced(changes: Changes, old: str, new: str) -> Changes:
    return {
        name: [(new,) if each == (old,) else each for each in tokens]
        for name, tokens in changes.items()
    }


def _place(name: str) -> str:
    return f"in `{name}`" if name else "outside of functions"


def _counted(changes: Changes) -> Counter[tuple[str, tuple[str, ...]]]:
    return Counter((name, lines) for name, blocks in changes.items() for lines in blocks)


def _renamed(before: Changes, old: Bodies, after: Changes, new: Bodies) -> dict[str, str]:
    """Return the functions that upstream renamed: old name -> new name."""
    found = {}
    for name, changes in before.items():
        if not name or name in new:
            continue
        others = [
            each
            for each, same in after.items()
            if same == changes
            and each not in old
            and _similar(old.get(name, set()), new.get(each, set()))
        ]
        others = others or [each for each in new.keys() - old.keys() if _same_member(name, each)]
        if len(others) == 1:
            found[name] = others[0]
    # The changes of two functions would hide a change that the merge lost.
    counts = Counter(found.values())
    return {name: other for name, other in found.items() if counts[other] == 1}


def _same_member(one: str, other: str) -> bool:
    """Return whether two names are those of one member in two classes."""
    (first, _, name), (second, _, same) = one.rpartition("::"), other.rpartition("::")
    return name == same and bool(first and second)


def _similar(one: set[bytes], other: set[bytes]) -> bool:
    """Return whether two functions have half of their lines in common."""
    return 2 * len(one & other) >= max(len(one), len(other)) > 0


def _functions(patch: Patch, read: Reader) -> Bodies:
    """Return the lines of the functions and types in the changed files, by name."""
    found: Bodies = {}
    for file in patch.files:
        if file.old is not None and file.new is not None:
            for name, lines in headings.bodies(hunk_locator.lines_of(read(file.path))).items():
                found.setdefault(name, set()).update(lines)
    return found


def _added_files(patch: Patch) -> dict[str, bytes]:
    return {
        file.path: b"".join(line for hunk in file.hunks for line in hunk.added)
        for file in patch.files
        if file.old is None
    }


def _tokens(patch: Patch, read: Reader) -> Changes:
    found: Changes = {}
    for name, removed, added in _changed(patch, read):
        old, new = (token_merge.split(_text(lines)) for lines in (removed, added))
        for edit in token_merge.edits(old, new):
            gone = [f"-{token.text}" for token in old[edit.first : edit.last]]
            made = [f"+{token.text}" for token in edit.tokens]
            found.setdefault(name, []).extend((each,) for each in (*gone, *made))
    return found


def _blocks(patch: Patch, read: Reader) -> Changes:
    found: Changes = {}
    for name, *sides in _changed(patch, read):
        lines = [
            sign + cpp_lines.normalize(line)
            for sign, side in zip("-+", sides, strict=True)
            for line in side
            if cpp_lines.is_significant(line)
        ]
        if lines:
            found.setdefault(name, []).append(tuple(sorted(lines)))
    return found


def _changed(patch: Patch, read: Reader) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """Yield the function, the removed and the added lines of each block of changed lines."""
    for file in patch.files:
        if file.old is not None and file.new is not None:
            yield from _changed_lines(file, read(file.path))


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
