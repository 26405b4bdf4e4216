"""Print the environment under which llama-cpp-python loads a variant: `pyllamakv env`."""

from __future__ import annotations

import typer

from pyllamakv.cli.options import Backend, BuiltVariant, Json
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import NotBuilt

app = typer.Typer(add_completion=False)


@app.command()
def command(
    variant: BuiltVariant = "",
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Print the environment variable that makes llama-cpp-python load a variant.

    The default is the newest verified release of llama-cpp-python that is built. Usage:
    `eval "$(pyllamakv env 0.3.36+patched)"`.
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
