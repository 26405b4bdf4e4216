"""Print the numbers of a cache after a run: `pyllamakv trace stats`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import Json, Model, PlayedOn, Run
from pyllamakv.cli.stdout import write_json
from pyllamakv.errors import ScenarioFailed, ScriptError, UsageError
from pyllamakv.scenarios import frames
from pyllamakv.traces import playback, variant_selection

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Counters
    from pyllamakv.runtime.metrics import CellStats
    from pyllamakv.scenarios.frames import Timeline

app = typer.Typer(add_completion=False)


@app.command()
def command(
    run: Run,
    variant: PlayedOn = "",
    model: Model = "",
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="KEY=VALUE label for --prometheus; repeatable."),
    ] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the Prometheus text format.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print KV cache statistics after a run.

    A script is run first, and also has the library's counters. Exit status 1: the script failed;
    the statistics end where it did.
    """
    from pyllamakv.runtime import metrics
    from pyllamakv.traces import trace as traces
    from pyllamakv.view.frame_statistics import LABELS, PictureStats

    if as_json and prometheus:
        raise UsageError("choose one of --json and --prometheus")
    labels = dict(_label(each) for each in label or ())
    metrics.check(labels, LABELS)
    stats: CellStats | None = None
    counters = broken = None
    if traces.is_trace(run) and not variant:
        head, lines = traces.read(run)
        timeline = playback.timeline_of_trace(lines, head.spec or head.variant)
        if timeline.frames and timeline.frames[-1].counted is None:
            stats = PictureStats(timeline.frames[-1].picture)
    else:
        with variant_selection.open_run(run, variant, model) as played:
            timeline = frames.Timeline(played.variant)
            try:
                playback.play(played.lines, played.session, timeline.frames.append)
            except ScenarioFailed as error:
                broken = error
            player = played.session.player
            if player is not None:
                snapshot = player.snapshot()
                stats = None if snapshot is None else snapshot.stats
                counters = player.counters()
    if stats is None:
        msg = f"{run} has no cells to count: record it with `pyllamakv trace record`"
        raise broken or ScriptError(msg)
    if as_json:
        write_json(_document(timeline, stats, counters, labels))
    else:
        sys.stdout.write((_exposition if prometheus else _table)(timeline, stats, counters, labels))
    if broken:
        raise broken


def _exposition(
    timeline: Timeline, stats: CellStats, counters: Counters | None, labels: dict[str, str]
) -> str:
    from pyllamakv.runtime import metrics
    from pyllamakv.view import frame_statistics

    found = (*metrics.metrics(stats, counters), *frame_statistics.timeline_metrics(timeline))
    return metrics.expose(found, {"variant": timeline.title, **labels})


def _document(
    timeline: Timeline, stats: CellStats, counters: Counters | None, labels: dict[str, str]
) -> dict[str, Any]:
    from pyllamakv.runtime import metrics
    from pyllamakv.view import frame_statistics

    raw = {
        "variant": timeline.title,
        **metrics.to_json(stats, counters),
        "run": frame_statistics.to_json(timeline),
    }
    return raw | ({"labels": labels} if labels else {})


def _table(
    timeline: Timeline, stats: CellStats, counters: Counters | None, labels: dict[str, str]
) -> str:
    from pyllamakv.printable import printable
    from pyllamakv.runtime import metrics
    from pyllamakv.view import frame_statistics

    named = {"variant": timeline.title, **labels}
    return metrics.aligned(
        [
            *((name, printable(value)) for name, value in named.items()),
            *metrics.rows(stats, counters),
            *((name, printable(value)) for name, value in frame_statistics.rows(timeline)),
        ]
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--label takes KEY=VALUE, not {text!r}")
    return key, value
