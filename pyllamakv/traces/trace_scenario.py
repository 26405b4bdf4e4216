"""Create a scenario from a trace or a script: play it, and check its claim.

The default claim of a trace: every decode succeeds if enough cells are free, every successful
restore succeeds again, no token is lost, no stray cell is left, and the logits equal those of a
reference that evaluates all tokens again.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus, MemoryType
from pyllamakv.errors import (
    ContextError,
    NativeError,
    ScenarioFailed,
    ScriptError,
    Unsupported,
    Untestable,
    UsageError,
    WorkerDied,
)
from pyllamakv.scenarios.player import word
from pyllamakv.scenarios.reference import LIMIT
from pyllamakv.scenarios.scenario import CONTIGUOUS, Scenario, Setting
from pyllamakv.traces import model_digest, script, script_player, trace
from pyllamakv.traces.script import DECODES
from pyllamakv.traces.script_session import ScriptSession, model_name

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player
    from pyllamakv.traces.script import Line
    from pyllamakv.traces.trace import Head

#: Number of decodes that keep their logits for the reference; later, one of several keeps them.
KEPT, FEW = 256, 16

CLAIM = "What was recorded goes through, with nothing lost and nothing wrong."


def scenario(path: Path) -> Scenario:
    """Return the scenario of a trace or script. Raises ScriptError if it is neither."""
    try:
        head, lines = load(path)
    except ScriptError as error:
        name = "" if str(path) in str(error) else f"{path}: "
        raise type(error)(f"{name}{error}", error.line) from error
    model, why = _model(head)
    name = re.sub(r"[^a-z0-9]+", "-", path.name.removesuffix(".jsonl").lower()).strip("-")
    return scenario_of_lines(head, lines, name, model, why)


def scenario_of_lines(
    head: Head, lines: list[Line], name: str, model: str, why: str = ""
) -> Scenario:
    """Return the scenario of these lines on a model; ``why`` is the reason if it cannot run."""
    words = lines[0].arguments if lines and lines[0].op == "context" else {}
    types = (str(words.get("type_k", "f16")), str(words.get("type_v", "f16")))
    return Scenario(
        id=name,
        kind=head.kind,  # type: ignore[arg-type]
        claim=head.claim or CLAIM,
        issue=head.issue or "a recorded run",
        run=partial(run_trace, head, lines, why=why),
        model=model,
        settings=(Setting(bool(words.get("flash_attn", False)), *types),),
        environment=tuple(sorted(head.environment.items())),
        record_frames=True,
    )


def load(path: Path) -> tuple[Head, list[Line]]:
    """Return head and lines of a trace, or of a script with a default head."""
    if trace.is_trace(path):
        return trace.read(path)
    lines = script.read(path)
    return trace.Head(model=model_name(lines, "tiny"), environment=dict(CONTIGUOUS)), lines


def run_trace(head: Head, lines: list[Line], lab: Lab, *, why: str = "") -> None:
    """Play a trace in a lab. Raises ScenarioFailed if its claim is broken."""
    if why:
        raise Untestable(why)
    file = Path(head.model or "tiny")
    session = ScriptSession(lab.native, file=file, guard=False, player_type=lab.player_type)
    session.loaded[str(session.file)] = lab.model
    try:
        _open(lines, session, lab)
    except (ContextError, Unsupported) as error:
        msg = f"cannot create a context with {lab.setting.name}: {error}"
        raise Untestable(msg) from error
    player = session.player
    assert player is not None
    for line in lines:
        if line.op == "context":
            continue
        try:
            _play(line, head, session, player)
        except ScenarioFailed as error:
            msg = f"row {line.number} ({line.op}): {error}"
            raise ScenarioFailed(msg, failure=error.failure, evidence=error.evidence) from error
        except UsageError as error:
            raise line.wrong(str(error)) from error
    lab.picture(player, "after")
    _verify(session, player, lab)


def _model(head: Head) -> tuple[str, str]:
    """Return the model to load, and the reason if the recorded one is missing."""
    try:
        return model_digest.name(trace.model_file(head)), ""
    except (UsageError, ScriptError, Untestable) as error:
        return "tiny", str(error)


def _open(lines: list[Line], session: ScriptSession, lab: Lab) -> None:
    first = lines[0]
    if first.op != "context":
        first = replace(first, op="context", arguments={})
    script_player.play_line(first, session)
    assert session.player is not None
    lab.adopt(session.player)
    session.follow(lab.reference(session.player))


def _play(line: Line, head: Head, session: ScriptSession, player: Player) -> None:
    recorded = line.result
    session.check_expectation(line)
    free, decodes = player.free, line.op in DECODES
    try:
        result = script_player.play_line(line, session)
    except (NativeError, Unsupported) as error:
        if isinstance(error, WorkerDied) or recorded is None or "error" not in recorded:
            raise
        return
    if decodes and result["status"] == DecodeStatus.OK:
        kept = sum(bool(step.logits) for step in player.steps[-2 * KEPT :])
        if kept > KEPT and line.number % FEW:
            player.steps[-1].logits.clear()
    if recorded is None:
        return
    if decodes:
        expected = _expected(line, recorded, head, None if player.ledger.streams else free)
        if expected is not None and result["status"] != expected:
            msg = (
                f"a decode of {line.tokens} tokens with {free} free cells ended with "
                f"{word(result['status'])}, expected {word(expected)}"
            )
            evidence = {"status": result["status"], "free": free}
            raise ScenarioFailed(msg, failure="claim", evidence=evidence)
    elif line.op in ("restore", "remove") and recorded.get("done") and not result["done"]:
        msg = f"it was refused with {free} free cells"
        raise ScenarioFailed(msg, failure="claim", evidence={"done": False})


def _expected(line: Line, recorded: dict[str, Any], head: Head, free: int | None) -> int | None:
    """Return the required status of a decode; None if any is accepted."""
    status = recorded.get("status")
    if status == DecodeStatus.ABORTED or not isinstance(status, int):
        return None
    if head.expect == "recorded":
        return status
    if free is not None and line.tokens > free:
        return None  # it cannot but fail
    known = free is not None and line.tokens
    return (
        int(DecodeStatus.OK)
        if status == DecodeStatus.OK or (known and status == DecodeStatus.NO_SLOT)
        else None
    )


def _verify(session: ScriptSession, player: Player, lab: Lab) -> None:
    player.check_cells()
    if player.info.memory == MemoryType.SWA and player.info.n_swa:
        player.check_windows(player.info.n_swa)
    decoded = sum(len(step.arguments[0].token) for step in player.steps if step.op == "decode")
    if session.foreign or decoded + player.info.n_ctx > LIMIT // 2:
        return  # no reference can follow: it would have to know what a state holds, or be too large
    reference = lab.reference(player)
    reference.catch_up()
    if player.free:
        reference.check_next()
        player.check_cells()
