"""List the defects that other sections found, and run the regression tests of their fixes.

A marker of a test states the defect, the method that found it, and the component::

@pytest.mark.regression("a restore left half a state", by="fuzzing", of="shim")

Several tests may cover one fix, and one test several. The markers are read from the sources of the
tests, which are in a checkout and not in the wheel.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeGuard
from xml.etree import ElementTree

from pyllamakv.errors import HarnessError
from pyllamakv.home import checkout
from qa import SECTIONS, child_environment
from qa.entry import Entry, StressOptions, Tick, skipped_entry, strip_directories

#: Methods that found defects: the other sections, operator mutation (removed), and audits of code
#: that reads foreign files.
FINDERS: Final = (*(name for name in SECTIONS if name != "defects"), "mutation", "hostile input")
#: Components of a defect. Defects of llama.cpp are worked around, refused or patched here.
PLACES: Final = ("llama.cpp", "patches", "shim", "Python")
_OUTCOMES: Final = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(frozen=True)
class Defect:
    """A defect, the method that found it, its component, and the tests that cover the fix.

    ``tests`` are pytest node ids without parameters, such as ``tests/test_x.py::test_y``.
    """

    what: str
    found_by: str
    location: str
    tests: tuple[str, ...]


def names() -> tuple[str, ...]:
    """Return the names of all entries: one per finder."""
    return tuple(f"found by {finder}" for finder in FINDERS)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run every regression test once, without a time limit; return an entry per finder.

    Raises HarnessError for an invalid marker, or if pytest does not finish.
    """
    wanted = {name: by for name, by in zip(names(), FINDERS, strict=True) if effort.wants(name)}
    root = checkout()
    if root is None or importlib.util.find_spec("pytest") is None:
        lacking = "a checkout, which contains the tests" if root is None else "pytest"
        return [skipped_entry("defects", name, f"needs {lacking}") for name in wanted]
    found = [each for each in read(root) if each.found_by in wanted.values()]
    outcomes = run(root, sorted({test for each in found for test in each.tests}), tick)
    return [
        evaluate(name, [each for each in found if each.found_by == by], outcomes)
        for name, by in wanted.items()
    ]


def read(root: Path) -> list[Defect]:
    """Return the defects in the markers of all tests below ``root``, each once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for what, by, of, test in _marks(path):
            name = path.relative_to(root).as_posix()
            found.setdefault((what, by, of), []).append(f"{name}::{test}")
    return [Defect(*key, tuple(tests)) for key, tests in found.items()]


def _marks(path: Path) -> Iterator[tuple[str, str, str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    decorators = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in filter(_is_mark, reversed(node.decorator_list)):
            decorators.add(mark)
            yield *_mark(mark, f"{path.name}:{mark.lineno}"), node.name
    for node in ast.walk(tree):
        if _is_mark(node) and node not in decorators:
            # The tests that it marks are not known.
            msg = f"{path.name}:{node.lineno}: write the marker as a decorator of each test"
            raise HarnessError(msg)


def _is_mark(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.regression"


def _mark(mark: ast.Call, place: str) -> tuple[str, str, str]:
    try:
        (what,) = (ast.literal_eval(each) for each in mark.args)
        said = {str(each.arg): ast.literal_eval(each.value) for each in mark.keywords}
    except ValueError:
        what, said = None, {}
    by, of = said.pop("by", None), said.pop("of", None)
    if said or not isinstance(what, str) or by not in FINDERS or of not in PLACES:
        msg = (
            f'{place}: expected regression("what was wrong", by=..., of=...) with by one of '
            f"{', '.join(FINDERS)} and of one of {', '.join(PLACES)}: {ast.unparse(mark)}"
        )
        raise HarnessError(msg)
    return what, by, of


def run(root: Path, tests: Sequence[str], tick: Tick) -> dict[str, list[str]]:
    """Run tests; return the outcomes (passed, failed, skipped) of all parameter sets of each."""
    if not tests:
        return {}
    with tempfile.TemporaryDirectory(prefix="pyllamakv-defects-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-v", "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests]
        with subprocess.Popen(
            command, cwd=root, env=child_environment.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                said = [_told(line, tick) for line in process.stdout]
            except BaseException:
                process.kill()
                raise
        if process.returncode not in (0, 1):
            text = strip_directories("".join(said)[-600:])
            raise HarnessError(f"pytest ended with status {process.returncode}: {text}")
        return _outcomes(ElementTree.parse(report).iter("testcase"))


def _told(line: str, tick: Tick) -> str:
    if line.startswith("tests/"):
        tick(re.split(r"\W", line.partition("::")[2])[0])
    return line


def _outcomes(cases: Iterator[ElementTree.Element]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for case in cases:
        test = f"{case.get('file')}::{case.get('name', '').split('[')[0]}"
        ends = [_OUTCOMES[part.tag] for part in case if part.tag in _OUTCOMES]
        found.setdefault(test, []).append(ends[0] if ends else "passed")
    return found


def evaluate(name: str, found: Collection[Defect], outcomes: dict[str, list[str]]) -> Entry:
    """Return the entry of one finder.

    A fix is covered if at least one of its tests passed and none failed.
    """
    tests = sorted({test for each in found for test in each.tests})
    broken = [test for test in tests if "failed" in outcomes.get(test, ["failed"])]
    passed = [test for test in tests if "passed" in outcomes.get(test, []) and test not in broken]
    unseen = [each for each in found if not _seen(each, outcomes)]
    row = {"defects fixed": str(len(found))}
    row |= {f"in {place}": str(sum(each.location == place for each in found)) for place in PLACES}
    row["tests that cover the fixes"] = str(len(tests))
    row["passed"] = str(len(passed))
    return Entry(
        "defects",
        name,
        row,
        tuple(f"{test} fails" for test in broken),
        data={"found": [{**asdict(each), "tests": [*each.tests]} for each in found]},
        skip_reason=f"{len(unseen)} need what is not built here" if unseen else "",
        notes=tuple(f"{each.what} ({each.location})" for each in found),
    )


def _seen(defect: Defect, outcomes: dict[str, list[str]]) -> bool:
    return any(outcome != "skipped" for test in defect.tests for outcome in outcomes.get(test, ()))
