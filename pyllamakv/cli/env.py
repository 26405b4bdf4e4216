"""Print the environment under which llama-cpp-python loads a variant: `pyllamakv env`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Backend, Json
from pyllamakv.errors import NotBuilt

app = typer.Typer(add_completion=False)


@app.command()
def command(
    variant: Annotated[
        str, typer.Argument(help="A built variant: 0.3.9+patched, 0.3.9+stock.")
    ] = "0.3.9+patched",
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Print the line that makes the matching llama-cpp-python load this variant.

    Use it as `eval "$(pyllamakv env 0.3.9+patched)"`.
    """
    from pyllamakv.building import dropin
    from pyllamakv.building.llama_cpp_python_env import NO_LIBRARY
    from pyllamakv.building.variant import find, parse

    found = find(variant, backend=backend)
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
        json.dump(facts, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    # Without the option pip compiles a llama.cpp that nobody loads.
    install = f"CMAKE_ARGS={NO_LIBRARY} pip install {described.package}"
    sys.stderr.write(f"# for {described.package}: {install}\n")
    sys.stdout.write(described.export() + "\n")
