"""Test that a moved cell keeps all its data, in each release that compaction supports."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_kit import ROOT, compiled, run, sanitizers

from pyllamakv.errors import UnknownRelease
from pyllamakv.patching import apply
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store

SOURCE = ROOT / "tests" / "native" / "kv_cells.cpp"
# Releases whose cells differ in their members, moved by upstream's cp(), rm() and set().
ROWS = ("b6845", "0.3.25", "0.3.36", "b11549")
# Releases with the class llama_kv_cells_unified, whose mv() a patch changes.
UNIFIED = ("0.3.10", "0.3.12", "0.3.16")
ADDED = ("src/llama-kv-compact-cells.h", "src/llama-kv-defrag.h")
HEADERS = ("src/llama-kv-cells.h", "src/llama-cparams.h", "include/llama.h")


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("base", ROWS)
def test_cell_moves_with_all_its_data(base: str, tmp_path: Path) -> None:
    """Positions, sequences, shifts, extras and the indexes over them follow the cell."""
    check(base, "compaction", tmp_path)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("base", UNIFIED)
def test_unified_cell_moves_with_all_its_data(base: str, tmp_path: Path) -> None:
    """A cell moves with all its data, without an allocation."""
    check(base, "full-defrag", tmp_path, "-Dllama_kv_cells=llama_kv_cells_unified")


def check(base: str, patch: str, tmp_path: Path, *flags: str) -> None:
    """Run kv_cells.cpp with the headers of a base after a patch."""
    store = open_store()
    try:
        release = spec_resolver.resolve(base)
    except UnknownRelease:
        pytest.skip(f"{base} is not pinned: pyllamakv upstream add {base}")
    if not store.has(release):
        pytest.skip(f"{base} was not fetched: pyllamakv upstream fetch {base}")
    tree = apply.apply(release, [patch], store=store).tree
    added = (name for name in ADDED if store.read(tree, name))
    names = [*HEADERS, *added, *(e for e in store.ls(tree, "ggml/include") if e.endswith(".h"))]
    for name in names:
        data = store.read(tree, name)
        assert data is not None
        (tmp_path / Path(name).name).write_bytes(data)
    built = compiled(SOURCE, tmp_path, "-std=c++17", "-O1", *flags, *sanitizers(tmp_path))
    assert built.returncode == 0, built.stderr
    ran = run(tmp_path / SOURCE.stem)
    assert ran.returncode == 0, ran.stdout + ran.stderr
