"""Classify lines of C and C++ by their text."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = re.compile(r"[A-Za-z_]\w*")
_CALL = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^<>();]*>)?\s*\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)+\'')
_NOTE = re.compile(r"//.*|/\*.*?(?:\*/|$)")
_KEYWORDS = """
alignas alignof auto bool break case catch char class const const_cast constexpr continue
decltype default defined delete do double dynamic_cast else enum explicit extern false
float for friend if include inline int int32_t int64_t long namespace new noexcept nullptr
operator override private protected public reinterpret_cast return short signed size_t
sizeof static static_assert static_cast std struct switch template this throw true try
typedef typename uint16_t uint32_t uint64_t uint8_t union unsigned using virtual void
volatile while
"""
#: Keywords and the names of common types, which say nothing about a piece of code.
WORDS = frozenset(_KEYWORDS.split())

#: The classes of lines, in the order in which they are tried.
_KINDS = (
    ("preprocessor", re.compile(r"#")),
    ("log", re.compile(r"\w*LOG\w*\s*\(|f?printf\s*\(|std::cerr")),
    ("assert", re.compile(r"\w*(?:ASSERT|assert)\w*\s*\(")),
    ("throw", re.compile(r"throw\b")),
    ("return", re.compile(r".*\breturn\b")),
    ("loop", re.compile(r"(?:\}\s*)?(?:for|while|do)\b")),
    ("condition", re.compile(r"(?:\}\s*)?(?:else\s+)?(?:if|switch|case)\b|(?:\}\s*)?else\b")),
    ("call", re.compile(r"[\w:.>\-\[\]()*&]+\(.*\)?;?$")),
)


def normalize(line: bytes) -> str:
    """Return a line without comments, with single spaces."""
    text = line.decode("utf-8", "replace")
    if not text.lstrip().startswith("#"):
        text = _NOTE.sub("", text)
    text = " ".join(text.split())
    return "" if text.startswith("* ") or text == "*" else text


def code(line: bytes) -> str:
    """Return a line without comments and the content of literals, with single spaces."""
    return _QUOTED.sub('""', normalize(line))


def is_significant(line: bytes) -> bool:
    """Return whether a line is code: not blank, a lone brace or a comment."""
    return _NAME.search(normalize(line)) is not None


def kind(line: bytes) -> str:
    """Return the class of a line: what it does, as "loop" or "return"; empty for none."""
    text = normalize(line)
    if not _NAME.search(text):
        return ""
    for name, pattern in _KINDS:
        if pattern.match(text):
            return name
    return "statement"


def calls(lines: Iterable[bytes]) -> Counter[str]:
    """Count the called or defined names in lines."""
    found: Counter[str] = Counter()
    for line in lines:
        text = code(line)
        if not text.startswith("#"):
            found.update(name for name in _CALL.findall(text) if name not in WORDS)
    return found


def names(lines: Iterable[bytes]) -> Counter[str]:
    """Count the names in lines, without keywords and words of fewer than four letters."""
    found: Counter[str] = Counter()
    for line in lines:
        found.update(n for n in _NAME.findall(code(line)) if len(n) > 3 and n not in WORDS)
    return found
