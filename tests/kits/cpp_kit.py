"""Helpers for tests that compile C++: shared files without llama.cpp, with sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "patches" / "shared"
STRICT = ("-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")

_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

Done = subprocess.CompletedProcess[str]


def compiler() -> str:
    """Return a C++ compiler, or skip."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def compiled(source: Path, folder: Path, *flags: str) -> Done:
    """Compile a program with the headers of a folder into it."""
    program = str(folder / source.stem)
    return _run([compiler(), *flags, "-I", str(folder), str(source), "-o", program])


def sanitizers(folder: Path) -> tuple[str, ...]:
    """Return the sanitizer flags, if this toolchain can build and run a program with them."""
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n", encoding="utf-8")
    works = (
        not compiled(probe, folder, *_SANITIZE).returncode and not run(folder / "probe").returncode
    )
    return _SANITIZE if works else ()


def run(program: Path, *arguments: str) -> Done:
    """Run a program."""
    return _run([str(program), *arguments])


def _run(words: list[str]) -> Done:
    return subprocess.run(
        words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )
