"""Caches that must not be compacted, and the threshold, as the library itself sees them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cpp_kit import compiler
from native_kit import built

from pyllamakv.harness import synthetic
from pyllamakv.source.store import open_store

SOURCE = Path(__file__).resolve().parent / "native" / "refusals.cpp"
SPEC = "0.3.36+patched"
FOLDERS = ("src", "include", "ggml/include", "ggml/src")


@pytest.mark.native
def test_cells_that_others_know_by_number_stay(tmp_path: Path) -> None:
    """Check shared cells, mirrors that drifted apart, and a batch that is preceded by a move."""
    found = built(SPEC)
    store, tree = open_store(), found.manifest.patched_tree
    names = [name for folder in FOLDERS for name in store.ls(tree, folder) if name.endswith(".h")]
    for name, data in store.read_many(tree, names).items():
        assert data is not None
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    libraries = found.folder / "lib"
    program = tmp_path / "refusals"
    command = [compiler(), "-std=c++17", *(f"-I{tmp_path / folder}" for folder in FOLDERS)]
    command += [str(SOURCE), "-o", str(program), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += [f"-l{path.stem.removeprefix('lib')}" for path in sorted(libraries.glob("lib*.so"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    models = [str(synthetic.model(name)) for name in ("tiny", "indexed")]
    ran = subprocess.run(
        [program, *models], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
