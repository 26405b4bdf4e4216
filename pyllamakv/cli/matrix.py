"""Judge every release and compare with what is expected: `pyllamakv matrix`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli import matrix_views as views
from pyllamakv.cli.options import Json
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from pyllamakv.verification.cell import CellResult, CellSpec
    from pyllamakv.verification.matrix import MatrixSelection

app = typer.Typer(add_completion=False)

Names = Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]…", help="Default: all.")]
Eras = Annotated[list[str] | None, typer.Option("--era", help="Only releases of this era.")]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="cpu (default), rpc, cuda, ….")
]
SeriesNames = Annotated[str, typer.Option("--series", help="Only these shipped patches: a,b.")]
Isolated = Annotated[
    list[str] | None, typer.Option("--isolate", help="Judge this patch alone; repeatable.")
]
Each = Annotated[bool, typer.Option("--each", help="Judge every patch alone as well.")]
Sample = Annotated[bool, typer.Option("--sample", help="One release per era is enough.")]
Scenarios = Annotated[list[str] | None, typer.Option("--scenario", help="Only this scenario.")]
Portable = Annotated[bool, typer.Option("--portable", help="Use builds for any machine.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Judge again what was judged before.")]
Scheduler = Annotated[
    str, typer.Option("--scheduler", help="Judge on the workers of this dask scheduler.")
]
Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="Take results from this JSON file of a run; repeatable."),
]
Expected = Annotated[
    Path | None, typer.Option("--expected", help="What is accepted; default: beside the patches.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write one HTML page there.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write a JUnit file there.")]
Github = Annotated[bool, typer.Option("--github", help="Print GitHub annotations as well.")]


@app.callback(invoke_without_command=True)
def whole(context: typer.Context, *, as_json: Json = False) -> None:
    """Judge every release, stock against patched, and compare with what is accepted.

    Without a command: run all, then show. What was judged before costs nothing. Exit status:
    0 as accepted or better, 1 something is worse.
    """
    if context.invoked_subcommand is None:
        run(as_json=as_json)


@app.command()
def plan(
    names: Names = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    series: SeriesNames = "",
    isolate: Isolated = None,
    each: Each = False,
    scenario: Scenarios = None,
    sample: Sample = False,
    portable: Portable = False,
    format_: Annotated[str, typer.Option("--format", help="text, json or github.")] = "text",
    as_json: Json = False,
) -> None:
    """List the cells that a run would judge, and which were judged before."""
    from pyllamakv.verification import matrix, matrix_reports

    if format_ not in ("text", "json", "github"):
        msg = f"expected --format text, json or github, found {format_!r}"
        raise UsageError(msg)
    specs = matrix.plan(
        _choice(names, era, backend, series, isolate, each, scenario, portable, sample)
    )
    if format_ == "github":
        views.compact(matrix_reports.github(specs))
        return
    views.plan(specs, as_json or format_ == "json")


@app.command()
def run(
    names: Names = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    series: SeriesNames = "",
    isolate: Isolated = None,
    each: Each = False,
    scenario: Scenarios = None,
    sample: Sample = False,
    portable: Portable = False,
    fresh: Fresh = False,
    scheduler: Scheduler = "",
    expected: Expected = None,
    html: Html = None,
    junit: Junit = None,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Judge releases; exit 1 when something is worse than accepted."""
    from pyllamakv.verification import matrix

    specs = matrix.plan(
        _choice(names, era, backend, series, isolate, each, scenario, portable, sample)
    )
    _judge(specs, fresh, scheduler, views.Wanted(expected, html, junit, github, as_json))


@app.command()
def show(
    names: Names = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    series: SeriesNames = "",
    isolate: Isolated = None,
    each: Each = False,
    expected: Expected = None,
    as_json: Json = False,
) -> None:
    """Show what was judged last, without running anything."""
    results, specs = _judged(None, names, era, backend, series, isolate, each)
    views.finish(results, views.Wanted(expected, as_json=as_json))
    views.missing(specs, results)


@app.command()
def report(
    names: Names = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    series: SeriesNames = "",
    isolate: Isolated = None,
    each: Each = False,
    merge: Merge = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of the README.")
    ] = False,
    expected: Expected = None,
    html: Html = None,
    junit: Junit = None,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Write reports on what was judged last, here or, with --merge, elsewhere.

    Without an option the HTML page is written to the home and its path printed.
    """
    from pyllamakv.verification import matrix_reports

    results, specs = _judged(merge, names, era, backend, series, isolate, each)
    views.missing(specs, results)
    if not results:
        msg = "nothing was judged yet; run `pyllamakv matrix run`"
        raise UsageError(msg)
    if markdown:
        sys.stdout.write(matrix_reports.markdown(results))
    asked = views.Wanted(expected, html, junit, github, as_json, quiet=True)
    if not (html or junit or github or as_json or markdown):
        asked = views.Wanted(expected, views.default_page(), quiet=True)
    views.finish(results, asked)


@app.command()
def watch(
    *,
    backend: Backends = None,
    unpinned: Annotated[
        bool, typer.Option("--unpinned", help="Judge older versions that no lock has as well.")
    ] = False,
    look: Annotated[bool, typer.Option("--look", help="Only look, judge nothing.")] = False,
    scheduler: Scheduler = "",
    expected: Expected = None,
    html: Html = None,
    junit: Junit = None,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Look for new versions on the package index, and judge them.

    A new version is added to the home's lock; nobody accepted it yet, so it has to be good. What
    was added before and never judged comes along.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import fetch
    from pyllamakv.source import watch as watching
    from pyllamakv.verification import matrix

    news = watching.compare_with_index()
    fresh = (*news.unpinned, *news.new) if unpinned else news.new
    names = (*_unjudged(backend), *fresh)
    views.news(news, names, as_json and (look or not names))
    if look or not names:
        return
    with progress_bar.progress() as progress:
        for name in fresh:
            fetch.add(name, progress=progress)
    specs = matrix.plan(_choice(list(names), None, backend))
    _judge(specs, False, scheduler, views.Wanted(expected, html, junit, github, as_json))


@app.command()
def accept(
    names: Names = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    series: SeriesNames = "",
    isolate: Isolated = None,
    each: Each = False,
    merge: Merge = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Accept verdicts whose inputs have changed since.")
    ] = False,
    expected: Expected = None,
    as_json: Json = False,
) -> None:
    """Accept what was judged last: write it to the file that runs are compared with."""
    from pyllamakv.verification import expected as accepting

    found, specs = _judged(merge, names, era, backend, series, isolate, each)
    results = [result for result in found if stale or not result.stale]
    if not results:
        msg = "nothing was judged on these inputs yet; run `pyllamakv matrix run`"
        raise UsageError(msg)
    path = expected or accepting.local_file()
    changed = accepting.accept(results, path)
    views.accepted(changed, path, as_json)
    views.missing(specs, results)


def _judged(
    merge: Sequence[Path] | None, *chosen: Any
) -> tuple[Sequence[CellResult], Sequence[CellSpec]]:
    """Return what was judged last of the cells that `_choice` names, and these.

    With ``merge`` what these files of other runs have, and no cells: they were chosen there.
    """
    from pyllamakv.verification import matrix, matrix_reports, result_cache

    if merge:
        return matrix_reports.merge(merge), ()
    specs = matrix.plan(_choice(*chosen))
    return result_cache.latest_of(specs), specs


def _unjudged(backend: Sequence[str] | None) -> list[str]:
    """Return the added releases without any result: a watch was ended before it judged them."""
    from pyllamakv.source import lockfile
    from pyllamakv.verification import matrix, result_cache

    names = [release.name for release in lockfile.load(lockfile.added()) if release.kind == "sdist"]
    specs = matrix.plan(_choice(names, None, backend)) if names else ()
    return list(dict.fromkeys(s.release for s in specs if result_cache.latest_result(s) is None))


def _choice(
    names: Sequence[str] | None = None,
    era: Sequence[str] | None = None,
    backend: Sequence[str] | None = None,
    series: str = "",
    isolate: Sequence[str] | None = None,
    each: bool = False,
    scenario: Sequence[str] | None = None,
    portable: bool = False,
    sample: bool = False,
) -> MatrixSelection:
    from pyllamakv.verification.matrix import MatrixSelection

    if series and (isolate or each):
        msg = "choose one of --series, --isolate and --each"
        raise UsageError(msg)
    return MatrixSelection(
        releases=tuple(names or ()),
        eras=tuple(era or ()),
        backends=tuple(backend or ("cpu",)),
        series=tuple(name for name in series.split(",") if name),
        scenarios=tuple(scenario or ()),
        isolate=tuple(isolate or ()),
        each=each,
        native=not portable,
        sample=sample,
    )


def _judge(specs: Sequence[CellSpec], fresh: bool, scheduler: str, wanted: views.Wanted) -> None:
    """Judge cells and write what is wanted; leave with 1 when something is worse than accepted."""
    from pyllamakv.cli import progress_bar
    from pyllamakv.verification import matrix

    try:
        with progress_bar.progress() as progress, _executor(scheduler, specs) as executor:
            results = matrix.run(specs, executor=executor, fresh=fresh, progress=progress)
    except KeyboardInterrupt:
        sys.stderr.write("what was judged is kept; the same command goes on from there\n")
        raise
    if views.finish(results, wanted):
        raise typer.Exit(1)


@contextlib.contextmanager
def _executor(scheduler: str, specs: Sequence[CellSpec]) -> Iterator[Executor | None]:
    if not scheduler:
        yield None
        return
    from pyllamakv.verification import cluster

    with cluster.connect(scheduler) as found:
        for cure in found.lacking({spec.backend for spec in specs}):
            sys.stderr.write(f"no worker for it yet; this waits for one: {cure}\n")
        yield found
