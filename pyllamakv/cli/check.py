"""Verify patches on a release: `pyllamakv check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import (
    Backend,
    Fresh,
    Isolate,
    Json,
    Junit,
    Portable,
    Quick,
    ReleaseOrNewest,
    Scenarios,
    Series,
    Verbose,
)
from pyllamakv.cli.stdout import write_json

if TYPE_CHECKING:
    from pyllamakv.verification.check import CheckResult

app = typer.Typer(add_completion=False)


@app.command()
def command(
    release: ReleaseOrNewest = "",
    patch: Annotated[
        list[Path] | None,
        typer.Option(
            "--patch", help="Verify a file, directory, git:REPO@FROM..TO instead; repeatable."
        ),
    ] = None,
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

    question = check.CheckRequest(
        release=release or verified.newest().name,
        series=tuple(name for name in series.split(",") if name),
        patches=tuple(patch or ()),
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
