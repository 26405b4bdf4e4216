"""What a build folder holds is collected, and what lacks is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.building import artifacts
from pyllamakv.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = '{"groups": {"load": "plain", "defrag": null}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a build folder as CMake leaves it."""
    (tmp_path / "dropin").mkdir()
    for name in ("libplk.so", "dropin/libllama.so", "dropin/libggml.so.0", "dropin/notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "plk-capabilities.json").write_text(GROUPS, encoding="utf-8")
    return tmp_path


def test_collect(folder: Path) -> None:
    """Libraries of any naming are found, other files are left."""
    made = artifacts.collect(folder)
    assert made.library == folder / "libplk.so"
    assert [path.name for path in made.dropin] == ["libggml.so.0", "libllama.so"]
    assert made.probes == {"load": "plain", "defrag": None}
    assert made.abi >= 1


def test_no_library(folder: Path) -> None:
    """If the library was not built, the error names the log file."""
    (folder / "libplk.so").unlink()
    with pytest.raises(BuildError, match=r"build\.log"):
        artifacts.collect(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": []}'])
def test_probes_that_cannot_be_read(folder: Path, text: str) -> None:
    """Answers of another shape are a BuildError that names the file."""
    (folder / "plk-capabilities.json").write_text(text, encoding="utf-8")
    with pytest.raises(BuildError, match="plk-capabilities"):
        artifacts.collect(folder)


def test_missing_probe_results_publish_nothing(folder: Path) -> None:
    """Without the file nothing is published."""
    (folder / "plk-capabilities.json").unlink()
    with pytest.raises(BuildError, match="plk-capabilities"):
        artifacts.collect(folder)
