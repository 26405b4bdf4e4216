"""RELIABILITY.md keeps results that were not measured again, and lists defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.home import checkout
from qa import SECTIONS, document, selection
from qa.entry import Entry, StressOptions, skipped_entry


def entry(name: str, count: str, *defects: str, section: str = "faults") -> Entry:
    """Return an entry of a section."""
    return Entry(section, name, {"faults": count}, defects, seed=3, measured="today")


def test_what_was_not_tried_again_stays(tmp_path: Path) -> None:
    """Entries are replaced by section and name, and come back as they were written."""
    path = tmp_path / "RELIABILITY.md"
    document.write(path, [entry("kill", "10"), entry("disk", "4")])
    document.write(path, [entry("kill", "20"), entry("rate", "9", section="random_operations")])
    assert document.read(path) == [
        entry("rate", "9", section="random_operations"),
        entry("kill", "20"),
        entry("disk", "4"),
    ]


def test_what_could_not_be_tried_replaces_nothing(tmp_path: Path) -> None:
    """A skipped entry is listed only if there is no other, with the reason and without a date."""
    path = tmp_path / "RELIABILITY.md"
    lacking = [skipped_entry("faults", name, "no clang").dated("a") for name in ("kill", "disk")]
    document.write(path, [entry("kill", "10")])
    document.write(path, lacking)
    kill, disk = document.read(path)
    assert (kill, disk.ran) == (entry("kill", "10"), False)
    assert "| disk |  | skipped: no clang |" in path.read_text()
    assert path.read_text().count("Measured") == 1
    document.write(path, [entry("disk", "4")])
    assert document.read(path)[1] == entry("disk", "4")


def test_defects_stand_in_the_table() -> None:
    """A row lists its defects, or "nothing"; bars and line breaks do not end it."""
    text = document.render([entry("kill", "10"), entry("disk", "4", "half|a\nstate")])
    assert "| kill | 10 | none |" in text
    assert "| disk | 4 | half\\|a state |" in text
    assert "Measured today: kill, disk." in text


@pytest.mark.parametrize("section", SECTIONS)
def test_the_shipped_document_has_no_names_of_before(section: str) -> None:
    """A row that was renamed or removed does not stay in the document."""
    root = checkout()
    if root is None:
        pytest.skip("no checkout")
    kept = document.read(root / "qa" / "results" / "reliability.md")
    names = {entry.name for entry in kept if entry.section == section}
    assert names and names <= set(selection.module(section).names())


def test_an_effort_is_shared_among_parts() -> None:
    """Parts have the time of the whole together, and `only` chooses among them."""
    assert StressOptions(seconds=60).shared(4).seconds == 15
    assert StressOptions().wants("any")
    assert not StressOptions(only=("one",)).wants("other")
