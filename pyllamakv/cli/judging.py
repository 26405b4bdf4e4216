"""Judge cells for a command: here, or on the machines of a scheduler."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import typer

from pyllamakv.cli import matrix_views as views
from pyllamakv.cli import showing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from pyllamakv.verification.cell import CellSpec


def judge(specs: Sequence[CellSpec], fresh: bool, scheduler: str, wanted: views.Wanted) -> None:
    """Judge cells and write what is wanted; leave with 1 when something is worse than accepted."""
    from pyllamakv.verification import matrix

    try:
        with showing.progress() as progress, _executor(scheduler, specs) as executor:
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
