"""Results of cells without a build, and verifiers for any executor."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pyllamakv.errors import UsageError
from pyllamakv.verification.cell import CellResult, CellSpec, FailedRun, ScenarioRow

#: Verdicts of the fake verifiers by release; all others are needed.
VERDICTS = {"0.3.6": "ineffective", "b4980": "untestable", "0.3.36": "native"}
#: Variable with the folder in which the fake verifiers write a file per verified cell.
TRACE = "PYLLAMAKV_TEST_TRACE"


class Series:
    """Replace the shipped series, whose ports do not matter here."""

    lock = None
    order = ("full-defrag", "kv-counters")

    def definition(self, name: str) -> str:
        """Refuse names that are not in the series."""
        if name not in self.order:
            raise UsageError(f"There is no patch {name!r}")
        return name


def row(
    name: str = "fragmented", verdict: str = "needed", kind: str = "fix", **more: Any
) -> ScenarioRow:
    """Make a scenario's row."""
    word = "holds" if kind == "guard" and verdict == "redundant" else verdict
    words = {"stock": "fails 6/6: claim", "patched": "passes 6", "claim": "It fits.", **more}
    return ScenarioRow(name, kind, verdict, word, **words)


def hunk(number: int, state: str = "exact", **more: Any) -> dict[str, Any]:
    """Make the drift of a hunk, as `patch drift --json` writes it."""
    return {
        "file": "src/llama-context.cpp",
        "hunk": number,
        "line": 10 * number,
        "function": "int llama_context::decode(llama_batch & batch)",
        "state": state,
        "offset": 0,
        "fuzz": 0,
        "blanks": False,
        "moved_to": [],
        "changed_in": None,
        "expected": None,
        "found": None,
        **more,
    }


def result(release: str = "0.3.9", verdict: str = "needed", **more: Any) -> CellResult:
    """Make a result with an example of everything."""
    spec = more.pop("spec", CellSpec(release))
    facts: dict[str, Any] = {
        "reason": "stock fails 55 of 77 runs, patched passes all",
        "era": "unified",
        "date": "2025-05-08T00:00:00Z",
        "commit": "8733e0cf" * 5,
        "runs": 77,
        "stock_failed": 55,
        "patches": ("full-defrag",),
        "skipped": {"kv-counters": "requires <more> & better"},
        "variants": {"stock": "s", "patched": "p"},
        "scenarios": (row(), row("fork-then-defrag", "redundant", "guard", stock="passes 6")),
        "drift": (
            {
                "release": release,
                "patch": "full-defrag",
                "state": "fails",
                "base": "0.3.9",
                "reason": "src/llama-context.cpp hunk 2",
                "hunks": [
                    hunk(1, "offset", offset=12),
                    hunk(
                        2,
                        "conflict",
                        fuzz=None,
                        changed_in="0.3.10",
                        moved_to=[{"file": "src/llama-memory.cpp", "likeness": 0.6}],
                    ),
                ],
            },
        ),
        "pictures": (
            {"side": "stock", "label": "when it failed", "runs": [[0, 1], [-1, 1]] * 128},
            {"side": "patched", "label": "after", "runs": [[0, 144], [-1, 112]]},
        ),
        "timelines": (
            {
                "scenario": "fragmented",
                "side": "stock",
                "title": "",
                "frames": [
                    {"number": 1, "op": "decode", "picture": {"label": "", "runs": [[0, 8]]}},
                    {"number": 2, "op": "decode", "detail": "<1>", "failed": "no-slot"},
                ],
            },
        ),
        "seconds": 12.5,
        "machine": "x86_64",
        **more,
    }
    return CellResult(spec, verdict, **facts)


def failing() -> FailedRun:
    """Make a run that fails on patched."""
    return FailedRun("many-moves", "flash q8_0", "data", "layer 0 differs <here>\x1b")


def judge(raw: dict[str, Any], fresh: bool = False) -> dict[str, Any]:
    """Return the verdict of `VERDICTS` for a cell, and record the call."""
    spec = CellSpec.from_json(raw)
    folder = os.environ.get(TRACE)
    if folder:
        file = Path(folder) / f"{spec.release}.{os.getpid()}.{time.monotonic_ns()}"
        file.write_text(spec.name, encoding="utf-8")
    return result(spec.release, VERDICTS.get(spec.release, "needed"), spec=spec).to_json()


def judge_and_die(raw: dict[str, Any], fresh: bool = False) -> dict[str, Any]:
    """Kill the worker at one release, verify the others."""
    if raw["release"] == "0.3.9":
        os._exit(7)
    return judge(raw, fresh)


def judge_then_be_killed(raw: dict[str, Any], fresh: bool = False) -> dict[str, Any]:
    """Verify cells up to one release, and kill the process there."""
    if raw["release"] == "0.3.6":
        raise KeyboardInterrupt
    return judge(raw, fresh)
