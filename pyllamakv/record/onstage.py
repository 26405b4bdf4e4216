"""Follow a script while it is played, or a trace that was recorded, frame by frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.printable import printable
from pyllamakv.record import playback, playing, runs, script
from pyllamakv.record.playback import Film
from pyllamakv.view.cell_drawing import Picture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyllamakv.record.playback import Frame
    from pyllamakv.record.script import Line
    from pyllamakv.record.stage import Stage
    from pyllamakv.scenarios.cell_samples import Look


def title(path: Path, variant: str) -> str:
    """Return what a picture of a run is called."""
    return printable(f"{path.stem}, {variant}" if variant else path.stem)


def film_of(path: Path, variant: str, model: str = "") -> Film:
    """Return the film of a script or a trace on a build, whatever its operations come to."""
    with runs.opened(path, variant, model) as run:
        run.stage.lenient = True
        made = Film(title(path, run.variant))
        play(run.lines, run.stage, made.frames.append)
    return made


def unseen(lines: list[Line]) -> int:
    """Count the decodes of a trace that kept no cells: a recording looks where they may move.

    One that failed was looked at, and has no picture when it changed nothing.
    """
    decodes = (line.result for line in lines if line.op in script.DECODES and line.result)
    return sum("picture" not in result and not result.get("status") for result in decodes)


def play(lines: list[Line], stage: Stage, show: Callable[[Frame], None]) -> None:
    """Play lines and show a frame of each, also of one that ends the run.

    Raises what `playing.play` raises, after that frame.
    """
    last: Look | None = None

    def observe(line: Line, result: dict[str, Any]) -> None:
        nonlocal last
        look = stage.look
        if look is None:
            return
        words = dict(result)
        if last is not None and line.op in playback.MOVING:
            words["moved"] = look.moved(last)
        last = look
        picture = Picture.of(look.snapshot, str(line.arguments.get("label", "")))
        frame = playback.after(line, words, picture)
        if frame is not None:
            show(frame)

    playing.play(lines, stage, observe)
