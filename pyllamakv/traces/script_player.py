"""Play scripts and traces line by line, on a context without cache managers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import KvError, ScenarioFailed, ScriptError, StateError, UsageError
from pyllamakv.runtime import state_parser
from pyllamakv.scenarios import cell_samples
from pyllamakv.scenarios.player import Player
from pyllamakv.traces import batch_encoding
from pyllamakv.traces.script import STATUS, Line
from pyllamakv.traces.script_session import ScriptSession, open_context

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.scenarios.batch_composition import BatchRows

#: The most likely tokens are recorded for this number of last rows of a batch.
PLACES = 16


def play(
    lines: Iterable[Line],
    session: ScriptSession,
    observe: Callable[[Line, dict[str, Any]], None] | None = None,
) -> None:
    """Play a script; ``observe`` is called after each line with its result.

    Raises ScriptError for a line that cannot be played, ScenarioFailed for an expectation that is
    not met.
    """
    for line in lines:
        try:
            result = play_line(line, session)
        except UsageError as error:
            raise line.wrong(str(error)) from error
        except ScriptError:
            raise
        except KvError as error:
            if observe:
                observe(line, _broken(error))
            if not isinstance(error, ScenarioFailed):
                raise
            msg = f"line {line.number} ({line.op}): {error}"
            raise ScenarioFailed(msg, failure=error.failure, evidence=error.evidence) from error
        if observe:
            observe(line, result)


def _broken(error: KvError) -> dict[str, Any]:
    """Return the result of a line that ended a script: the most important one."""
    if not isinstance(error, ScenarioFailed):
        return {"error": type(error).__name__}
    evidence = error.evidence if isinstance(error.evidence, dict) else {}
    return {name: evidence[name] for name in ("status", "done") if name in evidence}


def play_line(line: Line, session: ScriptSession) -> dict[str, Any]:
    """Play one line and return its result; ``session.last_sample`` has the cells afterwards."""
    result: dict[str, Any] = {}
    if line.op == "context":
        open_context(line, session)
        assert session.player is not None
        result = {"n_ctx": session.player.info.n_ctx}
    else:
        if session.player is None:
            open_context(Line(line.number, "context", {}), session)
        assert session.player is not None
        session.take_back()
        try:
            result = _PLAYS[line.op](line, session, session.player)
        except OverflowError as error:
            raise line.wrong(f"a number or a position is out of range: {error}") from error
    return {**result, **session.sample()}


def _decode(line: Line, session: ScriptSession, player: Player) -> dict[str, Any]:
    words = line.arguments
    if line.op == "decode":
        feed = player.feed(_feeds(line, session), interleave=bool(words.get("interleave", False)))
    elif line.op == "step":
        one = {**words, "tokens": [words["token"]], "logits": "all"}
        feed = batch_encoding.decode_words(one, player.ledger.next)
    else:
        feed = batch_encoding.decode_words(words, player.ledger.next)
    return _run(line, session, player, feed)


def _advance(line: Line, session: ScriptSession, player: Player) -> dict[str, Any]:
    words, result = line.arguments, {"status": int(DecodeStatus.OK), "steps": 0}
    pos = words.get("pos")
    for step, tokens in enumerate(words["steps"]):
        one: dict[str, Any] = {"tokens": tokens, "seq": words["seq"], "logits": "all"}
        if pos is not None:
            base = pos if isinstance(pos, list) else list(range(pos, pos + len(tokens)))
            one["pos"] = [at + step for at in base]
        result = {
            **_run(line, session, player, batch_encoding.decode_words(one, player.ledger.next)),
            "steps": step,
        }
        if result["status"] != DecodeStatus.OK:
            return result
        result["steps"] = step + 1
    return result


def _run(line: Line, session: ScriptSession, player: Player, feed: BatchRows) -> dict[str, Any]:
    recorded = line.result or {}
    ended = recorded.get("status", 0)
    expect = line.arguments.get("expect", "ok" if ended in (0, None) else "any")
    polls = recorded.get("polls", 0) if ended == DecodeStatus.ABORTED else 0
    if polls:
        player.cancel_after(polls)
    try:
        wanted = None if expect == "any" or session.lenient else STATUS[expect]
        status = player.decode(feed, expect=wanted)
    finally:
        if polls:
            player.cancel_after(-1)
    result: dict[str, Any] = {"status": status}
    if status != DecodeStatus.OK:
        return result
    logits = player.steps[-1].logits
    chosen = [int(place) for place in recorded.get("best", ())] or list(logits)[-PLACES:]
    there = {place: cell_samples.top_token(logits[place]) for place in chosen if place in logits}
    if there:
        result["best"] = {str(place): found for place, found in there.items()}
    if ended not in (0, None):
        # The failed decode of the recording left no tokens, and later lines rely on that.
        session.take_back_later(feed)
    return result


def _remove(line: Line, _: ScriptSession, player: Player) -> dict[str, Any]:
    return {"done": player.remove(line.arguments["seq"], *_span(line.arguments))}


def _save(line: Line, _: ScriptSession, player: Player) -> dict[str, Any]:
    name = line.arguments["as"]
    player.save(line.arguments["seq"], name)
    return {"bytes": len(player.saved[name][0])}


def _restore(line: Line, session: ScriptSession, player: Player) -> dict[str, Any]:
    words = line.arguments
    if "state" in words and words["as"] not in player.saved:
        try:
            raw = base64.b64decode(words["state"], validate=True)
            held = state_parser.parse(raw)
        except (TypeError, ValueError, StateError) as error:
            raise line.wrong(f"its state cannot be read: {error}") from error
        positions = sorted({int(pos) for each in held.sections for pos in each.pos.tolist()})
        player.saved[words["as"]] = (raw, [(pos, -1) for pos in positions])
        session.accept_foreign_state()
    if words["as"] not in player.saved:
        raise line.wrong(f"no sequence was saved as {words['as']!r}")
    recorded = (line.result or {}).get("done", True)
    must = words.get("expect", "ok" if recorded else "any") == "ok" and not session.lenient
    return {"done": player.restore(words["seq"], words["as"], must=must)}


def _defrag(_: Line, __: ScriptSession, player: Player) -> dict[str, Any]:
    report = player.defrag()
    return {"moves": report.moves, "cells": report.cells}


def _verify(_: Line, session: ScriptSession, player: Player) -> dict[str, Any]:
    player.check_cells()
    if player.info.n_swa:
        player.check_windows(player.info.n_swa)
    assert session.reference is not None
    if not session.foreign:
        session.reference.catch_up()
        if player.free:
            session.reference.check_next()
    return {}


def _expect(line: Line, _: ScriptSession, player: Player) -> dict[str, Any]:
    snapshot = player.snapshot()
    if snapshot is None:
        return {}
    for name, expected in line.arguments.items():
        found = getattr(snapshot.stats, name)
        if found != expected:
            msg = f"{name} is {found}, expected {expected}"
            raise ScenarioFailed(msg, failure="claim")
    return {}


def _plain(call: Callable[[Player, Mapping[str, Any]], Any]) -> Callable[..., dict[str, Any]]:
    def act(line: Line, _: ScriptSession, player: Player) -> dict[str, Any]:
        call(player, line.arguments)
        return {}

    return act


_PLAYS: Mapping[str, Callable[[Line, ScriptSession, Player], dict[str, Any]]] = {
    **dict.fromkeys(("decode", "step", "batch"), _decode),
    "advance": _advance,
    "remove": _remove,
    "copy": _plain(lambda p, w: p.copy(w["seq"], w["into"], *_span(w))),
    "keep": _plain(lambda p, w: p.keep(w["seq"])),
    "shift": _plain(lambda p, w: p.shift(w["seq"], *_span(w), w["by"])),
    "divide": _plain(lambda p, w: p.divide(w["seq"], *_span(w), w["by"])),
    "clear": _plain(lambda p, _: p.clear()),
    "save": _save,
    "restore": _restore,
    "defrag": _defrag,
    "update": _plain(lambda p, _: p.update()),
    "cancel": _plain(lambda p, w: p.cancel_after(w["polls"])),
    "threads": _plain(lambda p, w: p.native.threads(p.context, w["n"], w["batch"])),
    "expect": _expect,
    "verify": _verify,
    **dict.fromkeys(("snapshot", "note"), _plain(lambda _, __: None)),
}


def _feeds(line: Line, session: ScriptSession) -> dict[Any, Any]:
    player = session.player
    assert player is not None
    feeds: dict[Any, Any] = {}
    for key, what in line.arguments["feed"].items():
        try:
            seqs = tuple(int(part) for part in key.split("+"))
        except ValueError:
            raise line.wrong(f'{key!r} is not a sequence: expected "0", or "0+1"') from None
        tokens = what
        if isinstance(what, str):
            first = player.ledger.next(seqs[0]) == 0
            tokens = session.native.tokenize(player.model, what.encode(), first, False)
        feeds[seqs if len(seqs) > 1 else seqs[0]] = tokens
    return feeds


def _span(words: Mapping[str, Any]) -> tuple[int, int]:
    low, high = words.get("from"), words.get("to")
    return -1 if low is None else int(low), -1 if high is None else int(high)
