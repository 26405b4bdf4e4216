"""Test that the libraries of a build directory are collected, and missing ones are named."""

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
    """Return a build directory like one of CMake."""
    (tmp_path / "dropin").mkdir()
    for name in ("libplk.so", "dropin/libllama.so", "dropin/libggml.so.0", "dropin/notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "plk-capabilities.json").write_text(GROUPS, encoding="utf-8")
    return tmp_path


def test_collect_finds_versioned_and_unversioned_libraries(folder: Path) -> None:
    """Libraries with and without versions in their names are found, and no other files."""
    made = artifacts.collect(folder)
    assert made.library == folder / "libplk.so"
    assert [path.name for path in made.dropin] == ["libggml.so.0", "libllama.so"]
    assert made.probes == {"load": "plain", "defrag": None}
    assert made.abi >= 1


def test_missing_library_error_names_the_log_file(folder: Path) -> None:
    """If the library was not built, the error names the log file."""
    (folder / "libplk.so").unlink()
    with pytest.raises(BuildError, match=r"build\.log"):
        artifacts.collect(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": []}'])
def test_malformed_probe_results_raise_a_build_error(folder: Path, text: str) -> None:
    """Probe results of another structure raise a BuildError that names the file."""
    (folder / "plk-capabilities.json").write_text(text, encoding="utf-8")
    with pytest.raises(BuildError, match="plk-capabilities"):
        artifacts.collect(folder)


def test_missing_probe_results_raise_a_build_error(folder: Path) -> None:
    """Without the file, nothing is published."""
    (folder / "plk-capabilities.json").unlink()
    with pytest.raises(BuildError, match="plk-capabilities"):
        artifacts.collect(folder)
