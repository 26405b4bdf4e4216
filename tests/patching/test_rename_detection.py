"""Test that moved code is found by its lines and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.patching import rename_detection, trees
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

LINES = [b"void cache_update(ctx & c) {\n", b"    c.reserve_cells();\n", b"    return;\n", b"}\n"]


def test_renamed_file_is_found_by_rare_lines(tmp_path: Path) -> None:
    """Rare lines decide; files of another kind or place, and accidental matches, do not count."""
    store = open_store(tmp_path / "store.git")
    files = {
        "src/old.cpp": b"int unrelated;\n",
        "src/new.cpp": b"// a\n" + b"".join(LINES),
        "src/some.cpp": b"void other() {\n    return;\n}\n",
        "docs/new.cpp": b"".join(LINES),
        "src/new.py": b"".join(LINES),
        **{f"src/m{n}.cpp": b"int x() {\n    return;\n}\n" for n in range(5)},
    }
    tree = trees.StoreTree(store, store.commit(None, files, "x")[1])
    found = rename_detection.find(tree, "src/old.cpp", LINES)
    assert [one.path for one in found] == ["src/new.cpp"]
    assert found[0].similarity > 0.9
    assert rename_detection.find(tree, "src/old.cpp", [b"nothing_like_it(here);\n"]) == ()
    assert rename_detection.find(tree, "src/old.cpp", [b"}\n", b"\n"]) == ()
    # code that is still in its place was not moved
    assert rename_detection.find(tree, "src/new.cpp", LINES) == ()
