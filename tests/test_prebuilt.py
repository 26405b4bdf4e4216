"""Test the wheel pyllamakv-prebuilt, which has portable builds and needs no compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import wheel_kit
from building_kit import BuildSandbox
from packaging.requirements import Requirement

import pyllamakv
from pyllamakv import home
from pyllamakv.building import build, compiler, variant
from pyllamakv.errors import BuildError, KvError
from pyllamakv.source import verified

ROOT = Path(__file__).resolve().parent.parent
MODULE = home.PREBUILT_MODULE


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return the module that writes the project of the wheel."""
    spec = importlib.util.spec_from_file_location("stage", ROOT / "tools/prebuilt/stage.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(folder: Path) -> Path:
    """Compile a library with one function."""
    try:
        cxx = compiler.find().cxx
    except KvError:
        pytest.skip("no compiler")
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    words = ("-shared", "-fPIC", "-o", str(folder / "one.so"), str(folder / "one.cpp"))
    assert wheel_kit.command(cxx, *words).returncode == 0
    return folder / "one.so"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tag_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """It is valid for every Python 3; the libraries do not use its C API."""
    pytest.importorskip("hatchling")
    path = ROOT / "tools/prebuilt/platform_tag.py"
    spec = importlib.util.spec_from_file_location("platform_tag", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: f"linux-{machine}")
    data: dict[str, object] = {}
    module.PlatformTag.initialize(None, "standard", data)
    assert data == {"pure_python": False, "tag": f"py3-none-linux_{machine}"}


@pytest.mark.slow
def test_prebuilt_wheel_contains_portable_builds_and_licences(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both builds are portable, indexed and without drop-in; licences and the tag are right."""
    pytest.importorskip("hatchling")
    library = compiled(tmp_path)
    shop = BuildSandbox(tmp_path / "shop", monkeypatch)
    (shop.tree / "LICENSE").write_text("The licence of upstream\n", encoding="utf-8")
    release = variant.parse(shop.spec).release
    stock = build.build(shop.spec, native=False)
    patched = variant.Variant(variant.built() / "patched")
    patched.folder.mkdir()
    dataclasses.replace(stock.manifest, variant="patched").save(patched.folder)
    for each in (stock, patched):
        each.library.unlink(missing_ok=True)
        each.library.write_bytes(library.read_bytes())
    asked = []

    def built(spec: variant.Spec, *, native: bool) -> variant.Variant:
        asked.append((str(spec), native))
        return stock if spec.series == () else patched

    monkeypatch.setattr(tool.build, "build", built)
    project = tmp_path / "project"
    project.mkdir()
    made = tool.stage(project, release)
    assert asked == [(f"{release}+stock", False), (f"{release}+patched", False)]
    assert [each.id for each in made] == [stock.id, "patched"]
    for each in made:
        assert each.folder.parent == project / MODULE / "built"
        assert each.manifest.dropin == ()
        assert each.library.read_bytes() == library.read_bytes()
    wheel = wheel_kit.built(project, tmp_path)
    assert wheel.name.startswith(f"pyllamakv_prebuilt-{pyllamakv.__version__}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    top = f"{MODULE}/built"
    index = [name for name in files if name.startswith(f"{top}/.index/")]
    assert sorted(files[name].decode().strip() for name in index) == sorted([stock.id, "patched"])
    licences = {name.rpartition("/")[2]: text for name, text in files.items() if "LICENSE" in name}
    assert licences["LICENSE.llama.cpp"] == b"The licence of upstream\n"
    assert licences["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert not [name for name in files if "/lib/" in name]


@pytest.mark.slow
def test_binaries_need_their_licence(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release without a licence is not packed."""
    shop = BuildSandbox(tmp_path / "shop", monkeypatch)
    stock = build.build(shop.spec, native=False)
    patched = variant.Variant(variant.built() / "patched")
    patched.folder.mkdir()
    patched.folder.joinpath(stock.library.name).write_bytes(b"")
    stock.manifest.save(patched.folder)
    monkeypatch.setattr(
        tool.build, "build", lambda spec, native: stock if spec.series == () else patched
    )
    (tmp_path / "project").mkdir()
    with pytest.raises(BuildError, match="has no LICENSE"):
        tool.stage(tmp_path / "project", variant.parse(shop.spec).release)


def test_the_extra_names_this_version() -> None:
    """`pyllamakv[prebuilt]` installs the libraries that were built for the same sources."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (wanted,) = map(Requirement, project["optional-dependencies"]["prebuilt"])
    other = tomllib.loads((ROOT / "tools/prebuilt/pyproject.toml").read_text("utf-8"))["project"]
    assert wanted.name == other["name"] == home.PREBUILT
    assert str(wanted.specifier) == f"=={pyllamakv.__version__}"


@pytest.mark.slow
@pytest.mark.native
def test_prebuilt_wheels_work_without_a_compiler(tool: ModuleType, tmp_path: Path) -> None:
    """Install both wheels in a new environment, with an empty PATH and home directory.

    The error for a CPU names the missing features, and that of verbs with sources names git.
    """
    pytest.importorskip("hatchling")
    release = verified.newest().name
    if not all(variant.find(f"{release}+{kind}", native=False) for kind in ("stock", "patched")):
        pytest.skip(f"not built: pyllamakv build {release} --portable")
    project = tmp_path / "project"
    project.mkdir()
    stock, patched = tool.stage(project)
    wheels = []
    for name, source in (("ours", ROOT), ("prebuilt", project)):
        (tmp_path / name).mkdir()
        wheels.append(wheel_kit.built(source, tmp_path / name))
    outside = wheel_kit.environment(tmp_path, wheels)
    nothing = str(outside / "nothing")
    code = (
        "import sys, pyllamakv as kv\n"
        "from pyllamakv.scenarios import synthetic_models\n"
        "for spec in (None, *sys.argv[1:]):\n"
        "    with kv.open(spec) as lib, lib.load_model(synthetic_models.tiny()) as model:\n"
        "        with model.context(n_ctx=256) as ctx:\n"
        "            ctx.decode([ctx.sequence().feed([1, 2, 3])])\n"
        "            print(lib.about.variant)\n"
    )
    specs = (f"{release}+stock", f"{release}+patched", stock.id)
    done = wheel_kit.run(outside, "-c", code, *specs, path=nothing)
    assert done.stdout.split() == [patched.id, stock.id, patched.id, stock.id], done.stderr
    done = wheel_kit.run(outside, "-m", "pyllamakv", "build", "--list", "--json", path=nothing)
    found = {row["id"]: row["origin"] for row in json.loads(done.stdout)}
    assert found == {stock.id: home.PREBUILT, patched.id: home.PREBUILT}
    script = str(ROOT / "examples" / "fragmented.jsonl")
    done = wheel_kit.run(outside, "-m", "pyllamakv", "trace", "stats", script, path=nothing)
    assert done.stdout.split()[:2] == ["variant", patched.id], done.stderr
    code = (
        "import pyllamakv as kv\n"
        "from pyllamakv.binding import local\n"
        "from pyllamakv.building import manifest\n"
        "manifest.machine_flags = lambda path: frozenset({'sse4_2', 'avx'})\n"
        "def refuse(path): raise AssertionError(path)\n"
        "local.loading.load = refuse\n"
        "try: kv.open()\n"
        "except kv.CpuFeaturesMissing as error: print(*error.missing, sep='\\n')\n"
    )
    done = wheel_kit.run(outside, "-c", code, path=nothing)
    lacks = set(patched.manifest.cpu_flags) - {"sse4_2", "avx"}
    assert set(done.stdout.split()) == lacks != set(), done.stderr
    for words, needed in (
        (("check",), "git is not installed"),
        (("build",), "expected a C and C++ compiler"),
        (("upstream", "sync"), "opening prebuilt libraries needs neither"),
    ):
        done = wheel_kit.run(outside, "-m", "pyllamakv", *words, path=nothing)
        assert (done.returncode, needed in done.stderr) == (2, True), done.stderr
    assert not any((outside / "empty").iterdir())
