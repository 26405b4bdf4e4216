"""The logic of the defragmentation patch by itself: no llama.cpp, one compiler, sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pyllamakv.patching import hunks

ROOT = Path(__file__).resolve().parent.parent
PATCH = ROOT / "patches" / "full-defrag" / "0.3.9" / "full-defrag.patch"
SOURCE = ROOT / "tests" / "native" / "kv_defrag.cpp"
HEADER = "src/llama-kv-defrag.h"
GROUPS = (
    "cells",
    "data-rows",
    "data-transposed",
    "data-wide",
    "graphs",
    "options",
    "plan-exhaustive",
    "plan-linear",
    "plan-random",
    "ranges",
    "stopwatch",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def header_text() -> bytes:
    """Return the header as the patch adds it."""
    (hunk,) = hunks.read(PATCH).file(HEADER).hunks
    return b"".join(line + b"\n" for line in (added.rstrip(b"\n") for added in hunk.added))


def compiler() -> str:
    """Return a C++ compiler, or skip."""
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no C++ compiler here")


def compiled(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile the tests against the header of the patch into `folder`/kv_defrag."""
    (folder / "llama-kv-defrag.h").write_bytes(header_text())
    command = [compiler(), *flags, "-g", "-pthread", "-I", str(folder), str(SOURCE)]
    command += ["-o", str(folder / "kv_defrag")]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )


def sanitized(folder: Path) -> bool:
    """Tell whether this toolchain can build and run a program with sanitizers."""
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n", encoding="utf-8")
    command = [compiler(), *SANITIZE, str(probe), "-o", str(folder / "probe")]
    built = subprocess.run(command, capture_output=True, timeout=300, check=False)
    if built.returncode:
        return False
    ran = subprocess.run([str(folder / "probe")], capture_output=True, timeout=300, check=False)
    return ran.returncode == 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header, under sanitizers where the toolchain has them."""
    folder = tmp_path_factory.mktemp("kv_defrag")
    flags = SANITIZE if sanitized(folder) else ()
    result = compiled(folder, "-std=c++17", "-O1", *flags)
    assert result.returncode == 0, result.stderr
    return folder / "kv_defrag"


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run groups of the tests."""
    return subprocess.run(
        [str(program), *args],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )


def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_header(program: Path, group: str) -> None:
    """A group of the header agrees with what is found cell by cell, and breaks no memory rule."""
    result = run(program, group)
    assert result.returncode == 0, result.stdout + result.stderr


def test_header_compiles_as_the_oldest_release_does(tmp_path: Path) -> None:
    """The header is clean C++11, as 0.2.90 is compiled, without a warning."""
    result = compiled(
        tmp_path, "-std=c++11", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"
    )
    assert result.returncode == 0, result.stderr


def test_tests_can_fail(tmp_path: Path) -> None:
    """Faults put into the header are found: the tests are not empty."""
    text = header_text().decode()
    faults = {
        "plan-exhaustive": ("while (!used[src])", "while (false)"),
        "plan-random": ("std::min(gap, m.len - k)", "gap"),
        "data-rows": ("moves[i].len*l.cell", "l.cell"),
        "data-transposed": ("row0 + l.stride", "row0"),
        "cells": ("src = cell_t();", ""),
        "ranges": ("add(c, range.c1);", ""),
        "graphs": ("/(3*n_tensors)", "/(2*n_tensors)"),
        "options": ("static thread_local", "static"),
    }
    for group, (right, wrong) in faults.items():
        assert text.count(right) >= 1, right
        folder = tmp_path / group
        folder.mkdir()
        (folder / "llama-kv-defrag.h").write_text(text.replace(right, wrong, 1), encoding="utf-8")
        program = folder / "kv_defrag"
        command = [compiler(), "-std=c++17", "-O0", "-w", "-pthread"]
        built = subprocess.run(
            [*command, "-I", str(folder), str(SOURCE), "-o", str(program)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert built.returncode == 0, built.stderr
        assert run(program, group).returncode != 0, f"{group} does not notice {wrong!r}"
