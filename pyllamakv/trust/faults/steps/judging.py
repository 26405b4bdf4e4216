"""Keep results: of runs of scenarios, and of cells of the matrix."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from pyllamakv.harness import cell, remembered, running
from pyllamakv.harness.lab import Run
from pyllamakv.harness.verdict import Outcome, Verdict
from pyllamakv.trust.faults.step import Step


class Results(Step):
    """Remember results, recall them, and make anew what is not there: as a matrix does."""

    name = "results"

    def run(self, folder: Path) -> Any:
        """Go on where the results end."""
        found = []
        for number in range(4):
            key = hashlib.sha256(b"run %d" % number).hexdigest()
            run = Run(f"scenario-{number}", "plain", Outcome("pass"), notes={"n": "x" * 9000})
            kept = running.recall(key)
            if kept is None:
                running.remember(key, run)
                kept = run
            found.append(running.to_json(kept))
        spec = cell.CellSpec("9.0.1")
        key = hashlib.sha256(b"cell").hexdigest()
        kept_cell = remembered.recall(key)
        if kept_cell is None:
            made = cell.untestable(spec, "tried")
            kept_cell = dataclasses.replace(made, verdict=Verdict.NEEDED)
            remembered.remember(key, kept_cell)
        return [found, kept_cell.to_json()]

    def wrong(self, folder: Path) -> list[str]:
        """Find results that cannot be read: a reader would run them again for ever."""
        found = []
        for path in (folder / "home" / "results").rglob("*.json"):
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                found.append(f"{path.name} cannot be read: {error}")
        return found
