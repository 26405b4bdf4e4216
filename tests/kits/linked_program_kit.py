"""Compile and run a C++ test program against a built library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cpp_kit import compiler
from native_kit import built

from pyllamakv.source.store import open_store

_FOLDERS = ("src", "include", "ggml/include", "ggml/src")


def run_inside(spec: str, name: str, folder: Path, *arguments: str) -> None:
    """Compile ``tests/native/NAME.cpp`` with the headers of a variant, link that, and run it."""
    run(linked(spec, name, folder), *arguments)


def linked(spec: str, name: str, folder: Path) -> Path:
    """Return ``tests/native/NAME.cpp`` as a program with the ordinary libraries of a variant."""
    found = built(spec)
    store, tree = open_store(), found.manifest.patched_tree
    names = [each for part in _FOLDERS for each in store.ls(tree, part) if each.endswith(".h")]
    for path, data in store.read_many(tree, names).items():
        assert data is not None
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    source, program = Path(__file__).resolve().parents[1] / "native" / f"{name}.cpp", folder / name
    libraries = found.folder / "lib"
    command = [compiler(), "-std=c++17", *(f"-I{folder / part}" for part in _FOLDERS)]
    command += [str(source), "-o", str(program), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += [f"-l{path.stem.removeprefix('lib')}" for path in sorted(libraries.glob("lib*.so"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: str, **variables: str) -> str:
    """Return the output of a program; ``variables`` are the only ones of the patches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_KV_")}
    ran = subprocess.run(
        [program, *arguments],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
