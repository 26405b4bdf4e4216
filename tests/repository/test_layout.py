"""Test that tests mirror the packages: the file of a test has the name of its module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

#: Directories without test modules of a package: helpers, data, C++ programs, and the repository.
OTHER = {"kits", "data", "native", "repository"}
FILES = sorted(
    path.relative_to(TESTS)
    for path in TESTS.rglob("test_*.py")
    if path.relative_to(TESTS).parts[0] not in OTHER and path.parent != TESTS
)


def package(folder: Path) -> Path:
    """Return the package that a directory of tests mirrors."""
    return ROOT / folder if folder.parts[0] == "qa" else ROOT / "pyllamakv" / folder


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_test_is_named_for_a_module(file: Path) -> None:
    """``test_NAME.py`` or ``test_NAME_ASPECT.py``.

    NAME is a module or subpackage of the mirrored package, or the package itself.
    """
    mirrored = package(file.parent)
    assert (mirrored / "__init__.py").is_file(), f"no package {mirrored.relative_to(ROOT)}"
    names = {path.stem for path in mirrored.glob("*.py")} | {mirrored.name}
    names |= {path.parent.name for path in mirrored.glob("*/__init__.py")}
    name = file.stem.removeprefix("test_")
    assert any(name == known or name.startswith(f"{known}_") for known in names), (
        f"tests/{file}: no module of {mirrored.relative_to(ROOT)} has this name; "
        f"rename it for the module that it tests"
    )


def test_the_page_lists_every_test_of_the_repository() -> None:
    """Each file of this directory has a row in its README."""
    folder = TESTS / "repository"
    rows = re.findall(r"^\| `(test_\w+\.py)` \|", (folder / "README.md").read_text("utf-8"), re.M)
    assert rows == sorted(path.name for path in folder.glob("test_*.py"))


@pytest.mark.slow
def test_a_class_name_is_unique() -> None:
    """A name means one class in all modules."""
    places = defaultdict(list)
    for path in sorted((ROOT / "pyllamakv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, f"rename the less visible class of each name: {shared}"


def test_contributing_guide_names_existing_paths() -> None:
    """Every path in docs/contributing.md exists, and every package has a row there."""
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:pyllamakv|patches|tests|vendor|qa|\.ci)[\w./-]*)`", text)
    assert len(paths) > 25
    for path in paths:
        assert (ROOT / path).exists(), path
    for package in (ROOT / "pyllamakv").glob("*/__init__.py"):
        assert f"`pyllamakv/{package.parent.name}`" in text, package.parent.name


@pytest.mark.slow
def test_docstrings_and_messages_name_classes_that_exist() -> None:
    """A class in backticks, or in the expected type of an argument, exists."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for folder in ("pyllamakv", "qa")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    nodes = [(path, node) for path, text in sources.items() for node in ast.walk(ast.parse(text))]
    known = {"True", "False", "None"} | {
        name
        for _, node in nodes
        for name in (
            getattr(node, "name", None),
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "asname", None),
        )
        if name
    }
    named = [
        (path, word)
        for path, text in sources.items()
        for word in re.findall(r"(?<!`)`([A-Z]\w*[a-z]\w*)[.\w]*`", text)
    ]
    for path, node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "arguments.instance":
            named += [(path, word) for word in re.findall(r"\b[A-Z]\w+", ast.unparse(node.args[3]))]
    assert len(named) > 200
    wrong = {f"{path.relative_to(ROOT)}: {word}" for path, word in named if word not in known}
    assert not wrong, f"no class of these names: {wrong}"
