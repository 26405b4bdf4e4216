"""Read decode scripts: one JSON object per line (docs/scripts.md, docs/traces.md).

A trace without its results is a script; `script_player` plays both.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import ScriptError
from pyllamakv.scenarios.player import WORDS
from pyllamakv.traces import batch_encoding
from pyllamakv.traces.batch_encoding import is_int32

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


#: Maximum number of cells in a recorded picture: ten times the longest contexts.
CELLS = 1 << 24
#: Maximum number of cells in all pictures of a trace: 8 bytes each.
DRAWN = 1 << 28

#: An index into a batch as a JSON key.
_PLACE = re.compile(r"[0-9]{1,9}")


def check(result: dict[str, Any]) -> str:
    """Return the error in a result, or an empty text."""
    for name in ("status", "polls", "used", "cells"):
        if not is_int32(result.get(name, 0)):
            return f"its {name} must be a number of 32 bits, found {result[name]!r}"
    best = result.get("best", {})
    if not isinstance(best, dict) or not all(map(_choice, best.values())):
        return f"its best must be [token, logit, margin] of places, found {best!r}"
    if not all(map(_PLACE.fullmatch, best)):
        return f"its best must have row numbers, found {best!r}"
    moved = result.get("moved", [])
    if not _rows(moved, 3) or not all(0 <= n <= CELLS for row in moved for n in row):
        return f"its moved must be a list of [from, to, cells], found {moved!r}"
    return _picture(result["picture"]) if "picture" in result else ""


def cells(result: dict[str, Any]) -> int:
    """Return the number of cells in the picture of a checked result."""
    return sum(length for _, length in result["picture"]["runs"]) if "picture" in result else 0


def _choice(found: Any) -> bool:
    """Return whether a value is a token, its logit, and the margin to the second."""
    if not isinstance(found, list) or len(found) != 3:
        return False
    token, *numbers = found
    return is_int32(token) and all(isinstance(n, float) or is_int32(n) for n in numbers)


def _picture(raw: Any) -> str:
    if not isinstance(raw, dict) or not isinstance(raw.get("label"), str):
        return f"its picture must have a label and runs, found {raw!r}"
    runs, streams = raw.get("runs"), raw.get("streams", [])
    known = runs and _rows(runs, 2) and all(owner >= -2 and length > 0 for owner, length in runs)
    if not known:
        return f"its picture must have runs of [owner, length], found {raw!r}"
    n = cells({"picture": raw})
    if n > CELLS:
        return f"its picture has {n} cells, more than any cache"
    parts = isinstance(streams, list) and all(type(n) is int and n > 0 for n in streams)
    if not parts or (streams and sum(streams) != n):
        return f"its picture's streams must be lengths that sum up to {n}, found {streams!r}"
    return ""


def _rows(found: Any, width: int) -> bool:
    """Return whether a value is a list of rows of ``width`` integers each."""
    return isinstance(found, list) and all(
        isinstance(row, list) and len(row) == width and all(map(is_int32, row)) for row in found
    )


#: Maximum size of a script or trace in bytes: a device or a pipe may be endless.
LARGEST = 1 << 30
#: Bytes read at a time: for a single large read, Python allocates the maximum first.
_PIECE = 1 << 20
#: Each operation with its arguments; a name that ends in "?" is optional.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "context": (
        "model?", "n_ctx?", "n_batch?", "n_ubatch?", "n_seq_max?", "n_threads?", "flash_attn?",
        "type_k?", "type_v?", "kv_unified?", "swa_full?", "defrag_thold?", "n_threads_batch?",
        "offload_kqv?", "embeddings?", "guard?", "defrag_plan?", "defrag_mover?", "defrag_threads?",
    ),
    "decode": ("feed", "interleave?", "expect?"),
    "step": ("seq", "token", "pos?", "expect?"),
    "batch": ("tokens", "seq", "pos?", "logits?", "expect?"),
    "advance": ("steps", "seq", "pos?", "expect?"),
    "remove": ("seq", "from?", "to?"),
    "copy": ("seq", "into", "from?", "to?"),
    "keep": ("seq",),
    "shift": ("seq", "by", "from?", "to?"),
    "divide": ("seq", "by", "from?", "to?"),
    "clear": (),
    "save": ("seq", "as"),
    "restore": ("seq", "as", "state?", "expect?"),
    "defrag": (),
    "update": (),
    "cancel": ("polls",),
    "threads": ("n", "batch"),
    "expect": ("used?", "free?", "holes?", "largest_hole?"),
    "verify": (),
    "snapshot": ("label?",),
    "note": ("text",),
}  # fmt: skip

#: The operations that decode.
DECODES = ("decode", "step", "batch", "advance")

STATUS = {text: status for status, text in WORDS.items()}

#: Maximum number of tokens of a count, because they are generated before the library is called.
MOST = 1 << 20

_HALF = re.compile("[\ud800-\udfff]")

#: Keys of lines that are no operations: the first and the last line of a trace.
_FRAME = ("trace", "end")

_TEXTS = ("as", "text", "label", "model", "state")
_SWITCHES = (
    "flash_attn", "kv_unified", "swa_full", "offload_kqv", "embeddings", "guard", "interleave",
)  # fmt: skip
_COUNTS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
_NUMBERS = (
    *_COUNTS, "defrag_plan", "defrag_mover", "defrag_threads",
    "seq", "into", "by", "polls", "used", "free", "holes", "largest_hole", "pos", "token", "n",
    "batch",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One operation of a script: its line number, name, arguments, and recorded result."""

    number: int
    op: str
    arguments: dict[str, Any]
    result: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens that a decode needs cells for at once.

        0 for other operations, and for a text, which only a model can tokenize.
        """
        words = self.arguments
        match self.op:
            case "step":
                return 1
            case "batch":
                return len(words["tokens"])
            case "advance":
                return len(words["seq"])
            case "decode":
                feeds = list(words["feed"].values())
                if any(isinstance(each, str) for each in feeds):
                    return 0
                return sum(each if isinstance(each, int) else len(each) for each in feeds)
        return 0

    def wrong(self, what: str) -> ScriptError:
        """Return an error with the number of this line."""
        return ScriptError(f"line {self.number} ({self.op}): {what}", self.number)

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        extra = {} if self.result is None else {"result": self.result}
        return {"op": self.op, **self.arguments, **extra}


def contents(path: Path) -> bytes:
    """Return the bytes of a script or a trace. Raises ScriptError if it is too large."""
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            data += piece
            if len(data) > LARGEST:
                msg = f"{path} is neither script nor trace: expected at most {LARGEST:,} bytes"
                raise ScriptError(msg)
    return bytes(data)


def read(path: Path) -> list[Line]:
    """Return the lines of a script file.

    Raises ScriptError with the invalid line, or if there are no lines.
    """
    try:
        text = contents(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = f"{path} cannot be read as a script: {why}"
        raise ScriptError(msg) from error
    lines = list(parse(text.split("\n")))
    if not lines:
        msg = f"{path} has no operations"
        raise ScriptError(msg)
    return lines


def parse(lines: Iterable[str]) -> Iterator[Line]:
    """Yield the operations of a script; empty lines and lines that begin with # are skipped."""
    begun = False
    for number, text in enumerate(lines, start=1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            msg = f"line {number}: not JSON ({error}); expected one object per line"
            raise ScriptError(msg, number) from error
        if not isinstance(raw, dict) or not isinstance(raw.get("op"), str):
            if isinstance(raw, dict) and any(word in raw for word in _FRAME):
                continue
            msg = f'line {number}: expected an object with "op", for example {{"op": "defrag"}}'
            raise ScriptError(msg, number)
        line = _line(number, raw)
        if begun and line.op == "context":
            raise line.wrong("the context must be the first operation, and the only one")
        begun = True
        yield line


def _line(number: int, raw: dict[str, Any]) -> Line:
    words = dict(raw)
    op = words.pop("op")
    result = words.pop("result", None)
    line = Line(number, op, words, result)
    if result is not None and not isinstance(result, dict):
        raise line.wrong(f"result must be an object, found {result!r}")
    if op not in OPERATIONS:
        close = difflib.get_close_matches(op, OPERATIONS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(OPERATIONS)}"
        raise line.wrong(f"unknown operation; {hint}")
    known = {name.rstrip("?"): name.endswith("?") for name in OPERATIONS[op]}
    for name in words:
        if name not in known:
            takes = ", ".join(known) or "nothing"
            raise line.wrong(f"unknown argument {name!r}: it takes {takes}")
    for name, optional in known.items():
        if not optional and name not in words:
            raise line.wrong(f"the argument {name!r} is missing")
    _check(line)
    wrong = check(result or {})
    if wrong:
        raise line.wrong(wrong)
    return line


def _check(line: Line) -> None:
    words = line.arguments
    for name in _NUMBERS:
        # Each token of the batch needs a sequence, and a position if any is given.
        if line.op in ("batch", "advance") and name in ("seq", "pos"):
            continue
        if name in words and not batch_encoding.is_int32(words[name]):
            raise line.wrong(f"{name} must be a number of 32 bits, found {words[name]!r}")
    for name in _COUNTS:
        if words.get(name, 1) < 1:
            raise line.wrong(f"{name} must be 1 or more, found {words[name]}")
    for name in _TEXTS:
        if not _text(words.get(name, "")):
            raise line.wrong(f"{name} must be a text, found {words[name]!r}")
    for name in _SWITCHES:
        if words.get(name) is not None and not isinstance(words[name], bool):
            raise line.wrong(f"{name} must be true or false, found {words[name]!r}")
    if not isinstance(words.get("defrag_thold", 0), (int, float)):
        raise line.wrong(f"defrag_thold must be a number, found {words['defrag_thold']!r}")
    for name in ("type_k", "type_v"):
        if not isinstance(words.get(name, ""), (str, int)):
            raise line.wrong(f"{name} must be the name of a type, found {words[name]!r}")
    for name in ("from", "to"):
        if words.get(name) is not None and not batch_encoding.is_int32(words[name]):
            raise line.wrong(f"{name} must be a number or null, found {words[name]!r}")
    if line.op == "decode":
        feed = words["feed"]
        if not isinstance(feed, dict) or not feed:
            raise line.wrong('feed must be like {"0": 16}, {"0": [1, 2]} or {"0": "text"}')
        for what in feed.values():
            number = type(what) is int and 0 < what <= MOST
            tokens = isinstance(what, list) and what and all(map(batch_encoding.is_int32, what))
            if not (number or tokens or (what and _text(what))):
                expected = f"expected a count up to {MOST}, tokens or a text"
                raise line.wrong(f"cannot feed {what!r}: {expected}")
    if line.op in ("batch", "advance"):
        wrong = _advance(words) if line.op == "advance" else batch_encoding.check(words)
        if wrong:
            raise line.wrong(wrong)
    if line.op == "restore" and words.get("expect", "ok") not in ("ok", "any"):
        raise line.wrong("expect must be ok or any")
    if words.get("expect", "ok") not in (*STATUS, "any") and line.op in DECODES:
        raise line.wrong(f"expect must be one of {', '.join(STATUS)}, any")


def _text(found: Any) -> bool:
    """Return whether a value is a text that can be encoded: JSON can contain lone surrogates."""
    return isinstance(found, str) and not _HALF.search(found)


def _advance(words: dict[str, Any]) -> str:
    steps, seq = words["steps"], words["seq"]
    if not (isinstance(steps, list) and steps and all(isinstance(row, list) for row in steps)):
        return f"steps must be a list of tokens of each step, found {steps!r}"
    if not (isinstance(seq, list) and all(map(batch_encoding.is_int32, seq))):
        return f"seq must be a list of sequences, found {seq!r}"
    for row in steps:
        wrong = batch_encoding.check({**words, "tokens": row, "logits": "all"})
        if wrong:
            return wrong
    return ""
