"""`python -m qa stress`: run sections, print their findings, and optionally write them."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pyllamakv.errors import UsageError
from qa import SECTIONS

if TYPE_CHECKING:
    from qa.entry import Entry, Tick

app = typer.Typer(add_completion=False)


@app.command()
def stress(
    sections: list[str] = typer.Argument(None, help=f"{', '.join(SECTIONS)}; default: all."),
    seconds: float = typer.Option(90.0, min=1.0, help="Maximum number of seconds per section."),
    operations: int = typer.Option(0, min=0, help="Minimum number of operations per release."),
    seed: int = typer.Option(1, min=0, help="Random seed."),
    only: list[str] = typer.Option(None, help="Run only the named entries."),
    write: Path = typer.Option(None, help="Write the results to this JSON file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Stress-test the package; exits 1 if a defect is found.

    `random_operations` compares random operations with a ledger, `slips` runs quick tests on
    mistakes, `fuzzing` fuzzes every parser, `native_calls` makes calls on every kind of memory,
    `faults` injects faults, `interrupts` interrupts operations, `sanitizers` and `leaks` check
    memory, `servers` verifies llama-server.
    """
    from qa import selection, summary
    from qa.entry import Entry, StressOptions

    chosen = selection.select(sections or (), only or ())
    if write is not None:
        summary.read(write, Entry)  # an error comes before hours of tests
    effort = StressOptions(seconds, seed, tuple(only or ()), operations)
    command = shlex.join(["python", "-m", "qa", "stress", *(sections or []), *effort.options])
    found: list[Entry] = []

    def run(name: str, tick: Tick) -> list[Entry]:
        entries = selection.module(name).entries(replace(effort, only=chosen[name]), tick)
        tried = [entry.dated(command) for entry in entries]
        found.extend(tried)
        if write is not None:
            # After each section: a long run takes hours.
            summary.store(write, found)
        return tried

    try:
        broken = _run([*chosen], run)
    finally:
        # Results before an interruption are printed.
        _show(found, as_json)
    if broken:
        raise broken[0]
    if not any(entry.ran for entry in found):
        why = "; ".join(f"{entry.name} {entry.skip_reason}" for entry in found)
        msg = f"nothing was tested: {why or 'no patch, build or target matches --only'}"
        raise UsageError(msg)
    if not all(entry.passed for entry in found):
        raise typer.Exit(1)


def _run(sections: Sequence[str], run: Callable[[str, Tick], list[Entry]]) -> list[Exception]:
    """Run one section after another; return the errors of those that failed."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    broken: list[Exception] = []
    about = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), about, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("testing", total=None)
        for name in sections:

            def tick(about: str, section: str = name) -> None:
                progress.update(task, description=f"{section}: {about}", advance=1)

            tick("")
            began = time.monotonic()
            try:
                made = run(name, tick)
                tried = [entry for entry in made if entry.ran]
                wrong = sum(len(entry.defects) for entry in tried) or "none"
                text = f"ran {len(tried)} in {time.monotonic() - began:.0f} s, defects: {wrong}"
                text += "".join(f"; {e.name} {e.skip_reason}" for e in made if not e.ran)
            except Exception as error:
                broken.append(error)
                # The first one is printed at the end.
                text = f"failed with {type(error).__name__}"
                text += f": {error}" if len(broken) > 1 else ""
            progress.console.print(f"{name}: {text}", highlight=False, markup=False, soft_wrap=True)
    return broken


def _show(found: Sequence[Entry], as_json: bool) -> None:
    """Print the entries and their defects."""
    from qa import summary

    if as_json:
        sys.stdout.write(json.dumps([asdict(entry) for entry in found], indent=1) + "\n")
    elif found:
        sys.stdout.write(summary.table(found))
    defects = [(entry, defect) for entry in found for defect in entry.defects]
    if defects:
        # Printed again at the end, for readers of the last lines of a log.
        sys.stderr.write(f"defects: {len(defects)}\n")
        for entry, defect in defects:
            sys.stderr.write(f"  {entry.section}, {entry.name}: {defect}\n")
