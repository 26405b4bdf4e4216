"""Test that all output formats have the same data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from fakes.cell_results import failing, result

from pyllamakv.errors import UsageError
from pyllamakv.verification import matrix_reports
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.expected import Accepted, compare

RESULTS = (
    result(),
    result("0.3.6", "ineffective", failing=(failing(),), reason="many | moves\nfail"),
    result("b4980", "untestable", runs=0, scenarios=(), variants={}, reason="npm | is missing"),
)
DAYS = range(11, 18)
TABLE = {"b4980+patched cpu": Accepted("untestable")}
COMPARED = compare(RESULTS, TABLE)


def test_matrix_json_is_valid_against_its_schema() -> None:
    """The schema contains every key, and refuses others."""
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(json.dumps(matrix_reports.document(RESULTS, COMPARED)))
    checker = jsonschema.Draft202012Validator(matrix_reports.schema())
    checker.check_schema(matrix_reports.schema())
    checker.validate(document)
    assert document["regressions"] == 1
    assert document["verdicts"] == {"ineffective": 1, "needed": 1, "untestable": 1}
    assert [cell["outcome"] for cell in document["cells"]] == ["new", "worse", "same"]
    document["cells"][0]["verdict"] = "splendid"
    assert not checker.is_valid(document)


def test_merged_documents_keep_the_last_result_of_a_cell(tmp_path: Path) -> None:
    """Artefacts of several machines are one matrix, with the last result of each cell."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(matrix_reports.document(RESULTS, COMPARED)))
    newer = (result(verdict="native"),)
    two.write_text(json.dumps(matrix_reports.document(newer, compare(newer, {}))))
    merged = {r.spec.release: r for r in matrix_reports.merge([one, two])}
    assert merged["0.3.9"].verdict == "native"
    assert merged["0.3.6"] == RESULTS[1]
    one.write_text('{"cells": [{"x": 1}]}')
    with pytest.raises(UsageError, match=r"one\.json"):
        matrix_reports.merge([one])


def test_markdown_keeps_its_columns() -> None:
    """Bars and newlines in messages do not break the table."""
    lines = matrix_reports.markdown(RESULTS).splitlines()
    assert lines[0] == "| release | era | backend | verdict | measured | fixed |"
    start = "| 0.3.9 | unified | cpu | needed | stock fails 55 of 77 runs, patched 0 |"
    assert lines[2].startswith(start)
    assert lines[4] == "| b4980 | unified | cpu | untestable | npm \\| is missing |  |"
    assert len(lines) == 5


def test_markdown_folds_older_releases() -> None:
    """The newest release is the first row; each part is its own table, as GitHub requires."""
    cells = [replace(RESULTS[0], spec=CellSpec(f"b{day}"), date=f"2026-01-{day}") for day in DAYS]
    text = matrix_reports.markdown(cells)
    recent, folded = text.split("\n<details>\n<summary>2 older verdicts</summary>\n\n")
    rows = [re.findall(r"^\| (b\d+) ", part, re.MULTILINE) for part in (recent, folded)]
    assert rows == [["b17", "b16", "b15", "b14", "b13"], ["b12", "b11"]]
    assert folded.splitlines()[:2] == recent.splitlines()[:2]
    assert folded.endswith(" |\n\n</details>\n")
    assert matrix_reports.markdown(cells[2:]) == recent
    assert "<summary>1 older verdict</summary>" in matrix_reports.markdown(cells[1:])


def test_markdown_counts_carried_patches() -> None:
    """A verdict on merged patches is marked in the table."""
    (line,) = matrix_reports.markdown((result(carried={"compaction": "0.3.30"}),)).splitlines()[2:]
    assert "| needed (1 carried) |" in line


def test_markdown_has_the_runs_and_dates_of_devices() -> None:
    """Runs that a device skipped are counted separately."""
    row = RESULTS[0].scenarios[0]
    spec = replace(RESULTS[0].spec, backend="vulkan")
    rows = (row, replace(row, id="other", verdict="untestable"))
    device = replace(RESULTS[0], spec=spec, scenarios=rows, verified="2026-11-22T01:02:03+00:00")
    lines = matrix_reports.markdown([device]).splitlines()
    assert lines[0].endswith("| fixed | scenarios that ran | verified |")
    assert lines[2].endswith("| 1 of 2 | 2026-11-22 |")
    assert lines[2].count("|") == lines[1].count("|")


def test_markdown_counts_more_than_two_fixes() -> None:
    """A few fixes are listed, many are counted."""
    one = replace(RESULTS[0].scenarios[0], verdict="needed")
    rows = [replace(one, id=name) for name in ("a", "b", "c")]
    few = matrix_reports.markdown([replace(RESULTS[0], scenarios=tuple(rows[:2]))])
    many = matrix_reports.markdown([replace(RESULTS[0], scenarios=tuple(rows))])
    assert few.endswith("| a, b |\n")
    assert many.endswith("| 3 scenarios |\n")


def test_junit_fails_on_regressions_alone() -> None:
    """An accepted result passes or is skipped; control characters are escaped."""
    cells = [replace(RESULTS[0], scenarios=(replace(RESULTS[0].scenarios[0], stock="\x1b"),))]
    root = ET.fromstring(matrix_reports.junit([*RESULTS, *cells], [*COMPARED, COMPARED[0]]))
    suites = {suite.get("name"): suite for suite in list(root)[:3]}
    assert [suites[n].get("failures") for n in ("0.3.9", "0.3.6", "b4980")] == ["0", "1", "0"]
    assert suites["0.3.6"].find(".//failure").get("type") == "ineffective"
    assert suites["b4980"].find(".//skipped").get("message") == "npm | is missing"
    assert suites["0.3.9"].get("tests") == "3"


def test_workflow_commands_are_one_line_each() -> None:
    """Regressions are errors for GitHub, and other changes notices."""
    lines = matrix_reports.workflow(COMPARED)
    assert [line.split(" ")[0] for line in lines] == ["::notice", "::error"]
    assert lines[1].startswith("::error title=pyllamakv 0.3.6::0.3.6: worse")
    assert "%0A" in lines[1] and "\n" not in lines[1]


def test_github_plan_has_the_arguments_of_each_job() -> None:
    """Each job has the arguments that verify its cell."""
    specs = [
        CellSpec("0.3.9"),
        CellSpec("b4980", isolate="full-defrag", backend="cuda", native=False),
        CellSpec("0.3.8", ("a", "b"), scenarios=("x",), quick=True),
    ]
    jobs = matrix_reports.github(specs)["include"]
    assert jobs[0] == {
        "name": "0.3.9",
        "release": "0.3.9",
        "backend": "cpu",
        "args": "0.3.9 --backend cpu",
    }
    assert jobs[1]["args"] == "b4980 --backend cuda --isolate full-defrag --portable"
    assert jobs[2]["args"] == "0.3.8 --backend cpu --series a,b --scenario x --quick"
