"""The benchmark of ports counts what the files hold, and compares builds of one release."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.building.variant import Variant
from pyllamakv.errors import UsageError
from pyllamakv.patching import series
from qa.bench import ports
from qa.bench.defrag_workloads import SETTINGS, CacheShape

ROOT = Path(__file__).resolve().parents[3]


def test_changed_lines_are_those_of_the_files() -> None:
    """The table holds minimum, median and maximum of every patch, shared files left out."""
    found = {figure.name: figure for figure in ports.figures(lambda: None)[1:]}
    files = {path.parent.name for path in (ROOT / "patches").glob("*/patch.toml")}
    assert set(found) == files - {patch.id for patch in series.load().server}
    for name, figure in found.items():
        counts = []
        for path in sorted((ROOT / "patches" / name).glob("*.patch")):
            lines = path.read_text("utf-8").splitlines()
            marked = [
                line for line in lines if line[:1] in "+-" and line[:4] not in ("+++ ", "--- ")
            ]
            counts.append(len(marked))
            assert figure.data[path.stem] == len(marked)
        row = figure.row
        assert (int(row["minimum"]), int(row["maximum"])) == (min(counts), max(counts))
        assert int(row["median"]) == sorted(counts)[(len(counts) - 1) // 2]


def test_lines_are_those_of_the_folder() -> None:
    """Ports, shared files and descriptions add up."""
    (figure, *_) = ports.figures(lambda: None)
    files = [path for path in (ROOT / "patches").rglob("*") if path.is_file()]
    assert figure.data["all"] == sum(len(path.read_bytes().splitlines()) for path in files)
    assert 0 < figure.data["shared"] < figure.data["all"]
    assert 0 < figure.data["ports"] < figure.data["all"]


def test_a_build_that_is_not_there() -> None:
    """The error names the id and where builds are."""
    with pytest.raises(UsageError, match=r"no variant 0\.3\.9-gone"):
        ports.figures(lambda: None, ["0.3.9-gone"])


@pytest.mark.slow
@pytest.mark.native
def test_builds_are_compared_side_by_side(patched: Variant) -> None:
    """Both contexts defragment the same cells, and the ratio is of as many pairs as asked."""
    figure = ports._ratio(patched, CacheShape("1B", SETTINGS[0], 1024), 3, lambda: None, rounds=2)
    assert "0.3.9" in figure.name
    assert len(figure.data["new"]) == len(figure.data["old"]) == 6
    assert len(figure.data["ratios"]) == 2
    assert patched.folder.name in figure.how
