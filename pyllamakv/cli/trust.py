"""Try to lose something, print what came of it, and write RELIABILITY.md."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pyllamakv.errors import UsageError
from pyllamakv.trust import SECTIONS

if TYPE_CHECKING:
    from pyllamakv.trust.entry import Effort, Entry

app = typer.Typer(add_completion=False)


@app.command()
def trust(
    sections: list[str] = typer.Argument(None, help=f"{', '.join(SECTIONS)}; all without any."),
    seconds: float = typer.Option(90.0, min=1.0, help="Bound each section by so many seconds."),
    operations: int = typer.Option(0, min=0, help="Play so many on each release, or more."),
    seed: int = typer.Option(1, min=0, help="Where chance starts."),
    only: list[str] = typer.Option(None, help="Of a section, only the entries of these names."),
    jobs: int = typer.Option(1, min=1, help="Processes at once, in mutants and fuzzing."),
    write: Path = typer.Option(None, help="Write into this document and its JSON."),
    add: bool = typer.Option(False, help="Add fuzzing to what the document has of other seeds."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Try to lose something, or to get something wrong: status 1 when that succeeds.

    `schedules` plays random operations, `mutants` makes the patches wrong, `fuzzing` feeds bytes
    and arguments that nobody would write, `faults` kills and starves, `sanitizers` and `leaks`
    watch memory.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from pyllamakv.trust import document
    from pyllamakv.trust.entry import Effort
    from pyllamakv.trust.fuzzing.outcome import added

    chosen = [*dict.fromkeys(sections or SECTIONS)]
    for name in chosen:
        if name not in SECTIONS:
            msg = f"there is no section {name!r}: choose from {', '.join(SECTIONS)}"
            raise UsageError(msg)
    if add and (write is None or chosen != ["fuzzing"]):
        msg = "--add is for fuzzing and a document: pyllamakv trust fuzzing --add --write FILE"
        raise UsageError(msg)
    effort = Effort(seconds, seed, tuple(only or ()), jobs, operations)
    command = shlex.join(["pyllamakv", "trust", *(sections or []), *effort.options])
    earlier = _earlier(write, effort) if add else {}
    found: list[Entry] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("trying", total=None)
        for name in chosen:

            def tick(about: str, section: str = name) -> None:
                progress.update(task, description=f"{section}: {about}", advance=1)

            tick("")
            began = time.monotonic()
            section = importlib.import_module(f"pyllamakv.trust.{name}")
            tried = [entry.dated(command) for entry in section.entries(effort, tick)]
            tried = [added(earlier[e.name], e) if e.name in earlier else e for e in tried]
            found += tried
            wrong = sum(len(entry.defects) for entry in tried)
            progress.console.print(
                f"{name}: {len(tried)} tried in {time.monotonic() - began:.0f} s, "
                f"{wrong or 'nothing'} lost or wrong", highlight=False,
            )  # fmt: skip
            if write is not None:
                # Each section as it ends: the long run takes hours.
                document.write(write, found)
    if as_json:
        sys.stdout.write(json.dumps([asdict(entry) for entry in found], indent=1) + "\n")
    else:
        sys.stdout.write(document.render(found))
    if not found:
        msg = f"nothing was tried: --only names none of what {', '.join(chosen)} have"
        raise UsageError(msg)
    defects = [(entry, defect) for entry in found for defect in entry.defects]
    if defects:
        # Once more at the end, where somebody looks who sees only the last lines of a log.
        sys.stderr.write(f"lost or wrong: {len(defects)}\n")
        for entry, defect in defects:
            sys.stderr.write(f"  {entry.section}, {entry.name}: {defect}\n")
        raise typer.Exit(1)


def _earlier(path: Path, effort: Effort) -> dict[str, Entry]:
    """Return what a document has of targets that are to be fuzzed again; of another seed."""
    from pyllamakv.trust import document
    from pyllamakv.trust.fuzzing.outcome import seeds

    found = {each.name: each for each in document.read(path) if each.section == "fuzzing"}
    found = {name: each for name, each in found.items() if effort.wants(name)}
    again = [name for name, each in found.items() if effort.seed in seeds(each)]
    if again:
        msg = f"seed {effort.seed} was tried before on {', '.join(again)}: choose another"
        raise UsageError(msg)
    return found
