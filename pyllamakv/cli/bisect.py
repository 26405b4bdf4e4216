"""Find the release where a verdict changed: `pyllamakv bisect`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import (
    Backend,
    Isolate,
    Json,
    Patches,
    Portable,
    Scenario,
    release_names,
)
from pyllamakv.cli.stdout import write_json, write_lines

if TYPE_CHECKING:
    from pyllamakv.verification.bisect import BisectStep
    from pyllamakv.verification.cell import CellResult

app = typer.Typer(add_completion=False)


@app.command()
def command(
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

    Untestable releases are skipped. BAD may be older than GOOD. Exit status: 0 found, 2 both have
    the same verdict, 125 GOOD or BAD is untestable.
    """
    from pyllamakv.building import backend as backends
    from pyllamakv.cli import progress_bar
    from pyllamakv.patching import port_choice
    from pyllamakv.source import lockfile, spec_resolver
    from pyllamakv.source.releases import ARCHIVE_KINDS
    from pyllamakv.verification import bisect, matrix, result_cache
    from pyllamakv.verification.cell import CellSpec

    lock = port_choice.load_series(patches).lock
    good, bad = (spec_resolver.resolve(name, lock).name for name in (good, bad))

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
        kept = result_cache.load_result(result_cache.key(spec(release)))
        if kept is None and scenario:
            # A run of the whole matrix has a result of this scenario, too.
            kept = result_cache.load_result(result_cache.key(replace(spec(release), scenarios=())))
            rows = [row for row in kept.scenarios if row.id == scenario] if kept else []
            return bisect.BisectStep(release, rows[0].verdict, rows[0].stock) if rows else None
        return _step(kept) if kept else None

    chain = [name for name, each in lockfile.known().items() if each.kind in ARCHIVE_KINDS]
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
