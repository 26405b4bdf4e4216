"""Inject faults and repeat the operation: no data may be lost, wrong, incomplete or locked.

One operation of the product at a time (`steps`) runs in a child process in which the n-th change of
a file fails (`preload`, `attempt`). The order of n is random, and usually the time limit ends the
run before all n were used (`fault_injection`); an entry reports the number of tested and possible
faults. Only faults that had an effect are counted.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from pyllamakv.source import lockfile, spec_resolver
from pyllamakv.source.releases import TEST_RELEASE
from qa.built import SPEC, STOCK
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.faults.fault_injection import FILES, InjectionRecord

_STEPS: Final = "qa.faults.steps"
#: Steps by the name of their entry; the native ones need a built variant and a model, the last one
#: stock and the release's sources.
_ALONE: Final = {
    "fetch from an index": "fetching:FetchIndex",
    "fetch files without a clone": "fetching:FetchPlain",
    "fetch from git": "fetching:FetchGit",
    "apply and vendor": "patching:Apply",
    "rebase": "patching:Rebase",
    "build": "building:Build",
    "compile and link": "building:Compile",
    "vendor and clean": "building:SyncAndClean",
    "results": "result_writing:StoreResults",
}
_NATIVE: Final = {
    "recording": "caching:RecordRun",
    "paging": "caching:Paging",
    "keeping": "caching:Keeping",
    "prefix store": "caching:StorePrefixes",
    "state store": "caching:StoreStates",
    "checkpoints": "caching:KeepCheckpoints",
    "parking": "caching:ParkGenerations",
}
#: Native steps that a long run repeats on one release per era, as "STEP RELEASE".
_CACHES: Final = ("paging", "prefix store", "state store", "checkpoints", "parking")
#: Those whose model keeps states.
_STATES: Final = ("state store", "checkpoints")
#: From this time limit in seconds, releases of other eras are tested.
LONG: Final = 1800.0
_JUDGED: Final = {"matrix": "result_writing:Matrix"}
#: Entries about one kind of fault on all steps.
_ACROSS: Final = {
    "two at once": ("stop",),
    "jumping clocks": ("clock",),
    "full disks": ("room", "fsize"),
    "little memory": ("memory",),
}
_WORDS: Final = {
    "kill": "kills of everything",
    "one": "kills of one process",
    "full": "disks full since a change",
    "once": "writes to a full disk",
    "eio": "I/O errors",
    "stop": "second runs during a stopped one",
    "clock": "jumps",
    "room": "disks with little space",
    "fsize": "limits of the file size",
    "memory": "limits of memory",
}


def names() -> tuple[str, ...]:
    """Return the names of all families of faults."""
    each = (f"{step} {release}" for step in _CACHES for release in lockfile.known())
    return (*_ALONE, *_NATIVE, *_JUDGED, *_ACROSS, *each)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Inject faults for about ``effort.seconds``; return an entry per family.

    An entry without tried faults states the reason.
    """
    from pyllamakv.building import variant

    patched, stock = variant.find(SPEC), variant.find(STOCK)
    sides = [found.folder if found else None for found in (stock, patched)]
    lacks = _lacks(*sides)
    later = _other_releases(effort)
    for name, found in later.items():
        if found is None:
            lacks[name] = f"it is not built; run: pyllamakv build {name.rpartition(' ')[2]}"
    records = _walked(effort, sides, lacks, later, tick)
    refused = {record.step for record in records if record.kind == "none" and not record.defects}
    lacks |= dict.fromkeys(refused, "this release does not support it")
    made = []
    for name in (*_ALONE, *_NATIVE, *_JUDGED, *later):
        of_files = [r for r in records if r.step == name and r.kind in (*FILES, "none")]
        made.append(_entry(name, of_files, effort))
    for name, kinds in _ACROSS.items():
        mine = [r for r in records if r.kind in kinds]
        # Mounting a file system is not possible everywhere.
        tried = {r.kind for r in mine if r.tried}
        lack = ", ".join(_WORDS[kind] for kind in kinds if kind not in tried)
        entry = _entry(name, mine, effort)
        made.append(replace(entry, skip_reason=f"skipped: {lack}" if lack else ""))
    shown = [each for each in made if not _empty(each) or effort.wants(each.name)]
    late = "the time limit was reached: increase --seconds"
    return [
        skipped_entry("faults", each.name, lacks.get(each.name, late)) if _empty(each) else each
        for each in shown
    ]


def _empty(entry: Entry) -> bool:
    return not entry.data["tried"] and not entry.defects


def _lacks(stock: Path | None, patched: Path | None) -> dict[str, str]:
    """Return the entries that cannot run here, with the reasons."""
    from pyllamakv.source.store import open_store

    build = f"run: pyllamakv build {TEST_RELEASE}"
    if patched is None:
        return dict.fromkeys((*_NATIVE, *_JUDGED), f"{SPEC} is not built; {build}")
    if stock is None:
        return dict.fromkeys(_JUDGED, f"{STOCK} is not built; {build}")
    if not open_store().has(spec_resolver.resolve(TEST_RELEASE)):
        return dict.fromkeys(_JUDGED, f"{TEST_RELEASE} is not fetched; {build}")
    return {}


def _other_releases(effort: StressOptions) -> dict[str, Path | None]:
    """Return the builds of the entries "STEP RELEASE" to try; None: it is not built."""
    from pyllamakv.building import variant
    from pyllamakv.verification import matrix

    releases = {name.rpartition(" ")[2] for name in effort.only if name in set(names())}
    wanted = [f"{step} {each}" for step in _CACHES for each in releases]
    chosen = [name for name in wanted if name in effort.only]
    if effort.seconds >= LONG:
        sample = [spec.release for spec in matrix.plan(matrix.MatrixSelection(sample=True))]
        chosen += [
            f"{step} {release}"
            for step in _CACHES
            if effort.wants(step)
            for release in sample
            if release != TEST_RELEASE
        ]
    found = {name: variant.find(f"{name.rpartition(' ')[2]}+patched") for name in chosen}
    return {name: each.folder if each is not None else None for name, each in found.items()}


def _walked(
    effort: StressOptions,
    sides: Sequence[Path | None],
    lacks: Mapping[str, str],
    later: Mapping[str, Path | None],
    tick: Tick,
) -> list[InjectionRecord]:
    """Try the selected kinds of fault on the selected steps."""
    from qa.faults import preloaded_process

    across = [kind for name, kinds in _ACROSS.items() if effort.wants(name) for kind in kinds]
    everywhere = any(effort.wants(name) for name in _ACROSS)
    steps = {
        name: place for name, place in (_ALONE | _NATIVE | _JUDGED).items() if name not in lacks
    }
    wanted: list[tuple[str, list[str]]] = []
    for name, place in steps.items():
        if not (everywhere or effort.wants(name)):
            continue
        given = [str(sides[1]), str(_model(name))] if name in _NATIVE else []
        given = [str(side) for side in sides] if name in _JUDGED else given
        wanted.append((f"{_STEPS}.{place}", given))
    for name, folder in later.items():
        if folder is not None:
            step, _, release = name.rpartition(" ")
            given = [str(folder), str(_model(step)), release]
            wanted.append((f"{_STEPS}.{_NATIVE[step]}", given))
    files = FILES if later or any(map(effort.wants, steps)) else ()
    kinds = [kind for pair in zip_longest(files, across) for kind in pair if kind is not None]
    if not wanted or not kinds:
        return []
    return preloaded_process.run_injections(
        wanted, kinds, seconds=effort.seconds, seed=effort.seed, tick=tick
    )


def _model(step: str) -> Path:
    """Return the model of a native step."""
    from pyllamakv.scenarios import synthetic_models

    return synthetic_models.model("recurrent" if step in _STATES else "tiny")


def _entry(name: str, records: Sequence[InjectionRecord], effort: StressOptions) -> Entry:
    """Return the row of a family of faults."""
    places = sum(record.places for record in records)
    tried = sum(record.tried for record in records)
    struck = sum(record.struck for record in records)
    kinds: Tally[str] = Tally()
    errors: Tally[str] = Tally()
    for record in records:
        kinds[record.kind] += record.struck
        errors += record.errors
    repeated = sum(record.repeated for record in records)
    seconds = sum(record.seconds for record in records)
    listed = ", ".join(f"{count} {_WORDS[kind]}" for kind, count in kinds.items() if count)
    return Entry(
        section="faults",
        name=name,
        row={
            "faults": f"{struck:,}",
            "of them": listed,
            "tried": f"{tried:,} of {places:,} places",
            "without effect": f"{tried - struck:,}",
            "repeats that worked": f"{repeated:,}",
            "seconds": f"{seconds:.0f}",
            "seed": str(effort.seed),
        },
        defects=tuple(defect for record in records for defect in record.defects),
        seed=effort.seed,
        data={
            "faults": struck,
            "tried": tried,
            "places": places,
            "repeated": repeated,
            "kinds": dict(kinds),
            "errors": dict(errors),
            "seconds": round(seconds, 1),
        },
    )
