"""`python -m qa bench`: measure, print, and optionally write the figures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import typer

from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)

#: Group -> its module in `qa.bench`, and whether it runs by default.
GROUPS = {
    "calls": ("python_overhead", True),
    "loop": ("loop", True),
    "generation": ("generation", False),
    "moving": ("defrag", True),
    "sparse": ("sparse", False),
    "server": ("sparse_server", False),
    "managers": ("manager_overhead", True),
    "threads": ("busy_machine", False),
    "signals": ("interrupts", False),
    "peers": ("cache_peers", False),
    "mapped": ("mapped_memory", False),
    "identity": ("identity", False),
    "hardware": ("hardware", False),
}


@app.command()
def bench(
    groups: list[str] = typer.Argument(
        None,
        help=f"{', '.join(GROUPS)}; default: {', '.join(k for k, (_, v) in GROUPS.items() if v)}.",
    ),
    backend: str = typer.Option("cuda", help="Backend of `hardware`: cuda, vulkan or rpc."),
    release: list[str] = typer.Option(
        None, help="Release of `hardware`; default: the test release and the newest one."
    ),
    write: Path = typer.Option(None, help="Write the results to this JSON file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure ratios side by side.

    `calls` and `loop` compare Python with C, `generation` several clients with
    llama-cpp-python, and `peers` prompt caches with those of llama-server.
    `moving` defragments caches, `sparse` and `server` compact them, `mapped` maps them to files.
    `identity` computes the digest of a model. `managers` compares cache managers with decodes by
    hand, `threads` numbers of threads beside busy processes, and `signals` how long a signal waits
    for a decode. `hardware` builds for a device, repeats `moving` and `sparse` on it, and runs
    scenarios in few settings, also those of llama-server.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from qa import summary
    from qa.bench.figure import Figure

    chosen = groups or [name for name, (_, default) in GROUPS.items() if default]
    for name in chosen:
        if name not in GROUPS:
            msg = f"there is no benchmark {name!r}: choose from {', '.join(GROUPS)}"
            raise UsageError(msg)
    words = [f"--backend {backend}"] if "hardware" in chosen else []
    words += [f"--release {name}" for name in release or () if "hardware" in chosen]
    command = " ".join(["python -m qa bench", *(groups or []), *words])
    console = Console(stderr=True)
    found: list[Figure] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)

        def tick() -> None:
            progress.advance(task)

        def keep(figures: list[Figure]) -> None:
            if write is not None:
                summary.store(write, [figure.dated(command) for figure in figures])

        for name in chosen:
            progress.update(task, description=name)
            more: dict[str, Any] = {}
            if name == "hardware":
                more = {"backend": backend, "names": release or (), "keep": keep}
            module = importlib.import_module(f"qa.bench.{GROUPS[name][0]}")
            found += [figure.dated(command) for figure in module.figures(tick, **more)]
    summary.report(found, write, as_json=as_json)
