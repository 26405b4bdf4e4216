"""Test that imports go in one direction: import-linter's contracts in pyproject.toml, no cycles.

The other tests check what contracts cannot express. import-linter finds imports, but neither unused
dependencies nor git as a subprocess. It excludes imports for type checkers in all contracts or in
none: the contracts include them, and cycles of types are allowed.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
ROOT = CHECKOUT / "pyllamakv"
MODULES = sorted(ROOT.rglob("*.py"))


def lint_imports(folder: Path) -> str:
    """Return the output of import-linter for the packages in a directory."""
    code = "from importlinter.cli import lint_imports; lint_imports(no_cache=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_contracts_of_imports_are_kept() -> None:
    """Packages import only from the rows below; an unknown package is an error."""
    output = lint_imports(CHECKOUT)
    assert "0 broken" in output, output


@pytest.mark.slow
def test_planted_imports_break_their_contracts(tmp_path: Path) -> None:
    """An upward import, one inside a function, a foreign library, and a new package are found."""
    for name in ("pyllamakv", "qa"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copyfile(CHECKOUT / "pyproject.toml", tmp_path / "pyproject.toml")
    planted = {
        "source/fetch.py": "from pyllamakv.patching import hunks",
        "runtime/snapshot.py": "from pyllamakv.runtime import kv",
        "scenarios/cell_ledger.py": "from pyllamakv.runtime import ledger",
        "runtime/kv.py": "def hidden() -> None:\n    import pyllamakv.building.build",
        "cache/prefix_cache.py": "import cffi",
        "view/live.py": "import git",
        "models/__init__.py": "import qa",
        "novel/__init__.py": "",
    }
    for name, text in planted.items():
        path = tmp_path / "pyllamakv" / name
        path.parent.mkdir(exist_ok=True)
        old = path.read_text("utf-8") if path.exists() else ""
        path.write_text(f"{old}\n{text}\n", encoding="utf-8")
    output = lint_imports(tmp_path)
    assert "pyllamakv.novel" in output, output
    shutil.rmtree(tmp_path / "pyllamakv" / "novel")
    output = " ".join(lint_imports(tmp_path).split())
    for arrow in (
        "pyllamakv.source.fetch -> pyllamakv.patching.hunks",
        "pyllamakv.runtime.snapshot -> pyllamakv.runtime.kv",
        "pyllamakv.scenarios.cell_ledger -> pyllamakv.runtime.ledger",
        "pyllamakv.runtime.kv -> pyllamakv.building.build",
        "pyllamakv.cache.prefix_cache -> cffi",
        "pyllamakv.view.live -> git",
        "pyllamakv.models -> qa",
    ):
        assert arrow in output, output


@pytest.mark.slow
def test_every_dependency_is_used() -> None:
    """Each one is imported or run as a program; each import is a dependency or an extra."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    modules = {"gitpython": "git", "pillow": "PIL", "llama-cpp-python": "llama_cpp"}
    programs = {"cmake", "ninja"}

    def named(requirements: list[str]) -> set[str]:
        names = {Requirement(each).name.lower() for each in requirements}
        return {modules.get(name, name) for name in names}

    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    needed = named(project["dependencies"])
    assert needed - found == programs
    text = (ROOT / "building" / "cmake.py").read_text("utf-8")
    assert all(f'binary("{name}")' in text for name in programs)
    extras = set().union(*map(named, project["optional-dependencies"].values()))
    foreign = found - set(sys.stdlib_module_names) - {"pyllamakv", "_cffi_backend"}
    assert not foreign - needed - extras


def _starts_git(node: ast.AST) -> bool:
    """Return whether a call looks up git, or a list is a git command."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
        text = words[0] if words and isinstance(words[0], str) else ""
        starting = {"which", "run", "Popen", "call", "check_call", "check_output", "system"}
        return (name in starting or name.startswith("exec")) and text.split(" ")[0] == "git"
    first = node.elts[:1] if isinstance(node, ast.List | ast.Tuple) else []
    return any(isinstance(word, ast.Constant) and word.value == "git" for word in first)


@pytest.mark.slow
def test_one_module_runs_git() -> None:
    """Only `source.git_command` looks up git, or contains a git command."""
    for path in MODULES:
        if path == ROOT / "source" / "git_command.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # An error shows the command that failed.
        shown = {
            id(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GitError"
            for argument in node.args
        }
        for node in ast.walk(tree):
            assert id(node) in shown or not _starts_git(node), f"{path}: {ast.unparse(node)}"


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    """There is no cycle, even by imports inside functions; imports for types do not count."""
    graph = grimp.build_graph("pyllamakv", exclude_type_checking_imports=True, cache_dir=None)
    # Exports at the top of the package are loaded when they are used.
    names = graph.modules - {"pyllamakv"}
    left = {name: graph.find_modules_directly_imported_by(name) & names for name in names}
    while True:
        done = {name for name, needed in left.items() if not needed & left.keys()}
        if not done:
            break
        left = {name: needed for name, needed in left.items() if name not in done}
    # The remaining modules are in a cycle, or import or are imported by one.
    while unused := left.keys() - set().union(*left.values()):
        left = {name: needed for name, needed in left.items() if name not in unused}
    assert not left, f"these modules import each other: {sorted(left)}"


@pytest.mark.slow
def test_at_most_six_modules_of_runtime_refer_to_each_other() -> None:
    """Types are included: a model, its contexts, their sequences, and objects that these create."""
    graph = grimp.build_graph("pyllamakv", exclude_type_checking_imports=False, cache_dir=None)
    names = {name for name in graph.modules if name.startswith("pyllamakv.runtime.")}
    reached = {name: graph.find_upstream_modules(name) & names for name in names}
    # `reached` of a module does not include the module itself.
    circles = [
        {name} | {other for other in reached[name] if name in reached[other]} for name in names
    ]
    largest = max(circles, key=len)
    assert len(largest) <= 6, sorted(largest)
