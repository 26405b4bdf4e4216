"""Test the mutants of one patch within a time limit, and count the outcomes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from qa.entry import Entry, Tick
from qa.mutation.equivalent_mutants import EquivalentMutant
from qa.mutation.mutant import Made, Mutant
from qa.mutation.mutant_evaluation import MutantEvaluator
from qa.mutation.mutant_results import NOT_EVALUATED, OUTCOMES, PASSING, MutantResult

SECTION = "mutation"


@dataclass(frozen=True)
class MutationResult:
    """The outcomes of the tested mutants, and the number of all."""

    made: Made
    equivalent: int
    answers: tuple[tuple[Mutant, MutantResult], ...] = field(default=(), repr=False)

    def count(self, outcome: str) -> int:
        """Count the mutants with an outcome."""
        return sum(answer.outcome == outcome for _, answer in self.answers)

    def entry(self, name: str, seed: int) -> Entry:
        """Return the row of the results; a mutant that survived or has no result is a defect."""
        catchers = Counter(a.by for _, a in self.answers if a.outcome == "scenario")
        counts = {outcome: self.count(outcome) for outcome in (*OUTCOMES, *PASSING)}
        tried = len(self.answers) - sum(counts[outcome] for outcome in PASSING)
        caught = sum(answer.killed for _, answer in self.answers)
        row = {
            "mutants": str(len(self.made.mutants)),
            "equivalent": str(self.equivalent),
            "tried": str(tried),
            "same code": str(counts["same code"]),
            "caught": f"{caught} of {tried - counts['same code']}",
            "by the compiler": str(counts["compiler"]),
            "by the header's tests": str(counts["driver"]),
            "by scenarios": str(counts["scenario"]),
            "caught most": ", ".join(f"{by} {n}" for by, n in catchers.most_common(3)),
        }
        survivors = [mutant for mutant, answer in self.answers if answer.outcome == "survivor"]
        data = {**counts, "left out": self.made.left_out, "catchers": dict(catchers)}
        defects = tuple(f"no test detects {each}" for each in survivors) + tuple(
            f"{mutant} has no result: {answer.message}"
            for mutant, answer in self.answers
            if answer.outcome == NOT_EVALUATED
        )
        if not tried and len(self.made.mutants) > self.equivalent:
            # An entry without tests cannot find a defect.
            none = f"none of {len(self.made.mutants)} mutants was tested: increase --seconds"
            defects = defects or (none,)
        return Entry(SECTION, name, row, defects, seed, data)


def run(
    made: Made,
    known: Iterable[EquivalentMutant],
    judges: Sequence[MutantEvaluator],
    *,
    seed: int,
    deadline: float,
    most: int | None = None,
    tick: Tick = lambda about: None,
) -> MutationResult:
    """Test mutants in random order until the deadline (of the monotonic clock).

    ``most`` is the maximum number of mutants. The evaluators run in parallel. Stored results cost
    no time and always count.
    """
    known = list(known)
    left = [each for each in made.mutants if not any(entry.covers(each) for entry in known)]
    equivalent = len(made.mutants) - len(left)
    random.Random(seed).shuffle(left)
    answers: list[tuple[Mutant, MutantResult]] = []
    waiting = iter(left[:most])
    lock = Lock()

    def work(judge: MutantEvaluator) -> None:
        while True:
            with lock:
                mutant = next(waiting, None)
            if mutant is None:
                return
            answer = judge.recall(mutant)
            if answer is None:
                if time.monotonic() > deadline:
                    continue
                tick(f"{len(answers)} of {len(left)}: {mutant}")
                answer = judge.answer(mutant, deadline)
            with lock:
                answers.append((mutant, answer))

    if len(judges) == 1:
        work(judges[0])
    else:
        with ThreadPoolExecutor(len(judges)) as pool:
            for future in [pool.submit(work, judge) for judge in judges]:
                future.result()
    return MutationResult(made, equivalent, tuple(answers))
