"""Replay a trace and report the first differences.

On the recording build, everything must be equal: results of decodes, cells, moves and logits. On
another build, only common properties must: results of decodes, the number of used cells, and the
most likely tokens, unless two tokens were almost equally likely in the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import NativeError, ScenarioFailed, Unsupported, UsageError, WorkerDied
from pyllamakv.scenarios import cell_samples
from pyllamakv.scenarios.player import word
from pyllamakv.scenarios.reference import Tolerance
from pyllamakv.traces import script_player, trace, variant_selection
from pyllamakv.traces.script import DECODES
from pyllamakv.traces.script_session import ScriptSession

if TYPE_CHECKING:
    from pyllamakv.traces.script import Line
    from pyllamakv.traces.trace import Head

#: Results that may differ on another build: the moved cells, and their new places.
_WORK = ("moves", "cells", "moved", "picture", "bytes", "holes", "largest_hole")
#: Results that are never compared: durations, and values that other rows contain.
_ASIDE = ("at", "us", "before", "polls", "chosen", "n_ctx")


@dataclass(frozen=True)
class Divergence:
    """One different result, with the counts of cells before and after.

    ``recorded`` and ``found`` are values of ``what``; ``row`` is the line in the trace.
    """

    row: int
    op: str
    what: str
    recorded: Any
    found: Any
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        where, recorded, found, before, after = self.cells()
        around = f"; cells before: {before}, after: {after}" if before else ""
        return f"{where} was {recorded}, now {found}{around}"

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the difference as texts: place, recorded value, present value, cells."""
        return (
            f"row {self.row} ({self.op}): {self.what}",
            _shown(self.what, self.recorded),
            _shown(self.what, self.found),
            _counts_of(self.before),
            _counts_of(self.after),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Replay:
    """The result of a replay on one variant: number of rows, and their differences."""

    variant: str
    recorded: bool
    rows: int
    divergences: tuple[Divergence, ...] = ()
    error: str = ""

    @property
    def failed(self) -> bool:
        """Return whether results differ on the recording build itself."""
        return self.recorded and bool(self.divergences or self.error)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        raw = asdict(self)
        return {**raw, "divergences": [each.to_json() for each in self.divergences]}


def replay(
    head: Head,
    lines: list[Line],
    session: ScriptSession,
    *,
    strict: bool = True,
    every: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[int, list[Divergence]]:
    """Replay a trace; return the number of rows and the first divergence, or ``every`` one.

    ``strict`` compares everything that was recorded.
    """
    session.play_leniently()
    found: list[Divergence] = []
    before: dict[str, int] = {}
    cells = strict and head.start == "empty"
    verifies = any(line.op == "verify" for line in lines)
    for played, line in enumerate(lines, start=1):
        result, died = _play(line, session)
        after = {} if session.last_sample is None else session.last_sample.counts
        for what, recorded, now in _differences(line, result, session, cells=cells, strict=strict):
            found.append(Divergence(line.number, line.op, what, recorded, now, before, after))
        before = after
        if died or (found and not every):
            return played, found
        if session.player is not None and not verifies:
            # No later row needs them, and a long run has many.
            session.player.steps.clear()
        if progress:
            progress(played)
    return len(lines), found


def _play(line: Line, session: ScriptSession) -> tuple[dict[str, Any], bool]:
    """Return the result of a line, and whether the replay must end after it."""
    try:
        return script_player.play_line(line, session), False
    except UsageError as error:
        raise line.wrong(str(error)) from error
    except ScenarioFailed as error:
        return {"holds": str(error)}, False
    except WorkerDied as error:
        return {"error": f"{type(error).__name__}: {error}"}, True
    except (NativeError, Unsupported) as error:
        if session.player is None:
            raise
        return {"error": type(error).__name__, **session.sample()}, False


def _differences(
    line: Line, result: dict[str, Any], session: ScriptSession, *, cells: bool, strict: bool
) -> Iterator[tuple[str, Any, Any]]:
    recorded = line.result or {}
    if "holds" in result:
        yield "it", "met", result["holds"]
        return
    if recorded.get("error", "") != result.get("error", "") and _counts(line, result, strict):
        yield "error", recorded.get("error"), result.get("error")
        return
    if line.op in DECODES and _excused(recorded, result, strict):
        return
    for what, then in recorded.items():
        if what in _ASIDE or what == "error" or (what in _WORK and not cells):
            continue
        if what == "best":
            yield from _choices(then, result.get("best", {}), session, strict)
            continue
        now = _now(what, session) if what in ("picture", "moved") else result.get(what)
        if what == "picture":
            then = then.get("runs") if isinstance(then, dict) else then
        # Moved cells are compared through the picture, even if the recording had none before.
        if what != "moved" and now != then and (now is not None or what not in cell_samples.COUNTS):
            yield what, then, now
            if what in ("status", "steps"):
                return  # the rest follows from that


def _counts(line: Line, result: dict[str, Any], strict: bool) -> bool:
    """Return whether a different error matters: some builds cannot move cells."""
    return strict or (line.op not in ("defrag", "update") and bool(result.get("error")))


def _excused(recorded: dict[str, Any], result: dict[str, Any], strict: bool) -> bool:
    """Return whether a decode was aborted at a point that another build reaches elsewhere."""
    ended = result.get("status")
    aborted = recorded.get("status") == DecodeStatus.ABORTED
    return not strict and aborted and ended in (DecodeStatus.OK, DecodeStatus.ABORTED)


def _choices(
    then: Any, now: Any, session: ScriptSession, strict: bool
) -> Iterator[tuple[str, Any, Any]]:
    assert session.player is not None
    bound = Tolerance().of(session.player)
    for place, choice in then.items() if isinstance(then, dict) else ():
        token, logit, margin = choice
        found = now.get(place)
        if found is None:
            yield f"best[{place}]", token, None
        elif found[0] != token and (strict or margin > bound):
            yield f"best[{place}]", token, found[0]
        elif strict and found[0] == token and abs(found[1] - logit) > bound:
            yield f"logit[{place}]", logit, found[1]


def _now(what: str, session: ScriptSession) -> Any:
    return (
        session.last_sample.runs()
        if session.last_sample is not None and what == "picture"
        else None
    )


def _shown(what: str, value: Any) -> str:
    if what == "status" and isinstance(value, int):
        return word(value)
    if what == "picture":
        return "other cells" if value is None else f"{len(value)} runs of cells"
    return "none" if value is None else str(value)


def _counts_of(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    return f"{counts['used']} used, {counts['holes']} holes up to {counts['largest_hole']}"


def replay_on_variant(
    spec: str,
    head: Head,
    lines: list[Line],
    *,
    model: str = "",
    every: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Replay a trace on a variant, in a worker."""
    file = trace.model_file(head, model)
    with variant_selection.opened(spec, head) as library:
        name = library.about.variant
        same = name == head.variant
        with closing(ScriptSession(library.native, file=file)) as session:
            try:
                rows, found = replay(
                    head, lines, session, strict=same, every=every, progress=progress
                )
            except (NativeError, Unsupported) as error:
                # The context could not be created.
                return Replay(name, same, 0, error=f"{type(error).__name__}: {error}")
    return Replay(name, same, rows, tuple(found))
