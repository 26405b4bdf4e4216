"""Find what detects a mutant: its header's tests, the scenarios, or the compiler.

A scenario detects a mutant if it fails on it, as `check` counts failures, and passes with the
original patches. The patch's own scenarios run first, and among these the ones that detected most
so far; then all others, then a device behind a server.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.verification import parallel_runs
from pyllamakv.verification.verdict import Pair
from qa.mutation import compiling, header_tests, mutant_results
from qa.mutation.compiling import CompilerCrash
from qa.mutation.mutant import HUNK
from qa.mutation.mutant_results import NOT_EVALUATED, UNFINISHED, MutantResult
from qa.mutation.scenario_runs import MutantRunner, ScenarioRun, SchemataLibrary

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from pyllamakv.scenarios.outcome import Outcome
    from pyllamakv.scenarios.scenario import Scenario
    from qa.mutation.mutant import Mutant
    from qa.mutation.mutant_builder import MutantBuilder

#: Detector of mutants that do not compile: its result for a text never changes.
COMPILER = "the compiler"


@dataclass
class MutantEvaluator:
    """Test the mutants of a patched release with all scenarios, a patch's own first.

    ``own`` are the ids that a patch names, ``logic`` the drivers of its headers by path. Mutants in
    the ``switched`` library need no build of their own. If ``stock`` is not built, a run that a
    mutant cannot start counts as one that stock cannot start either. ``quick`` runs only the quick
    settings and no device, as `check --quick` does.
    """

    patched: Variant
    workshop: MutantBuilder
    scenarios: Sequence[Scenario]
    own: Sequence[str]
    logic: dict[str, header_tests.HeaderTest]
    switched: SchemataLibrary | None = None
    stock: Variant | None = None
    quick: bool = False
    caught: Counter[str] = field(default_factory=Counter)

    def answer(self, mutant: Mutant, deadline: float) -> MutantResult:
        """Return the result for a mutant, and store it for `recall`."""
        try:
            found = self._ask(mutant, deadline)
        except CompilerCrash as error:
            found = MutantResult(NOT_EVALUATED, message=str(error))
        mutant_results.store_result(self._key(mutant, found), found, self._digests(mutant))
        self.caught[found.by] += found.killed
        return found

    def recall(self, mutant: Mutant) -> MutantResult | None:
        """Return the stored result for a mutant, if there is one."""
        digests = self._digests(mutant)
        for outcome in ("driver", "scenario"):
            found = mutant_results.load_result(self._key(mutant, MutantResult(outcome)), digests)
            if found is not None and (found.by != COMPILER or compiling.refusal(found.message)):
                return found
        return None

    def _key(self, mutant: Mutant, answer: MutantResult) -> str:
        if answer.outcome == "driver":
            # A header is equal in every release, and so are the results of its tests.
            return mutant_results.key("driver", mutant.file, _text(mutant))
        return mutant_results.key("failed scenario", self.patched.id, mutant.id)

    def _digests(self, mutant: Mutant) -> dict[str, str]:
        """Return the digest of each detector; the empty name has that of all together."""
        found = {each.id: each.digest for each in self.scenarios}
        if mutant.file in self.logic:
            driver = self.logic[mutant.file]
            found[driver.source.stem] = driver.digest
        # A run without a failure depends on the runner and on stock as well.
        texts = "".join(found.values()) + parallel_runs.code_digest()
        texts += self.stock.id if self.stock is not None else ""
        texts += "quick" if self.quick else ""
        every = hashlib.sha256(texts.encode()).hexdigest()
        return found | {"": every, COMPILER: ""}

    def _ask(self, mutant: Mutant, deadline: float) -> MutantResult:
        number = self.switched.numbers.get(mutant.id) if self.switched else None
        found = self._by_header(mutant, number)
        if found is None and number is not None and self.switched is not None:
            found = self._by_number(self.switched, number, deadline)
        if found is not None:
            return found
        place = self.workshop.folder / "mutant"
        built = self.workshop.build(mutant.files, place, all_of_it=mutant.operator == HUNK)
        try:
            if built.error:
                return MutantResult("compiler", COMPILER, built.error)
            if built.library is None:
                return MutantResult("same code")
            if number is not None:
                return MutantResult("survivor")
            return self._by_itself(built.library, deadline)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _by_header(self, mutant: Mutant, number: int | None) -> MutantResult | None:
        """Run the tests of the mutant's header, if it is in one."""
        driver = self.logic.get(mutant.file) if mutant.operator != HUNK else None
        if driver is None:
            return None
        said = driver.choose(number) if number is not None else None
        if said is None:
            said = driver.judge(mutant.files[mutant.file] or b"")
        if said.error:
            return MutantResult("compiler", COMPILER, said.error)
        return MutantResult("driver", driver.source.stem, said.group) if said.group else None

    def _by_number(
        self, library: SchemataLibrary, number: int, deadline: float
    ) -> MutantResult | None:
        """Run the trials that reach a mutant of the switched library; None if none detects it."""
        unjudged = None
        with library.benches(number) as benches:
            for trial in self._trials():
                if time.monotonic() > deadline:
                    return MutantResult(UNFINISHED)
                if number in library.covered(trial):
                    outcome = benches.run(trial)
                    if self._fails(trial, outcome):
                        return _said(trial, outcome)
                    if outcome.status == "fault":
                        unjudged = _said(trial, outcome)
        return unjudged

    def _by_itself(self, library: Path, deadline: float) -> MutantResult:
        """Run all trials on a separately built mutant."""
        unjudged = None
        with MutantRunner(library) as benches:
            for trial in self._trials():
                if time.monotonic() > deadline:
                    return MutantResult(UNFINISHED)
                outcome = benches.run(trial)
                if self._fails(trial, outcome) and self._passes(trial):
                    return _said(trial, outcome)
                if outcome.status == "fault":
                    unjudged = _said(trial, outcome)
        return unjudged or MutantResult("survivor")

    def _fails(self, trial: ScenarioRun, outcome: Outcome) -> bool:
        """Return whether `check` would count a mutant's run as a failure."""
        stock = outcome
        if self.stock is not None and outcome.status in ("absent", "skip"):
            task = self._task(trial, self.stock, "stock")
            stock = parallel_runs.run_tasks([task])[task].outcome
        each = trial.scenario
        return Pair(each.id, each.kind, trial.setting.name, stock, outcome).broken

    def _passes(self, trial: ScenarioRun) -> bool:
        """Return whether the original patches pass a run; cached like any other run."""
        task = self._task(trial, self.patched)
        return parallel_runs.run_tasks([task])[task].outcome.status == "pass"

    def _trials(self) -> Iterator[ScenarioRun]:
        """Return all runs in order: the patch's own scenarios before all others.

        First a few settings of each, then the rest; behind a server only the patch's own.
        """
        ours = [each for each in self.scenarios if each.id in self.own]
        others = [each for each in self.scenarios if each.id not in self.own]
        for group in (ours, others):
            group.sort(key=lambda each: (-self.caught[each.id], self._seconds(each)))
            yield from (ScenarioRun(each, setting) for each in group for setting in each.few)
            for each in group if not self.quick else ():
                left = [setting for setting in each.settings if setting not in each.few]
                yield from (ScenarioRun(each, setting) for setting in left)
        for each in ours if not self.quick else ():
            yield from (ScenarioRun(each, setting, "rpc") for setting in each.few)

    def _seconds(self, each: Scenario) -> float:
        """Return the time of a scenario with the original patches, if known."""
        tasks = [self._task(ScenarioRun(each, setting), self.patched) for setting in each.few]
        known = [parallel_runs.load_run(task.key) for task in tasks]
        return sum(run.seconds for run in known if run)

    def _task(
        self, trial: ScenarioRun, built: Variant, side: str = "patched"
    ) -> parallel_runs.RunTask:
        digest = built.manifest.library_sha256
        return parallel_runs.RunTask(
            side, built.folder, digest, trial.scenario, trial.setting, trial.backend
        )


def _said(trial: ScenarioRun, outcome: Outcome) -> MutantResult:
    kind = NOT_EVALUATED if outcome.status == "fault" else "scenario"
    said = f"{trial.name} {outcome.failure or outcome.status}: {outcome.message}"
    return MutantResult(kind, trial.scenario.id, " ".join(said.split())[:300])


def _text(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.files[mutant.file] or b"").hexdigest()
