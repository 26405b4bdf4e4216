"""Mutate lines of C++, one token or statement at a time.

An operator yields the variants of one line that a slip could produce. A variant need not compile:
such variants are counted separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A variant of a line; ``now`` is empty if the line is deleted."""

    operator: str
    now: str


Operator = Callable[[str, bool], Iterator[Change]]

#: Boundaries and their neighbours. Operators have spaces around them; template brackets do not.
_BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_NEGATIONS = {"==": "!=", "!=": "=="}
_JOINTS = {"&&": "||", "||": "&&"}
_ENDS = {"min": "max", "max": "min"}
#: Names for K, and the corresponding names for V.
_SIDES = (
    ("k_l", "v_l"),
    ("n_embd_k_gqa", "n_embd_v_gqa"),
    ("n_embd_head_k", "n_embd_head_v"),
    ("type_k", "type_v"),
    ("KEYS", "VALUES"),
)
_SWAPS = {a: b for pair in _SIDES for a, b in (pair, pair[::-1])}

_BINARY = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<|>)(?= )")
_STEP = re.compile(r" [+-] 1\b(?![.\w])|\b1 \+ ")
_WORD = re.compile(r"\b(?:" + "|".join(_SWAPS) + r")\b")
_LAYOUT = re.compile(r"(?<!bool )\bv_trans\b")
_DECLARED = re.compile(r"= (?:default|delete);$")
_END = re.compile(r"\bstd::(min|max)\b")
_CONDITION = re.compile(r"\b(if|while) \(")
_RETURN = re.compile(r"^(\s*)return (.*);$")
_STATEMENT = re.compile(
    r"^\s*(?:(?:\+\+|--)[\w.\[\]>-]+|[\w.\[\]>-]+(?:\+\+|--)|break|continue|return"
    r"|(?!return\b|throw\b|delete\b|goto\b|else\b)(?:\([a-z ]+\) )?"
    r"(?:::)?[\w.:>\[\]-]+(?:<\w+>)?(?:\(.*\))+(?:[.>-]+\w+\(.*\))*);$"
)
_THROW = re.compile(r"^\s*throw .*;$")
_ASSIGNMENT = re.compile(r"^\s*[\w.()\[\]*:>+-]+(?:\[[^=]*\])?\s+[-+*/|&^]?= .*;$")

_NO_CODE = {
    "comment": re.compile(r"^\s*(?://|/\*|\*)"),
    "preprocessor": re.compile(r"^\s*#"),
    "assert or log": re.compile(r"^\s*(?:GGML_ASSERT|GGML_ABORT|GGML_UNUSED|assert|static_assert"
                                r"|(?:LLAMA|GGML)_LOG_\w+|fprintf)\b"),
}  # fmt: skip


def left_out(line: str) -> str:
    """Return why a line is not mutated; "" for a line of code."""
    if not line.strip() or not re.search(r"\w", line):
        return "no code"
    return next((why for why, found in _NO_CODE.items() if found.match(line)), "")


def changes(line: str, above: str = "") -> list[Change]:
    """Return every variant of a line of code, each once; ``above`` is the last code before it.

    Strings and comments stay unchanged, and a statement is deleted only if it starts and ends on
    this line.
    """
    if left_out(line):
        return []
    code, comment = _split(line)
    alone = whole(line, above)
    found: dict[str, Change] = {}
    for operator in OPERATORS:
        for change in operator(code, alone):
            now = (change.now + comment).rstrip() if change.now else ""
            if now != line.rstrip():
                found.setdefault(now, Change(change.operator, now))
    return list(found.values())


def _tokens(name: str, pattern: re.Pattern[str], other: Callable[[str], str]) -> Operator:
    """Return an operator that replaces each occurrence of a pattern outside strings."""

    def operate(code: str, whole: bool) -> Iterator[Change]:
        for match in pattern.finditer(_blind(code)):
            start, end = match.span()
            now = other(match[0])
            if now != match[0]:
                yield Change(name, code[:start] + now + code[end:])

    return operate


def _negated(code: str, whole: bool) -> Iterator[Change]:
    blind = _blind(code)
    for match in _CONDITION.finditer(blind):
        end = _closing(blind, match.end() - 1)
        if end:
            inner = code[match.end() : end]
            yield Change("condition negated", f"{code[: match.end()]}!({inner}){code[end:]}")


def _turned(code: str, whole: bool) -> Iterator[Change]:
    match = _RETURN.match(code)
    if not match or not whole:
        return
    space, value = match.groups()
    opposite = {"true": "false", "false": "true"}.get(value)
    if opposite is None and value.startswith("!") and re.fullmatch(r"![\w.:>()-]+", value):
        opposite = value[1:]
    if opposite is None and (" && " in _blind(value) or " || " in _blind(value)):
        opposite = f"!({value})"
    if opposite is not None:
        yield Change("return negated", f"{space}return {opposite};")


def _removed(code: str, whole: bool) -> Iterator[Change]:
    if not whole:
        return
    blind = _blind(code)
    if _STATEMENT.match(blind):
        yield Change("statement removed", "")
    elif _THROW.match(blind):
        yield Change("error not raised", "")
    elif _ASSIGNMENT.match(blind) and not _DECLARED.search(blind):
        yield Change("assignment dropped", "")


OPERATORS: Sequence[Operator] = (
    _tokens("bound", _BINARY, lambda found: _BOUNDS.get(found, found)),
    _tokens("off by one", _STEP, lambda found: ""),
    _tokens("minimum, maximum", _END, lambda found: "std::" + _ENDS[found[5:]]),
    _tokens("comparison negated", _BINARY, lambda found: _NEGATIONS.get(found, found)),
    _tokens("&& and || swapped", _BINARY, lambda found: _JOINTS.get(found, found)),
    _tokens("K and V swapped", _WORD, lambda found: _SWAPS[found]),
    _tokens("layout of V negated", _LAYOUT, lambda found: f"!{found}"),
    _negated,
    _turned,
    _removed,
)


def whole(line: str, above: str = "") -> bool:
    """Return whether brackets that open on a line close on it."""
    return _complete(code_of(line)) and (not above or above.rstrip()[-1:] in ";{}:")


def removable(code: str) -> bool:
    """Return whether a line is a statement that can be deleted."""
    return any(True for _ in _removed(code, True))


def code_of(line: str) -> str:
    """Return a line without its trailing comment."""
    return _split(line)[0]


def _split(line: str) -> tuple[str, str]:
    """Return a line's code and its trailing comment, with the space between."""
    at = _blind(line).find("//")
    if at < 0:
        return line.rstrip(), ""
    code = line[:at].rstrip()
    return code, line[len(code) :]


def _blind(code: str) -> str:
    """Return the code with the contents of its strings masked, at equal offsets."""
    return re.sub(r'"(?:\\.|[^"\\])*"', lambda match: '"' + "_" * (len(match[0]) - 2) + '"', code)


def _closing(code: str, start: int) -> int:
    """Return the index of the closing parenthesis, 0 if not on this line."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if depth == 0:
            return at
    return 0


def _complete(code: str) -> bool:
    blind = _blind(code)
    return all(blind.count(a) == blind.count(b) for a, b in ("()", "[]", "{}"))
