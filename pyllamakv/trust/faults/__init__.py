"""Inject faults and repeat: nothing may be lost, wrong, left half done, or locked for ever.

One part of the product at a time (`steps`) runs in a child in which the n-th change of a file goes
wrong (`preload`, `attempt`), at every n in turn (`trial`); what is lost otherwise, workers and
servers, is in `lost`. Only what struck counts as a fault.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

from pyllamakv.source.releases import DEFAULT
from pyllamakv.trust.built import SPEC, STOCK
from pyllamakv.trust.entry import Effort, Entry, Tick
from pyllamakv.trust.faults.trial import FILES, Record

_STEPS: Final = "pyllamakv.trust.faults.steps"
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
    "results": "judging:Results",
}
_NATIVE: Final = {
    "recording": "caching:Recording",
    "paging": "caching:Paging",
    "keeping": "caching:Keeping",
}
_JUDGED: Final = {"matrix": "judging:Matrix"}
#: Entries about one kind of fault on all steps.
_ACROSS: Final = {
    "two at once": ("stop",),
    "jumping clocks": ("clock",),
    "full disks": ("room", "fsize"),
    "little memory": ("memory",),
}
#: What part of the time workers and servers get, each.
_SHARE: Final = 0.08
_WORDS: Final = {
    "kill": "kills of everything",
    "one": "kills of one process",
    "full": "disks full from there on",
    "once": "writes without room",
    "eio": "I/O errors",
    "stop": "second runs beside a stopped one",
    "clock": "jumps",
    "room": "disks with little room",
    "fsize": "limits of a file's size",
    "memory": "limits of memory",
    "lost": "lost",
}


def names() -> tuple[str, ...]:
    """Return the names of all families of faults."""
    return (*_ALONE, *_NATIVE, *_JUDGED, *_ACROSS, "workers", "servers")


def entries(effort: Effort, tick: Tick) -> list[Entry]:
    """Inject faults for about ``effort.seconds``; return an entry per family."""
    from pyllamakv.building import variant

    found = variant.find(SPEC)
    folder = found.folder if found else None
    records = _walked(effort, folder, tick)
    made = []
    for name in (*_ALONE, *_NATIVE, *_JUDGED):
        of_files = [r for r in records if r.step == name and r.kind in (*FILES, "none")]
        made.append(_entry(name, of_files, effort))
    for name, kinds in _ACROSS.items():
        made.append(_entry(name, [r for r in records if r.kind in kinds], effort))
    if folder is not None:
        made += _lost(effort, folder, tick)
    return [entry for entry in made if entry.data["tried"] or entry.defects]


def _walked(effort: Effort, folder: Path | None, tick: Tick) -> list[Record]:
    """Try the kinds of fault that are wanted on the steps that are wanted."""
    from pyllamakv.building import variant
    from pyllamakv.harness import synthetic
    from pyllamakv.source import releases
    from pyllamakv.source.store import open_store
    from pyllamakv.trust.faults import stage

    across = [kind for name, kinds in _ACROSS.items() if effort.wants(name) for kind in kinds]
    everywhere = any(effort.wants(name) for name in _ACROSS)
    needed: list[tuple[str, list[str]]]
    needed = [(f"{_STEPS}.{place}", []) for name, place in _ALONE.items()]
    names = list(_ALONE)
    if folder is not None:
        given = [str(folder), str(synthetic.tiny())]
        needed += [(f"{_STEPS}.{place}", given) for place in _NATIVE.values()]
        names += _NATIVE
    stock = variant.find(STOCK)
    if folder is not None and stock is not None and open_store().has(releases.resolve(DEFAULT)):
        sides = [str(stock.folder), str(folder)]
        needed += [(f"{_STEPS}.{place}", sides) for place in _JUDGED.values()]
        names += _JUDGED
    wanted = [
        step for step, name in zip(needed, names, strict=True) if everywhere or effort.wants(name)
    ]
    files = FILES if any(map(effort.wants, names)) else ()
    kinds = [kind for pair in zip_longest(files, across) for kind in pair if kind is not None]
    if not wanted or not kinds:
        return []
    seconds = effort.seconds * (1 - 2 * _SHARE)
    return stage.conduct(wanted, kinds, seconds=seconds, seed=effort.seed, tick=tick)


def _lost(effort: Effort, folder: Path, tick: Tick) -> list[Entry]:
    from pyllamakv.trust.faults import lost

    seconds = effort.seconds * _SHARE
    made = []
    for name, lose in (("workers", lost.workers), ("servers", lost.servers)):
        if effort.wants(name):
            made.append(_entry(name, [lose(folder, seconds, effort.seed, tick)], effort))
    return made


def _entry(name: str, records: Sequence[Record], effort: Effort) -> Entry:
    """Return the line of a family."""
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
            "repeated": repeated,
            "kinds": dict(kinds),
            "errors": dict(errors),
            "seconds": round(seconds, 1),
        },
    )
