"""Play random schedules on every combination, and shrink what fails to a trace.

A schedule is operations as `harness.operations` does them, each checked against a ledger; around a
share of them, drawn by chance, K and V are compared byte by byte, and every now and then all logits
with those of a rebuilt context. Combinations come in an order that the seed decides. What fails is
made as short as it can be, and written as a trace that `pyllamakv replay` plays.

Left out: caches of several streams, where a decode finds its cells by sequence, which the ledger's
count of free cells cannot promise (the scenario memory-streams has them).
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import variant
from pyllamakv.errors import NotBuilt
from pyllamakv.home import home
from pyllamakv.source import lockfile
from pyllamakv.source.releases import DEFAULT_RELEASE
from pyllamakv.verification import matrix
from qa.entry import Entry, StressOptions, Tick, strip_directories
from qa.random_operations import operation_cases
from qa.random_operations.case_counts import CaseCounts
from qa.random_operations.case_process import CaseProcess, Make
from qa.random_operations.case_session import CaseSession
from qa.random_operations.combination import Combination, walk
from qa.random_operations.task import CaseTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.building.manifest import Manifest
    from pyllamakv.building.variant import Variant
    from pyllamakv.errors import ScenarioFailed

#: The share of operations around which bytes are compared.
WATCHED = 0.2
#: From so many seconds on one release per era is tried, and not the default one alone.
LONG = 1800.0
#: Seeds of schedules lie so far apart that no two runs have one in common.
SEEDS = 1_000_003
#: Seconds that the search for a shorter schedule may take.
SEARCH = 120.0
#: The ways back (`Manifest.probes`) that are llama.cpp's own, patched or not. With the others it is
#: the shim that undoes a broken-off decode: from 0.3.10 on its finished micro-batches stay.
ROLLING_BACK = ("guard", "patched")
#: Releases whose RPC server ends over a quantized cache, stock as well, where that is not built.
FAILING_DEVICES = ("0.3.5",)
#: What a first batch is, for a device that may not even do that.
FIRST = (operation_cases.Operation("prefill", 1),)


def names() -> tuple[str, ...]:
    """Return the names of all releases."""
    return tuple(lockfile.known())


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Play schedules on each release for its share of the seconds; an entry for each.

    Raises NotBuilt before anything is tried.
    """
    wanted = effort.only or tuple(_releases(effort.seconds))
    found = {name: variant.find(f"{name}+patched") for name in wanted}
    missing = [name for name, each in found.items() if each is None]
    if missing:
        build = " && ".join(f"pyllamakv build {name}" for name in missing)
        msg = f"schedules need {', '.join(missing)}, patched: {build}"
        raise NotBuilt(msg)
    share = effort.shared(len(found))
    return [
        run_cases(
            name,
            each.folder,
            share,
            tick,
            undoes=each.manifest.probes.get("rollback") in ROLLING_BACK,
            can=_can(each.manifest),
            stock=variant.find(f"{name}+stock"),
        )
        for name, each in found.items()
        if each is not None
    ]


def _releases(seconds: float) -> list[str]:
    if seconds < LONG:
        return [DEFAULT_RELEASE]
    return [spec.release for spec in matrix.plan(matrix.MatrixSelection(sample=True))]


def _can(manifest: Manifest) -> tuple[str, ...]:
    """Return the backings and devices that a build promises."""
    mapped = ("mmap", "file", "kept") if "mmap-kv" in manifest.patches else ()
    return (*mapped, *({"rpc"} & {*manifest.capabilities}))


def run_cases(
    name: str, folder: Path, effort: StressOptions, tick: Tick, make: Make = CaseSession,
    most: int = 0, *,
    undoes: bool = True, can: Sequence[str] = (), stock: Variant | None = None,
) -> Entry:  # fmt: skip
    """Play schedules on the variant in a folder, for the effort's seconds and its operations.

    No more than ``most`` schedules are played, if it is not 0, in whatever time. What the build
    ``can`` have must have been played, and a device that fails at a first batch, or a cache that
    is absent, must with ``stock`` as well.
    """
    tally, began = CaseCounts(), time.monotonic()
    with ExitStack() as stack:
        hands: dict[str, CaseProcess] = {}
        for number, combination in enumerate(walk(effort.seed, undoes=undoes)):
            spent = time.monotonic() - began
            hopeless = bool(tally.absent) and not tally.operations
            enough = tally.operations >= effort.operations or hopeless
            if (spent > effort.seconds and enough) or (most and number == most):
                lost = [*tally.never(can), *_fainted(name, tally, stock, make)]
                lost += _lacking(folder, tally, stock, make)
                return tally.entry(name, effort.seed, spent, lost)
            tick(f"{name}: {tally.operations} operations ({combination})")
            # The environment is that of a process.
            if combination.slots not in hands:
                hand = CaseProcess(folder, combination.environment, make)
                hands[combination.slots] = stack.enter_context(hand)
            hand = hands[combination.slots]
            operations = operation_cases.generate_operations(
                effort.seed * SEEDS + number, combination.length
            )
            task = CaseTask(combination, operations, watched=WATCHED)
            played = hand.play(task)
            if played.failed is not None and played.failed.failure == "hang":
                # A machine that was busy or asleep looks the same; a real hang comes again.
                played = hand.play(task)
            tally.add(combination, played)
            if played.failed is not None:
                tick(f"{name}: shortening a failure ({combination})")
                trace = home() / "random_operations" / name / f"{effort.seed}-{number}.jsonl"
                _find(hand, replace(task, trace=trace), played.failed, tally)
    msg = "walks have no end"
    raise AssertionError(msg)


def _fainted(name: str, tally: CaseCounts, stock: Variant | None, make: Make) -> Iterator[str]:
    """Yield a defect for each device that fails at a first batch, and not so with stock."""
    for why, met in tally.faint.items():
        if stock is None:
            if name not in FAILING_DEVICES:
                ask = f"pyllamakv build {name}+stock"
                yield f"{why}, at a first batch; whether stock does so too is not known: {ask}"
            continue
        with CaseProcess(stock.folder, met.environment, make) as hand:
            if _has(hand, met.plain):
                yield f"{why}, at a first batch, which stock computes"


def _lacking(folder: Path, tally: CaseCounts, stock: Variant | None, make: Make) -> Iterator[str]:
    """Yield a defect for what cannot be opened on the heap, and can with stock, where that is."""
    if stock is None:
        return
    usual = Combination().environment
    with CaseProcess(folder, usual, make) as ours, CaseProcess(stock.folder, usual, make) as theirs:
        for (why, *_), met in tally.lacking.items():
            # Some memories cannot be kept; that a backing is there at all, `Tally.never` says.
            backed = met.backing != "heap" and _has(ours, replace(met, backing="heap"))
            if not backed and _has(theirs, met.plain):
                yield f"absent with {met}, which stock has: {why}"


def _has(hand: CaseProcess, combination: Combination) -> bool:
    again = hand.play(CaseTask(combination, FIRST))
    return again.failed is None and not again.absent


def _find(hand: CaseProcess, task: CaseTask, failed: ScenarioFailed, tally: CaseCounts) -> None:
    """Shorten what failed and write its trace, unless its kind is known."""
    # Whichever operation it was that met it.
    kind = failed.failure, re.sub(r"\d+", "#", re.sub(r"^\w+: ", "", _text(failed)))
    tally.kinds[kind] += 1
    if kind in tally.told:
        return
    assert task.trace is not None
    until = time.monotonic() + SEARCH
    short, failed = operation_cases.minimize_operations(
        lambda less: hand.play(replace(task, operations=tuple(less), trace=None)).failed,
        task.operations,
        failed,
        revives=True,
        enough=lambda: time.monotonic() > until,
    )
    task.trace.parent.mkdir(parents=True, exist_ok=True)
    again = hand.play(replace(task, operations=short)).failed
    where = f"its trace is {task.trace.relative_to(home())} in the home"
    if not task.trace.is_file():
        where = "it could not be traced"
    elif again is None:
        where += ", where it did not fail once more"
    names = " ".join(f"{each.name}:{each.number}" for each in short)
    tally.told[kind] = (
        f"{failed.failure} with {task.combination}: {_text(failed)}, "
        f"after {len(short)} operations ({names}); {where}"
    )


def _text(failed: ScenarioFailed) -> str:
    return strip_directories(next(iter(str(failed).strip().splitlines()), "without a word"))
