"""A generated queue is carried with and without each mechanism; scripts decide what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import MemoryTree
from upkeep_kit import sandbox

from pyllamakv.patching import series
from pyllamakv.patching.strict_apply import DraftEntry
from pyllamakv.source.store import open_store
from qa.upkeep import ablation, page, queues
from qa.upkeep.measurement import Measurement
from qa.upkeep.queues import Edit, Mail, Shape

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = {"src/a.cpp": b"int one(int n) {\n    n = 1;\n    use(n);\n}\n\nint two(int n) {\n}\n"}
NOTE = Edit("src/a.cpp", "one", "n = 1;", lines=("    print(&n);",), name="n")


class Files(MemoryTree):
    """Files in memory are there without a fetch."""

    def fetch(self, paths: object) -> None:
        """Do nothing."""


def changed(data: bytes) -> dict[str, DraftEntry | None]:
    """Return a tree with another content of the file."""
    return {"src/a.cpp": DraftEntry(data)}


def test_a_script_finds_its_line_in_the_function() -> None:
    """Without the line, or with two of them, it has no place; a function that moved is found."""
    made = Mail("x", (NOTE,)).apply(Files(SOURCE))
    assert made is not None
    assert b"    n = 1;\n    print(&n);\n" in made["src/a.cpp"].data
    twice = {"src/a.cpp": SOURCE["src/a.cpp"].replace(b"use(n);", b"n = 1;")}
    assert Mail("x", (NOTE,)).apply(Files(twice)) is None
    moved = Mail("x", (NOTE,)).apply(Files({"src/b.cpp": SOURCE["src/a.cpp"]}))
    assert moved is not None and list(moved) == ["src/b.cpp"]
    assert Mail("x", (NOTE,)).apply(Files({"src/a.cpp": b"int two(int n) {\n}\n"})) is None


def test_a_copy_has_each_member() -> None:
    """The lines follow the class of the tree."""
    head = "    void copy(const cells & other) {"
    edit = Edit("a.h", "cells", "struct cells {", lines=(head,), copies=True)
    members = b"    int a;\n    int b;\n    int c;\n    int d;\n"
    function = b"    bool e() {\n        return true;\n    }\n"
    tree = {"a.h": b"struct cells {\n" + members + function + b"};\n"}
    made = Mail("x", (edit,)).apply(Files(tree))
    assert made is None  # the line that opens the class is not in it
    edit = Edit("a.h", "", "struct cells {", lines=(head,), copies=True)
    made = Mail("x", (edit,)).apply(Files(tree))
    assert made is not None
    assert b"a = other.a; b = other.b; c = other.c; d = other.d; }" in made["a.h"].data


def test_what_is_misplaced() -> None:
    """Lines in another function, or without the variable that they use."""
    right = SOURCE["src/a.cpp"].replace(b"use(n);", b"use(n);\n    print(&n);")
    assert not NOTE.misplaced(changed(right))
    other = SOURCE["src/a.cpp"].replace(b"two(int n) {\n", b"two(int n) {\n    print(&n);\n")
    assert NOTE.misplaced(changed(other))
    lost = right.replace(b"int n", b"int m").replace(b"n = 1", b"m = 1").replace(b"use(n)", b"f(m)")
    assert NOTE.misplaced(changed(lost))
    edit = Edit("src/a.cpp", "one", "if (n) {", r"\) \{$", ' && getenv("FORK_X") == NULL) {')
    for condition, wrong in (("n", False), ("!n", True), ("m->n", False)):
        line = (
            f'int one(int n) {{\n    if ({condition} && getenv("FORK_X") == NULL) {{\n    }}\n}}\n'
        )
        assert edit.misplaced(changed(line.encode())) == wrong


@pytest.mark.slow
def test_mechanisms_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four states in three modes: every tree is right, and a second run measures nothing."""
    sandbox(tmp_path, monkeypatch)
    monkeypatch.setitem(queues.SHAPES, "small", Shape("0.3.1", 1, ("src/a.cpp",), ("drop",)))
    monkeypatch.setattr(ablation, "STEPS", ("0.3.1", "0.3.2", "0.3.3", "0.3.4"))
    measured = Measurement(open_store(), series.load(), lambda *_: None)
    ablation.run(["small"], measured, lambda *_: None)
    kept = ablation.kept()
    rows = {mechanism: kept["small", mechanism] for _, mechanism in kept}
    assert set(rows) == {ablation.NOTHING, *ablation.CARRYING, *ablation.PLACING}
    assert (rows[ablation.NOTHING].good, rows[ablation.NOTHING].wrong) == (10, 0)
    assert {one.allowed for one in rows.values()} == {0}
    monkeypatch.setattr(ablation._Queue, "measure", pytest.fail)
    ablation.run(["small"], measured, lambda *_: None)
    text = page.with_mechanisms("# Page\n\n## Mechanisms\n\nold\n\n## Next\n\nmore\n", kept)
    assert text.startswith("# Page\n\n## Mechanisms\n") and text.endswith("\n## Next\n\nmore\n")
    assert "\nold\n" not in text
