"""The modules of patching import one another in one direction."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pyllamakv.patching

FOLDER = Path(pyllamakv.patching.__file__).parent
MODULES = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


def imports(path: Path) -> set[str]:
    """Return the neighbours that a module imports when it runs, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "pyllamakv.patching":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, name = node.module.rpartition(".")
            found |= {name} if package == "pyllamakv.patching" else set()
    return found & MODULES


def test_no_import_cycle() -> None:
    """An import inside a function counts: it would hide the cycle."""
    graph = {name: imports(FOLDER / f"{name}.py") for name in MODULES}
    assert graph["port_choice"] >= {"definition", "series"}
    TopologicalSorter(graph).prepare()
