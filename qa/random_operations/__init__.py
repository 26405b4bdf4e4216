"""Run random operations on every combination, and minimize failures to traces.

A case is a list of operations (`operations`), each checked against a ledger, or of operations of a
cache manager (`manager_operations`). Around a random share of the former, K and V are compared byte
by byte, and occasionally all logits with those of a rebuilt context. The order of combinations is
random. A failing case is minimized, and written as a trace for `pyllamakv trace replay`.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.building import variant
from pyllamakv.errors import NotBuilt
from pyllamakv.home import home
from pyllamakv.open_variant import OpenLibrary
from pyllamakv.source import lockfile
from pyllamakv.source.releases import TEST_RELEASE
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

    from pyllamakv.building.variant import Variant
    from pyllamakv.errors import ScenarioFailed

#: The share of operations around which bytes are compared.
WATCHED = 0.2
#: End of the name of an entry whose cases all operate a cache manager.
MANAGERS = " managers"
#: From this time limit in seconds, one release per era is tested, not the default one alone.
LONG = 1800.0
#: Distance of the seeds of two runs, so that they have no case in common.
SEEDS = 1_000_003
#: Number of cases after which a run ends if none did an operation.
HOPELESS = 10
#: Time limit of a minimization in seconds.
SEARCH = 120.0
#: Methods of rollback (`Manifest.probes`) of llama.cpp itself, patched or not. With the others the
#: shim rolls back a failed decode: since 0.3.10, its completed micro-batches stay.
ROLLING_BACK = ("guard", "patched")
#: Releases whose RPC server crashes on a quantized cache, for stock too, if stock is not built.
FAILING_DEVICES = ("0.3.5",)
#: The first batch, which some devices cannot decode.
FIRST = (operation_cases.Operation("prefill", 1),)


def names() -> tuple[str, ...]:
    """Return the names of all releases, and those of their cache managers alone."""
    releases = tuple(lockfile.known())
    return (*releases, *(name + MANAGERS for name in releases))


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run cases on each release for its share of the seconds; return an entry for each.

    Raises NotBuilt before the first case.
    """
    wanted = effort.only or tuple(_releases(effort.seconds))
    releases = {name: name.removesuffix(MANAGERS) for name in wanted}
    found = {name: variant.find(f"{release}+patched") for name, release in releases.items()}
    missing = list(dict.fromkeys(releases[name] for name in wanted if found[name] is None))
    if missing:
        build = " && ".join(f"pyllamakv build {name}" for name in missing)
        msg = f"random operations need a patched build of {', '.join(missing)}: {build}"
        raise NotBuilt(msg)
    share = effort.shared(len(found))
    return [
        run_cases(
            name,
            each.folder,
            share,
            tick,
            undoes=each.manifest.probes.get("rollback") in ROLLING_BACK,
            can=_can(each),
            stock=variant.find(f"{releases[name]}+stock"),
            managers=name != releases[name],
        )
        for name, each in found.items()
        if each is not None
    ]


def _releases(seconds: float) -> list[str]:
    if seconds < LONG:
        return [TEST_RELEASE]
    return [spec.release for spec in matrix.plan(matrix.MatrixSelection(sample=True))]


def _can(built: Variant) -> tuple[str, ...]:
    """Return the backings, devices, streams and windows that a build supports."""
    manifest = built.manifest
    mapped = ("mmap", "file", "kept") if "mmap-kv" in manifest.patches else ()
    # The manifest names what the shim can compile; whether streams exist is the library's answer.
    with OpenLibrary.open(built.folder, isolated=True) as library:
        streams = ("separate",) if Capability.KV_UNIFIED in library.about.capabilities else ()
        windows = ("windows",) if Capability.SWA_FULL in library.about.capabilities else ()
    return (*mapped, *streams, *windows, *({"rpc"} & {*manifest.capabilities}))


def run_cases(
    name: str, folder: Path, effort: StressOptions, tick: Tick, make: Make = CaseSession,
    most: int = 0, *,
    undoes: bool = True, can: Sequence[str] = (), stock: Variant | None = None,
    managers: bool = False,
) -> Entry:  # fmt: skip
    """Run cases on the variant in a directory, for the given seconds and operations.

    At most ``most`` cases run, if it is not 0, without a time limit. Each backing and device that
    the build ``can`` use must have been used, and streams; a device that fails at a first batch, or
    an absent cache, must do so with ``stock`` as well. With ``managers``, every case has a cache
    manager.
    """
    tally, began = CaseCounts(), time.monotonic()
    with ExitStack() as stack:
        hands: dict[str, CaseProcess] = {}
        walked = walk(
            effort.seed,
            undoes=undoes,
            separate="separate" in can,
            windows="windows" in can,
            managers=managers,
        )
        for number, combination in enumerate(walked):
            spent = time.monotonic() - began
            # A memory that is absent, or a process that cannot start, must not repeat for ever.
            hopeless = number >= HOPELESS and not tally.operations
            enough = tally.operations >= effort.operations or hopeless
            if (spent > effort.seconds and enough) or (most and number == most):
                lost = [*tally.never(can), *_fainted(name, tally, stock, make)]
                lost += _lacking(folder, tally, stock, make)
                return tally.entry(name, effort.seed, spent, lost)
            tick(f"{name}: {tally.operations} operations ({combination})")
            # A process has one environment.
            if combination.slots not in hands:
                hand = CaseProcess(folder, combination.environment, make)
                hands[combination.slots] = stack.enter_context(hand)
            hand = hands[combination.slots]
            seed = effort.seed * SEEDS + number
            operations = operation_cases.generate_operations(
                seed, combination.length, combination.manager
            )
            task = CaseTask(combination, operations, watched=WATCHED, seed=seed)
            played = hand.play(task)
            if played.failed is not None and played.failed.failure == "hang":
                # A loaded or suspended machine looks the same; a real hang repeats.
                played = hand.play(task)
            tally.add(combination, played)
            if played.failed is not None:
                tick(f"{name}: minimizing a failure ({combination})")
                trace = home() / "random_operations" / name / f"{effort.seed}-{number}.jsonl"
                _find(hand, replace(task, trace=trace), played.failed, tally)
    msg = "the list of combinations has no end"
    raise AssertionError(msg)


def _fainted(name: str, tally: CaseCounts, stock: Variant | None, make: Make) -> Iterator[str]:
    """Yield a defect for each device that fails at a first batch, but not with stock."""
    for why, met in tally.faint.items():
        if stock is None:
            if name not in FAILING_DEVICES:
                ask = f"pyllamakv build {name}+stock"
                yield f"{why}, at the first batch; build stock to compare: {ask}"
            continue
        with CaseProcess(stock.folder, met.environment, make) as hand:
            if _has(hand, met.plain):
                yield f"{why}, at the first batch, which stock computes"


def _lacking(folder: Path, tally: CaseCounts, stock: Variant | None, make: Make) -> Iterator[str]:
    """Yield a defect for each combination that only stock can open in heap memory."""
    if stock is None:
        return
    usual = Combination().environment
    with CaseProcess(folder, usual, make) as ours, CaseProcess(stock.folder, usual, make) as theirs:
        for (why, *_), met in tally.lacking.items():
            # Some memories cannot be kept; `CaseCounts.never` checks that each backing was used.
            backed = met.backing != "heap" and _has(ours, replace(met, backing="heap"))
            if not backed and _has(theirs, met.plain):
                yield f"cannot be opened, but stock can: {met}: {why}"


def _has(hand: CaseProcess, combination: Combination) -> bool:
    again = hand.play(CaseTask(replace(combination, manager="none"), FIRST))
    return again.failed is None and not again.absent


def _find(hand: CaseProcess, task: CaseTask, failed: ScenarioFailed, tally: CaseCounts) -> None:
    """Minimize a failure and write its trace, unless its kind is known."""
    # Failures of one kind count once, whichever operation revealed them.
    kind = failed.failure, re.sub(r"\d+", "#", re.sub(r"^\w+: ", "", _text(failed)))
    tally.kinds[kind] += 1
    if kind in tally.first_messages:
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
    where = f"its trace is {task.trace.relative_to(home())} in the data directory"
    if not task.trace.is_file():
        where = "it has no trace"
    elif again is None:
        where += ", whose replay did not fail"
    names = " ".join(f"{each.name}:{each.number}" for each in short)
    tally.first_messages[kind] = (
        f"{failed.failure} with {task.combination}: {_text(failed)}, "
        f"after {len(short)} operations ({names}); {where}"
    )


def _text(failed: ScenarioFailed) -> str:
    return strip_directories(next(iter(str(failed).strip().splitlines()), "no message"))
