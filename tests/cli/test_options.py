"""Test that options and helpers of several commands are defined once."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pyllamakv.cli

MODULES = {
    path.name: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(Path(pyllamakv.cli.__file__).parent.glob("*.py"))
}


def declared(tree: ast.Module) -> set[str]:
    """Return the options that a module declares, including those named by their parameter."""
    found = set()
    for node in ast.walk(tree):
        parameter = isinstance(node, ast.arg)
        annotation = node.annotation if parameter else node
        if not isinstance(annotation, ast.Subscript) or "typer.Option(" not in ast.unparse(
            annotation
        ):
            continue
        (call,) = (each for each in ast.walk(annotation) if isinstance(each, ast.Call))
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if not names and parameter:
            names = [f"--{node.arg.replace('_', '-')}"]
        found |= set(names)
    return found


def test_an_option_is_declared_in_one_module() -> None:
    """An option of two commands belongs in `cli.options`, with one type and one help text."""
    found = defaultdict(set)
    for name, tree in MODULES.items():
        for option in declared(tree):
            found[option].add(name)
    assert len(found) > 50
    assert not {option: files for option, files in found.items() if len(files) > 1}


def test_no_two_modules_define_the_same_function() -> None:
    """A function that two commands need belongs in a module that both import."""
    found = defaultdict(set)
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                doc = ast.get_docstring(node) is not None
                body = "\n".join(ast.unparse(each) for each in node.body[doc:])
                found[body].add(f"{name}: {node.name}")
    assert not [names for names in found.values() if len({n.split(":")[0] for n in names}) > 1]


def test_json_is_written_in_one_module() -> None:
    """`cli.stdout` defines the format; no other module imports the encoder."""
    users = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(each.name == "json" for each in node.names)
    }
    assert users == {"stdout.py"}
