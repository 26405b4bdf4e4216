"""Print the numbers of a cache after a run: `pyllamakv stats`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import PlayedModel, PlayedVariant, Run
from pyllamakv.errors import ScenarioFailed, ScriptError, UsageError
from pyllamakv.scenarios import frames
from pyllamakv.traces import playback, variant_selection

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Counters
    from pyllamakv.runtime.metrics import CellStats
    from pyllamakv.scenarios.frames import Timeline

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    """Say for whom the numbers are."""

    TEXT = "text"
    JSON = "json"
    PROMETHEUS = "prometheus"


@app.command()
def command(
    run: Run,
    format: Annotated[
        Format, typer.Option("--format", help="How the numbers are written.")
    ] = Format.TEXT,
    variant: PlayedVariant = "",
    model: PlayedModel = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", help="KEY=VALUE for every metric; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Print what the cells are like after a run, and what was done in it.

    Of a trace what it recorded; a script is played first, and tells the library's counters as well.
    Exit 1 when the script does not end as it expects, after its numbers up to there.
    """
    from pyllamakv.runtime import metrics
    from pyllamakv.traces import playback as films
    from pyllamakv.traces import trace as traces
    from pyllamakv.view.frame_statistics import LABELS, PictureStats

    form = Format.JSON if as_json else format
    labels = dict(_label(each) for each in label or ())
    metrics.check(labels, LABELS)
    stats: CellStats | None = None
    counters = broken = None
    if traces.is_trace(run) and not variant:
        head, lines = traces.read(run)
        film = films.timeline_of_trace(lines, head.spec or head.variant)
        if film.frames:
            stats = PictureStats(film.frames[-1].picture)
    else:
        with variant_selection.open_run(run, variant or "0.3.9+patched", model) as played:
            film = frames.Timeline(played.variant)
            try:
                playback.play(played.lines, played.stage, film.frames.append)
            except ScenarioFailed as error:
                broken = error
            player = played.stage.player
            if player is not None:
                snapshot = player.snapshot()
                stats = None if snapshot is None else snapshot.stats
                counters = player.counters()
    if stats is None:
        msg = f"{run} has no cells to count: record it with `pyllamakv run --trace`"
        raise broken or ScriptError(msg)
    sys.stdout.write(_formatted(form, film, stats, counters, labels))
    if broken:
        raise broken


def _formatted(
    form: Format,
    film: Timeline,
    stats: CellStats,
    counters: Counters | None,
    labels: dict[str, str],
) -> str:
    from pyllamakv.printable import printable
    from pyllamakv.runtime import metrics
    from pyllamakv.view import frame_statistics

    if form is Format.PROMETHEUS:
        found = (*metrics.metrics(stats, counters), *frame_statistics.timeline_metrics(film))
        return metrics.expose(found, {"variant": film.title, **labels})
    if form is Format.JSON:
        raw = {
            "variant": film.title,
            **metrics.to_json(stats, counters),
            "run": frame_statistics.to_json(film),
        }
        return json.dumps(raw | ({"labels": labels} if labels else {}), indent=2) + "\n"
    named = {"variant": film.title, **labels}
    return metrics.aligned(
        [
            *((name, printable(value)) for name, value in named.items()),
            *metrics.rows(stats, counters),
            *((name, printable(value)) for name, value in frame_statistics.rows(film)),
        ]
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--label takes KEY=VALUE, not {text!r}")
    return key, value
