"""Run llama-cpp-python's own tests on the ordinary libraries of a variant."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pyllamakv.building import dropin
from qa.peer import hub

if TYPE_CHECKING:
    from pyllamakv.building.llama_cpp_python_env import LlamaCppPythonEnv
    from pyllamakv.building.variant import Variant

#: Timeout in seconds; a suite takes seconds.
SECONDS = 1200

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"


@dataclass(frozen=True)
class Suite:
    """The outcome of each test, by name; ``crash`` is the reason if the run ended early."""

    outcomes: dict[str, str] = field(default_factory=dict)
    crash: str = ""

    def counts(self) -> dict[str, int]:
        """Return how many tests had each outcome."""
        return dict(Counter(self.outcomes.values()))

    def __str__(self) -> str:
        counts = self.counts()
        words = [
            f"{counts[what]} {text}"
            for what, text in (
                (PASSED, "passed"),
                (FAILED, "failed"),
                (SKIPPED, "skipped"),
                (NOT_RUN, f"not run ({hub.REASON})"),
            )
            if counts.get(what)
        ]
        return ", ".join([*words, self.crash] if self.crash else words) or "no tests"

    def worse_than(self, stock: Suite) -> tuple[str, ...]:
        """Return the tests that pass on stock and not here."""
        return tuple(
            name
            for name, outcome in stock.outcomes.items()
            if outcome == PASSED and self.outcomes.get(name) != PASSED
        )


def environment(variant: Variant) -> dict[str, str]:
    """Return the environment in which llama-cpp-python loads a variant only."""
    described = dropin.describe(variant)
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST_", "PYTHON", "LLAMA_CPP_LIB", "LLAMA_", "GGML_", "COV_"))
    }
    return kept | {
        described.variable: described.value,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Without it, ggml starts a debugger on a process that aborts.
        "GGML_NO_BACKTRACE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run(peer: LlamaCppPythonEnv, variant: Variant, *, seconds: float = SECONDS) -> Suite:
    """Run the suite. A crash or a hang is a result."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-dropin-") as name:
        folder = Path(name)
        report = folder / "report.xml"
        # The name must differ from all modules that the tests import.
        shutil.copy(hub.__file__, folder / "pyllamakv_model_hub.py")
        command = [
            *(os.fspath(peer.python), "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider"),
            *("-p", "pyllamakv_model_hub", "-o", "addopts=", f"--junitxml={report}"),
        ]
        env = environment(variant) | {"PYTHONPATH": name}
        try:
            done = subprocess.run(
                command,
                cwd=peer.suite,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Suite(crash=f"no end after {seconds:.0f} s")
        if not report.is_file():
            lines = (done.stdout + done.stderr).decode("utf-8", "replace").strip().splitlines()
            detail = f": {lines[-1]}" if lines else ""
            return Suite(crash=f"it ended with status {done.returncode}{detail}")
        return Suite(read(report.read_bytes()))


def read(report: bytes) -> dict[str, str]:
    """Return the outcomes in a JUnit report; skipped tests requested the model hub."""
    found: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome = PASSED
        if (skip := case.find("skipped")) is not None:
            outcome = NOT_RUN if hub.REASON in (skip.get("message") or "") else SKIPPED
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = FAILED
        found[name] = outcome
    return found
