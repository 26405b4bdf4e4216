"""`python -m qa load`: send many requests to llama-server and to `Batcher`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.errors import UsageError
from pyllamakv.source.releases import TEST_RELEASE
from qa import summary
from qa.load import load_figures, load_picture
from qa.load.load_cells import DEFAULT_SYSTEMS, SYSTEMS, LoadCell, LoadPlan, describe, stored
from qa.load.request_schedule import WORKLOADS

if TYPE_CHECKING:
    from qa.load.load_result import LoadResult

app = typer.Typer(add_completion=False)


@app.command()
def load(
    releases: Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]…")] = None,
    *,
    workload: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WORKLOADS)}; default: fits and shift.")
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SYSTEMS)}; default: not serve.")
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Clients and slots; default: 4.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per cell; default: 1000.")] = 1000,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Mean requests per second; default: 20.")
    ] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; default: 1.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads; default: 1.")] = 1,
    model: Annotated[
        str, typer.Option(help="Model or GGUF file; default: $PYLLAMAKV_TEST_MODEL.")
    ] = "test",
    trace: Annotated[
        Path | None, typer.Option(help="Recorded trace for the workload trace.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure stored cells again.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the first round of the first cells as SVG.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send the requests of a workload to servers and `Batcher`; interrupted runs continue.

    Exits with 1 if patched or the batcher loses a request. Build first: `pyllamakv build RELEASE
    --server`.
    """
    from pyllamakv.cli import progress_bar
    from pyllamakv.cli.stdout import write_json, write_lines

    for name in system or ():
        if name not in SYSTEMS:
            raise UsageError(f"there is no system {name!r}: choose from {', '.join(SYSTEMS)}")
    plan = LoadPlan(
        releases=tuple(releases or [TEST_RELEASE]),
        workloads=tuple(workload or ["fits", "shift"]),
        clients=tuple(clients or [4]),
        systems=tuple(each for each in SYSTEMS if each in (system or DEFAULT_SYSTEMS)),
        requests=requests,
        rate=rate,
        rounds=rounds,
        threads=threads,
        model=model,
        trace=trace,
    )
    plan.check()
    results: dict[LoadCell, LoadResult] = {}
    with progress_bar.progress() as progress:
        for cells in plan.rounds_of_cells():
            known = {} if fresh else stored(cells)
            for cell in cells:
                name = str(cell)

                def tick(done: int, name: str = name) -> None:
                    progress(name, done, requests)

                results[cell] = known.get(cell) or cell.measure(tick)
    days: dict[str, str] = {}
    for cell, one in results.items():
        name = load_figures.group(cell)
        days[name] = max(days.get(name, ""), one.day)
    figures = load_figures.figures(results)
    found = [each.dated(_command(plan), days[each.group]) for each in figures]
    if picture is not None:
        _draw(results, picture)
    if write is not None:
        summary.store(write, found)
    if as_json:
        write_json([describe(cell) | one.to_json() for cell, one in results.items()])
    else:
        write_lines(summary.table(found).splitlines())
    if any(one.lost for cell, one in results.items() if cell.system != "stock"):
        raise typer.Exit(1)


def _command(plan: LoadPlan) -> str:
    """Return the command that repeats a load test, without the user's paths."""
    words = ["python -m qa load", *plan.releases]
    words += [f"--workload {name}" for name in plan.workloads]
    words += (
        [f"--system {name}" for name in plan.systems] if plan.systems != DEFAULT_SYSTEMS else []
    )
    words += [f"--clients {count}" for count in plan.clients]
    words += [f"--requests {plan.requests}", f"--rate {plan.rate:g}", f"--rounds {plan.rounds}"]
    words += [f"--threads {plan.threads}"] if plan.threads != 1 else []
    words += [f"--model {Path(plan.model).name}"] if plan.model != "test" else []
    return " ".join([*words, *([f"--trace {plan.trace.name}"] if plan.trace else [])])


def _draw(results: dict[LoadCell, LoadResult], path: Path) -> None:
    from pyllamakv.source.files import write_text_atomic
    from pyllamakv.view.drawing import svg

    first = next(iter(results))
    runs = {
        cell.system: one
        for cell, one in results.items()
        if (cell.release, cell.workload, cell.clients, cell.round)
        == (first.release, first.workload, first.clients, 0)
    }
    about = WORKLOADS[first.workload].rstrip(".")
    title = f"llama-server {first.release}, {first.clients} clients: {about}"
    write_text_atomic(path, svg(load_picture.draw(title, runs)) + "\n")
