"""Verify a release, and store results: of scenario runs, and of matrix cells."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

from pyllamakv.building import variant
from pyllamakv.errors import Untestable
from pyllamakv.home import home
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.scenarios.runner import Run
from pyllamakv.source import git_command
from pyllamakv.source.store import open_store
from pyllamakv.verification import cell, matrix, parallel_runs, result_cache
from pyllamakv.verification.verdict import Verdict
from qa.faults import attempt
from qa.faults.step import FaultTarget


class ResultWriting(FaultTarget):
    """Check that no unreadable result remains."""

    def check_interrupted(
        self, folder: Path, outcome: attempt.AttemptResult, expected: Any
    ) -> list[str]:
        """Check that readers see no partial result, before a repeat replaces it."""
        return self._unreadable(folder)

    def check_completed(self, folder: Path) -> list[str]:
        """Check for unreadable results: each later run would repeat them."""
        return [*super().check_completed(folder), *self._unreadable(folder)]

    def _unreadable(self, folder: Path) -> list[str]:
        found = []
        for path in (folder / "home" / "results").rglob("*.json"):
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                found.append(f"{path.name} cannot be read: {error}")
        return found


class Matrix(ResultWriting):
    """Verify a built release with a scenario, and again with the stored result."""

    name = "matrix"
    # llama.cpp aborts when memory is exhausted, on stock and patched alike: not a defect of a
    # matrix.
    without = ("memory",)
    #: The fastest of the scenarios that stock fails.
    _CHOICE: Final = matrix.MatrixSelection(scenarios=("truncated-prompts",))

    def __init__(self, stock: Path, patched: Path) -> None:
        self._sides = (stock, patched)
        self._release = variant.Variant(stock).manifest.release

    def prepare(self, folder: Path) -> None:
        """Create a data directory with the release's sources and builds."""
        # The same path as in each attempt's copy.
        place = home()
        (place / "built").mkdir(parents=True)
        store, name = open_store(), f"refs/upstream/{self._release}"
        old = self._sides[0].parents[1] / "store.git"
        words = ("fetch", "--quiet", "--update-shallow", str(old), f"{name}:{name}")
        git_command.git(store.path, *words, network=True)
        for side, made in zip(("stock", "patched"), self._sides, strict=True):
            (variant.built() / made.name).symlink_to(made)
            asked = variant.request(f"{self._release}+{side}")
            variant.add_to_index(asked, variant.Variant(variant.built() / made.name))
        self.run(folder)
        shutil.rmtree(place / "results")
        place.rename(folder / "home")

    def run(self, folder: Path) -> Any:
        """Verify, and read the stored result."""
        choice = dataclasses.replace(self._CHOICE, releases=(self._release,))
        found = []
        for _ in range(2):
            (result,) = matrix.run(matrix.plan(choice))
            if result.verdict in (Verdict.UNTESTABLE, Verdict.BROKEN_BUILD, Verdict.BROKEN_CARRY):
                # A matrix turns an error into a cell with this status.
                raise Untestable(result.reason)
            counts = (result.runs, result.stock_failed, result.patched_failed)
            found.append([str(result.verdict), result.reason, *counts])
        return found


class StoreResults(ResultWriting):
    """Store results, load them, and recreate missing ones, as a matrix does."""

    name = "results"

    def run(self, folder: Path) -> Any:
        """Continue after the last stored result."""
        found = []
        for number in range(4):
            key = hashlib.sha256(b"run %d" % number).hexdigest()
            run = Run(f"scenario-{number}", "plain", Outcome("pass"), notes={"n": "x" * 9000})
            kept = parallel_runs.load_run(key)
            if kept is None:
                parallel_runs.store_run(key, run)
                kept = run
            found.append(parallel_runs.to_json(kept))
        spec = cell.CellSpec("9.0.1")
        key = hashlib.sha256(b"cell").hexdigest()
        kept_cell = result_cache.load_result(key)
        if kept_cell is None:
            made = cell.untestable(spec, "tried")
            kept_cell = dataclasses.replace(made, verdict=Verdict.NEEDED)
            result_cache.store_result(key, kept_cell)
        return [found, kept_cell.to_json()]
