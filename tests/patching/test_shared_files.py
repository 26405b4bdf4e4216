"""Test hooks and shared files as files, and slips that show that guards can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from variable_kit import read_by_patches

from pyllamakv.patching import hunks, series
from pyllamakv.patching.definition import Port
from pyllamakv.verification import discovery
from qa import slips

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / "patches" / "shared"
FOREIGN = sorted((ROOT / "tests" / "data" / "foreign").glob("*.patch"))


def ports() -> list[Path]:
    """Return the hooks of every port of every patch."""
    return sorted((ROOT / "patches").glob("*/*.patch"))


def added(patch: hunks.Patch, path: str) -> list[bytes]:
    """Return the lines that a patch adds to a file, without their newlines."""
    return [line.rstrip(b"\n") for hunk in patch.file(path).hunks for line in hunk.added]


def test_the_planner_names_no_upstream_type() -> None:
    """It includes only the standard library and names no type of ggml or llama.cpp."""
    lines = (SHARED / "src" / "llama-kv-defrag.h").read_bytes().split(b"\n")
    code = [line.split(b"//")[0] for line in lines]
    assert not [line for line in code if line.startswith(b'#include "')]
    assert not [line for line in code if b"ggml" in line]
    words = b" ".join(code).replace(b"llama_kv_defrag", b"").replace(b"LLAMA_KV_DEFRAG", b"")
    assert b"llama_" not in words


@pytest.mark.parametrize("path", ports(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_hooks_are_clean(path: Path) -> None:
    """A port adds no trailing blanks, tabs or carriage returns, and no shared file."""
    patch = hunks.read(path)
    assert path.read_bytes().endswith(b"\n")
    for file in patch.files:
        assert not (SHARED / file.path).exists()
        for line in added(patch, file.path):
            assert line == line.rstrip(), f"{file.path}: {line!r}"
            assert b"\t" not in line, f"{file.path}: {line!r}"


@pytest.mark.parametrize("path", sorted(SHARED.rglob("*.h")), ids=lambda path: path.name)
def test_a_shared_file_is_kept_once(path: Path) -> None:
    """Every port that adds it is composed with the bytes of the one file."""
    name = path.relative_to(SHARED).as_posix()
    users = [one for one in series.load(ROOT / "patches").every if name in one.shared]
    assert users
    for text in (text for one in users for text in one.ports):
        (hunk,) = text.patch.file(name).hunks
        assert b"".join(hunk.new) == path.read_bytes()
        assert b"\t" not in path.read_bytes()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "patches" / "full-defrag").glob("*.patch")), ids=lambda path: path.stem
)
def test_hooks_are_call_sites(path: Path) -> None:
    """A port of full-defrag keeps upstream's code in the tree, including unused functions.

    The ports remove 2 to 13 lines and change 126 to 202; earlier ones removed 278 to 300.
    """
    lines = [line for file in hunks.read(path).files for hunk in file.hunks for line in hunk.lines]
    removed = [line for line in lines if line[:1] == b"-"]
    changed = [line for line in lines if line[:1] in (b"+", b"-")]
    assert 0 < len(removed) <= 13
    # 0.3.16 and b5590 have the most
    assert len(changed) <= 202


def test_the_page_lists_every_variable() -> None:
    """The table of docs/environment.md has exactly the variables of the patches."""
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    table = page.split("\n\n")[2]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == len({row[0] for row in rows})
    assert {row[0].strip("| `") for row in rows} == read_by_patches()
    assert all(len(row) == 6 and all(map(str.strip, row)) for row in rows)


def test_the_page_has_the_words_that_the_patches_accept() -> None:
    """Each word of a plan or mover is a value of the page, and the message is the logged one."""
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    text = (SHARED / "src" / "llama-kv-settings.h").read_text("utf-8")
    words = re.findall(r'\{ "(\w+)", +llama_kv_defrag::', text)
    assert len(words) == 7
    rows = {name: next(line for line in page.splitlines() if f"| `{name}` |" in line)
            for name in ("LLAMA_KV_DEFRAG_PLAN", "LLAMA_KV_DEFRAG_MOVER")}  # fmt: skip
    listed = re.findall(r"`(\w+)`", " ".join(row.split(" | ")[1] for row in rows.values()))
    assert sorted(listed) == sorted(words)
    assert "which is ignored; expected a number from 0 to 1\n" in page
    assert '"a number from 0 to 1"' in text and "which is ignored; expected %s" in text


def test_a_slip_shows_that_each_guard_of_the_defragmentation_can_fail() -> None:
    """Most guards pass on stock too, so a slip shows that they can fail."""
    own = series.load(ROOT / "patches").definition("full-defrag").scenarios
    guards = {name for name in own if discovery.discover()[name].kind == "guard"}
    named = {slip.by for slip in slips.load() if slip.patch == "full-defrag"}
    assert guards and guards <= named


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_foreign_patch_is_the_shipped_one_with_one_fault(path: Path) -> None:
    """It applies on top of the shipped port and changes few lines of its files."""
    text = Port.from_file(path)
    real = series.load(ROOT / "patches").definition("full-defrag").port(text.base).patch
    assert text.requires == ("full-defrag",)
    assert set(text.patch.paths) <= set(real.paths)
    lines = [line for file in text.patch.files for hunk in file.hunks for line in hunk.lines]
    assert 1 <= sum(line[:1] in (b"+", b"-") for line in lines) <= 16
