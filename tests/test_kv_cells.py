"""Moving a cell carries all that is known about it, in each release that compaction is for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_defrag_header import SANITIZE, compiler, sanitized

from pyllamakv.patching import apply, series
from pyllamakv.source import releases
from pyllamakv.source.store import open_store

SOURCE = Path(__file__).resolve().parent / "native" / "kv_cells.cpp"
BASES = [text.base for text in series.load().definition("compaction").texts]
HEADERS = ("src/llama-kv-cells.h", "src/llama-cparams.h", "include/llama.h")


@pytest.mark.native
@pytest.mark.parametrize("base", BASES)
def test_cells_move_whole(base: str, tmp_path: Path) -> None:
    """Positions, sequences, shifts, extras and the indexes over them follow the cell."""
    store, release = open_store(), releases.resolve(base)
    if not store.has(release):
        pytest.skip(f"{base} was not fetched: pyllamakv upstream fetch {base}")
    tree = apply.apply(release, ["compaction"], store=store).tree
    names = [*HEADERS, *(e for e in store.ls(tree, "ggml/include") if e.endswith(".h"))]
    for name in names:
        data = store.read(tree, name)
        assert data is not None
        (tmp_path / Path(name).name).write_bytes(data)
    flags = SANITIZE if sanitized(tmp_path) else ()
    program = tmp_path / "kv_cells"
    command = [compiler(), "-std=c++17", "-O1", *flags, "-I", str(tmp_path), str(SOURCE)]
    command += ["-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
