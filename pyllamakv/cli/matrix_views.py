"""Show plans, results and comparisons of the matrix."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.home import home

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyllamakv.source.watch import NewVersions
    from pyllamakv.verification.cell import CellResult, CellSpec
    from pyllamakv.verification.expected import Comparison, Table
    from pyllamakv.verification.release_watch import FollowedRelease


@dataclass(frozen=True)
class ReportOptions:
    """The requested reports of results, and the accepted verdicts to compare with."""

    accepted: Table
    html: Path | None = None
    junit: Path | None = None
    github: bool = False
    as_json: bool = False
    quiet: bool = False
    verbose: bool = False


def write_reports(
    results: Sequence[CellResult],
    wanted: ReportOptions,
    followed: Sequence[FollowedRelease] = (),
    warnings: Sequence[str] = (),
) -> bool:
    """Write the requested output; return whether a verdict is worse than accepted.

    ``followed`` are the releases of a watch, and ``warnings``, for JSON, those about its indexes.
    """
    from pyllamakv.source.files import write_text_atomic
    from pyllamakv.verification import expected, matrix_reports
    from pyllamakv.view import page

    compared = expected.compare(results, wanted.accepted)
    if wanted.html:
        write_text_atomic(wanted.html, page.render(results, compared))
        note(f"report: {wanted.html}")
    if wanted.junit:
        write_text_atomic(wanted.junit, matrix_reports.junit(results, compared))
    if wanted.as_json:
        watched = {"watched": [each.as_json() for each in followed]} if followed else {}
        more = watched | ({"warnings": list(warnings)} if warnings else {})
        write_json(matrix_reports.document(results, compared) | more)
    elif not wanted.quiet:
        _table(results, compared)
        if wanted.verbose:
            _details(results)
        write_lines(line for each in followed for line in _followed(each))
    if wanted.github:
        # Workflow commands are read from both streams; JSON must stay JSON.
        out = sys.stderr if wanted.as_json else sys.stdout
        out.writelines(f"{line}\n" for line in matrix_reports.workflow(compared))
    return any(one.regression for one in compared)


def _followed(found: FollowedRelease) -> Iterable[str]:
    """Yield the branch of a release, the patches to drop, and what requires manual work."""
    if found.branch:
        yield f"{found.name}: branch {found.branch.name}"
    yield from (
        f"{found.name}: {patch.id} is contained: {patch.reason}" for patch in found.contained
    )
    for patch in found.conflicts:
        places = [str(conflict) for conflict in patch.conflicts] or [patch.reason]
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        yield f"{found.name}: {patch.id} requires manual work: {places[0]}{more}"
    if found.error:
        note(f"{found.name}: {found.error}")


def write_watch(
    followed: Sequence[FollowedRelease],
    warnings: Sequence[str],
    folder: Path,
    accepted: Table,
) -> None:
    """Write the report of a watch as Markdown and HTML; ``accepted`` as in `ReportOptions`."""
    from pyllamakv.source.files import write_text_atomic
    from pyllamakv.verification import expected, watch_report
    from pyllamakv.view import page

    results = [result for each in followed for result in each.results]
    compared = expected.compare(results, accepted)
    write_text_atomic(folder / "watch.md", watch_report.markdown(followed, compared, warnings))
    write_text_atomic(folder / "watch.html", page.render(results, compared, followed, warnings))
    note(f"report: {folder / 'watch.md'}, {folder / 'watch.html'}")


def default_page() -> Path:
    """Return the path of the report without --html."""
    return home() / "results" / "matrix.html"


def plan(specs: Sequence[CellSpec], as_json: bool) -> None:
    """Print the cells of a plan, and known verdicts."""
    from pyllamakv.verification import result_cache

    rows: list[dict[str, Any]] = []
    for spec in specs:
        kept = result_cache.latest_result(spec)
        state = "to verify" if kept is None else "outdated" if kept.stale else "verified"
        verdict = kept.verdict if kept else None
        rows.append({"name": spec.name, "state": state, "verdict": verdict, "spec": spec.to_json()})
    if as_json:
        write_json({"schema": 1, "cells": rows})
        return
    width = max(len(spec.name) for spec in specs)
    for row in rows:
        known = f" ({row['verdict']})" if row["verdict"] else ""
        sys.stdout.write(f"{row['name']:<{width}}  {row['state']}{known}\n")


def missing(specs: Sequence[CellSpec], results: Iterable[CellResult]) -> None:
    """Name the cells without a result."""
    known = {result.spec for result in results}
    names = [spec.name for spec in specs if spec not in known]
    if names:
        note(f"no results yet: {', '.join(names)}; run `pyllamakv matrix run`")


def new_releases(found: NewVersions, names: Sequence[str], as_json: bool) -> None:
    """List versions on the indexes that are not pinned."""
    if as_json:
        write_json(asdict(found) | {"verify": list(names)})
        return
    nothing = "there is no new version on the indexes that answered"
    note(f"to verify: {', '.join(names)}" if names else nothing)
    for problem in found.unreachable:
        note(f"warning: {problem}")
    if found.lost:
        note(f"removed or changed on the index: {', '.join(found.lost)}")
    for name in found.moved:
        note(moved(name))


def moved(name: str) -> str:
    """Return a warning about a pinned git reference."""
    return f"{name} is at another commit, or gone; `pyllamakv matrix watch {name}` follows it"


def accepted(changed: Sequence[str], path: Path, as_json: bool) -> None:
    """List verdicts that are accepted now and were not before."""
    if as_json:
        write_json({"file": str(path), "changed": list(changed)})
        return
    sys.stdout.writelines(f"{line}\n" for line in changed or ("nothing changed",))
    note(f"written to {path}" if changed else f"{path} is up to date")


def _details(results: Sequence[CellResult]) -> None:
    """Print the reason of each verdict, and the scenarios that are not good."""
    from pyllamakv.verification.verdict import GOOD

    for result in results:
        lines = [f"{result.spec.name}: {result.verdict}: {result.reason}"]
        lines += [f"  skipped patch {name}: {why}" for name, why in result.skipped.items()]
        lines += [
            f"  {row.id} ({row.kind}): {row.word}: stock {row.stock}, patched {row.patched}"
            for row in result.scenarios
            if row.verdict not in GOOD
        ]
        lines += [
            f"  {failed.scenario} [{failed.setting}]: {failed.failure}: {failed.message}"
            for failed in result.failing
        ]
        write_lines(["", *lines])


def _table(results: Sequence[CellResult], compared: Sequence[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pyllamakv.view import page

    styles = {"good": "green", "idle": "cyan", "bad": "red", "dim": "yellow"}
    # A pipe has no width: nothing may be cut there.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False)
    for head in ("release", "era", "backend", "verdict", "measured", "accepted"):
        table.add_column(head, no_wrap=head not in ("measured", "accepted"))
    for result, one in zip(results, compared, strict=True):
        verdict = Text(result.verdict, style=styles[page.css_class(result.verdict)])
        if result.stale:
            verdict.append(" (old)", style="dim")
        comparison: str = "yes" if one.outcome == "same" else one.outcome
        if one.outcome != "same" and one.expected:
            comparison += f", was {one.expected}"
        style = "bold red" if one.regression else ""
        name, backend = Text(result.spec.what), result.spec.backend
        measured = Text(result.measured)
        table.add_row(name, result.era, backend, verdict, measured, Text(comparison, style=style))
    if results:
        console.print(table)
    for one in compared:
        if one.outcome in ("worse", "better"):
            style = "red" if one.regression else "green"
            console.print(str(one), style=style, markup=False, soft_wrap=True)
    worse = sum(one.regression for one in compared)
    if results:
        console.print(f"{worse} of {len(results)} worse than accepted" if worse else "as accepted")
