"""Build a variant: with stand-ins for CMake and ninja, and a tiny one with the real tools."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pyllamakv.building import build, cmake, variant
from pyllamakv.source import spec_resolver, vendor
from pyllamakv.source.store import open_store
from qa.faults.step import GIT_LEAVES, FaultTarget
from qa.faults.steps import tiny_upstream

#: Accepts the arguments of a configure run and writes the files that this package reads.
CMAKE = r"""
while [ $# -gt 0 ]; do
    case $1 in
    -S) source=$2; shift ;;
    -B) build=$2; shift ;;
    -DPLK_LLAMA_SRC=*) tree=${1#*=} ;;
    -DPLK_VARIANT=*) variant=${1#*=} ;;
    esac
    shift
done
mkdir -p "$build"
printf 'CMAKE_HOME_DIRECTORY:INTERNAL=%s\nCMAKE_CACHEFILE_DIR:INTERNAL=%s\n' \
    "$source" "$build" >"$build/CMakeCache.txt"
printf '%s' "$tree" >"$build/tree"
printf '%s' "$variant" >"$build/variant"
printf '{"groups": {"load": "plain", "defrag": null}}' >"$build/plk-capabilities.json"
"""
#: Creates a library from the tree's sources, as ninja does: written next to its path, then renamed.
_NINJA = r"""
cd "$2"
mkdir -p dropin
cat "$(cat tree)"/src/*.cpp >new
mv new libplk.so
cp libplk.so dropin/new
mv dropin/new dropin/libllama.so
echo "[plk 1/1] Linking libplk.so"
"""

#: What `building` requires of a project: two targets, and the results of the probes.
_PROJECT = r"""
cmake_minimum_required(VERSION 3.28)
project(plk C)
file(WRITE ${CMAKE_BINARY_DIR}/plk-capabilities.json
     [[{"groups": {"load": "plain", "defrag": null}}]])
file(GLOB sources ${PLK_LLAMA_SRC}/src/*.c)
add_library(plk SHARED ${sources})
add_library(llama SHARED ${sources})
set_target_properties(llama PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/dropin)
add_custom_target(plk_dropin DEPENDS llama)
"""


def script(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nset -eu\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return path


class Build(FaultTarget):
    """Build a release with stand-ins that compile nothing: tests everything except the compiler."""

    name = "build"
    allowed_leftovers = GIT_LEAVES

    def prepare(self, folder: Path) -> None:
        """Write the stand-ins and a tree."""
        for name, text in (("cmake", CMAKE), ("ninja", _NINJA)):
            script(folder / "programs" / name, text)
        tiny_upstream.fill(folder / "llama", tiny_upstream.TREE)
        os.environ["PYLLAMAKV_COMPILER_LAUNCHER"] = "none"

    def run(self, folder: Path) -> Any:
        """Build stock, find it again, and check it against its manifest."""
        cmake.binary = lambda name: folder / "programs" / name
        # Nothing of the shim is compiled.
        variant.shim_digest = lambda: "shim"
        spec = f"path:{folder / 'llama'}+stock"
        found = build.build(spec)
        again = variant.lookup(variant.request(spec))
        library = found.manifest.check_library(found.folder).read_bytes()
        return [
            found.id,
            again is not None and again.id,
            hashlib.sha256(library).hexdigest(),
            sorted(str(path.relative_to(found.folder)) for path in found.folder.rglob("*")),
        ]


class SyncAndClean(FaultTarget):
    """Write a tree and remove it again, as `upstream sync` and `upstream clean` do."""

    name = "vendor and clean"
    allowed_leftovers = GIT_LEAVES

    def prepare(self, folder: Path) -> None:
        """Create a data directory with a release."""
        with tiny_upstream.at_home(folder / "home"):
            tiny_upstream.release("9.0.1", tiny_upstream.TREE, "2025-01-01")

    def run(self, folder: Path) -> Any:
        """Run sync and clean."""
        release = spec_resolver.resolve("9.0.1")
        vendored, _ = vendor.sync(open_store(), release, release.commit, spec="9.0.1")
        vendor.clean(vendored)
        # Files that another run wrote meanwhile do not count.
        return vendored.tree

    def check_completed(self, folder: Path) -> list[str]:
        """Check that no file of the tree remains."""
        left = sorted((folder / "home" / "trees").glob("*"))
        return [*super().check_completed(folder), *(f"{path.name} still exists" for path in left)]


class Compile(FaultTarget):
    """Build a tiny library with the real CMake, ninja and compiler."""

    name = "compile and link"
    # The contents of a build directory belong to CMake and ninja, which resume from them.
    allowed_leftovers = (*GIT_LEAVES, r"home/objects/.+")

    def prepare(self, folder: Path) -> None:
        """Write the project and a tree."""
        (folder / "native").mkdir()
        (folder / "native" / "CMakeLists.txt").write_text(_PROJECT, encoding="utf-8")
        (folder / "llama" / "include").mkdir(parents=True)
        (folder / "llama" / "include" / "llama.h").write_text("int part(int);\n", "utf-8")
        (folder / "llama" / "src").mkdir()
        for n in range(3):
            text = f"int part_{n}(int a) {{ return a + {n}; }}\n"
            (folder / "llama" / "src" / f"part-{n}.c").write_text(text, encoding="utf-8")
        os.environ["PYLLAMAKV_COMPILER_LAUNCHER"] = "none"

    def run(self, folder: Path) -> Any:
        """Build it; the library is bit-identical each time."""
        build.shim = lambda: folder / "native"  # type: ignore[attr-defined]
        # Nothing of the shim is compiled.
        variant.shim_digest = lambda: "shim"
        found = build.build(f"path:{folder / 'llama'}+stock", jobs=2)
        found.manifest.check_library(found.folder)
        files = sorted(path.name for path in found.dropin.iterdir())
        return [found.id, found.manifest.library_sha256, files]
