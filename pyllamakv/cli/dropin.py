"""Run llama-cpp-python on stock and patched libraries: `pyllamakv dropin`."""

from __future__ import annotations

import typer

from pyllamakv.cli.options import Backend, BuiltVariant, Json, ReleaseOrNewest
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import NotBuilt

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


@app.command()
def env(
    variant: BuiltVariant = "",
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Print the environment variable that makes llama-cpp-python load a variant.

    The default is the newest verified release of llama-cpp-python that is built. Usage:
    `eval "$(pyllamakv dropin env 0.3.36+patched)"`.
    """
    from pyllamakv.building import dropin
    from pyllamakv.building.llama_cpp_python_env import NO_LIBRARY
    from pyllamakv.building.variant import find, newest_verified, parse

    if variant:
        found = find(variant, backend=backend)
    else:
        found = newest_verified(backend=backend, kind="sdist")
    if found is None:
        spec = parse(variant)
        option = f" --backend {backend}" if backend != "cpu" else ""
        raise NotBuilt(f"{spec} is not built here; run: pyllamakv build {spec}{option}")
    described = dropin.describe(found)
    if as_json:
        facts = {
            "variable": described.variable,
            "value": described.value,
            "package": described.package,
            "variant": found.id,
        }
        write_json(facts)
        return
    # Without this option, pip compiles a llama.cpp that is never loaded.
    install = f"CMAKE_ARGS={NO_LIBRARY} pip install {described.package}"
    note(f"# for {described.package}: {install}")
    write_lines([described.export()])
