"""`python -m qa upkeep`: measure how many upstream states need no manual work.

Each fetched release is treated as unseen, in two ways: *leave one out* removes the ports that were
written for it, *forward* uses only ports of older bases. A release counts as carried only if every
patch that the whole series applies to it is strict or carried, and no other patch needs manual
work. Nothing is built here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pyllamakv.home import home
from pyllamakv.patching import carry, series, status
from pyllamakv.source import lockfile
from pyllamakv.source.files import write_text_atomic
from pyllamakv.source.releases import ARCHIVE_KINDS
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

app = typer.Typer(add_completion=False)

#: The first release that the series is for (llama-cpp-python 0.2.85), by date of its commit.
SINCE = "2024-07-31"
#: Releases after this date are reported separately.
RECENT = "2026-08-01"
#: Ways to treat a release as unseen -> (heading, target in percent, target of recent releases).
MODES = {
    "leave-one-out": ("leave one out", 98.0, None),
    "forward": ("forward", 95.0, 90.0),
}


@dataclass(frozen=True)
class Measured:
    """One release in one mode: the state of each patch that is meant for it.

    A state is ``strict``, ``carried BASE`` or ``manual``.
    """

    release: str
    era: str
    date: str
    mode: str
    patches: dict[str, str]

    @property
    def good(self) -> bool:
        """Return whether the release needs no manual work."""
        return all(state != "manual" for state in self.patches.values())


def states(store: Store) -> list[Release]:
    """Return the fetched releases of the indexes, oldest first; equal trees count once."""
    found: dict[str, Release] = {}
    for release in lockfile.known().values():
        if release.kind in ARCHIVE_KINDS and release.date >= SINCE and store.has(release):
            found.setdefault(release.tree, release)
    return sorted(found.values(), key=lambda release: release.order)


def unseen(whole: Series, release: Release, mode: str, bases: Mapping[str, Release]) -> Series:
    """Return the series as if the release had never been seen."""

    def kept(base: str) -> bool:
        known = bases.get(base)
        if known is None:
            return mode == "leave-one-out"
        if mode == "forward":
            return known.date < release.date
        return known.tree != release.tree

    definitions = tuple(
        replace(each, ports=tuple(port for port in each.ports if kept(port.base))) for each in whole
    )
    return replace(whole, definitions=definitions)


def measure(
    release: Release, mode: str, whole: Series, store: Store, bases: Mapping[str, Release]
) -> Measured:
    """Apply the series to a release as if it were unseen, and compare with the whole series."""
    wanted = {one.id for one in status.of_release(release, whole, store) if one.good}
    tried = status.of_release(release, unseen(whole, release, mode, bases), store)
    found: dict[str, str] = {}
    for one in tried:
        if one.good:
            found[one.id] = f"carried {one.port}" if one.state == "carried" else "strict"
        elif one.id in wanted or one.bad:
            found[one.id] = "manual"
    return Measured(release.name, release.era, release.date, mode, found)


def key(release: Release, mode: str, whole: Series) -> str:
    """Return a name of a result that changes with the release, the ports and the code."""
    ports = "".join(port.digest for each in whole for port in each.ports)
    rules = "".join(f"{each.carry}{each.releases}" for each in whole)
    files = sorted(Path(carry.__file__).parent.glob("*.py"))
    code = "".join(file.read_text("utf-8") for file in files)
    text = "\0".join((release.tree, mode, ports, rules, code))
    return hashlib.sha256(text.encode()).hexdigest()


def measure_all(progress: Progress, limit: int = 0) -> list[Measured]:
    """Measure every state in both modes; results are kept, so that a later call continues.

    With ``limit``, stop before the next measurement after this many.
    """
    store = open_store()
    whole = series.load()
    bases = lockfile.known()
    file = home() / "results" / "upkeep.json"
    known: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    wanted = [(release, mode) for release in states(store) for mode in MODES]
    found: list[Measured] = []
    measured = 0
    for number, (release, mode) in enumerate(wanted):
        name = key(release, mode, whole)
        if name not in known:
            if limit and measured >= limit:
                break
            measured += 1
            progress(f"{mode} {release.name}", number, len(wanted))
            made = measure(release, mode, whole, store, bases)
            known[name] = asdict(made)
            write_text_atomic(file, json.dumps(known))
        found.append(Measured(**known[name]))
    return found


def page(found: Sequence[Measured]) -> str:
    """Return docs/upkeep.md: totals, by era, by patch, and each release that needs work."""
    lines = [
        "# Upkeep",
        "",
        "Written by `python -m qa upkeep --write docs/upkeep.md`: how many upstream states the",
        "patch series fits without manual work. Every state that the package indexes have is",
        "treated as unseen, in two ways: *leave one out* removes the ports that were written for",
        "it, *forward* uses only ports of older bases. A release counts if every patch applies",
        "strictly or is [carried](patches.md#carried-patches).",
        "",
        *_table("releases", {"all": lambda one: True, "after July 2026": _recent}, found),
        "",
        "## By era",
        "",
        *_table("era", {era: _in_era(era) for era in _unique(one.era for one in found)}, found),
        "",
        "## By patch",
        "",
        "| patch | mode | strict | carried | manual |",
        "|---|---|---|---|---|",
    ]
    for id_ in _unique(id_ for one in found for id_ in one.patches):
        for mode in MODES:
            states = [one.patches[id_] for one in found if one.mode == mode and id_ in one.patches]
            count = Counter(state.split()[0] for state in states)
            numbers = " | ".join(str(count[word]) for word in ("strict", "carried", "manual"))
            lines.append(f"| {id_} | {MODES[mode][0]} | {numbers} |")
    lines += ["", "## Releases that need manual work", ""]
    lines += ["| release | date | mode | patches |", "|---|---|---|---|"]
    for one in found:
        if not one.good:
            names = ", ".join(id_ for id_, state in one.patches.items() if state == "manual")
            lines.append(f"| {one.release} | {one.date[:10]} | {MODES[one.mode][0]} | {names} |")
    return "\n".join([*lines, ""])


def _table(
    what: str, groups: Mapping[str, Callable[[Measured], bool]], found: Sequence[Measured]
) -> list[str]:
    lines = [f"| {what} | mode | releases | strict | carried | manual | no manual work | target |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, chosen in groups.items():
        for mode, (heading, target, recent) in MODES.items():
            own = [one for one in found if one.mode == mode and chosen(one)]
            if not own:
                continue
            strict = sum(set(one.patches.values()) <= {"strict"} for one in own)
            good = sum(one.good for one in own)
            wanted = target if name == "all" else recent if name == "after July 2026" else None
            counts = f"{len(own)} | {strict} | {good - strict} | {len(own) - good}"
            share = f"{100 * good / len(own):.1f} %"
            goal = f"{wanted:.0f} %" if wanted else ""
            lines.append(f"| {name} | {heading} | {counts} | {share} | {goal} |")
    return lines


def _recent(one: Measured) -> bool:
    return one.date >= RECENT


def _in_era(era: str) -> Callable[[Measured], bool]:
    return lambda one: one.era == era


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


@app.command()
def upkeep(
    write: Path = typer.Option(None, help="Write the page into this file."),
    limit: int = typer.Option(0, min=0, help="Stop after this many measurements; 0: all."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure how many fetched releases need no manual work; interrupted runs continue."""
    from pyllamakv.cli.progress_bar import progress
    from pyllamakv.cli.stdout import write_json, write_lines

    with progress() as report:
        found = measure_all(report, limit)
    if write is not None:
        write_text_atomic(write, page(found))
    if as_json:
        write_json([asdict(one) | {"good": one.good} for one in found])
    else:
        write_lines(page(found).splitlines())
