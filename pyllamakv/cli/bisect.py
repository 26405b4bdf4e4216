"""Find the release where a verdict changed: `pyllamakv bisect`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.cli.options import Backend, Json, Portable
from pyllamakv.source import spec_resolver

if TYPE_CHECKING:
    from pyllamakv.verification.bisect import BisectStep
    from pyllamakv.verification.cell import CellResult

app = typer.Typer(add_completion=False)


@app.command()
def command(
    good: Annotated[str, typer.Argument(help="A release on one side of the change.")],
    bad: Annotated[str, typer.Argument(help="A release on the other side.")],
    *,
    scenario: Annotated[
        str, typer.Option("--scenario", help="The verdict of this scenario alone.")
    ] = "",
    isolate: Annotated[
        str, typer.Option("--isolate", help="The verdict of this patch alone.")
    ] = "",
    backend: Backend = "cpu",
    portable: Portable = False,
    as_json: Json = False,
) -> None:
    """Find the first release, from GOOD on the way to BAD, that has another verdict than GOOD.

    Both ends are judged first, and releases that cannot be judged are passed over. The way may go
    back in time. Exit status: 0 found, 2 nothing to find, 125 an end cannot be judged.
    """
    from pyllamakv.building import backend as backends
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import lockfile
    from pyllamakv.verification import bisect, matrix, result_cache
    from pyllamakv.verification.cell import CellSpec

    good, bad = (spec_resolver.resolve(name).name for name in (good, bad))

    def spec(release: str) -> CellSpec:
        names = (scenario,) if scenario else ()
        return CellSpec(
            release,
            isolate=isolate,
            backend=backends.known(backend),
            native=not portable,
            scenarios=names,
        )

    def known(release: str) -> BisectStep | None:
        kept = result_cache.load_result(result_cache.key(spec(release)))
        if kept is None and scenario:
            # A whole matrix has judged this scenario too.
            kept = result_cache.load_result(result_cache.key(replace(spec(release), scenarios=())))
            rows = [row for row in kept.scenarios if row.id == scenario] if kept else []
            return bisect.BisectStep(release, rows[0].verdict, rows[0].stock) if rows else None
        return _step(kept) if kept else None

    chain = [name for name, each in lockfile.known().items() if each.kind in ("sdist", "npm")]
    with progress_bar.progress() as progress:

        def judge(release: str) -> BisectStep:
            return _step(matrix.run([spec(release)], progress=progress)[0])

        found = bisect.bisect(good, bad, chain, judge, known)
    if as_json:
        json.dump(found.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    for step in found.steps:
        sys.stdout.write(f"{step.release}: {step.verdict}\n")
    sys.stdout.write(f"{found}\n")


def _step(result: CellResult) -> BisectStep:
    from pyllamakv.verification.bisect import BisectStep

    return BisectStep(result.spec.release, result.verdict, result.reason)
