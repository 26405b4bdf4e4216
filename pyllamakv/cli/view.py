"""Show the cells of a run: `pyllamakv trace view`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import Json, Model, PlayedOn, Run
from pyllamakv.cli.stdout import write_json, write_lines
from pyllamakv.errors import ScenarioFailed, ScriptError, UsageError
from pyllamakv.scenarios import frames
from pyllamakv.traces import playback, variant_selection

if TYPE_CHECKING:
    from pyllamakv.scenarios.frames import Timeline

app = typer.Typer(add_completion=False)


@app.command()
def command(
    run: Run,
    variant: PlayedOn = "",
    model: Model = "",
    speed: Annotated[
        float, typer.Option("--speed", min=0.0, help="Operations per second; 0: no pauses.")
    ] = 4.0,
    width: Annotated[int, typer.Option("--width", min=8, help="Cells per line.")] = 64,
    line: Annotated[
        int, typer.Option("--line", min=0, help="Show only this line of the file; 0: all.")
    ] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Print without animation.")] = False,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Write a timeline: .svg or .png.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write SVG pictures to this directory.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Write PNG pictures to this directory.")
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Use a dark background for PNG.")] = False,
    as_json: Json = False,
) -> None:
    """Show how KV cache cells change in a trace or script.

    A terminal shows an animation; otherwise the cells are printed after each operation that changed
    them. Exit status 1: the script failed.
    """
    files = [each for each in (timeline, svg, png) if each is not None]
    _check(timeline, svg, png)
    silent = bool(files) or as_json or bool(line)
    recorded, broken = _follow(run, variant, model, speed, width, silent=silent, plain=plain)
    if timeline is None:  # only a timeline can show how many cells are used, but not which
        recorded.frames[:] = [frame for frame in recorded.frames if frame.counted is None]
    numbers = [frame.number for frame in recorded.frames]
    if line:
        recorded.frames[:] = [frame for frame in recorded.frames if frame.number == line]
    if not recorded.frames:
        known = f"; lines {numbers[0]} to {numbers[-1]} have" if numbers else ""
        where = f"line {line} of {run}" if line else str(run)
        hint = known or ": --variant shows those of a build, `trace record` records them"
        msg = f"{where} has no cells to show{hint}"
        raise broken or ScriptError(msg)
    if as_json:
        _print_json(recorded)
    try:
        written = _write(recorded, timeline, svg, png, width, dark=dark)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from error
    write_lines(map(str, written))
    if line and not files and not as_json:
        _print(recorded, width)
    if broken:
        raise broken


def _follow(
    run: Path, variant: str, model: str, speed: float, width: int, *, silent: bool, plain: bool
) -> tuple[Timeline, ScenarioFailed | None]:
    """Show a run on the terminal unless ``silent``; return its timeline and what ended it early."""
    from contextlib import nullcontext

    from rich.console import Console

    from pyllamakv.printable import printable
    from pyllamakv.traces import trace as traces
    from pyllamakv.view.screen import Screen

    def screen(title: str) -> Screen | nullcontext[None]:
        live = False if plain else None
        return nullcontext() if silent else Screen(title, speed=speed, width=width, live=live)

    if traces.is_trace(run) and not variant:
        head, lines = traces.read(run)
        title = playback.title(run, head.spec or head.variant)
        recorded = playback.timeline_of_trace(lines, title)
        unseen = playback.unseen(lines)
        if unseen:
            missing = (
                f"{unseen} decodes recorded no cells: --variant {head.spec or 'SPEC'} shows them"
            )
            Console(stderr=True).print(
                printable(missing), style="dim", markup=False, highlight=False, soft_wrap=True
            )
        with screen(title) as shown:
            if shown:
                for frame in recorded.frames:
                    shown.show(frame)
        return recorded, None

    with variant_selection.open_run(run, variant, model) as played:
        recorded = frames.Timeline(playback.title(run, played.variant))
        with screen(recorded.title) as shown:

            def show(frame: frames.Frame) -> None:
                recorded.frames.append(frame)
                if shown:
                    shown.show(frame)

            try:
                playback.play(played.lines, played.session, show)
            except ScenarioFailed as error:
                return recorded, error
    return recorded, None


def _check(timeline: Path | None, svg: Path | None, png: Path | None) -> None:
    """Refuse invalid output files before anything is played."""
    if timeline is not None and timeline.suffix not in (".svg", ".png"):
        raise UsageError(f"--timeline takes a file that ends in .svg or .png, not {timeline.name}")
    for folder in (svg, png):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; --svg and --png take a directory")
    if png is not None or (timeline is not None and timeline.suffix == ".png"):
        from pyllamakv.view import raster

        raster.check()


def _write(
    recorded: Timeline,
    timeline: Path | None,
    svg: Path | None,
    png: Path | None,
    width: int,
    *,
    dark: bool,
) -> list[Path]:
    from pyllamakv.view import cell_drawing, drawing, raster, timeline_drawing

    written = []
    if timeline is not None:
        made = timeline_drawing.paint(recorded)
        timeline.parent.mkdir(parents=True, exist_ok=True)
        if timeline.suffix == ".svg":
            timeline.write_text(drawing.svg(made) + "\n", encoding="utf-8")
        else:
            timeline.write_bytes(raster.png(made, scheme="dark" if dark else "light"))
        written.append(timeline)
    for folder, suffix in ((svg, ".svg"), (png, ".png")):
        if folder is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for frame in recorded.changes():
            made = cell_drawing.paint(
                frame.picture, width, heading=f"line {frame.number}: {frame.caption()}"
            )
            path = folder / f"{frame.number:04d}{suffix}"
            if suffix == ".svg":
                path.write_text(drawing.svg(made), encoding="utf-8")
            else:
                path.write_bytes(raster.png(made, scheme="dark" if dark else "light"))
            written.append(path)
    return written


def _print(recorded: Timeline, width: int) -> None:
    from pyllamakv.view.screen import Screen

    with Screen(recorded.title, width=width, live=False) as screen:
        for frame in recorded.frames:
            screen.show(frame)


def _print_json(recorded: Timeline) -> None:
    raw = [
        {
            "line": frame.number,
            "op": frame.op,
            "failed": frame.failed,
            "moved": frame.moved,
            "used": frame.picture.used,
            "holes": frame.picture.holes[0],
            **frame.picture.to_json(),
        }
        for frame in recorded.changes()
    ]
    write_json(raw)
