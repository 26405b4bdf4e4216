"""The layers import in one direction only, and C's names stay where they belong."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
ROOT = CHECKOUT / "pyllamakv"

#: Layer -> the layers that it may import. `errors` and `home` are open to all.
_ENGINE = {"cache", "runtime", "binding", "building", "patching", "models", "source"}
ALLOWED = {
    "cli": {"server", "view", "testing", "verification", "traces", "scenarios", *_ENGINE},
    "server": {"verification", "scenarios", "binding", "building", "patching", "source"},
    "testing": {"verification", "traces", "scenarios", *_ENGINE},
    "view": {"verification", "traces", "scenarios", *_ENGINE},
    "verification": {"traces", "scenarios", *_ENGINE},
    "traces": {"scenarios", *_ENGINE},
    "scenarios": _ENGINE,
    "cache": {"runtime", "binding"},
    "runtime": {"binding"},
    "binding": {"native"},
    "native": set(),
    "building": {"patching", "source"},
    "patching": {"source"},
    "models": {"source"},
    "source": set(),
}
#: Modules at the top: the package's face, what runs it, and where its data is.
TOP = {
    "__init__.py",
    "__main__.py",
    "closing.py",
    "content_digest.py",
    "cpus.py",
    "errors.py",
    "home.py",
    "open_variant.py",
    "printable.py",
}
#: Modules that both sides may read.
SHARED = {
    "pyllamakv.building.manifest",
    "pyllamakv.closing",
    "pyllamakv.content_digest",
    "pyllamakv.cpus",
    "pyllamakv.errors",
    "pyllamakv.home",
    "pyllamakv.printable",
    "pyllamakv",
}
#: `open_variant` finds and opens builds: above the runtime and building, below all that use both.
OPENING = {"cli", "testing", "view", "verification", "traces", "scenarios"}


def imported(path: Path) -> set[str]:
    """Return the full names of the package's modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("pyllamakv", *path.relative_to(ROOT).parent.parts)
                base = ".".join((*package[: len(package) - node.level + 1], *base.split(".")))
                base = base.rstrip(".")
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "pyllamakv"}


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_arrow_runs_upward(path: Path) -> None:
    """A module imports its own layer and the ones below it, nothing else."""
    relative = path.relative_to(ROOT)
    if len(relative.parts) == 1:
        assert relative.name in TOP, f"{relative}: an unknown module at the top of the package"
        return
    layer = relative.parts[0]
    assert layer in ALLOWED, f"{relative}: the package {layer} has no place in the layers"
    for name in imported(path):
        if name in SHARED or name.startswith(
            tuple(f"{each}." for each in SHARED if each != "pyllamakv")
        ):
            continue
        parts = name.split(".")
        if parts[1:2] == ["open_variant"]:
            assert layer in OPENING, f"{relative} imports {name}"
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target == layer or (len(parts) == 2 and not (ROOT / target).is_dir()):
            continue  # a name that the package itself exports
        assert target in ALLOWED[layer], f"{relative} imports {name}: {layer} may not use {target}"


def test_errors_import_nothing_of_the_package() -> None:
    """Every layer can raise them."""
    assert not imported(ROOT / "errors.py")


@pytest.mark.slow
def test_cffi_stays_in_the_binding() -> None:
    """Nothing outside native and binding touches cffi."""
    for path in MODULES:
        layer = path.relative_to(ROOT).parts[0]
        if layer in {"native", "binding"}:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(n.split(".")[0] in {"cffi", "_cffi_backend"} for n in names), path


def test_snapshot_needs_numpy_alone() -> None:
    """A snapshot needs the protocol's types and the checks of arguments, nothing else of ours."""
    for found in imported(ROOT / "runtime" / "snapshot.py"):
        assert found.startswith(
            ("pyllamakv.binding.protocol", "pyllamakv.binding.arguments", "pyllamakv.errors")
        ), found


@pytest.mark.slow
def test_the_package_never_imports_quality_assurance() -> None:
    """`qa` imports the package, which works without it: no wheel contains it."""
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "qa" for name in names), path


@pytest.mark.slow
def test_every_dependency_is_used() -> None:
    """Each is imported, or is a program that is run; what is imported is a dependency or extra."""
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
    """Return whether a call looks git up, or a list is a command of git."""
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
    """`source.git_command` alone imports GitPython, looks git up, or writes a command of git."""
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
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "git" for name in names), path
            assert id(node) in shown or not _starts_git(node), f"{path}: {ast.unparse(node)}"


def dependencies(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of this package that a file imports when it runs, in functions as well."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typed and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    # What the top of the package exports is loaded when it is used.
    return found & modules - {"pyllamakv"}


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    """No cycle, also none that an import inside a function hides."""
    names = {
        ".".join(("pyllamakv", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in MODULES
    }
    left = {name: dependencies(path, set(names)) - {name} for name, path in names.items()}
    while True:
        done = {name for name, needed in left.items() if not needed & left.keys()}
        if not done:
            break
        left = {name: needed for name, needed in left.items() if name not in done}
    # What is left is in a cycle or imports one; what nothing left imports is in none.
    while unused := left.keys() - set().union(*left.values()):
        left = {name: needed for name, needed in left.items() if name not in unused}
    assert not left, f"these modules import each other: {sorted(left)}"
