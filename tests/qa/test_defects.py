"""Regression tests name the defects that stress tests found, and run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.errors import HarnessError
from qa import defects, summary
from qa.entry import StressOptions

_CONFIG = """
[tool.pytest.ini_options]
markers = ["regression(what, by, of): one"]
"""

_TESTS = """
import pytest

@pytest.mark.regression("keys turned the wrong way", by="random_operations", of="llama.cpp")
@pytest.mark.regression("a restore left half a state", by="fuzzing", of="shim")
def test_both():
    pass

@pytest.mark.regression("a restore left half a state", by="fuzzing", of="shim")
@pytest.mark.parametrize("n", [1, 2])
def test_again(n):
    assert n == {wanted}

@pytest.mark.regression("a pipe was waited for", by="faults", of="Python")
def test_elsewhere():
    pytest.skip("nothing is built")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout with three tests that cover three fixes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text(_CONFIG)
    monkeypatch.setattr(defects, "checkout", lambda: tmp_path)
    return tmp_path


def put(root: Path, text: str) -> None:
    """Write the tests of a checkout."""
    (root / "tests" / "test_some.py").write_text(text)


@pytest.mark.slow
def test_defect_counts_come_from_markers(root: Path) -> None:
    """Each defect counts once. Its tests run, and a fix whose tests did not run is reported."""
    put(root, _TESTS.replace("== {wanted}", "> 0"))
    seen: list[str] = []
    found = {entry.name: entry for entry in defects.entries(StressOptions(), seen.append)}
    assert tuple(found) == defects.names()
    fuzzing = found["found by fuzzing"]
    assert (fuzzing.row["defects fixed"], fuzzing.row["in shim"]) == ("1", "1")
    assert (fuzzing.row["tests that cover the fixes"], fuzzing.row["passed"]) == ("2", "2")
    assert fuzzing.notes == ("a restore left half a state (shim)",)
    assert found["found by random_operations"].row["in llama.cpp"] == "1"
    assert found["found by faults"].skip_reason == "1 need what is not built here"
    assert all(entry.passed for entry in found.values())
    assert "test_both" in seen


@pytest.mark.slow
def test_a_fix_that_does_not_hold_is_a_defect(root: Path) -> None:
    """One parameter is enough, and what another finder found is not blamed."""
    put(root, _TESTS.replace("{wanted}", "1"))
    effort = StressOptions(only=("found by fuzzing", "found by random_operations"))
    schedules, fuzzing = defects.entries(effort, str)
    assert schedules.passed
    assert fuzzing.defects == ("tests/test_some.py::test_again fails",)
    assert fuzzing.row["passed"] == "1"


@pytest.mark.slow
def test_tests_that_cannot_be_run_break_off(root: Path) -> None:
    """Nothing was proved then."""
    put(root, _TESTS + "\nimport nothing_of_that_name\n")
    with pytest.raises(HarnessError, match="pytest ended with status"):
        defects.entries(StressOptions(), str)


@pytest.mark.parametrize(
    "words",
    [
        '"what", by="chance", of="shim"',
        '"what", by="fuzzing", of="elsewhere"',
        '"what", by="fuzzing"',
        '1, by="fuzzing", of="shim"',
        'by="fuzzing", of="shim"',
        '"what" + str(1), by="fuzzing", of="shim"',
        '"what", by="fuzzing", of="shim", at=1',
    ],
)
def test_defect_marker_requires_all_fields(root: Path, words: str) -> None:
    """A marker names the defect, its finder and its place; any other marker fails with the line."""
    put(root, f"import pytest\n\n@pytest.mark.regression({words})\ndef test_it():\n    pass\n")
    with pytest.raises(HarnessError, match=r"test_some\.py:3: expected regression"):
        defects.read(root)


@pytest.mark.parametrize(
    "text",
    [
        "MARK = {}\n\n@MARK\ndef test_it():\n    pass\n",
        "pytestmark = [{}]\n",
        "@{}\nclass TestIt:\n    pass\n",
    ],
)
def test_markers_are_decorators_of_tests(root: Path, text: str) -> None:
    """Another marker would not count, so it fails with its line."""
    mark = 'pytest.mark.regression("what", by="fuzzing", of="shim")'
    put(root, "import pytest\n\n" + text.format(mark))
    with pytest.raises(HarnessError, match=r"test_some\.py:3: write the marker as a decorator"):
        defects.read(root)


def test_an_installed_package_has_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tests, the entry reports that and replaces no other."""
    monkeypatch.setattr(defects, "checkout", lambda: None)
    entry = defects.entries(StressOptions(only=("found by leaks",)), str)[0]
    assert not entry.ran
    assert "needs a checkout" in entry.skip_reason


@pytest.mark.slow
def test_defects_are_listed_below_the_table(root: Path) -> None:
    """Each defect that a test covers is named, with the part of the code."""
    put(root, _TESTS.replace("== {wanted}", "> 0"))
    made = defects.entries(StressOptions(only=("found by fuzzing",)), str)
    assert "\nFound by fuzzing:\n\n- a restore left half a state (shim)\n" in summary.table(made)
