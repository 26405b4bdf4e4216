"""Find the release where a verdict changed, in the release chain.

A plain bisection assumes one change. Verdicts over years of upstream change back and forth, so both
ends are verified first: they must differ. Known verdicts of other releases that contradict a single
change are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyllamakv.errors import Untestable, UsageError
from pyllamakv.verification.verdict import Verdict


@dataclass(frozen=True)
class BisectStep:
    """The verdict on one release."""

    release: str
    verdict: str
    reason: str = ""

    @property
    def testable(self) -> bool:
        """Return whether the release could be verified."""
        return self.verdict != Verdict.UNTESTABLE


@dataclass(frozen=True)
class BisectResult:
    """A change of the verdict: ``last`` is the last release before it, ``first`` the first after.

    ``suspects`` are the untestable releases between the two; any of them may be the first.
    ``untestable`` are all releases without a verdict.
    """

    last: BisectStep
    first: BisectStep
    steps: tuple[BisectStep, ...]
    suspects: tuple[str, ...] = ()
    untestable: tuple[BisectStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {"schema": 1, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.first.release} is the first release that is {self.first.verdict}; "
            f"{self.last.release} is {self.last.verdict}.",
            f"  {self.first.release}: {self.first.reason}",
        ]
        if self.suspects:
            names = ", ".join(self.suspects)
            lines.append(f"It may have changed in {names} already, which cannot be verified here.")
        if self.untestable:
            names = ", ".join(f"{step.release} is {step.verdict}" for step in self.untestable)
            lines.append(f"There was more than one change: {names}. Bisect between these as well.")
        return "\n".join(lines)


def bisect(
    good: str,
    bad: str,
    chain: Sequence[str],
    judge: Callable[[str], BisectStep],
    known: Callable[[str], BisectStep | None] = lambda _: None,
) -> BisectResult:
    """Find the first release from ``good`` to ``bad`` whose verdict differs from good's.

    ``chain`` has the releases in order; the search may go back in time. ``known`` has verdicts that
    need no verification. Raises UsageError if the ends are equal, are not in the chain, or have the
    same verdict, and Untestable if one of them cannot be verified.
    """
    way = _way(good, bad, chain)
    steps = {good: _end(good, judge), bad: _end(bad, judge)}
    before, after = steps[good].verdict, steps[bad].verdict
    if before == after:
        msg = (
            f"{good} and {bad} are both {before}, so there is no single change between them; "
            "`pyllamakv matrix show` has the releases in between"
        )
        raise UsageError(msg)
    low, high = 0, len(way) - 1
    while True:
        open_ = [n for n in range(low + 1, high) if way[n] not in steps]
        if not open_:
            break
        middle = min(open_, key=lambda n: abs(2 * n - low - high))
        step = steps[way[middle]] = judge(way[middle])
        if not step.testable:
            continue
        low, high = (middle, high) if step.verdict == before else (low, middle)
    facts = [(place, steps.get(name) or known(name)) for place, name in enumerate(way)]
    odd = tuple(
        step
        for place, step in facts
        if step and step.testable and (step.verdict == before) != (place <= low)
    )
    return BisectResult(
        steps[way[low]],
        steps[way[high]],
        tuple(steps[name] for name in way if name in steps),
        tuple(way[low + 1 : high]),
        odd,
    )


def _way(good: str, bad: str, chain: Sequence[str]) -> list[str]:
    for name in (good, bad):
        if name not in chain:
            msg = f"{name} is not in the release chain: {', '.join(chain)}"
            raise UsageError(msg)
    start, end = chain.index(good), chain.index(bad)
    if start == end:
        msg = f"no release is between {good} and {bad}; name two releases"
        raise UsageError(msg)
    return list(chain[start : end + 1] if start < end else chain[end : start + 1][::-1])


def _end(name: str, judge: Callable[[str], BisectStep]) -> BisectStep:
    step = judge(name)
    if not step.testable:
        msg = f"{name} cannot be verified here, so the search cannot start from it: {step.reason}"
        raise Untestable(msg)
    return step
