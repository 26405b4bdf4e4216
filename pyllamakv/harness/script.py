"""Read decode scripts, and play them: one JSON object per line (docs/scripts.md).

A script, and a trace with its results taken away, are the same thing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import ContextParams, ModelParams, Native, Status
from pyllamakv.errors import ScenarioFailed, ScriptError, UsageError
from pyllamakv.harness import synthetic
from pyllamakv.harness.player import WORDS, Player
from pyllamakv.harness.reference import Reference
from pyllamakv.runtime import ggml_types as types

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Each operation with its arguments: a name that ends in "?" may be left out.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "context": (
        "model?", "n_ctx?", "n_batch?", "n_ubatch?", "n_seq_max?", "n_threads?", "flash_attn?",
        "type_k?", "type_v?", "kv_unified?", "swa_full?", "defrag_thold?",
    ),
    "decode": ("feed", "interleave?", "expect?"),
    "remove": ("seq", "from?", "to?"),
    "copy": ("seq", "into", "from?", "to?"),
    "keep": ("seq",),
    "shift": ("seq", "by", "from?", "to?"),
    "divide": ("seq", "by", "from?", "to?"),
    "clear": (),
    "save": ("seq", "as"),
    "restore": ("seq", "as", "expect?"),
    "defrag": (),
    "update": (),
    "cancel": ("polls",),
    "expect": ("used?", "free?", "holes?", "largest_hole?"),
    "verify": (),
    "snapshot": ("label?",),
    "note": ("text",),
}  # fmt: skip

_STATUS = {text: status for status, text in WORDS.items()}


@dataclass(frozen=True)
class Line:
    """Hold one operation of a script: its line number, name, arguments, and recorded result."""

    number: int
    op: str
    arguments: dict[str, Any]
    result: dict[str, Any] | None = None

    def wrong(self, what: str) -> ScriptError:
        """Return an error that names this line."""
        return ScriptError(f"line {self.number} ({self.op}): {what}", self.number)

    def to_json(self) -> dict[str, Any]:
        """Return the line as it stands in a file."""
        extra = {} if self.result is None else {"result": self.result}
        return {"op": self.op, **self.arguments, **extra}


@dataclass
class Stage:
    """Hold what a script works on: a library, the model, and the context once it is there."""

    native: Native
    model: str = "tiny"
    player: Player | None = None
    reference: Reference | None = None
    loaded: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Give the contexts back."""
        if self.reference is not None:
            self.reference.close()
        if self.player is not None:
            self.player.close()


def read(path: Path) -> list[Line]:
    """Return the lines of a script file. Raises ScriptError with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read as a script: {error}"
        raise ScriptError(msg) from error
    return list(parse(text.splitlines()))


def parse(lines: Iterable[str]) -> Iterator[Line]:
    """Yield the operations of a script; empty lines and lines that begin with # are skipped."""
    for number, text in enumerate(lines, start=1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        try:
            raw = json.loads(text)
        except ValueError as error:
            msg = f"line {number}: not JSON ({error}); expected one object per line"
            raise ScriptError(msg, number) from error
        if not isinstance(raw, dict) or not isinstance(raw.get("op"), str):
            if isinstance(raw, dict) and "trace" in raw:
                continue
            msg = f'line {number}: expected an object with "op", for example {{"op": "defrag"}}'
            raise ScriptError(msg, number)
        yield _line(number, raw)


def play(
    lines: Iterable[Line],
    stage: Stage,
    observe: Callable[[Line, dict[str, Any]], None] | None = None,
) -> None:
    """Play a script; ``observe`` is called after each line with its result.

    Raises ScriptError for a line that cannot be played, ScenarioFailed for an expectation that is
    not met.
    """
    for line in lines:
        try:
            result = play_line(line, stage)
        except UsageError as error:
            raise line.wrong(str(error)) from error
        except ScenarioFailed as error:
            msg = f"line {line.number} ({line.op}): {error}"
            raise ScenarioFailed(msg, failure=error.failure, evidence=error.evidence) from error
        if observe:
            observe(line, result)


def play_line(line: Line, stage: Stage) -> dict[str, Any]:
    """Play one line and return what came of it."""
    words = line.arguments
    if line.op == "context":
        _open(line, stage)
        assert stage.player is not None
        return {"n_ctx": stage.player.info.n_ctx}
    if stage.player is None:
        _open(Line(line.number, "context", {}), stage)
    player = stage.player
    assert player is not None
    result: dict[str, Any] = {}
    match line.op:
        case "decode":
            expect = words.get("expect", "ok")
            status = player.decode(
                _feeds(line, stage),
                interleave=bool(words.get("interleave", False)),
                expect=None if expect == "any" else _STATUS[expect],
            )
            result = {"status": status}
            if status == Status.OK:
                result["argmax"] = {
                    str(place): int(row.argmax()) for place, row in player.steps[-1].logits.items()
                }
        case "remove":
            result = {"done": player.remove(words["seq"], *_span(words))}
        case "copy":
            player.copy(words["seq"], words["into"], *_span(words))
        case "keep":
            player.keep(words["seq"])
        case "shift":
            player.shift(words["seq"], *_span(words), words["by"])
        case "divide":
            player.divide(words["seq"], *_span(words), words["by"])
        case "clear":
            player.clear()
        case "save":
            player.save(words["seq"], words["as"])
        case "restore":
            if words["as"] not in player.saved:
                raise line.wrong(f"nothing was saved as {words['as']!r}")
            must = words.get("expect", "ok") == "ok"
            result = {"done": player.restore(words["seq"], words["as"], must=must)}
        case "defrag":
            report = player.defrag()
            result = {"moves": report.moves, "cells": report.cells}
        case "update":
            player.update()
        case "cancel":
            player.cancel_after(words["polls"])
        case "expect":
            _expect(player, words)
        case "verify":
            player.check_cells()
            assert stage.reference is not None
            stage.reference.catch_up()
            if player.ledger.used < player.n_cells:
                stage.reference.check_next()
        case _:
            pass
    snapshot = player.snapshot()
    if snapshot is not None:
        stats = snapshot.stats
        result |= {"used": stats.used, "holes": stats.holes, "largest_hole": stats.largest_hole}
    return result


def _open(line: Line, stage: Stage) -> None:
    if stage.player is not None:
        raise line.wrong("the context is there already; it must be the first operation")
    words = dict(line.arguments)
    name = words.pop("model", stage.model)
    for key, default in (("type_k", "f16"), ("type_v", "f16")):
        words[key] = types.cache_type(words.get(key, default), key[-1].upper()).number
    words.setdefault("n_ctx", 256)
    words.setdefault("n_batch", words["n_ctx"])
    words.setdefault("n_ubatch", min(words["n_batch"], 512))
    words.setdefault("n_seq_max", 8)
    if name not in stage.loaded:
        path = synthetic.model(name)
        stage.loaded[name] = stage.native.model_load(str(path), ModelParams())
    params = ContextParams(guard=False, **words)
    stage.player = Player(stage.native, stage.loaded[name], params)
    stage.reference = Reference(stage.player)


def _feeds(line: Line, stage: Stage) -> dict[Any, Any]:
    player = stage.player
    assert player is not None
    feeds: dict[Any, Any] = {}
    for key, what in line.arguments["feed"].items():
        try:
            seqs = tuple(int(part) for part in key.split("+"))
        except ValueError:
            raise line.wrong(f'{key!r} names no sequence: expected "0", or "0+1"') from None
        tokens = what
        if isinstance(what, str):
            first = player.ledger.next(seqs[0]) == 0
            tokens = stage.native.tokenize(player.model, what.encode(), first, False)
        feeds[seqs if len(seqs) > 1 else seqs[0]] = tokens
    return feeds


def _span(words: Mapping[str, Any]) -> tuple[int, int]:
    low, high = words.get("from"), words.get("to")
    return -1 if low is None else int(low), -1 if high is None else int(high)


def _expect(player: Player, words: Mapping[str, Any]) -> None:
    snapshot = player.snapshot()
    if snapshot is None:
        return
    for name, expected in words.items():
        found = getattr(snapshot.stats, name)
        if found != expected:
            msg = f"{name} is {found}, expected {expected}"
            raise ScenarioFailed(msg, failure="claim")


def _line(number: int, raw: dict[str, Any]) -> Line:
    words = dict(raw)
    op = words.pop("op")
    result = words.pop("result", None)
    line = Line(number, op, words, result)
    if op not in OPERATIONS:
        close = difflib.get_close_matches(op, OPERATIONS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(OPERATIONS)}"
        raise line.wrong(f"there is no such operation; {hint}")
    known = {name.rstrip("?"): name.endswith("?") for name in OPERATIONS[op]}
    for name in words:
        if name not in known:
            takes = ", ".join(known) or "nothing"
            raise line.wrong(f"unknown argument {name!r}: it takes {takes}")
    for name, optional in known.items():
        if not optional and name not in words:
            raise line.wrong(f"the argument {name!r} is missing")
    _check(line)
    return line


def _check(line: Line) -> None:
    words = line.arguments
    for name in ("seq", "into", "by", "polls", "used", "free", "holes", "largest_hole"):
        if name in words and type(words[name]) is not int:
            raise line.wrong(f"{name} must be a number, found {words[name]!r}")
    for name in ("from", "to"):
        if words.get(name) is not None and type(words[name]) is not int:
            raise line.wrong(f"{name} must be a number or null, found {words[name]!r}")
    if line.op == "decode":
        feed = words["feed"]
        if not isinstance(feed, dict) or not feed:
            raise line.wrong('feed must be like {"0": 16}, {"0": [1, 2]} or {"0": "text"}')
        for what in feed.values():
            number = type(what) is int and what > 0
            tokens = isinstance(what, list) and what and all(type(each) is int for each in what)
            if not (number or tokens or (isinstance(what, str) and what)):
                raise line.wrong(f"cannot feed {what!r}: expected a count, tokens or a text")
        if words.get("expect", "ok") not in (*_STATUS, "any"):
            raise line.wrong(f"expect must be one of {', '.join(_STATUS)}, any")
