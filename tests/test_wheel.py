"""Test that the wheel is complete, small, and works outside of the checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from wheel_kit import built, command, environment, run

import pyllamakv

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1_270_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    pytest.importorskip("hatchling")
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new environment that has the wheel; dependencies are those of this one."""
    return environment(tmp_path_factory.mktemp("outside"), [wheel])


def verb(outside: Path, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return run(outside, "-m", "pyllamakv", *words, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a directory."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_wheel_is_below_its_size_limit_and_complete(wheel: Path) -> None:
    """At most 1.27 MB, with patches, lock, shim and scenarios, without tests, qa and builds."""
    assert wheel.stat().st_size <= LIMIT
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    listed = command("git", "ls-files", "pyllamakv", cwd=ROOT)
    for name in listed.stdout.split() if listed.returncode == 0 else ():
        assert name in names or not (ROOT / name).exists(), name
    assert {"patches", "vendor"} == {
        name.split("/")[2] for name in names if name.startswith("pyllamakv/data/")
    }
    data = ("vendor/architectures.toml", "vendor/upstream.lock.toml", "patches/expected.toml")
    assert {f"pyllamakv/data/{name}" for name in data} <= names
    assert {"pyllamakv/native/plk.h", "pyllamakv/native/CMakeLists.txt"} <= names
    assert "pyllamakv/data/patches/shared/src/llama-kv-defrag.h" in names
    ours = {name.split("/")[0] for name in names}
    assert ours == {"pyllamakv", f"pyllamakv-{pyllamakv.__version__}.dist-info"}
    assert not [name for name in names if name.endswith((".pyc", ".so", ".part"))]


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The sdist contains all files of a build."""
    code = "import sys, hatchling.build as b; b.build_sdist(sys.argv[1])"
    done = command(sys.executable, "-c", code, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with (
        zipfile.ZipFile(wheel) as ours,
        zipfile.ZipFile(built(sdist, tmp_path)) as theirs,
    ):
        assert {i.filename: i.CRC for i in ours.infolist()} == {
            i.filename: i.CRC for i in theirs.infolist()
        }


def test_wheel_version_is_the_package_version(wheel: Path) -> None:
    """The version is that of the package, and is in no other file."""
    assert wheel.name.split("-")[1] == pyllamakv.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    text = (ROOT / "pyllamakv" / "__init__.py").read_text("utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE) == [pyllamakv.__version__]


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ("wheel.sh", {"pyllamakv.home", "pyllamakv.scenarios"}),
        ("prebuilt.sh", {"pyllamakv.scenarios"}),
    ],
)
def test_the_script_imports_modules_that_exist(script: str, modules: set[str]) -> None:
    """The Python program in a script of `tools` uses only existing names."""
    text = (ROOT / "tools" / script).read_text("utf-8")
    (program,) = re.findall(r"<<'PYTHON'\n(.*?)^PYTHON$", text, re.DOTALL | re.MULTILINE)
    imports = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == modules
    names: dict[str, object] = {"kv": pyllamakv}
    exec("\n".join(ast.unparse(node) for node in imports), names)
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), ast.unparse(node)


@pytest.mark.slow
def test_wheel_imports_without_a_compiler(outside: Path) -> None:
    """With an empty PATH, the package is that of the wheel, and its import is cheap."""
    code = (
        "import sys, pyllamakv; heavy = {'numpy', '_cffi_backend', 'git'} & set(sys.modules);"
        "assert not heavy, heavy; pyllamakv.open, pyllamakv.Snapshot; print(pyllamakv.__file__)"
    )
    done = run(outside, "-c", code, path="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(outside)
    ran = verb(outside, "--version", path="/nonexistent")
    assert ran.stdout == f"pyllamakv {pyllamakv.__version__}\n", ran.stderr


@pytest.mark.slow
def test_installed_wheel_contains_patches_and_scenarios(outside: Path) -> None:
    """Patches, lock, scenarios and the shim are in the wheel; builds go to the user's cache."""
    shown = verb(outside, "patch", "show", "--json")
    assert shown.returncode == 0 and '"full-defrag"' in shown.stdout, shown.stderr
    listed = verb(outside, "upstream", "list", "--json")
    assert listed.returncode == 0 and '"0.3.9"' in listed.stdout, listed.stderr
    lint = verb(outside, "patch", "lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    code = (
        "from pyllamakv.building.variant import built, shim_digest;"
        "from pyllamakv.scenarios import synthetic_models;"
        "from pyllamakv.verification import discovery;"
        "assert len(discovery.discover()) > 30;"
        "from pyllamakv.home import data;"
        "print(built(), shim_digest(), synthetic_models.tiny(), data('patches'))"
    )
    done = run(outside, "-c", code)
    assert done.returncode == 0, done.stderr
    from pyllamakv.building.variant import shim_digest

    built, shim, model, patches = done.stdout.split()
    cache = (outside / "home" / ".cache" / "pyllamakv").resolve()
    assert Path(built) == cache / "built"
    assert Path(model).is_relative_to(cache)
    assert Path(patches).is_relative_to(outside / "venv")
    assert contents(Path(patches)) == contents(ROOT / "patches")
    assert shim == shim_digest()
    missing = verb(outside, "dropin", "env", "0.3.9+stock", path=os.environ.get("PATH", os.defpath))
    assert "pyllamakv build 0.3.9+stock" in missing.stderr
    assert not any((outside / "empty").iterdir())


def test_wheel_has_command_and_plugin_entry_points(outside: Path) -> None:
    """The wheel brings the command and the pytest plugin."""
    (info,) = (outside / "venv").glob("lib/*/site-packages/pyllamakv-*.dist-info")
    found = importlib.metadata.PathDistribution(info).entry_points
    assert {(one.group, one.value) for one in found} == {
        ("console_scripts", "pyllamakv.cli.main:main"),
        ("pytest11", "pyllamakv.testing.plugin"),
    }
