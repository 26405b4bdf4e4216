"""Merge the sides of a conflict token by token, where git merges whole lines.

Git reports a conflict if both sides change a line, or lines without another line between them.
Often the changes are apart: upstream adds an argument, and the patch replaces the name of the
function. Here, the changes of the patch are applied to upstream's tokens. A token that the patch
removes must be unchanged, and so must both tokens beside an insertion within a line. Beside
inserted lines, one line must be unchanged, or the conflict must end. These places need a name:
brackets alone can match anywhere. What the patch adds must not use a name that upstream removed
there, unless it was renamed, or a function whose arguments upstream changed. Arguments are not
changed if upstream calls another function there, and a condition not if upstream changed a negation
or a comparison in it.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllamakv.patching import cpp_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Maximum number of tokens of a side; the time to compare two sides grows with their product.
MAX_TOKENS = 5000

_TOKEN = re.compile(
    r"(?P<space>(?:\s|//[^\n]*|/\*.*?\*/)*)"
    r'(?P<text>[A-Za-z_]\w*|\d[\w.]*|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|::|->|\+\+|--|'
    r"&&|\|\||[=!<>]=|\S|\Z)",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_]")
#: The words before a condition, and the operators that turn it around.
_TESTS = frozenset({"if", "while"})
_OPERATORS = frozenset({"!", "==", "!=", "<", ">", "<=", ">="})


class Token(NamedTuple):
    """A token of C or C++, with the blanks and comments before it."""

    space: str
    text: str


class Merged(NamedTuple):
    """The merged lines, and the names in the changes of the patch that follow upstream's."""

    text: str
    renamed: dict[str, str]


class Edit(NamedTuple):
    """Tokens ``first`` up to, not including, ``last`` are replaced by ``tokens``."""

    first: int
    last: int
    tokens: tuple[Token, ...]


def split(text: str) -> list[Token]:
    """Return the tokens of lines of code; the last one has no text, but what follows the code."""
    # Every line then begins with a line feed, which belongs to its first token.
    found = [Token(*match.groups()) for match in _TOKEN.finditer("\n" + text.removesuffix("\n"))]
    while len(found) > 1 and not found[-2].text:
        found.pop()
    return found


def join(tokens: Sequence[Token]) -> str:
    """Return the lines of code from their tokens: the reverse of `split`."""
    text = "".join(f"{token.space}{token.text}" for token in tokens).removeprefix("\n")
    return f"{text}\n" if text else ""


def edits(old: Sequence[Token], new: Sequence[Token]) -> list[Edit]:
    """Return the changes of tokens; blanks and comments are ignored.

    Whole lines are compared first, and then the tokens of lines that differ.
    """
    before, after = _lines(old), _lines(new)
    found = []
    for kind, a, b, c, d in _opcodes([key for _, key in before], [key for _, key in after]):
        first, last = (before[at][0] if at < len(before) else len(old) - 1 for at in (a, b))
        start, end = (after[at][0] if at < len(after) else len(new) - 1 for at in (c, d))
        if kind == "replace":
            sides = [[token.text for token in side] for side in (old[first:last], new[start:end])]
            found += [
                Edit(first + i, first + j, tuple(new[start + k : start + m]))
                for each, i, j, k, m in _opcodes(*sides)
                if each != "equal"
            ]
        elif kind != "equal":
            found.append(Edit(first, last, tuple(new[start:end])))
    return found


def merge(upstream: str, base: str, patch: str) -> Merged | None:
    """Return upstream's lines with the changes of the patch, or None if the changes collide."""
    ours, old, theirs = map(split, (upstream, base, patch))
    if max(map(len, (ours, old, theirs))) > MAX_TOKENS:
        return None
    changes, upstreams = edits(old, theirs), edits(old, ours)
    used = {token.text for edit in changes for token in edit.tokens}
    renamed = {name: new for name, new in _renamed(old, upstreams).items() if name in used}
    if used & _touched(old, ours, upstreams) - renamed.keys():
        return None
    kept = _kept(old, upstreams)
    # Arguments for one function need not fit another one.
    if any(kept[at] is None for edit in changes for at in _callees(old, edit.first)):
        return None
    # A term of a condition need not fit the opposite condition.
    turned = {_condition(old, edit.first) for edit in upstreams if _turns(old, edit)} - {None}
    if any(_condition(old, edit.first) in turned for edit in changes):
        return None
    for token, at, there in zip(old, kept, _kept(old, changes), strict=True):
        if at is not None and there is not None and ours[at].space == token.space:
            ours[at] = theirs[there]
    target = _Target(old, kept)
    done = 0
    out: list[Token] = []
    for edit in changes:
        found = target.place(edit)
        if found is None or found[0] < done:
            return None
        out += ours[done : found[0]]
        out += (Token(space, renamed.get(text, text)) for space, text in edit.tokens)
        done = found[1]
    return Merged(join([*out, *ours[done:]]), renamed)


def _renamed(old: Sequence[Token], changes: Sequence[Edit]) -> dict[str, str]:
    """Return the names that upstream replaced by a new one wherever they occur."""
    found: dict[str, set[str]] = {token.text: set() for token in old if _NAME.match(token.text)}
    single = {
        edit.first: edit.tokens[0].text
        for edit in changes
        if edit.last - edit.first == len(edit.tokens) == 1
    }
    for at, token in enumerate(old):
        if token.text in found:
            found[token.text].add(single.get(at, token.text))
    pairs = [(name, *others) for name, others in found.items() if len(others) == 1]
    return {name: new for name, new in pairs if new not in found and _NAME.match(new)}


def _touched(old: Sequence[Token], new: Sequence[Token], changes: Sequence[Edit]) -> set[str]:
    """Return the names that upstream removed, and the functions whose arguments it changed.

    A change of an argument to another name is no change of the function.
    """
    names = {token.text for token in old} - {token.text for token in new}
    for edit in changes:
        if edit.last - edit.first == len(edit.tokens) == 1:
            continue
        names.update(old[at].text for at in _callees(old, edit.first))
    return {name for name in names if _NAME.match(name)} - cpp_lines.WORDS


def _callees(old: Sequence[Token], at: int) -> Iterator[int]:
    """Yield the places of the functions in whose arguments a token is, the innermost first."""
    depth = 0
    for there in range(at - 1, 0, -1):
        depth += (old[there].text in (")", "]")) - (old[there].text in ("(", "["))
        if old[there].text in (";", "{", "}"):
            return
        if depth < 0:
            depth = 0
            yield there - 1


def _condition(old: Sequence[Token], at: int) -> int | None:
    """Return the place of the `if` or `while` in whose condition a token is, outside of calls."""
    callee = next((each for each in _callees(old, at) if _NAME.match(old[each].text)), None)
    return callee if callee is not None and old[callee].text in _TESTS else None


def _turns(old: Sequence[Token], edit: Edit) -> bool:
    """Return whether an edit adds, removes or replaces a negation or a comparison."""
    removed = {token.text for token in old[edit.first : edit.last]}
    return bool(_OPERATORS & (removed ^ {token.text for token in edit.tokens}))


def _kept(old: Sequence[Token], changes: Sequence[Edit]) -> list[int | None]:
    """Return where each token of the old side is on the new one; None for a changed token."""
    found: list[int | None] = []
    moved = 0
    for edit in changes:
        found += range(len(found) + moved, edit.first + moved)
        found += [None] * (edit.last - edit.first)
        moved += len(edit.tokens) - (edit.last - edit.first)
    return [*found, *range(len(found) + moved, len(old) + moved)]


class _Target:
    """Find the tokens of the base in upstream's tokens."""

    def __init__(self, old: Sequence[Token], kept: Sequence[int | None]) -> None:
        self._old = old
        self._kept = kept
        self._starts = [first for first, _ in _lines(old)]

    def place(self, edit: Edit) -> tuple[int, int] | None:
        """Return the range of upstream's tokens that an edit replaces; None if it is uncertain."""
        first, last, tokens = edit
        before = self._kept[first - 1] if first else -1
        after = self._kept[last]
        if first < last:
            return self._run(first, last) if self._anchored(first, last) else None
        if not ("\n" in tokens[0].space and first in (*self._starts, len(self._old) - 1)):
            if before is None or after != before + 1 or not self._anchored(first, first):
                return None
            return before + 1, before + 1
        left = before is not None and (not first or self._line(first - 1))
        right = after is not None and (first == len(self._old) - 1 or self._line(first))
        if before is not None and after is not None and after != before + 1:
            return None  # upstream inserts here as well
        if left and before is not None:
            return before + 1, before + 1
        return (after, after) if right and after is not None else None

    def _anchored(self, first: int, last: int) -> bool:
        """Return whether a range has a name, or upstream kept all up to a name of the line."""
        start, end = self._around(first)
        while (
            first > start
            and self._run(first - 1, max(last, first))
            and not self._named(first, last)
        ):
            first -= 1
        while last < end and self._run(first, last + 1) and not self._named(first, last):
            last += 1
        return self._named(first, last)

    def _around(self, at: int) -> tuple[int, int]:
        """Return the range of the line of a token."""
        end = len(self._old) - 1
        first = max((start for start in self._starts if start <= at), default=0)
        return first, min((start for start in self._starts if start > at), default=end)

    def _named(self, first: int, last: int) -> bool:
        return any(_NAME.match(token.text) for token in self._old[first:last])

    def _run(self, first: int, last: int) -> tuple[int, int] | None:
        """Return where consecutive tokens of the base are, if upstream changed none of them."""
        places = self._kept[first:last]
        start = places[0]
        if start is None or [*places] != [*range(start, start + len(places))]:
            return None
        return start, start + len(places)

    def _line(self, at: int) -> bool:
        """Return whether upstream has the line of a token, and the line has a name."""
        first, last = self._around(at)
        return self._named(first, last) and self._run(first, last) is not None


def _lines(tokens: Sequence[Token]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the first token and the texts of each line that has tokens."""
    starts = [n for n, token in enumerate(tokens[:-1]) if not n or "\n" in token.space]
    ends = [*starts[1:], len(tokens) - 1]
    return [
        (start, tuple(token.text for token in tokens[start:end]))
        for start, end in zip(starts, ends, strict=False)
    ]


def _opcodes(old: Sequence[Any], new: Sequence[Any]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
