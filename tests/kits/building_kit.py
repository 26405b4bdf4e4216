"""Fake cmake and ninja, a tiny llama.cpp, and a data directory, for the tests of building."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv import home
from pyllamakv.building import cmake, variant
from pyllamakv.building.manifest import Manifest
from qa.faults.steps.building import CMAKE as CMAKE
from qa.faults.steps.building import script as script

if TYPE_CHECKING:
    import pytest

#: Creates a library from the tree's only source, and the drop-in, and prints the same lines as
#: ninja.
NINJA = r"""
while [ $# -gt 0 ]; do
    case $1 in
    -C) cd "$2"; shift ;;
    esac
    shift
done
echo "[plk 1/2] Building CXX object src/llama.cpp.o"
mkdir -p dropin
{ cat variant; echo; cat "$(cat tree)/src/llama.cpp"; } >libplk.so
cp libplk.so dropin/libllama.so.0.1
ln -sf libllama.so.0.1 dropin/libllama.so
echo "[plk 2/2] Linking CXX shared library libplk.so"
"""


class BuildSandbox:
    """A data directory, a tiny tree as release, and the fake programs that build it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.programs = folder / "programs"
        self.calls = folder / "calls"
        self.tree = folder / "llama"
        self.compiler_calls = folder / "compiler-calls"
        monkeypatch.setenv("PYLLAMAKV_HOME", str(self.home))
        # A distribution that is installed here would be found.
        monkeypatch.setattr(home, "PREBUILT_MODULE", "pyllamakv_prebuilt_in_a_sandbox")
        monkeypatch.setenv("PYLLAMAKV_COMPILER_LAUNCHER", "none")
        self.use("cmake", CMAKE)
        self.use("ninja", NINJA)
        for name in ("cc", "c++"):
            script(
                self.programs / name,
                f"echo {name} >>{shlex.quote(str(self.compiler_calls))}\n"
                "case $* in\n"
                "--version) echo 'gcc (Stand-in) 1.2.3' ;;\n"
                "-dumpmachine) echo x86_64-standin ;;\n"
                "*) echo '#define __SSE3__ 1'; echo '#define __cplusplus 201703L' ;;\n"
                "esac\n",
            )
        monkeypatch.setenv("CC", str(self.programs / "cc"))
        monkeypatch.setenv("CXX", str(self.programs / "c++"))
        monkeypatch.setattr(cmake, "binary", lambda name: self.programs / name)
        # Fake builds compile nothing of the shim, so its state must not affect a test.
        monkeypatch.setattr(variant, "shim_digest", lambda: "shim")
        for path, text in (
            ("include/llama.h", "// the interface\n"),
            ("src/llama.cpp", "// stock\n"),
            ("src/other.cpp", "// untouched\n"),
            ("CMakeLists.txt", "project(llama)\n"),
        ):
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / path).write_text(text, encoding="utf-8")

    @property
    def spec(self) -> str:
        """Return the spec of the stock variant."""
        return f"path:{self.tree}+stock"

    def use(self, name: str, body: str) -> None:
        """Replace a fake program; each call of it is counted."""
        counted = f"echo {name} >>{shlex.quote(str(self.calls))}\n"
        script(self.programs / name, counted + body)

    def count(self, name: str) -> int:
        """Return how often a fake program ran."""
        text = self.calls.read_text(encoding="utf-8") if self.calls.exists() else ""
        return text.split().count(name)

    def built(self) -> list[str]:
        """Return the names of all entries of ``built/`` except the index."""
        folder = self.home / "built"
        return sorted(p.name for p in folder.iterdir() if p.name != ".index")


def manifest(**changed: object) -> Manifest:
    """Return a manifest with plausible values, except for the given ones."""
    values: dict[str, object] = {
        "variant": "0.3.9-stock-cpu-0123456789abcdef",
        "release": "0.3.9",
        "commit": "c" * 40,
        "tree": "a" * 40,
        "patched_tree": "a" * 40,
        "patches": (),
        "series_digest": "",
        "backend": "cpu",
        "options": {"GGML_RPC": "ON"},
        "compiler": "gcc 1.2.3 for x86_64",
        "cpu_flags": ("avx2", "fma"),
        "abi": 1,
        "library": "libplk.so",
        "library_sha256": "0" * 64,
        "dropin": ("libllama.so",),
        "capabilities": ("load",),
        "probes": {"load": "plain", "defrag": None},
        **changed,
    }
    return Manifest(**values)  # type: ignore[arg-type]
