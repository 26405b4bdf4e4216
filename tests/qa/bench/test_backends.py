"""The costs of backends are read off build folders, and compiled again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllamakv.building import cuda
from pyllamakv.errors import ToolMissing
from qa.bench import backends


def entry(folder: Path, text: str) -> dict[str, str]:
    """Return the compile command of a source with this text."""
    (folder / "part.cpp").write_text(text)
    return {
        "directory": str(folder),
        "command": "c++ -c part.cpp -o part.cpp.o",
        "file": str(folder / "part.cpp"),
    }


def test_compiling_again_leaves_the_object_alone(tmp_path: Path) -> None:
    """The command is the build's own; its object is not written, and its CPU time is counted."""
    one = entry(tmp_path, "#include <map>\nint f() { return std::map<int, int>{{1, 2}}[1]; }\n")
    (tmp_path / "part.cpp.o").write_text("kept")
    assert backends.compiled(one) > 0.01
    assert (tmp_path / "part.cpp.o").read_text() == "kept"


def test_a_source_that_does_not_compile_is_told(tmp_path: Path) -> None:
    """What fails has no time."""
    with pytest.raises(subprocess.CalledProcessError):
        backends.compiled(entry(tmp_path, "int f( {"))


def test_commands_and_stamps_are_those_of_the_folder(tmp_path: Path) -> None:
    """A stamp changes when an object is written again."""
    one = entry(tmp_path, "")
    (tmp_path / "compile_commands.json").write_text(json.dumps([one]))
    assert backends.commands(tmp_path) == [one]
    nested = tmp_path / "deep" / "part.cu.o"
    nested.parent.mkdir()
    nested.write_text("")
    os.utime(nested, ns=(1, 1))
    before = backends.stamps(tmp_path)
    assert before == {nested: 1}
    os.utime(nested, ns=(2, 2))
    assert backends.stamps(tmp_path) != before


class Built:
    """Stand in for the builds of a home: objects in one folder, which every build may write."""

    def __init__(self, home: Path) -> None:
        self.objects = home / "objects"
        self.made: list[str] = []
        self.anew = ("patched.cpp.o",)
        for name in ("patched.cpp.o", "one.cu.o", "two.cu.o"):
            self.write(name, 1)
        self._home = home

    def write(self, name: str, stamp: int) -> None:
        """Write an object at a time."""
        path = self.objects / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        os.utime(path, ns=(stamp, stamp))

    def build(self, spec: str, **_: object) -> SimpleNamespace:
        """Build a variant, of which some objects are new."""
        self.made.append(spec)
        for name in self.anew:
            self.write(name, len(self.made) + 1)
        folder = self._home / spec
        folder.mkdir()
        return SimpleNamespace(folder=folder, manifest=SimpleNamespace(cpu_seconds=len(self.made)))

    def find(self, spec: str, **_: object) -> SimpleNamespace | None:
        """Return what was built."""
        folder = self._home / spec
        return SimpleNamespace(folder=folder) if folder.exists() else None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Put builds that compile nothing in the place of real ones."""
    made = Built(tmp_path)
    monkeypatch.setattr(backends.build, "build", made.build)
    monkeypatch.setattr(backends.variant, "find", made.find)
    monkeypatch.setattr(backends.variant, "request", lambda *_, **__: made)
    return made


TOOLKIT = cuda.Toolkit(Path("nvcc"), "13.0", {"CMAKE_CUDA_ARCHITECTURES": "90-real"})


@pytest.mark.parametrize("anew", [(), ("two.cu.o",), ("two.cu.o", "new.cu.o")])
def test_cuda_sources_that_are_compiled_again_are_counted(
    home: Built, monkeypatch: pytest.MonkeyPatch, anew: tuple[str, ...]
) -> None:
    """Of the build after the change alone; a variant that an earlier run left is built anew."""
    (home.objects.parent / f"1+{backends.CHANGED}").mkdir()
    build = home.build

    def building(spec: str, **options: object) -> SimpleNamespace:
        home.anew = ("patched.cpp.o", *anew) if spec.endswith(backends.CHANGED) else ("one.cu.o",)
        return build(spec, **options)

    monkeypatch.setattr(backends.build, "build", building)
    first, again = backends._cuda(lambda: None, "1", TOOLKIT)
    assert home.made == ["1+stock", "1+patched", f"1+{backends.CHANGED}"]
    assert first.data == {"stock": 1, "patched": 2}
    assert again.data == {"anew": len(anew), "files": 2 + ("new.cu.o" in anew), "seconds": 3}
    assert again.met is not bool(anew)
    assert home.find(f"1+{backends.CHANGED}") is None


def test_a_build_without_cuda_sources_promises_nothing(home: Built) -> None:
    """None was compiled again, because there is none."""
    for name in ("one.cu.o", "two.cu.o"):
        (home.objects / name).unlink()
    assert backends._cuda(lambda: None, "1", TOOLKIT)[1].met is False


@pytest.mark.parametrize(("folder", "n"), [("ggml-rpc", 1), ("ggml-cpu", 0)])
def test_sources_of_rpc_are_found(home: Built, folder: str, n: int) -> None:
    """By their folder; where there are none the promise is not kept, although nothing is spent."""
    place = home.objects / folder
    place.mkdir()
    (home.objects / "compile_commands.json").write_text(json.dumps([entry(place, "int f();")]))
    found = backends._rpc(lambda: None, "1")
    assert (found.met, found.limit) == (bool(n), f"{n} source file")
    assert (found.data["seconds"] > 0) is bool(n)


@pytest.mark.parametrize("there", [True, False])
def test_cuda_is_measured_where_it_can_be_built(
    home: Built, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """RPC is in every build."""

    def find() -> cuda.Toolkit:
        if not there:
            raise ToolMissing("no nvcc", "nvcc", "install it")
        return TOOLKIT

    monkeypatch.setattr(backends.cuda, "find", find)
    (home.objects / "compile_commands.json").write_text("[]")
    assert len(backends.figures(lambda: None, "1")) == (3 if there else 1)
