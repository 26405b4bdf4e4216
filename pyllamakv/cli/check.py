"""Judge a patch series on a release: `pyllamakv check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import Backend, Json, Portable
from pyllamakv.source.releases import DEFAULT_RELEASE
from pyllamakv.verification import discovery

if TYPE_CHECKING:
    from pyllamakv.verification.check import CheckResult

app = typer.Typer(add_completion=False)


@app.command()
def command(
    release: Annotated[
        str, typer.Argument(help="0.3.9, b4980, git:URL@REF or path:DIR.")
    ] = DEFAULT_RELEASE,
    patch: Annotated[
        list[Path] | None,
        typer.Option("--patch", help="Judge this patch file or folder, not the shipped series."),
    ] = None,
    series: Annotated[
        str, typer.Option("--series", help="Judge these shipped patches only: a,b.")
    ] = "",
    isolate: Annotated[
        str, typer.Option("--isolate", help="Judge one shipped patch by its own scenarios.")
    ] = "",
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="Run only this scenario; repeatable.")
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option("--scenarios", help="Find more scenarios in this folder; repeatable."),
    ] = None,
    backend: Backend = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="Run each scenario in a few settings only.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run everything again, remembered or not.")
    ] = False,
    portable: Portable = False,
    maps: Annotated[bool, typer.Option(help="Draw the cells before and after.")] = True,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write a JUnit file there as well.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run stock and patched through the scenarios and say what the patches are worth.

    Exit status: 0 needed, redundant or native; 1 harmful, ineffective or broken; 125 untestable;
    128 a fault of the harness.
    """
    from pyllamakv.verification import check, check_report
    from pyllamakv.view import check_console

    question = check.CheckRequest(
        release=release,
        series=tuple(name for name in series.split(",") if name),
        patches=tuple(patch or ()),
        isolate=isolate,
        scenarios=tuple(scenario or ()),
        folders=tuple(folder or ()),
        backend=backend,
        quick=quick,
        fresh=fresh,
        native=not portable,
    )
    answer = _answer(question)
    if junit is not None:
        junit.write_text(check_report.junit(answer), encoding="utf-8")
    if as_json:
        json.dump(answer.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        from rich.console import Console

        known = discovery.discover(question.folders)
        check_console.show(answer, known, Console(), maps)
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
        # Git bisect must not take a fault of ours for a bad release.
        msg = f"the harness failed: {type(error).__name__}: {error}"
        raise HarnessError(msg) from error
