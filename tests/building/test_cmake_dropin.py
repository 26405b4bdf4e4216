"""Test that the libraries of a CUDA build have the toolkit's directories in their RPATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pyllamakv.building import cmake

DROPIN = Path(__file__).resolve().parents[2] / "pyllamakv/native/cmake/dropin.cmake"

PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(tiny LANGUAGES CXX)
function(plk_link_whole target archive)
    target_link_libraries(${{target}} PRIVATE
        "$<LINK_LIBRARY:WHOLE_ARCHIVE,${{archive}}>" "{toolkit}/libcublas.so")
endfunction()
function(plk_links archive result)
    set(${{result}} "" PARENT_SCOPE)
endfunction()
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
add_library(ggml STATIC ggml.cpp)
include("{dropin}")
plk_dropin("${{CMAKE_BINARY_DIR}}/dropin" ggml)
"""


@pytest.mark.parametrize(("on", "expected"), [("ON", "[$ORIGIN:{0}]"), ("OFF", "[$ORIGIN]")])
def test_the_loader_finds_the_toolkit(tmp_path: Path, on: str, expected: str) -> None:
    """Only a build for CUDA contains directories of this machine."""
    compiler, readelf = shutil.which("c++"), shutil.which("readelf")
    if compiler is None or readelf is None:
        pytest.skip("no compiler for Linux here")
    toolkit, source, folder = tmp_path / "toolkit", tmp_path / "source", tmp_path / "build"
    for made in (toolkit, source):
        made.mkdir()
    (source / "blas.cpp").write_text("int blas() { return 1; }\n", encoding="utf-8")
    (source / "ggml.cpp").write_text("int blas(); int ggml() { return blas(); }\n", "utf-8")
    (source / "CMakeLists.txt").write_text(
        PROJECT.format(toolkit=toolkit, dropin=DROPIN), encoding="utf-8"
    )
    target = toolkit / "libcublas.so"
    run(compiler, "-shared", "-fPIC", str(source / "blas.cpp"), "-o", str(target))
    ninja = f"-DCMAKE_MAKE_PROGRAM={cmake.binary('ninja')}"
    words = ("-G", "Ninja", ninja, f"-DGGML_CUDA={on}", f"-DCMAKE_CXX_COMPILER={compiler}")
    run(str(cmake.binary("cmake")), "-S", str(source), "-B", str(folder), *words)
    run(str(cmake.binary("ninja")), "-C", str(folder), "plk_dropin")
    output = run(readelf, "-d", str(folder / "dropin" / "libggml.so"))
    (line,) = (line for line in output.splitlines() if "PATH)" in line)
    assert line.endswith(expected.format(toolkit))


def run(*words: str) -> str:
    """Return the output of a program that succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
