"""A pytest plugin: leave out long tests with `--quick`, and record how long each test takes.

`make test` passes `--quick`; `make test-all` runs every test. Durations are measured on two cores
and kept in ``tests/data/durations.json``, which `--record-durations` writes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[1] / "data" / "durations.json"

#: Seconds from which a test is long, and its duration is recorded.
LONG = 0.15


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("long tests")
    group.addoption("--quick", action="store_true", help="Leave out long tests.")
    group.addoption(
        "--record-durations", action="store_true", help=f"Write durations into {FILE.name}."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker, and record durations, except in workers of xdist."""
    config.addinivalue_line("markers", f"long: takes {LONG:g} seconds or more ({FILE.name})")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(config), "long-tests-summary")


def durations() -> dict[str, float]:
    """Return the recorded seconds by node id; a test that is not listed is quick."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def long_ones(ids: list[str], known: dict[str, float], marked: Container[str] = ()) -> set[str]:
    """Return which of the collected tests are long.

    These are the ``marked`` ones and those that take LONG seconds, except the quickest unmarked
    test of each module.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    for each in ids:
        if each not in marked:
            modules[each.partition("::")[0]].append(each)
    kept = {min(members, key=lambda each: known.get(each, 0.0)) for members in modules.values()}
    return {each for each in ids if each in marked or known.get(each, 0.0) >= LONG} - kept


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark long tests; with `--quick` deselect them."""
    # A fixture of the module is charged to its first test, so those tests have the marker.
    marked = {item.nodeid for item in items if item.get_closest_marker("long")}
    long = long_ones([item.nodeid for item in items], durations(), marked)
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")
    if config.getoption("--quick") and long:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in long])
        items[:] = [item for item in items if item.nodeid not in long]
        config.stash[LEFT_OUT] = sorted(long)
        if hasattr(config, "workeroutput"):
            config.workeroutput["long"] = sorted(long)


LEFT_OUT = pytest.StashKey[list[str]]()


class Summary:
    """Collect durations, and list the omitted tests at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of each phase."""
        self.seconds[report.nodeid] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Add the omitted tests of an xdist worker, because the controller collects none."""
        self.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("long", [])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the omitted tests, the longest first, and write durations if requested."""
        left_out = self.config.stash.get(LEFT_OUT, [])
        if left_out:
            known = durations()
            terminalreporter.section(f"{len(left_out)} long tests left out (make test-all)")
            for each in sorted(left_out, key=lambda name: -known.get(name, 0.0)):
                # A test with the marker may have no record of its own.
                seconds = f"{known[each]:7.1f} s" if each in known else f"{'marked':>9}"
                terminalreporter.write_line(f"{seconds}  {each}")
        if self.config.getoption("--record-durations"):
            # Tests that did not run keep their record: a part of the suite may be measured.
            both = {k: v for k, v in durations().items() if k not in self.seconds}
            both |= {k: round(v, 2) for k, v in self.seconds.items() if v >= LONG}
            kept = dict(sorted(both.items()))
            FILE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
            terminalreporter.write_line(f"{len(kept)} durations in {FILE}")
