"""Verify patches on a release: `pyllamakv check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import (
    Backend,
    CheckServer,
    Fresh,
    Isolate,
    Json,
    Junit,
    Patches,
    Portable,
    Quick,
    ReleaseOrNewest,
    Scenarios,
    Series,
    Verbose,
)
from pyllamakv.cli.stdout import write_json, write_lines
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pyllamakv.server.server_check import ServerCheck
    from pyllamakv.verification.check import CheckResult

app = typer.Typer(add_completion=False)

#: Columns of a line without -v.
_WIDTH = 80


@app.command()
def command(
    release: ReleaseOrNewest = "",
    *,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolate = "",
    scenario: Scenarios = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option("--scenario-dir", help="Directory with more scenarios; repeatable."),
    ] = None,
    backend: Backend = "cpu",
    quick: Quick = False,
    fresh: Fresh = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.1,
            help="Seconds until a call counts as hung; default: 30, GPUs longer.",
        ),
    ] = None,
    portable: Portable = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Print cells before and after defragmentation.")
    ] = False,
    server: CheckServer = False,
    verbose: Verbose = False,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Run scenarios on stock and patched, and print the verdict.

    Exit status: 0 needed, works, redundant, harmless or native; 1 harmful, ineffective or broken;
    125 untestable; 128 internal error.
    """
    from pyllamakv.source import verified
    from pyllamakv.verification import check, check_report, discovery
    from pyllamakv.view import check_console

    if server:
        if isolate or folder or quick or fresh or timeout or pictures or junit:
            raise UsageError(
                "--server has only the options --patches, --series, --scenario, --backend, "
                "--portable, --verbose and --json"
            )
        found = _server_answer(
            release or verified.newest().name, patches, series, scenario, backend, not portable
        )
        if as_json:
            write_json(found.to_json())
        else:
            write_lines(_server_lines(found, verbose=verbose))
        raise typer.Exit(found.decision.exit_code)
    question = check.CheckRequest(
        release=release or verified.newest().name,
        series=_names(series),
        patches=patches,
        isolate=isolate,
        scenarios=tuple(scenario or ()),
        folders=tuple(folder or ()),
        backend=backend,
        quick=quick,
        fresh=fresh,
        native=not portable,
        timeout=timeout,
    )
    answer = _answer(question)
    if junit is not None:
        junit.write_text(check_report.junit(answer), encoding="utf-8")
    if as_json:
        write_json(answer.to_json(pictures=pictures))
    else:
        from rich.console import Console

        known = discovery.discover(question.folders)
        check_console.show(answer, known, Console(), pictures=pictures, verbose=verbose)
    raise typer.Exit(answer.decision.exit_code)


def _names(series: str) -> tuple[str, ...]:
    return tuple(name for name in series.split(",") if name)


def _server_answer(
    release: str,
    patches: str,
    series: str,
    scenarios: list[str] | None,
    backend: str,
    native: bool,
) -> ServerCheck:
    from pyllamakv.cli import progress_bar
    from pyllamakv.server.server_check import check_server

    with progress_bar.progress() as progress:
        return check_server(
            release,
            patches=patches,
            series=_names(series),
            scenarios=tuple(scenarios or ()),
            backend=backend,
            native=native,
            progress=progress,
        )


def _server_lines(found: ServerCheck, *, verbose: bool) -> list[str]:
    """Return the results of both sides by scenario, and the verdict in the last line."""
    lines = []
    for pair in found.pairs:
        lines.append(f"{pair.scenario:24}{pair.kind:9}{found.decision.scenarios[pair.scenario]}")
        for side, outcome in (("stock", pair.stock), ("patched", pair.patched)):
            if outcome is None:
                continue
            counts = found.notes.get((pair.scenario, side), {})
            shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            first, *log = outcome.message.splitlines() or [""]
            what = f"{outcome.failure or outcome.status}: {first}" if first else outcome.status
            line = f"  {side:9}{what}{f' ({shown})' if shown else ''}"
            lines.append(line if verbose or len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…")
            lines += log if verbose else ()
    first, *log = str(found.decision).splitlines()
    return [*lines, first, *(log if verbose else ())]


def _answer(question: Any) -> CheckResult:
    from pyllamakv.cli import progress_bar
    from pyllamakv.errors import HarnessError, KvError
    from pyllamakv.verification import check

    try:
        with progress_bar.progress() as progress:
            return check.check(question, progress=progress)
    except KvError:
        raise
    except Exception as error:
        # `git bisect` must not treat an internal error as a bad release.
        msg = f"internal error: {type(error).__name__}: {error}"
        raise HarnessError(msg) from error
