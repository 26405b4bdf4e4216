"""Run llama-server: `pyllamakv server`."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Backend, Json, PortableOnly, release_names
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def command(
    release: Annotated[
        str,
        typer.Argument(
            metavar="RELEASE[+SERIES]",
            help="0.3.36 (patched) or 0.3.36+stock; default: newest verified.",
            autocompletion=release_names,
        ),
    ] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="Arguments of llama-server."),
    ] = None,
    *,
    backend: Backend = "cpu",
    portable: PortableOnly = False,
    print_path: Annotated[
        bool, typer.Option("--print-path", help="Print the program's path and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run llama-server until Ctrl-C; print its address when it is ready.

    The log of the server goes to stderr. Build it first: `pyllamakv build RELEASE --server`.
    """
    from pyllamakv.server.server_artifact import find_server
    from pyllamakv.server.server_process import ServerProcess, prints_and_ends, run_directly
    from pyllamakv.source import verified

    words = arguments or []
    if release.startswith("-"):
        # After `--`, the first argument of llama-server takes the place of a release.
        release, words = "", [release, *words]
    if print_path and words:
        raise UsageError("--print-path takes no arguments of llama-server; leave them out")
    found = find_server(
        release or verified.newest().name, backend=backend, native=False if portable else None
    )
    program = found.check_program()
    if print_path:
        where = {"path": str(program), "id": found.id}
        write_json(where) if as_json else write_lines([str(program)])
        return
    if prints_and_ends(words):
        raise typer.Exit(run_directly(program, words))
    # A large model on a slow disk can exceed any limit; the user can interrupt.
    with ServerProcess(program, words, sink=note, patience=math.inf) as server:
        facts = {"url": server.url, "pid": server.pid, "id": found.id}
        write_json(facts, indent=None) if as_json else write_lines([server.url])
        sys.stdout.flush()
        server.wait()
