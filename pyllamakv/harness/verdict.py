"""Say what stock and patched, run through the same scenarios, mean for a patch on a release.

Pure functions over plain facts: nothing here runs, builds or reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind = Literal["cure", "guard", "feature"]
Status = Literal["pass", "fail", "absent", "skip", "fault"]

#: What a run can do worse than not keeping its claim.
HARM = ("data", "crash", "hang", "lost")
FAILURES = (*HARM, "claim")


class Verdict(StrEnum):
    """Name what a patch is worth on a release."""

    UNTESTABLE = "untestable"
    BROKEN_APPLY = "broken-apply"
    NATIVE = "native"
    BROKEN_BUILD = "broken-build"
    HARMFUL = "harmful"
    INEFFECTIVE = "ineffective"
    NEEDED = "needed"
    REDUNDANT = "redundant"


#: Worst first; a release takes the first that one of its scenarios has.
SEVERITY = (
    Verdict.BROKEN_APPLY,
    Verdict.BROKEN_BUILD,
    Verdict.HARMFUL,
    Verdict.INEFFECTIVE,
    Verdict.NEEDED,
    Verdict.REDUNDANT,
    Verdict.NATIVE,
    Verdict.UNTESTABLE,
)

#: Verdicts under which nothing has to be done.
GOOD = frozenset({Verdict.NEEDED, Verdict.REDUNDANT, Verdict.NATIVE})


@dataclass(frozen=True)
class Outcome:
    """Hold how one run of a scenario ended.

    ``status`` is "pass", "fail", "absent" (the capability does not exist there), "skip" (the
    setting cannot be judged there) or "fault" (of the harness). ``failure`` is empty or one of
    "data" (K, V or logits wrong), "crash", "hang", "lost" (tokens lost or ghosts left), "claim".
    """

    status: Status
    failure: str = ""
    message: str = ""

    @property
    def failed(self) -> bool:
        """Tell whether the run broke the claim of its scenario."""
        return self.status == "fail"


@dataclass(frozen=True)
class Pair:
    """Hold one scenario in one setting on both sides; ``patched`` is None where nothing applied."""

    scenario: str
    kind: Kind
    setting: str
    stock: Outcome
    patched: Outcome | None = None


@dataclass(frozen=True)
class Judgement:
    """Hold a verdict, its reason in one line, the counts behind it and each scenario's own."""

    verdict: Verdict
    reason: str
    runs: int = 0
    stock_failed: int = 0
    patched_failed: int = 0
    scenarios: dict[str, Verdict] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the status that ``git bisect run`` understands."""
        if self.verdict is Verdict.UNTESTABLE:
            return 125
        return 0 if self.verdict in GOOD else 1

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


def judge(
    pairs: Sequence[Pair],
    *,
    untestable: str = "",
    conflict: str = "",
    build_error: str = "",
) -> Judgement:
    """Return the verdict of a release: the first line of the design's table that matches.

    ``untestable`` says why nothing can run here, ``conflict`` why no text of the patch applies
    strictly, ``build_error`` is the first error of the patched build; each is empty otherwise.
    """
    counted = [pair for pair in pairs if _countable(pair.stock)]
    stock_failed = sum(_ailing(pair) for pair in counted)
    if untestable:
        return Judgement(Verdict.UNTESTABLE, untestable)
    if conflict:
        return _unapplied(counted, conflict, stock_failed)
    if build_error:
        return Judgement(
            Verdict.BROKEN_BUILD, build_error, len(counted), stock_failed, 0, {}
        )
    scenarios = {
        name: judge_scenario([pair for pair in pairs if pair.scenario == name])
        for name in dict.fromkeys(pair.scenario for pair in pairs)
    }
    judged = [verdict for verdict in scenarios.values() if verdict is not Verdict.UNTESTABLE]
    if not judged:
        reason = _first_message(pairs) or "no scenario could run"
        return Judgement(Verdict.UNTESTABLE, reason, scenarios=scenarios)
    verdict = worst(judged)
    patched = [pair for pair in pairs if pair.patched is not None and _countable(pair.patched)]
    patched_failed = sum(pair.patched is not None and pair.patched.failed for pair in patched)
    reason = _reason(verdict, pairs, scenarios, len(counted), stock_failed, patched_failed)
    return Judgement(verdict, reason, len(counted), stock_failed, patched_failed, scenarios)


def judge_scenario(pairs: Sequence[Pair]) -> Verdict:
    """Return the verdict of one scenario over its settings, all of them run on both sides."""
    ran = [pair for pair in pairs if pair.patched is not None and _countable(pair.patched)]
    if not ran:
        return Verdict.UNTESTABLE
    if any(harms(pair) for pair in ran):
        return Verdict.HARMFUL
    if any(pair.patched is not None and not _passes(pair.patched) for pair in ran):
        # A guard must hold on patched; failing it just as stock does is no harm, and no cure.
        return Verdict.INEFFECTIVE
    if any(pair.kind == "cure" and _ailing(pair) for pair in ran):
        return Verdict.NEEDED
    return Verdict.REDUNDANT


def harms(pair: Pair) -> bool:
    """Tell whether patched fails in a way that stock does not.

    Another class of harm than stock's counts, and so does any failure where stock passes.
    """
    if pair.patched is None or not pair.patched.failed:
        return False
    if pair.stock.status == "pass":
        return True
    return pair.patched.failure in HARM and pair.patched.failure != pair.stock.failure


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that a release takes from its scenarios."""
    return min(verdicts, key=SEVERITY.index)


def _unapplied(counted: Sequence[Pair], conflict: str, stock_failed: int) -> Judgement:
    cures = [pair for pair in counted if pair.kind == "cure"]
    if not cures:
        return Judgement(Verdict.UNTESTABLE, f"{conflict}; no cure could run on stock")
    failing = [pair for pair in cures if _ailing(pair)]
    count = len(counted)
    if failing:
        names = ", ".join(dict.fromkeys(pair.scenario for pair in failing))
        reason = f"{conflict}; stock fails {names}"
        return Judgement(Verdict.BROKEN_APPLY, reason, count, stock_failed)
    reason = f"stock passes all {len(cures)} runs of the cures by itself"
    return Judgement(Verdict.NATIVE, reason, count, stock_failed)


def _reason(
    verdict: Verdict,
    pairs: Sequence[Pair],
    scenarios: dict[str, Verdict],
    runs: int,
    stock_failed: int,
    patched_failed: int,
) -> str:
    if verdict in (Verdict.HARMFUL, Verdict.INEFFECTIVE):
        names = [name for name, found in scenarios.items() if found is verdict]
        broken = next(
            pair
            for pair in pairs
            if pair.scenario == names[0]
            and pair.patched is not None
            and not _passes(pair.patched)
            and (harms(pair) or verdict is Verdict.INEFFECTIVE)
        )
        assert broken.patched is not None
        what = broken.patched.failure or broken.patched.status
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return (
            f"patched fails {patched_failed} of {runs} runs, stock {stock_failed}; "
            f"{broken.scenario} [{broken.setting}]{more}: {what}: {broken.patched.message}"
        )
    if verdict is Verdict.NEEDED:
        return f"stock fails {stock_failed} of {runs} runs, patched passes all"
    return f"stock passes every cure, patched passes all {runs} runs"


def _first_message(pairs: Sequence[Pair]) -> str:
    outcomes = [outcome for pair in pairs for outcome in (pair.stock, pair.patched) if outcome]
    return next((outcome.message for outcome in outcomes if outcome.message), "")


def _countable(outcome: Outcome) -> bool:
    return outcome.status not in ("skip", "fault")


def _passes(outcome: Outcome) -> bool:
    return outcome.status == "pass"


def _ailing(pair: Pair) -> bool:
    """Tell whether stock does not do what the scenario claims."""
    return pair.stock.failed or (pair.kind == "cure" and pair.stock.status == "absent")
