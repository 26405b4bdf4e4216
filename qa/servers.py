"""Verify llama-server over HTTP, stock against patched: one release per era, or those named.

The servers must be built before. A short run stops after its time, so it runs a part of the
scenarios: the fixes first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pyllamakv.errors import NotBuilt
from pyllamakv.server import server_check
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_scenarios import SCENARIOS
from pyllamakv.source import lockfile
from pyllamakv.verification import matrix
from pyllamakv.verification.verdict import decide
from qa.entry import Entry, StressOptions, Tick, skipped_entry, strip_directories

if TYPE_CHECKING:
    from pyllamakv.server.server_check import ServerCheck

#: The first release whose server can be built.
FIRST = "0.3.6"
#: Outcomes of scenarios that a release or its patches lack something for.
_NOT_RUN = {"skip", "absent"}


def names() -> tuple[str, ...]:
    """Return the names of all releases with a server that can be built."""
    known = lockfile.known()
    return tuple(name for name, each in known.items() if each.order >= known[FIRST].order)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run the scenarios on each release whose servers are built; return an entry for each."""
    wanted = effort.only or _one_per_era()
    missing = {name: reason for name in wanted if (reason := _missing(name))}
    share = effort.shared(len(wanted) - len(missing)).seconds
    return [
        skipped_entry("servers", name, missing[name])
        if name in missing
        else verify(name, share, tick)
        for name in wanted
    ]


def verify(name: str, seconds: float, tick: Tick) -> Entry:
    """Run scenarios on a release until the time is over, at least one; return the entry."""
    chosen = sorted(SCENARIOS, key=lambda each: each.kind != "fix")
    until = time.monotonic() + seconds
    found: list[ServerCheck] = []
    for scenario in chosen:
        tick(f"{name}: {scenario.id}")
        found.append(server_check.check_server(name, scenarios=(scenario.id,)))
        if time.monotonic() > until:
            break
    return entry(name, found, len(chosen))


def entry(name: str, found: list[ServerCheck], scenarios: int) -> Entry:
    """Return the entry of a release; a verdict that is not good is a defect."""
    pairs = [pair for each in found for pair in each.pairs]
    decision = decide(pairs)
    counts: dict[tuple[str, str], int] = {}
    for each in found:
        for (_, side), facts in each.notes.items():
            for what, count in facts.items():
                counts[side, what] = counts.get((side, what), 0) + count
    stock = [pair.scenario for pair in pairs if pair.stock.failed]
    patched = [pair.scenario for pair in pairs if pair.patched and pair.patched.failed]
    skipped = sum(each.patched is not None and each.patched.status in _NOT_RUN for each in pairs)
    left = [pair.scenario for pair in pairs if pair.patched is None]
    row = {
        "era": lockfile.known()[name].era,
        "verdict": str(decision.verdict),
        "scenarios": f"{len(pairs) - skipped} of {scenarios}"
        + (f", {skipped} skipped" if skipped else ""),
        "stock fails": ", ".join(stock) or "none",
        "patched fails": ", ".join(patched) or "none",
        "not patched": ", ".join(left) or "none",
        "requests": str(counts.get(("patched", "requests"), 0)),
        "retries on stock": str(counts.get(("stock", "retries"), 0)),
        "on patched": str(counts.get(("patched", "retries"), 0)),
    }
    broken = strip_directories(str(decision).splitlines()[0])
    defects = (broken,) if decision.exit_code else ()
    return Entry("servers", name, row, defects, data={"servers": found[0].servers})


def _one_per_era() -> tuple[str, ...]:
    known = lockfile.known()
    sample = (spec.release for spec in matrix.plan(matrix.MatrixSelection(sample=True)))
    return tuple(name for name in sample if known[name].order >= known[FIRST].order)


def _missing(name: str) -> str:
    """Return why a release is skipped: the command that builds its servers; or an empty text."""
    try:
        for side in ("stock", "patched"):
            find_server(f"{name}+{side}")
    except NotBuilt:
        return f"build its servers: pyllamakv build {name} --server"
    return ""
