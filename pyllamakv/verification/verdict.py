"""Decide the verdict on a patch from scenario runs on stock and patched.

Pure functions over plain facts: nothing here runs, builds or reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pyllamakv.scenarios.outcome import HARM, Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Verdict(StrEnum):
    """The verdicts on a patch for a release."""

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
class Pair:
    """One scenario in one setting on both sides; ``patched`` is None if no port applied.

    What stock can run and patched cannot, a model or a context that it does not make, is the
    patch's doing: a failure of patched.
    """

    scenario: str
    kind: Kind
    setting: str
    stock: Outcome
    patched: Outcome | None = None

    def __post_init__(self) -> None:
        """Count a run that only stock could do as failed by patched."""
        ran = _countable(self.stock) and self.stock.status != "absent"
        if self.patched and self.patched.status == "skip" and ran:
            message = f"cannot run a setting that stock can: {self.patched.message}"
            failure = self.patched.failure or "claim"
            object.__setattr__(self, "patched", Outcome("fail", failure, message))

    @property
    def broken(self) -> bool:
        """Return whether patched fails in a run that counts."""
        if self.patched is None or _absent_on_both(self):
            return False
        return _countable(self.patched) and self.patched.status != "pass"


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason in one line, its counts, and the verdict of each scenario."""

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


def decide(
    pairs: Sequence[Pair],
    *,
    untestable: str = "",
    conflict: str = "",
    build_error: str = "",
) -> Decision:
    """Return the verdict of a release: the worst one of its scenarios.

    ``untestable`` is the reason why nothing can run here, ``conflict`` the reason why a patch does
    not apply strictly (its scenarios have no patched side), and ``build_error`` the first error of
    the patched build. Each is empty otherwise.
    """
    names = list(dict.fromkeys(pair.scenario for pair in pairs))
    pairs = [pair for pair in pairs if not _absent_on_both(pair)]
    counted = [pair for pair in pairs if _countable(pair.stock)]
    stock_failed = sum(_stock_fails(pair) for pair in counted)
    if untestable:
        return Decision(Verdict.UNTESTABLE, untestable)
    if build_error:
        return Decision(Verdict.BROKEN_BUILD, build_error, len(counted), stock_failed)
    scenarios = {
        name: decide_scenario([pair for pair in pairs if pair.scenario == name]) for name in names
    }
    verdict = worst(scenarios.values())
    patched_failed = sum(pair.patched is not None and pair.patched.failed for pair in pairs)
    counts = len(counted), stock_failed, patched_failed
    reason = _reason(verdict, pairs, scenarios, conflict, counts)
    return Decision(verdict, reason, *counts, scenarios)


def decide_scenario(pairs: Sequence[Pair]) -> Verdict:
    """Return the verdict of one scenario over its settings, all of them run on both sides."""
    if all(pair.patched is None for pair in pairs):
        fixes = [pair for pair in pairs if pair.kind == "fix" and _countable(pair.stock)]
        if not fixes:
            return Verdict.UNTESTABLE
        return Verdict.BROKEN_APPLY if any(map(_stock_fails, fixes)) else Verdict.NATIVE
    ran = [pair for pair in pairs if pair.patched is not None and _countable(pair.patched)]
    if not ran:
        return Verdict.UNTESTABLE
    if any(is_harmful(pair) for pair in ran):
        return Verdict.HARMFUL
    if any(pair.broken for pair in ran):
        # A guard must hold on patched; failing it just as stock does is no harm, and no fix.
        return Verdict.INEFFECTIVE
    if any(pair.kind == "fix" and _stock_fails(pair) for pair in ran):
        return Verdict.NEEDED
    return Verdict.REDUNDANT


def is_harmful(pair: Pair) -> bool:
    """Return whether patched fails in a way that stock does not.

    A failure of another class than stock's counts, and so does every failure if stock passes.
    """
    if pair.patched is None or not pair.patched.failed:
        return False
    if pair.stock.status == "pass":
        return True
    return pair.patched.failure in HARM and pair.patched.failure != pair.stock.failure


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that a release takes from its scenarios; of none: untestable."""
    return min(verdicts, key=SEVERITY.index, default=Verdict.UNTESTABLE)


def _reason(
    verdict: Verdict,
    pairs: Sequence[Pair],
    scenarios: dict[str, Verdict],
    conflict: str,
    counts: tuple[int, int, int],
) -> str:
    runs, stock_failed, patched_failed = counts
    inside = [pair for pair in pairs if scenarios[pair.scenario] is verdict]
    # Fix scenarios explain more than guards, so they come first.
    inside.sort(key=lambda pair: pair.kind != "fix")
    named = list(dict.fromkeys(pair.scenario for pair in inside))
    match verdict:
        case Verdict.UNTESTABLE:
            return next(filter(None, map(_says, pairs)), conflict or "no scenario could run")
        case Verdict.BROKEN_APPLY:
            failing = dict.fromkeys(pair.scenario for pair in inside if _stock_fails(pair))
            return f"stock fails {', '.join(failing)}; {conflict or 'no port applies'}"
        case Verdict.NATIVE:
            fixes = sum(pair.kind == "fix" for pair in inside)
            return f"stock passes all {fixes} runs of the fix scenarios; {conflict or 'no port'}"
        case Verdict.HARMFUL | Verdict.INEFFECTIVE:
            broken = next(
                pair
                for pair in inside
                if pair.patched is not None
                and pair.patched.status != "pass"
                and _countable(pair.patched)
                and is_harmful(pair) is (verdict is Verdict.HARMFUL)
            )
            assert broken.patched is not None
            what = broken.patched.failure or broken.patched.status
            more = f" (and {', '.join(named[1:])})" if len(named) > 1 else ""
            return (
                f"stock fails {stock_failed} of {runs} runs, patched {patched_failed}: "
                f"{broken.scenario} [{broken.setting}]{more}: {what}: {broken.patched.message}"
            )
        case Verdict.NEEDED:
            return f"stock fails {stock_failed} of {runs} runs, patched passes all"
        case _:
            return f"stock passes every fix scenario, patched passes all {runs} runs"


def _says(pair: Pair) -> str:
    return pair.stock.message or (pair.patched.message if pair.patched else "")


def _countable(outcome: Outcome) -> bool:
    return outcome.status not in ("skip", "fault")


def _absent_on_both(pair: Pair) -> bool:
    """Return whether neither side has the capability that the scenario needs.

    For example, if neither upstream nor a patch has a defragmentation, a scenario that requests one
    has no verdict.
    """
    if pair.kind == "feature" or pair.stock.status != "absent":
        return False
    return pair.patched is None or pair.patched.status == "absent"


def _stock_fails(pair: Pair) -> bool:
    """Return whether stock fails the claim of the scenario."""
    return pair.stock.failed or (pair.kind == "fix" and pair.stock.status == "absent")
