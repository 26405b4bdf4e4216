"""Decide the verdict on a patch from scenario runs on stock and patched.

Pure functions over plain facts: nothing here runs, builds or reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pyllamakv.scenarios.outcome import HARM, Kind, Outcome
from pyllamakv.source import verified

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Verdict(StrEnum):
    """The verdicts on a patch for a release, worst first.

    A release takes the worst verdict of its scenarios.
    """

    BROKEN_APPLY = "broken-apply"
    BROKEN_BUILD = "broken-build"
    BROKEN_CARRY = "broken-carry"
    HARMFUL = "harmful"
    INEFFECTIVE = "ineffective"
    NEEDED = "needed"
    WORKS = "works"
    REDUNDANT = "redundant"
    HARMLESS = "harmless"
    NATIVE = "native"
    UNTESTABLE = "untestable"


SEVERITY = tuple(Verdict)

#: Verdicts with exit status 0.
GOOD = frozenset(map(Verdict, verified.GOOD))

#: Failure classes of the patched side, worst first, with their names in headlines.
RANKS = {
    "data": "wrong data",
    "lost": "lost tokens or stray cells",
    "crash": "a crash",
    "hang": "a hang",
    "claim": "a failed claim",
}
#: Whose defect a harmful run shows, worst first.
ORIGINS = ("introduces", "introduces or reaches", "reaches")


@dataclass(frozen=True)
class Pair:
    """One scenario in one setting on both sides; ``patched`` is None if no port applied.

    A setting that stock can run and patched cannot is a failure of patched, and so is a capability
    that only patched lacks in a run that stock passes. ``claimed`` is whether
    the patch states that it keeps the claim of the scenario: a shipped series does so for all
    scenarios, a patch without a list of scenarios for none.
    """

    scenario: str
    kind: Kind
    setting: str
    stock: Outcome
    patched: Outcome | None = None
    claimed: bool = True

    def __post_init__(self) -> None:
        """Count a run that only stock could do as failed by patched."""
        ran = _countable(self.stock) and self.stock.status != "absent"
        if self.patched and self.patched.status == "skip" and ran:
            what = "cannot run a setting that stock can"
        elif self.patched and self.patched.status == "absent" and self.stock.status == "pass":
            what = "lacks a capability that stock has"
        else:
            return
        failed = Outcome("fail", self.patched.failure or "claim", f"{what}: {self.patched.message}")
        object.__setattr__(self, "patched", failed)

    @property
    def broken(self) -> bool:
        """Return whether patched fails in a run that counts."""
        if self.patched is None or _absent_on_both(self):
            return False
        return _countable(self.patched) and self.patched.status != "pass"

    @property
    def fixed(self) -> bool:
        """Return whether patched passes a run of a fix scenario that stock fails."""
        if self.patched is None or self.patched.status != "pass":
            return False
        return self.kind == "fix" and _stock_fails(self)

    @property
    def decides(self) -> bool:
        """Return whether the run shows what the patch does, or whether stock needs it."""
        if _absent_on_both(self):
            return False
        return self.patched is not None or (self.kind == "fix" and _countable(self.stock))

    @property
    def gained(self) -> bool:
        """Return whether patched has a feature that stock lacks."""
        if self.patched is None or self.patched.status != "pass":
            return False
        return self.kind == "feature" and self.stock.status == "absent"


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason in one line, its counts, and the verdict of each scenario.

    ``fixes`` and ``breaks`` contain the settings of each scenario in which patched is better or
    worse than stock. ``shared`` counts the runs that both sides fail alike.
    """

    verdict: Verdict
    reason: str
    runs: int = 0
    stock_failed: int = 0
    patched_failed: int = 0
    scenarios: dict[str, Verdict] = field(default_factory=dict)
    fixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    breaks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shared: int = 0

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
    headers: Sequence[str] = (),
    partly: bool = False,
    contained: bool = False,
    carried: Sequence[str] = (),
    undecided: Sequence[str] = (),
) -> Decision:
    """Return the verdict of a release: the worst one of its scenarios.

    ``untestable`` is the reason why nothing can run here, ``conflict`` the reason why a patch does
    not apply strictly (its scenarios have no patched side), and ``build_error`` the first error of
    the patched build. ``headers`` are the failures of header tests: with any, the verdict is at
    best harmful. ``partly`` is whether the release already contains some changes of the patch: the
    verdict is then broken-apply, never native. ``contained`` is whether it contains all of them: a
    patch without claims is then native. If such a patch does not apply for another reason, no
    scenario can show that upstream does its job, and the verdict is broken-apply. ``carried`` are
    the patches that were merged from a port of another release: if they do not compile, fail a
    claim or do harm, the verdict is broken-carry, because the same patches passed on that release.
    ``undecided`` are patches that were not applied and that no run decides on: with any, the
    verdict is broken-apply.
    Each is empty otherwise.
    """
    merged = f"carried {', '.join(carried)}: " if carried else ""
    names = list(dict.fromkeys(pair.scenario for pair in pairs))
    unproven = not any(pair.claimed or pair.patched for pair in pairs)
    pairs = [
        pair
        for pair in pairs
        if not _absent_on_both(pair) and (unproven or pair.claimed or pair.patched)
    ]
    counted = [pair for pair in pairs if _countable(pair.stock)]
    stock_failed = sum(_stock_fails(pair) for pair in counted)
    if untestable:
        return Decision(Verdict.UNTESTABLE, untestable)
    if build_error:
        broken = Verdict.BROKEN_CARRY if carried else Verdict.BROKEN_BUILD
        return Decision(broken, merged + build_error, len(counted), stock_failed)
    if partly:
        return Decision(Verdict.BROKEN_APPLY, conflict, len(counted), stock_failed)
    if conflict and unproven:
        unapplied = Verdict.NATIVE if contained else Verdict.BROKEN_APPLY
        return Decision(unapplied, conflict, len(counted), stock_failed)
    scenarios = {
        name: decide_scenario([pair for pair in pairs if pair.scenario == name]) for name in names
    }
    verdict = worst(scenarios.values())
    patched_failed = sum(pair.patched is not None and pair.patched.failed for pair in pairs)
    counts = len(counted), stock_failed, patched_failed
    reason = _reason(verdict, pairs, scenarios, conflict, counts)
    if headers and SEVERITY.index(verdict) > SEVERITY.index(Verdict.HARMFUL):
        verdict, reason = Verdict.HARMFUL, headers[0]
    if carried and verdict in (Verdict.HARMFUL, Verdict.INEFFECTIVE):
        verdict, reason = Verdict.BROKEN_CARRY, merged + reason
    if undecided:
        verdict, reason = Verdict.BROKEN_APPLY, conflict
    fixes = _settings(pair for pair in pairs if pair.fixed or pair.gained)
    breaks = _settings(filter(is_harmful, pairs))
    shared = sum(pair.stock.failed and pair.broken and not is_harmful(pair) for pair in pairs)
    return Decision(verdict, reason, *counts, scenarios, fixes, breaks, shared)


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
    if any(pair.broken and pair.claimed for pair in ran):
        # A claimed guard must hold on patched; a failure that stock shares is no harm, and no fix.
        return Verdict.INEFFECTIVE
    if any(pair.fixed for pair in ran):
        return Verdict.NEEDED
    if any(pair.gained for pair in ran):
        return Verdict.WORKS
    # A patch without claims cannot be redundant.
    redundant = any(pair.kind != "guard" and pair.claimed for pair in ran)
    return Verdict.REDUNDANT if redundant else Verdict.HARMLESS


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
        case Verdict.HARMFUL:
            return _harm(pairs, inside)
        case Verdict.INEFFECTIVE:
            broken = min((p for p in inside if p.broken and p.claimed), key=_rank)
            assert broken.patched is not None
            what = broken.patched.failure or broken.patched.status
            more = f" (and {', '.join(named[1:])})" if len(named) > 1 else ""
            return (
                f"stock fails {stock_failed} of {runs} runs, patched {patched_failed}: "
                f"{broken.scenario} [{describe(broken.setting)}]{more}: {what}: "
                f"{broken.patched.message}"
            )
        case Verdict.NEEDED if all(pair.claimed for pair in pairs):
            return f"stock fails {stock_failed} of {runs} runs, patched passes all"
        case Verdict.NEEDED:
            return f"fixes {_listed(p for p in pairs if p.fixed)}, and breaks none of {runs} runs"
        case Verdict.WORKS:
            gained = dict.fromkeys(pair.scenario for pair in pairs if pair.gained)
            return f"adds {', '.join(gained)}, and breaks none of {runs} runs"
        case Verdict.HARMLESS if not any(map(_differs, pairs)):
            return f"no outcome of {runs} runs of {_named(scenarios)} differs from stock"
        case Verdict.HARMLESS if all(pair.kind == "guard" for pair in pairs):
            # Guards must hold on patched, whatever stock does: they prove no fix.
            return f"stock fails {stock_failed} of {runs} guard runs, patched {patched_failed}"
        case Verdict.HARMLESS:
            return f"no outcome of {runs} runs of {_named(scenarios)} is worse than on stock"
        case _ if all(pair.claimed for pair in pairs):
            return f"stock passes every fix scenario, patched passes all {runs} runs"
        case _:
            named = list(dict.fromkeys(pair.scenario for pair in inside if pair.claimed))
            return f"stock passes {', '.join(named)}, and patched breaks none of {runs} runs"


def _harm(pairs: Sequence[Pair], inside: Sequence[Pair]) -> str:
    """Return the headline for harm: its worst class, in which setting, and whose defect it is."""
    harmful = [pair for pair in inside if is_harmful(pair)]
    origins = {pair: origin(pair, pairs) for pair in harmful}
    worst_pair = min(
        harmful,
        key=lambda pair: (
            _rank(pair),
            ORIGINS.index(origins[pair]),
            any(_shows(each, pair) for each in pairs),
        ),
    )
    assert worst_pair.patched is not None
    failure = RANKS[worst_pair.patched.failure or "claim"]
    what = f"{origins[worst_pair]} {failure}"
    shown = next((pair for pair in pairs if _shows(pair, worst_pair)), None)
    if origins[worst_pair] == "reaches" and shown:
        what += f" that stock has as well (see {shown.scenario})"
    head = f"{what}: {worst_pair.scenario} [{describe(worst_pair.setting)}]"
    fixed = [pair for pair in pairs if pair.fixed or pair.gained]
    tail = f"; fixes {_listed(fixed)}" if fixed else ""
    return f"{head}: {worst_pair.patched.message}; breaks {_listed(harmful)}{tail}"


def origin(pair: Pair, pairs: Sequence[Pair]) -> str:
    """Return whose defect a harmful run shows, one of `ORIGINS`.

    A patch introduces the defect if stock passes the scenario, or if patched fails it in the same
    class in a setting where stock fails nothing in that class. It reaches a defect of stock if
    stock fails another scenario in that class in each of these settings. If stock ran no other
    scenario in one of them, both are possible. A setting is layout and types here: a variable of
    the environment selects code of the patch.
    """
    if not pair.stock.failed or pair.patched is None:
        return ORIGINS[0]
    same = [
        each
        for each in pairs
        if each.scenario == pair.scenario
        and is_harmful(each)
        and each.patched is not None
        and each.patched.failure == pair.patched.failure
    ]
    unshown = [each for each in same if not any(_shows(other, each) for other in pairs)]
    if not unshown:
        return ORIGINS[2]
    ran = [any(_beside(other, each) for other in pairs) for each in unshown]
    return ORIGINS[0] if any(ran) else ORIGINS[1]


def _shows(each: Pair, pair: Pair) -> bool:
    """Return whether stock fails another scenario in the class and setting of a harmful run."""
    assert pair.patched is not None
    return _beside(each, pair) and each.stock.failure == pair.patched.failure


def _beside(each: Pair, pair: Pair) -> bool:
    """Return whether stock ran another scenario in the setting of a run, and it counts."""
    there = each.scenario != pair.scenario and _countable(each.stock)
    return there and each.setting.split(" ")[:2] == pair.setting.split(" ")[:2]


def _rank(pair: Pair) -> int:
    assert pair.patched is not None
    return list(RANKS).index(pair.patched.failure or "claim")


def _settings(pairs: Iterable[Pair]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        found[pair.scenario] = (*found.get(pair.scenario, ()), pair.setting)
    return found


def _listed(pairs: Iterable[Pair]) -> str:
    """Return ``fragmented (6 runs), many-moves (1 run)``, three scenarios at most."""
    found = _settings(pairs)
    shown = [f"{name} ({_runs(len(where))})" for name, where in list(found.items())[:3]]
    if len(found) > len(shown):
        left = list(found.values())[len(shown) :]
        shown.append(f"{len(left)} more scenarios ({_runs(sum(map(len, left)))})")
    return ", ".join(shown)


def _named(names: Iterable[str]) -> str:
    """Return ``fragmented, many-moves, story and 12 more scenarios``."""
    first, more = (found := list(names))[:3], len(found) - 3
    return ", ".join(first) + (f" and {more} more scenarios" if more > 0 else "")


def _runs(n: int) -> str:
    return f"{n} run{'' if n == 1 else 's'}"


def describe(setting: str) -> str:
    """Return layout and types of a setting's name: ``no flash attention, K q8_0, V f16``."""
    layout, _, rest = setting.partition(" ")
    types, _, environment = rest.partition(" ")
    layouts = {"flash": "flash attention", "plain": "no flash attention"}
    if layout not in layouts or not types:
        return setting
    k, _, v = types.partition("/")
    words = [layouts[layout], f"K {k}, V {v}" if v else f"K and V {k}"]
    return ", ".join([*words, environment] if environment else words)


def _says(pair: Pair) -> str:
    return pair.stock.message or (pair.patched.message if pair.patched else "")


def _countable(outcome: Outcome) -> bool:
    return outcome.status not in ("skip", "fault")


def _differs(pair: Pair) -> bool:
    """Return whether a run that counts ends in another way on patched than on stock."""
    if pair.patched is None or not _countable(pair.stock):
        return False
    one, other = pair.stock, pair.patched
    return (one.status, one.failure) != (other.status, other.failure)


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
