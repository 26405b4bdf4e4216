"""Find the newest release that a whole series applies to, builds and verifies on.

Applying is tried on every release, newest first, because it is cheap. Between the first one that
the series applies to and the next one, commits of a local repository are bisected. Building and
verifying are not cheap: among the releases that the series applies to, the newest good one is found
by bisection. Bisection assumes one change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import Untestable, UsageError
from pyllamakv.patching import conflict_report, port_choice, status
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import bisect, matrix
from pyllamakv.verification.bisect import BisectStep
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.verdict import GOOD, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyllamakv.patching.conflict_report import UncarriedPatch
    from pyllamakv.patching.status import PatchStatus
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class Newest:
    """The newest release that a series fits, and the first one after it that it does not fit.

    ``release`` is empty if there is none, and ``first`` if nothing newer fails. ``verdict`` is
    empty if nothing was verified. ``states`` has the state of each patch on ``release``. ``reason``
    and ``conflicts`` describe the failure on ``first``.
    """

    release: str = ""
    verdict: str = ""
    measured: str = ""
    states: tuple[tuple[str, str], ...] = ()
    first: str = ""
    reason: str = ""
    conflicts: tuple[UncarriedPatch, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "release": self.release or None,
            "verdict": self.verdict or None,
            "patches": dict(self.states),
            "first_failure": self.first or None,
            "reason": self.reason or None,
            "conflicts": [each.as_json() for each in self.conflicts],
        }

    def lines(self) -> list[str]:
        """Return the result in lines."""
        verdict = f": {self.verdict}: {self.measured}" if self.verdict else ""
        found = [f"newest: {self.release or 'none'}{verdict}"]
        found += [f"  {id_}: {state}" for id_, state in self.states if state != "not-applicable"]
        if self.first:
            found.append(f"first failure: {self.first}: {self.reason}")
        for patch in self.conflicts:
            places = [str(conflict) for conflict in patch.conflicts] or [patch.reason]
            found += [f"  {patch.id}: {place}" for place in dict.fromkeys(places)]
        return found


def newest(
    releases: Iterable[Release],
    *,
    patches: str = "",
    scenarios: Sequence[str] = (),
    quick: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Newest:
    """Search releases for the newest one that a series fits.

    A patch that a release contains, or that its `patch.toml` excludes from it, does not count. With
    ``verify``, stock and patched are built, and the verdict must be good.
    """
    store = open_store()
    series = port_choice.load_series(patches)
    chain = sorted(releases, key=lambda release: release.order)
    failed: Release | None = None
    states: dict[str, tuple[PatchStatus, ...]] = {}

    def fits(release: Release) -> bool:
        if progress:
            progress(f"applying to {release.name}", 0, None)
        found = states[release.name] = status.of_release(release, series, store, progress)
        good = any(one.good for one in found)
        return good and not any(one.bad or one.state == "unknown" for one in found)

    while chain and not fits(chain[-1]):
        failed = chain.pop()
    if chain and failed:
        last_fitting, failed = _nearest(chain[-1], failed, fits)
        chain += [last_fitting] if last_fitting is not chain[-1] else []

    def judge(name: str) -> BisectStep:
        spec = CellSpec(name, patches=patches, scenarios=tuple(scenarios), quick=quick)
        (result,) = matrix.run([spec], progress=progress)
        verdict = "good" if result.verdict in GOOD else result.verdict
        reasons[name] = result.verdict, result.measured or result.reason, result.reason
        return BisectStep(name, verdict, result.reason)

    reasons: dict[str, tuple[str, str, str]] = {}
    last, bad = (chain[-1].name if chain else ""), ""
    if last and verify and judge(last).verdict != "good":
        fitting = [release.name for release in chain[:-1] if fits(release)]
        last, bad = _bisected([*fitting, last], judge)
    conflicts: tuple[UncarriedPatch, ...] = ()
    reason = f"{reasons[bad][0]}: {reasons[bad][2]}" if bad else ""
    if not bad and failed:
        bad = failed.name
        conflicts = conflict_report.of_release(failed, series=series, progress=progress)
        reason = f"{len(conflicts)} of {len(series)} patches require manual work"
    verdict, measured, _ = reasons.get(last, ("", "", ""))
    shown = tuple((one.id, one.state) for one in states.get(last, ()))
    return Newest(last, verdict, measured, shown, bad, reason, conflicts)


def _nearest(
    good: Release, bad: Release, fits: Callable[[Release], bool]
) -> tuple[Release, Release]:
    """Return neighbouring commits between two releases: one that a series fits, and the next.

    Without their history, they are returned.
    """
    try:
        names = spec_resolver.history(good, bad)
    except UsageError:
        return good, bad
    low, high = 0, len(names) - 1 if names[0] == good.name else 0
    while high - low > 1:
        middle = (low + high) // 2
        release = spec_resolver.fetch_git(names[middle])
        if fits(release):
            low, good = middle, release
        else:
            high, bad = middle, release
    return good, bad


def _bisected(names: Sequence[str], judge: Any) -> tuple[str, str]:
    """Return the last good and the first other release of a chain whose last one is not good."""

    def other(name: str) -> BisectStep:
        # All bad verdicts are one side of the search.
        step: BisectStep = judge(name)
        known = step.verdict in ("good", Verdict.UNTESTABLE)
        return step if known else BisectStep(name, "bad", step.reason)

    if len(names) < 2 or judge(names[0]).verdict != "good":
        return "", names[-1]
    try:
        found = bisect.bisect(names[0], names[-1], names, other)
    except Untestable:
        return "", names[-1]
    return found.last.release, found.first.release
