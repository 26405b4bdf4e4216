"""Verify every release; compare with accepted verdicts: `pyllamakv matrix`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli import matrix_views as views
from pyllamakv.cli.options import (
    Backend,
    Backends,
    Fresh,
    Github,
    Isolate,
    Isolates,
    Json,
    Junit,
    Patches,
    Portable,
    Quick,
    Releases,
    Scenario,
    Scenarios,
    Series,
    Verbose,
    release_names,
)
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import FetchError, KvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from pyllamakv.source.progress import Progress
    from pyllamakv.verification.bisect import BisectStep
    from pyllamakv.verification.cell import CellResult, CellSpec
    from pyllamakv.verification.matrix import MatrixSelection

app = typer.Typer(add_completion=False)

Eras = Annotated[
    list[str] | None, typer.Option("--era", help="Only this era of `upstream list`; repeatable.")
]
Each = Annotated[bool, typer.Option("--each", help="Include each patch alone.")]
Sample = Annotated[
    bool, typer.Option("--sample", help="Use one release (default or newest) per era.")
]
Scheduler = Annotated[str, typer.Option("--scheduler", help="Address of a Dask scheduler to use.")]
Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="Use `matrix run --json` results instead; repeatable."),
]
Expected = Annotated[
    Path | None,
    typer.Option("--expected", help="Accepted verdicts; default: those of the series."),
]
Branch = Annotated[
    str | None,
    typer.Option("--branch", help="Name of a release's branch; empty: none."),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", help="Write watch.md and watch.html there.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write an HTML report to this file.")]


@app.callback(invoke_without_command=True)
def main(context: typer.Context, *, as_json: Json = False) -> None:
    """Verify every release, stock against patched, and compare with accepted verdicts.

    Without a command: `run` of all releases. Known results are not run again. Exit status: 0 as
    accepted or better, 1 a verdict is worse.
    """
    if context.invoked_subcommand is None:
        run(as_json=as_json)


@app.command()
def plan(
    names: Releases = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolates = None,
    each: Each = False,
    scenario: Scenarios = None,
    sample: Sample = False,
    portable: Portable = False,
    quick: Quick = False,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """List what a run would verify, and known verdicts."""
    from pyllamakv.verification import matrix, matrix_reports

    specs = matrix.plan(
        _choice(
            names, era, backend, patches, series, isolate, each, scenario, portable, sample, quick
        )
    )
    if github:
        write_json(matrix_reports.github(specs), indent=None)
        return
    views.plan(specs, as_json)


@app.command()
def run(
    names: Releases = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolates = None,
    each: Each = False,
    scenario: Scenarios = None,
    sample: Sample = False,
    portable: Portable = False,
    quick: Quick = False,
    fresh: Fresh = False,
    scheduler: Scheduler = "",
    expected: Expected = None,
    html: Html = None,
    junit: Junit = None,
    github: Github = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Verify releases; exits 1 if a verdict is worse than accepted."""
    from pyllamakv.verification import expected as accepting
    from pyllamakv.verification import matrix

    specs = matrix.plan(
        _choice(
            names, era, backend, patches, series, isolate, each, scenario, portable, sample, quick
        )
    )
    accepted = accepting.load(expected, patches)
    wanted = views.ReportOptions(accepted, html, junit, github, as_json, verbose=verbose)
    _verify(specs, fresh, scheduler, wanted)


@app.command()
def show(
    names: Releases = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolates = None,
    each: Each = False,
    expected: Expected = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Show the last results; run nothing."""
    from pyllamakv.verification import expected as accepting

    results, specs = _last_results(None, names, era, backend, patches, series, isolate, each)
    accepted = accepting.load(expected, patches)
    wanted = views.ReportOptions(accepted, as_json=as_json, verbose=verbose)
    views.write_reports(results, wanted)
    views.missing(specs, results)


@app.command()
def report(
    names: Releases = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolates = None,
    each: Each = False,
    merge: Merge = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    expected: Expected = None,
    html: Html = None,
    junit: Junit = None,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Write reports of the last results, or of files (--merge).

    Without an option, an HTML report is written to the data directory.
    """
    from pyllamakv.verification import expected as accepting
    from pyllamakv.verification import matrix_reports

    results, specs = _last_results(merge, names, era, backend, patches, series, isolate, each)
    views.missing(specs, results)
    if not results:
        msg = "there are no results yet; run `pyllamakv matrix run`"
        raise UsageError(msg)
    if markdown:
        sys.stdout.write(matrix_reports.markdown(results))
    accepted = accepting.load(expected, patches)
    asked = views.ReportOptions(accepted, html, junit, github, as_json, quiet=True)
    if not (html or junit or github or as_json or markdown):
        asked = views.ReportOptions(accepted, views.default_page(), quiet=True)
    views.write_reports(results, asked)


@app.command()
def watch(
    names: Releases = None,
    *,
    patches: Patches = "",
    backend: Backends = None,
    scenario: Scenarios = None,
    quick: Quick = False,
    unpinned: Annotated[
        bool, typer.Option("--unpinned", help="Also verify older unpinned versions.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list new versions.")] = False,
    branch: Branch = None,
    report: ReportFolder = None,
    scheduler: Scheduler = "",
    expected: Expected = None,
    junit: Junit = None,
    github: Github = False,
    as_json: Json = False,
) -> None:
    """Verify new versions of the package indexes, and write branches for review.

    New versions, and new commits of pinned git references, are added to the lock of the data
    directory. Each release with a good verdict gets a branch with its ports and verdict,
    watch/RELEASE by default, if the series is in a git checkout; the others are reported with their
    conflicts. With RELEASE, only these are followed. An interrupted watch is continued, also if no
    index answers. Exit status 1: a verdict is bad; 4: no index answers.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import port_choice
    from pyllamakv.verification import expected as accepting
    from pyllamakv.verification import matrix, release_watch, review_branch

    def which(chosen: Sequence[str]) -> MatrixSelection:
        return _choice(chosen, None, backend, patches, scenario=scenario, quick=quick)

    with contextlib.nullcontext() if dry_run else release_watch.only_one():
        accepted = accepting.load(expected, patches)
        wanted, warnings, unread = _versions(names, which, unpinned, dry_run, as_json)
        if dry_run:
            raise typer.Exit(unread.exit_code if unread else 0)
        if branch is None and wanted and review_branch.root_of(patches) is None:
            branch = ""
            what = f"{patches} is no directory with series.toml" if patches else "pyllamakv is not"
            warnings = (*warnings, f"no branches for review: {what} in a git checkout")
            note(f"warning: {warnings[-1]}")
        lock = port_choice.lock_of(patches)
        with progress_bar.progress() as progress:
            # Without a release, no branch is written, and the command runs anywhere.
            template = "watch/{release}" if branch is None else branch
            following = release_watch.ReleaseWatch(template if wanted else "", patches, progress)
            chosen = []
            for version in wanted:
                try:
                    release = release_watch.obtain(version, lock, progress)
                except KvError as error:
                    # One archive that cannot be fetched does not stop the others.
                    following.failed(version, error)
                    continue
                if release.name not in chosen and following.start(release):
                    chosen.append(release.name)
            results: Sequence[CellResult] = ()
            try:
                if chosen:
                    specs = matrix.plan(which(chosen))
                    following.expect(specs)
                    results = _results(specs, False, scheduler, progress, following.take)
            finally:
                if report:
                    views.write_watch(following.followed, warnings, report, accepted)
        options = views.ReportOptions(accepted, None, junit, github, as_json and bool(wanted))
        worse = views.write_reports(results, options, following.followed, warnings)
    ended = unread or following.error
    if ended:  # was printed as a warning, or with its release
        raise typer.Exit(ended.exit_code)
    if worse:
        raise typer.Exit(1)


def _versions(
    names: Sequence[str] | None,
    which: Callable[[Sequence[str]], MatrixSelection],
    unpinned: bool,
    dry_run: bool,
    as_json: bool,
) -> tuple[list[str], Sequence[str], FetchError | None]:
    """Return the releases to follow, and warnings about the indexes; print both.

    By default those that an interrupted watch left, and new versions, oldest first: an interrupted
    watch leaves the newest to the next one. If no index answers, only the former are returned, and
    the error.
    """
    from pyllamakv.source import watch as watching
    from pyllamakv.verification import matrix, release_watch

    news, unread = watching.NewVersions((), (), (), ()), None
    if names:
        wanted = list(dict.fromkeys(names))
    else:
        added = [release.name for release in release_watch.added()]
        specs = matrix.plan(which(added)) if added else ()
        wanted = release_watch.pending(specs)
        try:
            news = watching.new_versions()
        except FetchError as error:
            news, unread = replace(news, unreachable=(str(error),)), error
        fresh = (*news.new, *news.unpinned) if unpinned else news.new
        wanted += [each.spec for each in reversed(fresh)]
        wanted += [name for name in news.moved if name not in wanted]
    views.new_releases(news, wanted, as_json and (dry_run or not wanted))
    lost = [f"{name} was removed from its index, or changed there" for name in news.lost]
    return wanted, (*news.unreachable, *lost, *map(views.moved, news.moved)), unread


@app.command()
def accept(
    names: Releases = None,
    *,
    era: Eras = None,
    backend: Backends = None,
    patches: Patches = "",
    series: Series = "",
    isolate: Isolates = None,
    each: Each = False,
    merge: Merge = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Also accept results of changed inputs.")
    ] = False,
    expected: Expected = None,
    as_json: Json = False,
) -> None:
    """Write the last verdicts to the file of accepted verdicts."""
    from pyllamakv.verification import expected as accepting

    path = expected or accepting.file_of(patches)
    if path is None:
        msg = f"no file is beside the commits {patches}: name the one to write with --expected"
        raise UsageError(msg)
    found, specs = _last_results(merge, names, era, backend, patches, series, isolate, each)
    results = [result for result in found if stale or not result.stale]
    if not results:
        msg = "there are no results for these inputs; run `pyllamakv matrix run`"
        raise UsageError(msg)
    changed = accepting.accept(results, path)
    views.accepted(changed, path, as_json)
    views.missing(specs, results)


@app.command("bisect")
def find_change(
    good: Annotated[
        str,
        typer.Argument(
            metavar="GOOD", help="Release before the change.", autocompletion=release_names
        ),
    ],
    bad: Annotated[
        str,
        typer.Argument(
            metavar="BAD", help="Release after the change.", autocompletion=release_names
        ),
    ],
    *,
    patches: Patches = "",
    scenario: Scenario = "",
    isolate: Isolate = "",
    backend: Backend = "cpu",
    portable: Portable = False,
    as_json: Json = False,
) -> None:
    """Find the first release between GOOD and BAD with another verdict than GOOD.

    Commits of a local repository, git:DIR@REF, are searched as well. Untestable releases are
    skipped. BAD may be older than GOOD. Exit status: 0 found, 2 both have the same verdict, 125
    GOOD or BAD is untestable.
    """
    from pyllamakv.building import backend as backends
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import port_choice
    from pyllamakv.source import lockfile, spec_resolver
    from pyllamakv.source.releases import ARCHIVE_KINDS
    from pyllamakv.verification import bisect, matrix, result_cache
    from pyllamakv.verification.cell import CellSpec

    lock = port_choice.lock_of(patches)
    ends = [spec_resolver.resolve(name, lock) for name in (good, bad)]
    good, bad = (release.name for release in ends)
    chain = [name for name, each in lockfile.known().items() if each.kind in ARCHIVE_KINDS]
    if any(release.kind not in ARCHIVE_KINDS for release in ends):
        chain = spec_resolver.history(*ends)

    def spec(release: str) -> CellSpec:
        names = (scenario,) if scenario else ()
        return CellSpec(
            release,
            isolate=isolate,
            backend=backends.known(backend),
            native=not portable,
            scenarios=names,
            patches=patches,
        )

    def known(release: str) -> BisectStep | None:
        if release.startswith("git:") and release not in lockfile.known():
            return None  # its key would require the sources
        kept = result_cache.load_result(result_cache.key(spec(release)))
        if kept is None and scenario:
            # A run of the whole matrix has a result of this scenario, too.
            kept = result_cache.load_result(result_cache.key(replace(spec(release), scenarios=())))
            rows = [row for row in kept.scenarios if row.id == scenario] if kept else []
            return bisect.BisectStep(release, rows[0].verdict, rows[0].stock) if rows else None
        return _step(kept) if kept else None

    with progress_bar.progress() as progress:

        def verify(release: str) -> BisectStep:
            return _step(matrix.run([spec(release)], progress=progress)[0])

        found = bisect.bisect(good, bad, chain, verify, known)
    if as_json:
        write_json(found.to_json())
        return
    write_lines([*(f"{step.release}: {step.verdict}" for step in found.steps), str(found)])


def _step(result: CellResult) -> BisectStep:
    from pyllamakv.verification.bisect import BisectStep

    return BisectStep(result.spec.release, result.verdict, result.reason)


def _last_results(
    merge: Sequence[Path] | None, *chosen: Any
) -> tuple[Sequence[CellResult], Sequence[CellSpec]]:
    """Return the last results of the cells that `_choice` names, and these cells.

    With ``merge`` what these files of other runs have, and no cells: they were chosen there.
    """
    from pyllamakv.verification import matrix, matrix_reports, result_cache

    if merge:
        return matrix_reports.merge(merge), ()
    specs = matrix.plan(_choice(*chosen))
    return result_cache.latest_of(specs), specs


def _choice(
    names: Sequence[str] | None = None,
    era: Sequence[str] | None = None,
    backend: Sequence[str] | None = None,
    patches: str = "",
    series: str = "",
    isolate: Sequence[str] | None = None,
    each: bool = False,
    scenario: Sequence[str] | None = None,
    portable: bool = False,
    sample: bool = False,
    quick: bool = False,
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
        quick=quick,
        patches=patches,
    )


def _verify(
    specs: Sequence[CellSpec], fresh: bool, scheduler: str, wanted: views.ReportOptions
) -> None:
    """Verify cells and write the requested output; exit with 1 if a verdict is worse."""
    from pyllamakv.cli import progress_bar

    with progress_bar.progress() as progress:
        results = _results(specs, fresh, scheduler, progress)
    if views.write_reports(results, wanted):
        raise typer.Exit(1)


def _results(
    specs: Sequence[CellSpec],
    fresh: bool,
    scheduler: str,
    progress: Progress,
    each: Callable[[CellResult], None] | None = None,
) -> Sequence[CellResult]:
    """Verify cells here or on a scheduler's workers; ``each`` is called with each result."""
    from pyllamakv.verification import matrix

    try:
        with _executor(scheduler, specs) as executor:
            return matrix.run(specs, executor=executor, fresh=fresh, each=each, progress=progress)
    except KeyboardInterrupt:
        note("results so far are kept; the same command continues from there")
        raise


@contextlib.contextmanager
def _executor(scheduler: str, specs: Sequence[CellSpec]) -> Iterator[Executor | None]:
    if not scheduler:
        yield None
        return
    from pyllamakv.verification import cluster

    with cluster.connect(scheduler) as found:
        for hint in found.lacking({spec.backend for spec in specs}):
            note(f"no worker for it yet; waiting for one: {hint}")
        yield found
