"""Apply the series to every fetched state as if the state were new.

A state is measured in several modes, which differ in the ports that are kept. A port is named for
the newest of several releases with equal code; its base is here the oldest state that it fits
strictly. A state needs no manual work if every patch of its series is strict or carried. Nothing is
built.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.home import home
from pyllamakv.patching import carry, headings, hunk_locator, trees
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.port_choice import AppliedPort, choose
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import lockfile
from pyllamakv.source.files import write_text_atomic
from pyllamakv.source.releases import ARCHIVE_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.port_choice import Manual, Skipped
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: The first release that the series is for (llama-cpp-python 0.2.85), by date of its commit.
SINCE = "2024-07-31"
#: States since this date are reported separately.
RECENT = "2026-08-01"
#: Every port is kept.
TODAY = "today"
#: The ports that fit no other state are removed: without this state, they would not exist.
LEAVE_ONE_OUT = "leave-one-out"
#: Only ports with a base older than the state are kept.
FORWARD = "forward"
#: The same, and a patch is carried from a port that does not fit the state, if it can be.
CARRY_FIRST = "carry-first"
MODES = (TODAY, LEAVE_ONE_OUT, FORWARD, CARRY_FIRST)

MANUAL = "manual"

#: The modules of `pyllamakv.patching` that determine how a patch is applied or carried.
_MODULES = ("carry", "carry_comparison", "cpp_lines", "definition", "headings",
            "hunk_locator", "hunks", "port_choice", "strict_apply", "token_merge",
            "used_names")  # fmt: skip

#: The states that each port fits, by the digest of the port.
Fits = dict[str, list["Release"]]


@dataclass(frozen=True)
class Measured:
    """One release in one mode: the state of each patch that is meant for it.

    A state is ``strict``, ``carried BASE`` or ``manual``; ``reasons`` has the reason of each manual
    patch. ``kept`` has, for a manual patch, each function of the nearest port's base in which there
    is a conflict, and the percentage of its lines that the release still has. ``equal`` states that
    the changed files are those of the ports that fit strictly today.
    """

    release: str
    era: str
    date: str
    mode: str
    patches: dict[str, str]
    reasons: dict[str, str]
    equal: bool = False
    kept: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Return whether the release needs no manual work."""
        return MANUAL not in self.patches.values()

    @property
    def strict(self) -> bool:
        """Return whether every patch applies strictly."""
        return set(self.patches.values()) <= {"strict"}

    @property
    def carried(self) -> bool:
        """Return whether the release needs no manual work, and a patch is carried."""
        return self.good and not self.strict


@dataclass(frozen=True)
class Hook:
    """A hunk of a port, and how many of some states have its lines.

    ``changes`` counts how often the lines appeared or disappeared from one state to the next.
    """

    patch: str
    file: str
    number: int
    function: str
    present: int
    states: int
    changes: int


@dataclass(frozen=True)
class Application:
    """The result of each patch of a series on one release, and the changed files."""

    draft: TreeOverlay
    found: dict[str, AppliedPort | Skipped]

    @property
    def ports(self) -> tuple[Port, ...]:
        """Return the ports that apply, in order."""
        return tuple(each.port for each in self.found.values() if isinstance(each, AppliedPort))

    @property
    def strict(self) -> bool:
        """Return whether no patch is carried or fails."""
        return not any(
            each.port.carried_from if isinstance(each, AppliedPort) else each.failed
            for each in self.found.values()
        )


def states(store: Store) -> list[Release]:
    """Return the fetched releases of the indexes, oldest first; equal trees count once."""
    found: dict[str, Release] = {}
    for release in lockfile.known().values():
        if release.kind in ARCHIVE_KINDS and release.date >= SINCE and store.has(release):
            found.setdefault(release.tree, release)
    return sorted(found.values(), key=lambda release: release.order)


class Measurement:
    """Measure the states of a store; results are kept in the data directory."""

    def __init__(self, store: Store, whole: Series, progress: Progress) -> None:
        self.store = store
        self.whole = whole
        self.states = states(store)
        self._progress = progress
        self._file = home() / "results" / "upkeep.json"
        text = self._file.read_text("utf-8") if self._file.is_file() else "{}"
        self._known: dict[str, Any] = json.loads(text)
        self._used: set[str] = set()
        self._code = _code()
        self._tree: trees.StoreTree | None = None

    def run(self) -> list[Measured]:
        """Return every state in every mode; a run continues after an interruption."""
        fits = self.fits()
        found: list[Measured] = []
        for number, release in enumerate(self.states):
            self._progress(f"measuring {release.name}", number, len(self.states))
            found += (self.measure(release, mode, fits) for mode in MODES)
        return found

    def forget(self) -> None:
        """Remove the results that this run did not use, of former ports and code."""
        self._known = {key: self._known[key] for key in self._known if key in self._used}
        self._save()

    def fits(self) -> Fits:
        """Return the states that each port fits strictly, oldest first, by its digest.

        A port fits if its markers hold, the patches that it requires apply strictly, and every hunk
        has a certain place after the earlier patches of the series.
        """
        found: Fits = {}
        for number, release in enumerate(self.states):
            key = self._key("fits", release, self.whole)
            if key not in self._known:
                self._progress(f"fitting the ports to {release.name}", number, len(self.states))
                self._keep(key, self._fitting(release))
            for digest in self._known[key]:
                found.setdefault(digest, []).append(release)
        return found

    def unseen(self, release: Release, mode: str, fits: Fits) -> Series:
        """Return the series as if the release were new; `TODAY` returns the whole series.

        The base of each port is the oldest state that it fits. A port without one is removed.
        """
        if mode == TODAY:
            return self.whole
        definitions = []
        for each in self.whole:
            ports = [
                replace(port, base=fits[port.digest][0].name)
                for port in each.ports
                if port.digest in fits and _kept(fits[port.digest], release, mode)
            ]
            definitions.append(replace(each, ports=tuple(ports)))
        return replace(self.whole, definitions=tuple(definitions))

    def apply(self, release: Release, mode: str, fits: Fits) -> Application:
        """Apply each patch of the series that can be applied or carried in a mode."""
        series = self.unseen(release, mode, fits)
        carrier = Carrier(self.store, release, series)
        tree = self._stock(release)
        draft = TreeOverlay(tree)
        found: dict[str, AppliedPort | Skipped] = {}
        applied: list[str] = []
        for each in series:
            tries = [each]
            if mode == CARRY_FIRST:
                others = (port for port in each.ports if release not in fits[port.digest])
                tries.insert(0, replace(each, ports=tuple(others)))
            for definition in tries:
                tried = choose(definition, draft, tree, release.name, applied, carrier)
                if isinstance(tried, AppliedPort):
                    applied.append(each.id)
                    break
            found[each.id] = tried
        return Application(draft, found)

    def hooks(self) -> list[Hook]:
        """Count how often upstream changed the lines of the hooks, over the states of one era.

        The hooks are those of the ports that fit the newest state. They are searched in each stock
        tree, with their context. A hook in lines of another patch is omitted.
        """
        newest = self.states[-1]
        ports = self.apply(newest, TODAY, {}).ports
        digests = " ".join(port.digest for port in ports)
        found: dict[tuple[str, str, int], list[bool]] = {}
        for release in (each for each in self.states if each.era == newest.era):
            key = self._key(f"hooks {digests}", release, self.whole)
            if key not in self._known:
                self._keep(key, _present_hooks(ports, self._stock(release)))
            for patch, file, number, present in self._known[key]:
                found.setdefault((patch, file, number), []).append(present)
        functions = {
            (port.id, file.path, number): headings.name(headings.written(hunk))
            for port in ports
            for file in port.patch.files
            for number, hunk in enumerate(file.hunks, 1)
        }
        return [
            Hook(*where, functions[where], sum(present), len(present), _changes(present))
            for where, present in found.items()
            if present[-1]
        ]

    def measure(self, release: Release, mode: str, fits: Fits) -> Measured:
        """Return the result of a release in a mode, from an earlier run if it is known."""
        series = self.unseen(release, mode, fits)
        key = self._key(mode, release, series)
        if key not in self._known:
            self._keep(key, asdict(self._measured(release, mode, fits)))
        return Measured(**self._known[key])

    def _measured(self, release: Release, mode: str, fits: Fits) -> Measured:
        tried = self.apply(release, mode, fits)
        today = tried if mode == TODAY else self.apply(release, TODAY, fits)
        patches: dict[str, str] = {}
        reasons: dict[str, str] = {}
        kept: dict[str, dict[str, int]] = {}
        for id_, found in tried.found.items():
            if isinstance(found, AppliedPort):
                base = found.port.carried_from
                patches[id_] = f"carried {base}" if base else "strict"
            elif found.failed or found.manual or isinstance(today.found[id_], AppliedPort):
                patches[id_] = MANUAL
                reasons[id_] = found.reason
                if found.manual:
                    kept[id_] = self._kept_lines(release, found.manual[0])
        equal = today.strict and tried.draft.changes == today.draft.changes
        facts = (release.name, release.era, release.date)
        return Measured(*facts, mode, patches, reasons, equal, kept)

    def _kept_lines(self, release: Release, manual: Manual) -> dict[str, int]:
        """Return how many percent of the lines of each function with a conflict upstream kept."""
        base = next(each for each in self.states if each.name == manual.base)
        found = {}
        for conflict in manual.conflicts:
            if conflict.function:
                old, new = (
                    headings.bodies(hunk_locator.lines_of(entry.data if entry else b""))
                    for tree in (base.tree, release.tree)
                    for entry in [trees.StoreTree(self.store, tree).entry(conflict.file)]
                )
                lines = old.get(conflict.function, set())
                share = len(lines & new.get(conflict.function, set())) / max(1, len(lines))
                found[conflict.function] = round(100 * share)
        return found

    def _fitting(self, release: Release) -> list[str]:
        tree = self._stock(release)
        draft = TreeOverlay(tree)
        found: list[str] = []
        applied: list[str] = []
        for each in self.whole:
            meant = each.ports if each.covers_release(release.name) else ()
            for port in meant:
                marked = not port.failed_markers(tree) and set(port.requires) <= set(applied)
                if marked and all(placement.good for placement in draft.dry_run(port.patch)):
                    found.append(port.digest)
            if isinstance(choose(each, draft, tree, release.name, applied), AppliedPort):
                applied.append(each.id)
        return found

    def _stock(self, release: Release) -> trees.StoreTree:
        if self._tree is None or self._tree.tree != release.tree:
            self._tree = trees.StoreTree(self.store, release.tree)
            ports = [port for each in self.whole for port in each.ports]
            self._tree.fetch(path for port in ports for path in port.patch.paths)
        return self._tree

    def _key(self, what: str, release: Release, series: Series) -> str:
        """Return a name of a result that changes with the release, the ports and the code."""
        rules = [
            (each.id, each.carry, each.releases, each.since, each.until, each.requires)
            for each in series
        ]
        ports = [
            (port.base, port.digest, port.markers, port.requires)
            for each in series
            for port in each.ports
        ]
        facts = (release.name, release.tree, release.date, what, str(rules), str(ports), self._code)
        key = hashlib.sha256("\0".join(facts).encode()).hexdigest()
        self._used.add(key)
        return key

    def _keep(self, key: str, result: Any) -> None:
        self._known[key] = result
        self._save()

    def _save(self) -> None:
        write_text_atomic(self._file, json.dumps(self._known))


def _present_hooks(ports: Sequence[Port], tree: Tree) -> list[tuple[str, str, int, bool]]:
    found = []
    for port in ports:
        for file in port.patch.files:
            if file.old is None:
                continue
            entry = tree.entry(file.old)
            index = hunk_locator.LineIndex(hunk_locator.lines_of(entry.data if entry else b""))
            for number, hunk in enumerate(file.hunks, 1):
                present = bool(index.find(hunk.old, hunk))
                found.append((port.id, file.path, number, present))
    return found


def _changes(present: Sequence[bool]) -> int:
    return sum(one != other for one, other in itertools.pairwise(present))


def _kept(fits: Sequence[Release], release: Release, mode: str) -> bool:
    """Return whether a port that fits some states is kept when a release is measured."""
    return fits != [release] if mode == LEAVE_ONE_OUT else fits[0].order < release.order


def _code() -> str:
    """Return the digest of the code that determines a result."""
    folder = Path(carry.__file__).parent
    files = [*(folder / f"{name}.py" for name in _MODULES), Path(__file__)]
    text = "".join(file.read_text("utf-8") for file in files)
    return hashlib.sha256(text.encode()).hexdigest()
