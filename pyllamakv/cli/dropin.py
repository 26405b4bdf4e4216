"""Run llama-cpp-python on stock and patched libraries: `pyllamakv dropin`."""

from __future__ import annotations

import typer

from pyllamakv.cli.options import Json, ReleaseOrNewest
from pyllamakv.cli.stdout import write_json, write_lines

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Run llama-cpp-python on a stock or patched library."""


@app.command()
def setup(
    release: ReleaseOrNewest = "",
    as_json: Json = False,
) -> None:
    """Install llama-cpp-python of a release; print the path of its Python.

    The default is the newest verified release of llama-cpp-python.
    """
    from pyllamakv.building import llama_cpp_python_env
    from pyllamakv.cli import progress_bar
    from pyllamakv.source import spec_resolver, verified

    chosen = spec_resolver.resolve(release) if release else verified.newest("sdist")
    with progress_bar.progress() as progress:
        found = llama_cpp_python_env.install(chosen, progress=progress)
    if as_json:
        facts = {"version": found.version, "python": str(found.python), "suite": str(found.suite)}
        write_json(facts)
        return
    write_lines([str(found.python)])
