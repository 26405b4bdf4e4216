"""The texts of the patches as files: one logic everywhere, doctored texts with one fault each."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.patching import hunks, series
from pyllamakv.patching.definition import PatchText

ROOT = Path(__file__).resolve().parent.parent
LOGIC = "src/llama-kv-defrag.h"
DOCTORED = sorted((ROOT / "tests" / "data" / "doctored").glob("*.patch"))
FOREIGN = sorted((ROOT / "tests" / "data" / "foreign").glob("*.patch"))
# A guard holds on stock too, mostly: only a text with a fault shows that it can fail.
GUARDS = {
    "abort-after-defrag",
    "abort-mid-decode",
    "fail-between-ubatches",
    "fork-then-defrag",
    "nothing-to-move",
    "restore-shifted",
    "shift-then-defrag",
}


def texts() -> list[Path]:
    """Return the file of every text of every patch."""
    return sorted((ROOT / "patches").glob("*/*/*.patch"))


def added(patch: hunks.Patch, path: str) -> list[bytes]:
    """Return the lines that a patch adds to a file, without their ends."""
    return [line.rstrip(b"\n") for hunk in patch.file(path).hunks for line in hunk.added]


def test_logic_is_the_same_everywhere() -> None:
    """The header with the logic is byte-identical in every text that adds it."""
    carriers = [path for path in texts() if LOGIC in hunks.read(path).paths]
    assert carriers
    bodies = {b"\n".join(added(hunks.read(path), LOGIC)) for path in carriers}
    assert len(bodies) == 1, f"{LOGIC} differs between {', '.join(map(str, carriers))}"


def test_logic_names_no_upstream_type() -> None:
    """The header with the logic includes only the standard library and uses nothing of ggml."""
    path = next(path for path in texts() if LOGIC in hunks.read(path).paths)
    lines = added(hunks.read(path), LOGIC)
    code = [line.split(b"//")[0] for line in lines]
    assert not [line for line in code if line.startswith(b'#include "')]
    assert not [line for line in code if b"ggml" in line]
    words = b" ".join(code).replace(b"llama_kv_defrag", b"").replace(b"LLAMA_KV_DEFRAG", b"")
    assert b"llama_" not in words


@pytest.mark.parametrize("path", texts(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_text_is_clean(path: Path) -> None:
    """A text adds no trailing blanks, no tabs and no carriage returns, and ends in a newline."""
    patch = hunks.read(path)
    assert path.read_bytes().endswith(b"\n")
    for file in patch.files:
        for line in added(patch, file.path):
            assert line == line.rstrip(), f"{file.path}: {line!r}"
            assert b"\t" not in line, f"{file.path}: {line!r}"


def test_every_guard_has_a_doctored_text() -> None:
    """Each guard is shown by at least one fault that it must catch."""
    assert {path.stem.split("--")[0] for path in DOCTORED} >= GUARDS


@pytest.mark.parametrize("path", [*DOCTORED, *FOREIGN], ids=lambda path: path.stem)
def test_doctored_text_is_one_fault(path: Path) -> None:
    """It goes on top of the shipped text, says what is wrong with it, and changes little."""
    text = PatchText.from_file(path)
    real = hunks.read(ROOT / "patches" / "full-defrag" / text.base / "full-defrag.patch")
    assert text.requires == ("full-defrag",)
    assert text.title.startswith("Doctored: ")
    assert set(text.patch.paths) <= set(real.paths)
    lines = [line for file in text.patch.files for hunk in file.hunks for line in hunk.lines]
    assert 1 <= sum(line[:1] in (b"+", b"-") for line in lines) <= 16


@pytest.mark.parametrize("path", DOCTORED, ids=lambda path: path.stem)
def test_doctored_text_names_what_must_catch_it(path: Path) -> None:
    """Its file and its header name one scenario, which is one of the patch."""
    scenario = path.stem.split("--")[0]
    assert scenario in series.load(ROOT / "patches").definition("full-defrag").scenarios
    assert f"Scenario: {scenario}\n".encode() in PatchText.from_file(path).patch.header
