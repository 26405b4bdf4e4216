"""Helpers for tests that compile C++: shared files without llama.cpp, with sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "patches" / "shared"
STRICT = ("-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")

_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Header:
    """Name a shared file, the patch that adds it, and the program that tests it.

    ``places``: each group of its tests needs a directory; ``needs`` are the other headers of the
    patch that it includes.
    """

    name: str
    patch: str
    source: Path
    places: bool = False
    needs: tuple[str, ...] = ()

    def text(self, name: str = "") -> str:
        """Return the header, or another one of the patch."""
        return (SHARED / "src" / (name or self.name)).read_text(encoding="utf-8")

    def compile(
        self, folder: Path, *flags: str, source: Path | None = None, text: str | None = None
    ) -> Done:
        """Compile a program against the header, or another ``text`` of it, into a folder."""
        for name in self.needs:
            (folder / name).write_text(self.text(name), encoding="utf-8")
        (folder / self.name).write_text(text or self.text(), encoding="utf-8")
        stubs = f"-I{ROOT / 'tests' / 'native' / 'stubs'}"
        return compiled(source or self.source, folder, *flags, "-pthread", stubs)

    def program(self, folder: Path) -> Path:
        """Build the tests of the header, under sanitizers where the toolchain has them."""
        result = self.compile(folder, "-std=c++17", "-g", "-O1", *sanitizers(folder))
        assert result.returncode == 0, result.stderr
        return folder / self.source.stem

    def run(self, program: Path, group: str, folder: Path) -> Done:
        """Run a group of the tests."""
        return run(program, group, *([str(folder)] if self.places else []))

    def check_faults(self, folder: Path, faults: dict[str, tuple[str, str]]) -> None:
        """Insert a fault for each test group, and check that the group detects it."""
        text = self.text()
        for group, (right, wrong) in faults.items():
            assert text.count(right) >= 1, right
            place = folder / group
            place.mkdir()
            faulty = text.replace(right, wrong, 1)
            built = self.compile(place, "-std=c++17", "-O0", "-w", text=faulty)
            assert built.returncode == 0, built.stderr
            found = self.run(place / self.source.stem, group, place)
            assert found.returncode != 0, f"{group} does not notice {wrong!r}"


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
