"""`python -m qa upkeep`: measure how many upstream states need no manual work."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pyllamakv.errors import UsageError
from pyllamakv.patching import series
from pyllamakv.source import spec_resolver
from pyllamakv.source.files import write_text_atomic
from pyllamakv.source.store import open_store
from qa.upkeep import page, sample, watching
from qa.upkeep.measurement import Measurement

if TYPE_CHECKING:
    from pyllamakv.source.progress import Progress

app = typer.Typer(add_completion=False)


@app.command()
def upkeep(
    write: Path = typer.Option(None, help="Write the page into this file."),
    count: int = typer.Option(0, "--sample", min=0, help="Draw this many carried states."),
    seed: int = typer.Option(1, help="Random seed of the sample; default: 1."),
    state: list[str] = typer.Option([], "--state", help="Choose this state instead of a sample."),
    verify: bool = typer.Option(False, "--verify", help="Build and check the sample."),
    watch: list[str] = typer.Option(
        [], "--watch", help="Time watches of this release on a local remote."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure how many fetched states need no manual work; interrupted runs continue.

    Exit status 1 if a carried tree of the sample is broken.
    """
    from pyllamakv.cli.progress_bar import progress
    from pyllamakv.cli.stdout import write_json, write_lines

    with progress() as report:
        measurement = Measurement(open_store(), series.load(), report)
        if watch:
            return _watch(watch, measurement, report, write)
        before = page.states(write.read_text("utf-8")) if write and write.is_file() else 0
        if before > len(measurement.states):
            raise UsageError(
                f"{write} has {before} states, and {len(measurement.states)} are fetched here: add "
                "the others with `pyllamakv upstream add`, or write another file"
            )
        found = measurement.run()
        hooks = measurement.hooks()
        measurement.forget()
        chosen = sample.named(found, state) if state else sample.draw(found, count, seed)
        if verify:
            verified = sample.verify(chosen, measurement, report)
        else:
            verified = sample.current(measurement, chosen if count or state else None)
    text = page.page(found, hooks, verified, watching.kept())
    if write is not None:
        write_text_atomic(write, text)
    if as_json:
        states = [asdict(one) | {"good": one.good} for one in found]
        write_json({"states": states, "sample": [asdict(one) for one in chosen]})
    elif count or state:
        write_lines(f"{one.release} {one.date[:10]} {one.mode}" for one in chosen)
    else:
        write_lines(text.splitlines())
    if verify and any(one.verdict == "broken-carry" for one in verified):
        raise typer.Exit(1)
    return None


def _watch(
    names: list[str], measurement: Measurement, report: Progress, write: Path | None
) -> None:
    """Time watches of the named releases, and write the section of the page."""
    from pyllamakv.cli.stdout import write_lines

    for name in names:
        watching.measure(spec_resolver.resolve(name), measurement.store, report)
    rows = watching.kept()
    if write is not None:
        write_text_atomic(write, page.with_watches(write.read_text("utf-8"), rows))
    write_lines(page.watches(rows))
