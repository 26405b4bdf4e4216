"""Options that several commands share are defined once."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pyllamakv.cli


def test_no_two_modules_spell_the_same_option() -> None:
    """An option or argument that two modules declare alike belongs in `cli.options`."""
    found = defaultdict(set)
    for path in Path(pyllamakv.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
                found[ast.unparse(node)].add(path.name)
    assert len(found) > 50
    assert not {option: files for option, files in found.items() if len(files) > 1}
