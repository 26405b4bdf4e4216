"""Write a matrix for machines and for readmes: JSON, JUnit, GitHub, markdown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from pyllamakv.errors import UsageError
from pyllamakv.printable import printable
from pyllamakv.verification.cell import CellResult
from pyllamakv.verification.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.verification.cell import CellSpec
    from pyllamakv.verification.expected import Comparison

SCHEMA = Path(__file__).with_name("matrix.schema.json")

#: Maximum number of names in a column.
FEW = 2
#: Rows of a table above the fold.
RECENT = 5

_LEVELS = {"worse": "error", "better": "notice", "changed": "notice", "new": "notice"}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a matrix."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def document(results: Sequence[CellResult], compared: Sequence[Comparison]) -> dict[str, Any]:
    """Return a matrix as plain JSON values, as ``matrix.schema.json`` describes it."""
    verdicts = [result.verdict for result in results]
    return {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdicts": {word: verdicts.count(word) for word in sorted(set(verdicts))},
        "regressions": sum(one.regression for one in compared),
        "cells": [
            {**result.to_json(), "expected": one.expected or None, "outcome": one.outcome}
            for result, one in zip(results, compared, strict=True)
        ],
    }


def merge(files: Iterable[Path]) -> tuple[CellResult, ...]:
    """Return the results in documents of several machines; the last of a cell counts.

    Raises UsageError with the path for a file that is not a matrix.
    """
    found: dict[CellSpec, CellResult] = {}
    for file in files:
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            for facts in raw["cells"]:
                own = {key: facts[key] for key in facts if key not in ("expected", "outcome")}
                result = CellResult.from_json(own)
                found[result.spec] = result
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{file} is not a result of `pyllamakv matrix run --json`: {error}"
            raise UsageError(msg) from error
    return tuple(sorted(found.values(), key=lambda r: (r.spec.backend, r.date, r.spec.name)))


def markdown(results: Iterable[CellResult]) -> str:
    """Return the table of verdicts for a readme, newest release first; older ones are folded.

    On devices it has what ran there, and when.
    """
    shown = sorted(results, key=lambda result: result.date, reverse=True)
    devices = any(result.spec.backend != "cpu" for result in shown)
    recent, older = _rows(shown[:RECENT], devices), _rows(shown[RECENT:], devices)
    if len(shown) <= RECENT:
        return recent
    count = len(shown) - RECENT
    summary = f"<summary>{count} older verdict{'' if count == 1 else 's'}</summary>"
    return f"{recent}\n<details>\n{summary}\n\n{older}\n</details>\n"


def _rows(results: Sequence[CellResult], devices: bool) -> str:
    heads = ["release", "era", "backend", "verdict", "measured", "fixed"]
    heads += ["scenarios that ran", "verified"] if devices else []
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for result in results:
        spec = result.spec
        cells = [spec.what, result.era, spec.backend, _verdict(result), result.measured]
        cells.append(_fixed(result))
        if devices:
            ran = [row for row in result.scenarios if row.verdict != Verdict.UNTESTABLE]
            cells += [f"{len(ran)} of {len(result.scenarios)}", result.verified[:10]]
        rows.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return "\n".join(rows) + "\n"


def _verdict(result: CellResult) -> str:
    """Return the verdict, and how many patches were merged from ports of other releases."""
    return f"{result.verdict} ({len(result.carried)} carried)" if result.carried else result.verdict


def _fixed(result: CellResult) -> str:
    """Return the names of fixed scenarios, or their number if there are many."""
    names = [row.id for row in result.scenarios if row.verdict == Verdict.NEEDED]
    return ", ".join(names) if len(names) <= FEW else f"{len(names)} scenarios"


def junit(results: Iterable[CellResult], compared: Iterable[Comparison]) -> str:
    """Return a JUnit document: a suite per cell, a case per scenario, and one for the verdict.

    Only regressions are failures. An accepted verdict is not a regression, even a bad one.
    """
    root = ET.Element("testsuites", name="pyllamakv matrix")
    for result, one in zip(results, compared, strict=True):
        suite = ET.SubElement(root, "testsuite", name=result.spec.name)
        for row in result.scenarios:
            case = ET.SubElement(suite, "testcase", classname=result.spec.name, name=row.id)
            outcomes = f"{row.word}: stock {row.stock}, patched {row.patched}"
            ET.SubElement(case, "system-out").text = _xml(outcomes)
            if row.verdict == "untestable":
                ET.SubElement(case, "skipped", message=_xml(outcomes))
        time = f"{result.seconds:.1f}"
        case = ET.SubElement(
            suite, "testcase", classname=result.spec.name, name="verdict", time=time
        )
        if one.regression:
            ET.SubElement(case, "failure", type=result.verdict, message=_xml(str(one)))
        elif result.verdict == "untestable":
            ET.SubElement(case, "skipped", message=_xml(result.reason))
        suite.set("tests", str(len(result.scenarios) + 1))
        suite.set("failures", str(int(one.regression)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def workflow(compared: Iterable[Comparison]) -> list[str]:
    """Return regressions as workflow commands of GitHub, one line each."""
    lines = []
    for one in compared:
        level = _LEVELS.get(one.outcome)
        if level:
            title = _escaped(f"pyllamakv {one.spec.name}").replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{level} title={title}::{_escaped(str(one))}")
    return lines


def github(specs: Iterable[CellSpec]) -> dict[str, Any]:
    """Return a plan as GitHub's ``strategy.matrix``; ``args`` are for `pyllamakv matrix run`."""
    return {
        "include": [
            {
                "name": spec.name,
                "release": spec.release,
                "backend": spec.backend,
                "args": _args(spec),
            }
            for spec in specs
        ]
    }


def _args(spec: CellSpec) -> str:
    words = [spec.release, "--backend", spec.backend]
    if spec.isolate or spec.series:
        words += (
            ["--isolate", spec.isolate] if spec.isolate else ["--series", ",".join(spec.series)]
        )
    for name in spec.scenarios:
        words += ["--scenario", name]
    words += ["--portable"] * (not spec.native) + ["--quick"] * spec.quick
    return " ".join(words)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _xml(text: str) -> str:
    # The output of a crashed worker may contain characters that XML cannot represent.
    return printable(text, keep="\n\t")
