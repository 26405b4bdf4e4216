"""Write docs/upkeep.md: what was measured, totals, patches, and the verified sample."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from qa.upkeep.measurement import (
    CARRY_FIRST,
    FORWARD,
    LEAVE_ONE_OUT,
    MANUAL,
    MODES,
    RECENT,
    TODAY,
)
from qa.upkeep.sample import STEPS as TIMED
from qa.upkeep.watching import lines as _watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from qa.upkeep.measurement import Hook, Measured
    from qa.upkeep.sample import Verified
    from qa.upkeep.watching import WatchTime

#: A function with a smaller percentage of kept lines counts as rewritten.
REWRITTEN = 50
#: Target for one state, from the fetch to the verdict, on two cores.
MINUTES = 10

_HEADINGS = {
    TODAY: "all ports",
    LEAVE_ONE_OUT: "leave one out",
    FORWARD: "forward",
    CARRY_FIRST: "forward, carry first",
}
#: Mode -> target in percent for all releases, and for those after July 2026.
_TARGETS = {LEAVE_ONE_OUT: (98, None), FORWARD: (95, 90)}

_CARRY = re.compile(
    r"cannot be carried from (\S+): (.*?)(?:; cannot be carried from|\Z)", re.DOTALL
)
_CONFLICT = re.compile(
    r"(\S+?)(?::\d+)?: (?:upstream changed the lines|the target has no such file)"
)

_INTRODUCTION = """\
# Upkeep

How many upstream states the patch series fits without manual work. Written by
`python -m qa upkeep --write docs/upkeep.md`.

Every fetched state of llama.cpp since llama-cpp-python 0.2.85 is measured: the sdists of
llama-cpp-python and xllamacpp, and the bundles of node-llama-cpp. Equal trees count once. A state
is *strict* if every patch that is meant for it applies strictly, *carried* if the others are
[carried](patches.md#carried-patches), and *manual* otherwise. Nothing is built for these numbers,
except [a sample](#verified-sample).

| mode | ports that are kept |
|---|---|
| all ports | all: what a user of this version gets |
| leave one out | all except those that fit no other state |
| forward | those that fit a state older than the measured one |
| forward, carry first | the same; a port that fits is used only if no other can be carried |

A port *fits* a state if its markers hold and every hunk applies strictly. Ports are named for the
newest of several releases with equal code, so here the base of a port is the oldest state that it
fits. It is also the ancestor of the merge. *Forward* assumes that each port was written at that
state. It measures whether the ports of today, and the rules of carrying of today, would have been
enough; the places of the hooks were chosen with knowledge of later releases. The oldest state has
no older ports and is not measured forward.
"""

_WATCHES = """\
## Time of a watch

`python -m qa upkeep --watch RELEASE --write docs/upkeep.md` follows a local git remote with the
shipped series: a new commit on the tree of a release, from an empty data directory to the verdict,
without a compiler cache of these files, and then the same commit again. The targets on two cores
are 10 minutes and 60 s. CPU time is that of all processes of the watch. The load is the mean of 15
minutes at the end: above 2, other jobs had a part of the two cores.
"""


def states(text: str) -> int:
    """Return the number of states that a page has, or 0."""
    row = re.search(rf"^\| all \| {_HEADINGS[TODAY]} \| (\d+) \|", text, re.MULTILINE)
    return int(row[1]) if row else 0


def page(
    found: Sequence[Measured],
    hooks: Sequence[Hook] = (),
    verified: Sequence[Verified] = (),
    watched: Sequence[WatchTime] = (),
) -> str:
    """Return the page."""
    oldest = min((one.date for one in found), default="")
    found = [one for one in found if one.mode not in (FORWARD, CARRY_FIRST) or one.date != oldest]
    everything = {"all": lambda one: True, "after July 2026": lambda one: one.date >= RECENT}
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        *_table(everything, found),
        "",
        "## By patch",
        "",
        *_patches(found),
        "",
        "## States that need manual work",
        "",
        *_limits(found),
        "",
        "The cause is that of the first patch, with the nearest port. The last column has the",
        "functions with a conflict, and how many of their lines of the base the state still has;",
        "0 % is a function that upstream removed or renamed.",
        "",
        "| state | date | mode | patches | cause | lines that upstream kept |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        if not one.good and one.mode != CARRY_FIRST:
            manual = [id_ for id_, state in one.patches.items() if state == MANUAL]
            cause = _cause(one.reasons.get(manual[0], ""))
            kept = one.kept.get(manual[0], {})
            shares = ", ".join(f"`{name}` {share} %" for name, share in kept.items())
            facts = (one.release, one.date[:10], _HEADINGS[one.mode], ", ".join(manual), cause)
            lines.append(f"| {' | '.join(facts)} | {shares} |")
    lines += ["", "## Hooks", "", *_hooks(hooks)]
    lines += ["", "## Verified sample", "", *_sample(verified)]
    lines += ["", *watches(watched)]
    return "\n".join([*lines, ""])


def with_watches(text: str, watched: Sequence[WatchTime]) -> str:
    """Return a page with another section of timed watches; it is added at the end if it lacks."""
    lines = watches(watched)
    before, _, rest = text.partition(f"{lines[0]}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    parts = (
        "\n".join(part).strip("\n") for part in (before.splitlines(), lines, after.splitlines())
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def watches(watched: Sequence[WatchTime]) -> list[str]:
    """Return the section of timed watches."""
    return [*_WATCHES.splitlines(), "", *_watched(watched)]


def _limits(found: Sequence[Measured]) -> list[str]:
    """Return why states miss: a new patch, a rewritten function, or a changed neighbour."""
    lines = ["What limits each mode, by the first patch that needs manual work:", ""]
    for mode in MODES:
        missed = [one for one in found if one.mode == mode and not one.good]
        if mode == CARRY_FIRST or not missed:
            continue
        counts = Counter(_limit(one) for one in missed)
        causes = "; ".join(f"{cause}: {count}" for cause, count in counts.most_common())
        lines.append(f"- {_HEADINGS[mode]}: {causes}.")
    return lines


def _limit(one: Measured) -> str:
    first = next(id_ for id_, state in one.patches.items() if state == MANUAL)
    reason = one.reasons.get(first, "")
    if not _CARRY.search(reason):
        return "no older port of the patch"
    kept = one.kept.get(first, {})
    if not kept:
        return "a file, name or patch that the port uses is missing"
    if min(kept.values()) < REWRITTEN:
        return f"upstream kept less than {REWRITTEN} % of a function that the patch changes"
    return "upstream changed the same or neighbouring lines of a function"


def _table(
    groups: Mapping[str, Callable[[Measured], bool]], found: Sequence[Measured]
) -> list[str]:
    lines = ["| states | mode | states | strict | carried | manual | no manual work | target |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, chosen in groups.items():
        for mode in MODES:
            own = [one for one in found if one.mode == mode and chosen(one)]
            if not own:
                continue
            good = sum(one.good for one in own)
            carried = sum(one.carried for one in own)
            counts = f"{len(own)} | {good - carried} | {carried} | {len(own) - good}"
            share = f"{100 * good / len(own):.1f} %"
            lines.append(
                f"| {name} | {_HEADINGS[mode]} | {counts} | {share} | {_goal(name, mode)} |"
            )
    return lines


def _goal(name: str, mode: str) -> str:
    every, recent = _TARGETS.get(mode, (None, None))
    target = {"all": every, "after July 2026": recent}.get(name)
    return f"{target} %" if target else ""


def _patches(found: Sequence[Measured]) -> list[str]:
    lines = ["| patch | mode | strict | carried | manual |", "|---|---|---|---|---|"]
    for id_ in _unique(id_ for one in found for id_ in one.patches):
        for mode in MODES:
            states = [one.patches[id_] for one in found if one.mode == mode and id_ in one.patches]
            count = Counter(state.split()[0] for state in states)
            numbers = " | ".join(str(count[word]) for word in ("strict", "carried", MANUAL))
            lines.append(f"| {id_} | {_HEADINGS[mode]} | {numbers} |")
    return lines


def _cause(reason: str) -> str:
    """Return the reason of the nearest port; conflicts are counted by file."""
    found = _CARRY.search(reason)
    if not found:
        return "no such port" if reason.endswith("has no port") or "skipped port" in reason else ""
    base, why = found.groups()
    files = Counter(_CONFLICT.findall(why))
    if files:
        why = "conflicts in " + ", ".join(f"`{file}` ({n})" for file, n in files.items())
    return f"{base}: {why}"


def _hooks(hooks: Sequence[Hook]) -> list[str]:
    changed = sorted((hook for hook in hooks if hook.changes), key=lambda hook: hook.present)
    count = max((hook.states for hook in hooks), default=0)
    lines = [
        f"The ports for the newest state have {len(hooks)} hooks. All {count} states of its era",
        f"have the lines of {len(hooks) - len(changed)} of them, context included. The others:",
        "",
        "| patch | file | function | states with these lines | changes |",
        "|---|---|---|---|---|",
    ]
    for hook in changed:
        where = f"{hook.patch} | `{hook.file}` | `{hook.function}`"
        lines.append(f"| {where} | {hook.present} of {hook.states} | {hook.changes} |")
    return lines


def _sample(verified: Sequence[Verified]) -> list[str]:
    if not verified:
        command = "`python -m qa upkeep --sample 12 --seed 1 --verify --write docs/upkeep.md`"
        return [f"No carried state has been built and verified yet: {command}."]
    lines = [
        "Carried trees that `python -m qa upkeep --sample N --verify` built and verified, and that",
        "the ports and rules of today still make; the mode is the one that made the tree. The last",
        "columns are a fetch into an empty data directory, the merges, the builds of stock and",
        "patched, and all runs. They depend on the machine, its load, and its compiler cache.",
        "",
        f"| state | date | mode | carried | verdict | verified | {' | '.join(TIMED)} |",
        f"|{'---|' * (6 + len(TIMED))}",
    ]
    for one in verified:
        carried = ", ".join(f"{id_} from {base}" for id_, base in one.carried.items())
        facts = (
            one.release,
            one.date[:10],
            _HEADINGS[one.mode],
            carried,
            one.verdict,
            one.verified,
            *(f"{one.seconds[step]:.0f} s" if step in one.seconds else "" for step in TIMED),
        )
        lines.append(f"| {' | '.join(facts)} |")
    totals = [sum(one.seconds.values()) for one in verified if {*TIMED} <= {*one.seconds}]
    if totals:
        took = f"{min(totals) / 60:.1f} to {max(totals) / 60:.1f} minutes"
        lines += [
            "",
            f"From the fetch to the verdict, states with all four steps ({len(totals)}) took",
            f"{took}; the target is at most {MINUTES} minutes on two cores.",
        ]
    broken = [one for one in verified if one.verdict == "broken-carry"]
    return [*lines, *([""] if broken else []), *map(_broken, broken)]


def _broken(one: Verified) -> str:
    """Return why a carried tree is broken, and what the ports of today have for the state."""
    lacks = "; ".join(
        f"{id_} in {', '.join(f'`{place}`' for place in places)}"
        for id_, places in one.lacks.items()
    )
    known = f"The ports of today for this state have more: {lacks}." if lacks else ""
    return f"- {one.release}, {_HEADINGS[one.mode]}: {one.reason}. {known}".rstrip()


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
