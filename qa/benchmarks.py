"""`python -m qa bench`: measure, print, and optionally write the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)

#: Group -> whether it runs by default; `grid` and `every` each take most of an hour.
GROUPS = {
    "calls": True,
    "loop": True,
    "sampling": False,
    "generation": False,
    "recording": True,
    "moving": True,
    "grid": False,
    "sparse": False,
    "server": False,
    "server-build": False,
    "policies": False,
    "prefixes": False,
    "stored": False,
    "managers": True,
    "reuse": False,
    "peers": False,
    "soak": False,
    "devices": False,
    "backends": False,
    "hardware": False,
    "mapped": False,
    "whole": False,
    "foreign": False,
    "every": False,
    "ports": False,
    "checkout": False,
    "prebuilt": False,
}


@app.command()
def bench(
    groups: list[str] = typer.Argument(
        None,
        help=f"{', '.join(GROUPS)}; default: {', '.join(k for k, v in GROUPS.items() if v)}.",
    ),
    backend: str = typer.Option("cuda", help="Backend of `hardware`: cuda, vulkan or rpc."),
    release: list[str] = typer.Option(
        None, help="Release of `hardware`; default: the test release and the newest one."
    ),
    old: list[str] = typer.Option(
        None, help="Earlier build (ports) or revision (checkout) to compare with."
    ),
    write: Path = typer.Option(None, help="Write the figures to this file and its JSON file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure ratios side by side.

    `generation` compares several clients with llama-cpp-python, and `peers` prompt caches with
    those of llama-cpp-python and llama-server. `moving` defragments some kinds of caches, and
    `grid` all kinds. `whole` builds a release stock and patched, `server-build` its servers.
    `foreign` checks two foreign patches. `every` verifies all releases. `ports` counts the lines
    that ports change. `checkout` runs make targets in new clones. `prebuilt` installs the wheels of
    `make prebuilt` and chats. `hardware` builds for a device, repeats measurements of `devices` and
    `sparse` on it, and runs scenarios in few settings, also those of llama-server.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from qa import summary
    from qa.bench import (
        all_releases,
        backends,
        benchmark_document,
        cache_peers,
        cache_reuse,
        checkout,
        command_times,
        defrag,
        devices,
        first_token,
        foreign_checks,
        generation,
        grid,
        hardware,
        loop,
        manager_overhead,
        mapped_memory,
        policies,
        ports,
        prefix_cache_cost,
        python_overhead,
        recording_overhead,
        sampling,
        server_build_times,
        soak,
        sparse,
        sparse_server,
        stored_prefixes,
    )
    from qa.bench.figure import Figure

    measures = {
        "calls": python_overhead,
        "loop": loop,
        "sampling": sampling,
        "generation": generation,
        "recording": recording_overhead,
        "moving": defrag,
        "grid": grid,
        "sparse": sparse,
        "server": sparse_server,
        "server-build": server_build_times,
        "policies": policies,
        "prefixes": prefix_cache_cost,
        "stored": stored_prefixes,
        "managers": manager_overhead,
        "reuse": cache_reuse,
        "peers": cache_peers,
        "soak": soak,
        "devices": devices,
        "backends": backends,
        "hardware": hardware,
        "mapped": mapped_memory,
        "whole": command_times,
        "foreign": foreign_checks,
        "every": all_releases,
        "ports": ports,
        "checkout": checkout,
        "prebuilt": first_token,
    }
    chosen = groups or [name for name, default in GROUPS.items() if default]
    for name in chosen:
        if name not in GROUPS:
            msg = f"there is no benchmark {name!r}: choose from {', '.join(GROUPS)}"
            raise UsageError(msg)
    words = [f"--backend {backend}"] if "hardware" in chosen else []
    words += [f"--release {name}" for name in release or () if "hardware" in chosen]
    words += [f"--old {name}" for name in old or ()]
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
                benchmark_document.write(write, [figure.dated(command) for figure in figures])

        for name in chosen:
            progress.update(task, description=name)
            more: dict[str, Any] = {}
            if name == "hardware":
                more = {"backend": backend, "names": release or (), "keep": keep}
            elif name in ("ports", "checkout"):
                more = {"old": old or ()}
            found += [figure.dated(command) for figure in measures[name].figures(tick, **more)]
    summary.report(found, write, as_json=as_json)
