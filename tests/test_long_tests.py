"""`--quick` leaves out long tests, keeps one of each module, and lists what it left out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import long_tests
import pytest

MODULE = """
def test_one(): pass
def test_two(): pass
"""


def test_the_quickest_of_each_module_stays() -> None:
    """Also if all of a module are long; a test without a record is quick."""
    known = {"a.py::x": 9.0, "a.py::y": 2.0, "b.py::x": 3.0, "c.py::x": long_tests.LONG}
    ids = ["a.py::x", "a.py::y", "b.py::x", "b.py::new", "c.py::x", "c.py::y", "d.py::x"]
    assert long_tests.long_ones(ids, known) == {"a.py::x", "b.py::x", "c.py::x"}
    marked = {"a.py::y", "d.py::x"}
    assert long_tests.long_ones(ids, known, marked) == {"a.py::y", "b.py::x", "c.py::x", "d.py::x"}


@pytest.mark.parametrize("parallel", [(), ("-n", "2")], ids=["one", "xdist"])
def test_quick_reports_what_it_left_out(pytester: pytest.Pytester, parallel: tuple) -> None:
    """The summary has node id and seconds; without `--quick` every test runs."""
    kits = pytester.mkdir("kits")
    plugin = Path(shutil.copy(long_tests.__file__, kits))
    data = pytester.mkdir("data")
    (data / "durations.json").write_text(json.dumps({"test_a.py::test_two": 7.25}), "utf-8")
    pytester.makepyfile(test_a=MODULE)
    pytester.makeconftest('pytest_plugins = ["long_tests"]')
    pytester.syspathinsert(plugin.parent)
    pytester.makeini("[pytest]\npythonpath = kits\n")
    quick = pytester.runpytest_subprocess("--quick", *parallel)
    quick.assert_outcomes(passed=1, deselected=0 if parallel else 1)
    quick.stdout.fnmatch_lines(["*1 long tests left out*", "*7.2 s  test_a.py::test_two"])
    pytester.runpytest_subprocess(*parallel).assert_outcomes(passed=2)


def test_durations_are_recorded(pytester: pytest.Pytester) -> None:
    """Long tests are recorded with the sum of their phases; other tests keep their record."""
    shutil.copy(long_tests.__file__, pytester.mkdir("kits"))
    (pytester.mkdir("data") / "durations.json").write_text('{"test_b.py::test_z": 3.0}', "utf-8")
    pytester.makeini("[pytest]\npythonpath = kits\n")
    pytester.makeconftest('pytest_plugins = ["long_tests"]')
    pytester.makepyfile(test_a="import time\ndef test_x(): time.sleep(0.6)\ndef test_y(): pass\n")
    pytester.runpytest_subprocess("--record-durations").assert_outcomes(passed=2)
    found = json.loads((pytester.path / "data" / "durations.json").read_text("utf-8"))
    assert list(found) == ["test_a.py::test_x", "test_b.py::test_z"], "test_b did not run"
    assert found["test_a.py::test_x"] >= 0.6


def test_every_recorded_duration_is_of_a_test() -> None:
    """A renamed test would silently become quick."""
    root = Path(__file__).resolve().parent.parent
    for each in long_tests.durations():
        file, first, *_ = each.partition("[")[0].split("::")
        assert re.search(rf"\b{first}\b", (root / file).read_text("utf-8")), each
