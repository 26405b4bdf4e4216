"""Draw carried states, and verify each tree exactly as its mode made it; the steps are timed."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import tomlkit

from pyllamakv.building import variant
from pyllamakv.building.build import build, build_patched
from pyllamakv.errors import BuildError, HarnessError, SourceError, UsageError
from pyllamakv.home import home
from pyllamakv.patching import apply, port_comparison, shared_files, trees
from pyllamakv.patching.definition import file_of
from pyllamakv.source import fetch
from pyllamakv.source.files import write_text_atomic
from pyllamakv.verification import check
from qa.upkeep.measurement import CARRY_FIRST, FORWARD, RECENT, TODAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from qa.upkeep.measurement import Application, Fits, Measured, Measurement

#: The modes that a sample is drawn from, in this order. Most states are strict in the first one.
_ORDER = (FORWARD, CARRY_FIRST)
#: The steps that are timed.
STEPS = ("fetch", "carry", "build", "verify")


@dataclass(frozen=True)
class Verified:
    """The verdict on the carried tree of a state.

    ``carried`` has the base of the merged port by patch, ``verified`` the day of the verification.
    ``seconds`` has the duration of each of `STEPS`: a download into an empty data directory and its
    import, the merges, the builds of stock and patched, and all runs. A step that was not made
    (no network, or a build that existed) is missing. ``lacks`` is the result of `lacking`.
    """

    release: str
    date: str
    mode: str
    carried: dict[str, str]
    tree: str
    verdict: str
    reason: str
    verified: str
    seconds: dict[str, float] = field(default_factory=dict)
    lacks: dict[str, list[str]] = field(default_factory=dict)


def named(found: Sequence[Measured], names: Sequence[str]) -> list[Measured]:
    """Return the named states in the first mode of `_ORDER` that carries them.

    Raises UsageError for a state that no mode carries.
    """
    chosen = []
    for name in names:
        carried = [one for mode in _ORDER for one in found
                   if (one.release, one.mode) == (name, mode) and one.carried]  # fmt: skip
        if not carried:
            msg = f"{name} is no fetched state that is carried: see --json"
            raise UsageError(msg)
        chosen.append(carried[0])
    return chosen


def draw(found: Sequence[Measured], count: int, seed: int) -> list[Measured]:
    """Draw carried states at random, each once; half of them are after July 2026, if there are.

    Of a state that is carried in several modes, the first mode of `_ORDER` is taken.
    """
    first: dict[str, Measured] = {}
    for mode in _ORDER:
        for one in found:
            if one.mode == mode and one.carried:
                first.setdefault(one.release, one)
    chance = random.Random(seed)
    groups: dict[bool, list[Measured]] = {True: [], False: []}
    for one in sorted(first.values(), key=lambda one: (one.date, one.release)):
        groups[one.date >= RECENT].append(one)
    for group in groups.values():
        chance.shuffle(group)
        group.sort(key=lambda one: _ORDER.index(one.mode))
    recent, older = groups[True], groups[False]
    newest = max((count + 1) // 2, count - len(older))
    taken = [*recent[:newest], *older[: max(0, count - len(recent[:newest]))]]
    return sorted(taken, key=lambda one: (one.date, one.release))


def verify(
    chosen: Sequence[Measured], measurement: Measurement, progress: Progress
) -> list[Verified]:
    """Build and check the tree of each state, and return the results.

    A tree that was verified before is skipped.
    """
    known = kept()
    results: list[Verified] = []
    fits = measurement.fits()
    by_name = {release.name: release for release in measurement.states}
    for number, one in enumerate(chosen):
        progress(f"verifying {one.mode} {one.release}", number, len(chosen))
        found = _verified(one, by_name[one.release], measurement, fits, known, progress)
        results.append(found)
        if found not in known:
            same = (one.release, one.mode)
            known = [each for each in known if (each.release, each.mode) != same]
            known = sorted([*known, found], key=lambda each: (each.date, each.release, each.mode))
            write_text_atomic(_file(), json.dumps([asdict(each) for each in known], indent=1))
    return results


def current(measurement: Measurement, chosen: Sequence[Measured] | None = None) -> list[Verified]:
    """Return the results of earlier runs for trees that the ports and rules of today make.

    With ``chosen``, results of other states and modes are omitted.
    """
    known = kept()
    if chosen is not None:
        wanted = {(one.release, one.mode) for one in chosen}
        known = [each for each in known if (each.release, each.mode) in wanted]
    fits = measurement.fits()
    releases = {release.name: release for release in measurement.states}
    return [
        each
        for each in known
        if each.release in releases
        and _make(releases[each.release], each.mode, measurement, fits)[1] == each.tree
    ]


def kept() -> list[Verified]:
    """Return the results of earlier runs, also of trees that nothing makes any more."""
    file = _file()
    found = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return [Verified(**each) for each in found]


def _file() -> Path:
    return home() / "results" / "upkeep-sample.json"


def _make(
    release: Release, mode: str, measurement: Measurement, fits: Fits
) -> tuple[Application, str]:
    """Apply the series to a state in a mode; return the result and its tree."""
    made = measurement.apply(release, mode, fits)
    return made, trees.write(measurement.store, release.tree, made.draft)


def _verified(
    one: Measured,
    release: Release,
    measurement: Measurement,
    fits: Fits,
    known: Sequence[Verified],
    progress: Progress,
) -> Verified:
    seconds: dict[str, float] = {}
    with _timed(seconds, "carry"):
        made, tree = _make(release, one.mode, measurement, fits)
    for each in known:
        if (each.release, each.mode, each.tree) == (one.release, one.mode, tree):
            return each
    _fetch_again(release, seconds, progress)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "patches"
        write_series(folder, measurement.whole, release, made.ports)
        again = apply.apply(release, [str(folder)], store=measurement.store)
        if again.tree != tree:
            msg = f"the series written for {release.name} makes tree {again.tree}, expected {tree}"
            raise HarnessError(msg)
        _build(release, again, seconds, progress)
        question = check.CheckRequest(release.name, patches=str(folder))
        with _timed(seconds, "verify"):
            found = check.check(question, progress=progress).decision
    carried = {port.id: port.carried_from for port in made.ports if port.carried_from}
    # The ports in the directory are strict there, so the check cannot know that they were carried.
    verdict = "broken-carry" if found.exit_code == 1 else str(found.verdict)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lacks = lacking(made.ports, measurement.apply(release, TODAY, fits).ports)
    facts = (carried, tree, verdict, found.reason, today, seconds, lacks)
    return Verified(release.name, release.date, one.mode, *facts)


def lacking(made: Sequence[Port], today: Sequence[Port]) -> dict[str, list[str]]:
    """Return the places of the hunks and lines that carried ports lack, by patch.

    ``made`` and ``today`` are the ports of a mode and those of today for the same state. A patch of
    which nothing is missing is omitted.
    """
    carried = {port.id: port for port in made if port.carried_from}
    found = {}
    for port in today:
        if port.id in carried:
            difference = port_comparison.compare(port, carried[port.id])
            parts = [*difference.missing, *difference.changed]
            places = [
                (each.function or each.file or each.name).split(" ")[-1].split("::")[-1]
                for each in parts
                if each.what in ("file", "hunk") or any(line[:1] == "-" for line in each.lines)
            ]
            if places:
                found[port.id] = list(dict.fromkeys(places))
    return found


def _fetch_again(release: Release, seconds: dict[str, float], progress: Progress) -> None:
    """Time a fetch into an empty data directory; without a network, it has no duration."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PYLLAMAKV_HOME=folder),
        contextlib.suppress(SourceError),
        _timed(seconds, "fetch"),
    ):
        fetch.fetch(release, progress=progress)


def _build(
    release: Release, patched: PatchedRelease, seconds: dict[str, float], progress: Progress
) -> None:
    """Time the builds of both sides if stock is not built; a failed build is left to the check."""
    stock = f"{release.name}+stock"
    if variant.lookup(variant.request(stock)) is not None:
        return
    with contextlib.suppress(BuildError), _timed(seconds, "build"):
        build(stock, progress=progress)
        build_patched(release, patched, progress=progress)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Store the duration of a block that raises nothing."""
    started = time.monotonic()
    yield
    seconds[step] = round(time.monotonic() - started, 1)


def write_series(folder: Path, whole: Series, release: Release, ports: Sequence[Port]) -> None:
    """Write ports into a directory in the layout of the series, each with ``release`` as its base.

    Claims and scenarios are those of the shipped patches.
    """
    for port in ports:
        definition = replace(whole.definition(port.id), folder=folder / port.id)
        hooks, contents = shared_files.separate(port.patch, definition.shared)
        file = file_of(definition, release.name)
        files = {shared_files.path_of(folder, path): data for path, data in contents.items()}
        for path, data in {file: hooks, **files}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        table = tomlkit.parse(_definition_file(whole, port).read_text("utf-8"))
        changed = next(each.old for each in port.patch.files if each.old is not None)
        requires = [id_ for id_ in port.requires if id_ not in definition.requires]
        table["port"] = [
            {
                "base": release.name,
                "era": release.era,
                "requires": requires,
                "markers": [{"file": changed, "exists": True}],
            }
        ]
        (folder / port.id / "patch.toml").write_text(tomlkit.dumps(table), "utf-8")
    order = {"schema": 1, "order": [port.id for port in ports]}
    (folder / "series.toml").write_text(tomlkit.dumps(order), "utf-8")


def _definition_file(whole: Series, port: Port) -> Path:
    folder = whole.definition(port.id).folder
    assert folder is not None  # the shipped series has directories
    return folder / "patch.toml"
