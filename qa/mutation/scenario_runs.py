"""Run scenarios on a library that contains all mutants, with one of them active."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.library import open_library
from pyllamakv.binding.remote import Remote
from pyllamakv.home import home
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.verification.parallel_runs import code_digest
from qa.mutation import mutant_schemata, resource_limits

if TYPE_CHECKING:
    from typing import Self

    from pyllamakv.scenarios.outcome import Outcome
    from pyllamakv.scenarios.scenario import Scenario, Setting
    from qa.mutation.mutant_schemata import MutantSchemata

#: Timeout of one call of a scenario in seconds; the slowest takes under one.
_PATIENCE = 30.0


@dataclass(frozen=True)
class ScenarioRun:
    """A scenario, a setting, and the placement of the cache."""

    scenario: Scenario
    setting: Setting
    backend: str = "cpu"

    @property
    def name(self) -> str:
        """Return the name of the run."""
        where = "" if self.backend == "cpu" else f" ({self.backend})"
        return f"{self.scenario.id}{where} [{self.setting.name}]"


class MutantRunner:
    """Run trials on one library with its own environment; ends its workers when it is closed.

    Heap blocks are checked as far as the C library supports it: small overruns have no other
    effect.
    """

    def __init__(self, library: Path, environment: Mapping[str, str] | None = None) -> None:
        self._library = library
        self._environment = dict(environment or {})
        self._benches: dict[str, ScenarioRunner] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for bench in self._benches.values():
            bench.close()

    def run(self, trial: ScenarioRun) -> Outcome:
        """Return the outcome of a trial; a hang or a crash must happen twice."""
        bench = self._benches.get(trial.backend)
        if bench is None:
            bench = self._benches[trial.backend] = ScenarioRunner(
                self._open, DevicePlacement(trial.backend)
            )
        outcome = bench.run(self._library, trial.scenario, trial.setting).outcome
        if outcome.failure == "hang" or outcome.status == "fault":
            outcome = bench.run(self._library, trial.scenario, trial.setting).outcome
        return outcome

    def _open(self, path: Path, environment: dict[str, str]) -> Any:
        own = {**resource_limits.checked_heap(), **environment, **self._environment}
        library = open_library(path, isolated=True, env=own, timeout=_PATIENCE)
        if isinstance(library.native, Remote):
            resource_limits.bound(library.native.pid)
        return library


@dataclass
class SchemataLibrary:
    """A library with all mutants, and the mutants that each trial reaches.

    ``identity`` identifies its content, independent of its path.
    """

    path: Path
    files: Mapping[str, bytes]
    numbers: Mapping[str, int]
    identity: str
    _met: dict[ScenarioRun, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, made: MutantSchemata, build: str) -> SchemataLibrary:
        """Return the library of switched files; ``build`` identifies the way it was built."""
        whole = hashlib.sha256(build.encode() + mutant_schemata.PRELUDE.encode())
        for name, data in sorted(made.files.items()):
            whole.update(name.encode() + b"\0" + data)
        return cls(path, made.files, made.numbers, whole.hexdigest())

    def benches(self, number: int) -> MutantRunner:
        """Return the runners for trials with one mutant."""
        return MutantRunner(self.path, {mutant_schemata.CHOSEN: str(number)})

    def covered(self, trial: ScenarioRun) -> frozenset[int]:
        """Return the mutants that a trial reaches, none if it fails without any."""
        if trial not in self._met:
            self._met[trial] = self._known(trial)
        return self._met[trial]

    def _known(self, trial: ScenarioRun) -> frozenset[int]:
        facts = [self.identity, trial.scenario.digest, trial.name, code_digest()]
        name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        kept = home() / "results" / "mutants" / "met" / name
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                file = Path(folder) / "met"
                with MutantRunner(self.path, {mutant_schemata.MET: str(file)}) as benches:
                    outcome = benches.run(trial)
                if outcome.status == "fault":
                    return frozenset()  # which is the harness's, and not kept
                if outcome.status != "pass" or not file.is_file():
                    file.write_text("", encoding="ascii")
                file.replace(kept)
        return mutant_schemata.read_covered(kept)
