"""Return the timeline of a recorded trace, or of a script or trace that is played now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.printable import printable
from pyllamakv.scenarios.cell_picture import FREE, Picture
from pyllamakv.scenarios.frames import MOVING, Frame, Timeline, detail
from pyllamakv.scenarios.player import word
from pyllamakv.traces import script, script_player, variant_selection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.scenarios.cell_samples import CellSample
    from pyllamakv.traces.script import Line
    from pyllamakv.traces.script_session import ScriptSession


def timeline_of_trace(lines: Iterable[Line], title: str = "") -> Timeline:
    """Return the timeline of a recorded trace.

    Raises ScriptError if the pictures have more cells in total than the limit.
    """
    return Timeline(title, list(frames(lines)))


def frames(lines: Iterable[Line]) -> Iterator[Frame]:
    """Yield a frame for every line of a trace since the first that has cells, or their number.

    A trace may record the cells of some operations, and of others only how many are used.
    """
    last: Picture | None = None
    counted: int | None = None
    cells = 0
    for line in lines:
        result = _with_cells(line) if last is None else line.result or {}
        cells += script.cells(result)
        if cells > script.DRAWN:
            msg = (
                f"the pictures up to here have {cells} cells, and {script.DRAWN} is the maximum; "
                f"show a "
                "trace that ends before this line"
            )
            raise line.wrong(msg)
        seen = "picture" in result
        # Moves cannot be inferred across operations whose cells are unknown.
        found = after(line, result, None if seen and counted is not None else last)
        if found is not None:
            last, used = found.picture, result.get("used")
            if seen:
                counted = 0 if result is not line.result else None
            elif isinstance(used, int) and (counted is not None or used != last.used):
                counted = used
            yield replace(found, counted=counted)


def _with_cells(line: Line) -> dict[str, Any]:
    """Return the result of a line, with empty cells if it created a context without a picture."""
    result = line.result or {}
    n_ctx = result.get("n_ctx")
    if line.op != "context" or "picture" in result or not isinstance(n_ctx, int):
        return result
    return {**result, "picture": {"label": "", "runs": [[FREE, n_ctx]]}}


def after(line: Line, result: Mapping[str, Any], last: Picture | None) -> Frame | None:
    """Return the frame of one line with its result, or None before any cells are known."""
    raw = result.get("picture")
    picture = last if raw is None else Picture.from_json(raw)
    if picture is None:
        return None
    words, failed = detail(line.arguments), _failed(result)
    frame = Frame(line.number, line.op, words, picture, failed, tokens=line.tokens)
    if "moved" in result:
        moves = tuple((int(a), int(b), int(n)) for a, b, n in result["moved"])
        return replace(frame, moves=moves, moved=sum(length for *_, length in moves))
    return _inferred(frame, last, int(result.get("cells") or 0))


def _inferred(frame: Frame, last: Picture | None, counted: int) -> Frame:
    """Add the probable moves since the last picture to a frame; ``counted`` is their number."""
    if last is None or frame.op not in MOVING or len(last.owner) != len(frame.picture.owner):
        return replace(frame, moved=counted)
    moves = tuple(infer(last.owner, frame.picture.owner))
    return replace(frame, moves=moves, moved=counted or sum(length for *_, length in moves))


def infer(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, cells) of runs that moved, inferred from the owners.

    Cells that an owner no longer has are matched, in order, with its new ones.
    """
    before, now = np.asarray(old), np.asarray(new)
    changed = before != now
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for owner in np.unique(before[changed & (before != FREE)]).tolist():
        left = np.flatnonzero(changed & (before == owner))
        taken = np.flatnonzero(changed & (now == owner))
        n = min(len(left), len(taken))
        pairs.append(np.column_stack((left[:n], taken[:n])))
    found = np.concatenate(pairs)
    yield from _runs(found[found[:, 0].argsort()])


def _runs(pairs: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Merge adjacent (source, target) pairs into runs."""
    if not len(pairs):
        return
    breaks = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(starts, append=len(pairs))
    for (source, target), length in zip(pairs[starts].tolist(), lengths.tolist(), strict=True):
        yield source, target, length


def _failed(result: Mapping[str, Any]) -> str:
    status = result.get("status", 0)
    if isinstance(status, int) and status:
        return word(status)
    if result.get("error"):
        return str(result["error"])
    return "refused" if result.get("done") is False else ""


def title(path: Path, variant: str) -> str:
    """Return the title of a run's pictures."""
    return printable(f"{path.stem}, {variant}" if variant else path.stem)


def play_timeline(path: Path, variant: str, model: str = "") -> Timeline:
    """Return the timeline of a script or a trace on a build, accepting any result of operations."""
    with variant_selection.open_run(path, variant, model) as run:
        run.session.play_leniently()
        made = Timeline(title(path, run.variant))
        play(run.lines, run.session, made.frames.append)
    return made


def unseen(lines: list[Line]) -> int:
    """Count the decodes of a trace without recorded cells: a decode without moves has none.

    A failed decode has no picture if nothing changed.
    """
    decodes = (line.result for line in lines if line.op in script.DECODES and line.result)
    return sum("picture" not in result and not result.get("status") for result in decodes)


def play(lines: list[Line], session: ScriptSession, show: Callable[[Frame], None]) -> None:
    """Play lines and show a frame of each, including a failing last one.

    Raises the exceptions of `script_player.play`, after that frame.
    """
    last: CellSample | None = None

    def observe(line: Line, result: dict[str, Any]) -> None:
        nonlocal last
        sample = session.last_sample
        if sample is None:
            return
        words = dict(result)
        if last is not None and line.op in MOVING:
            words["moved"] = sample.moved(last)
        last = sample
        picture = Picture.of(sample.snapshot, str(line.arguments.get("label", "")))
        frame = after(line, words, picture)
        if frame is not None:
            show(frame)

    script_player.play(lines, session, observe)
