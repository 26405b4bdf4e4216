"""Choose the ports for a release: by markers, then by strict apply, including requirements.

A patch without a port that applies can be carried from the nearest one (see `carry`).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import foreign_series, trees
from pyllamakv.patching import series as series_module
from pyllamakv.patching.definition import Definition, Marker, Port
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import lockfile
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.carry import Carrier
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Placement, Tree
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class MergeConflict:
    """A place of a file that git could not merge, with the lines of both sides and of the base.

    ``line`` is counted from 1 in the target's file; it is 0 if one side deleted the file.
    ``function`` is the function or type of the base that the patch changes there, or empty.
    """

    file: str
    line: int
    upstream: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    patch: tuple[str, ...] = ()
    function: str = ""

    def __str__(self) -> str:
        if not self.line:
            return f"{self.file}: the target has no such file, or adds one"
        where = f" in `{self.function}`" if self.function else ""
        return f"{self.file}:{self.line}: upstream changed the lines that the patch changes{where}"


@dataclass(frozen=True)
class AppliedPort:
    """One patch that applies: its port, and the place of each hunk.

    ``conflicts`` are those of git that a carried patch was merged in token by token. ``contained``
    are the places of its changes that the release contains: file and line. ``manual`` has the
    reason for each nearer port that it could not be carried from.
    """

    port: Port
    placements: tuple[Placement, ...]
    conflicts: tuple[MergeConflict, ...] = ()
    contained: tuple[str, ...] = ()
    manual: tuple[Manual, ...] = ()


@dataclass(frozen=True)
class Manual:
    """The reason why a patch cannot be carried from a port, with each conflict.

    ``lacks`` is a required patch that is not applied.
    """

    base: str
    reason: str
    conflicts: tuple[MergeConflict, ...] = ()
    lacks: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "base": self.base,
            "reason": self.reason,
            "conflicts": [asdict(each) for each in self.conflicts],
        }


@dataclass(frozen=True)
class Skipped:
    """A patch of the series that is skipped on a release, with the reason.

    ``manual`` has an entry for each port from which the patch could not be carried.
    """

    id: str
    reason: str
    conflicts: tuple[PatchConflict, ...] = ()
    manual: tuple[Manual, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the patch is meant for the release, and neither applied nor carried."""
        if self.contained:
            return False
        return bool(self.conflicts) or any(not each.lacks for each in self.manual)

    @property
    def contained(self) -> bool:
        """Return whether the release already contains all changes of the patch."""
        return bool(self.conflicts) and all(each.contained for each in self.conflicts)


@dataclass(frozen=True)
class PortChoice:
    """The ports for a release, in order, the resulting tree, and the skipped patches."""

    steps: tuple[AppliedPort, ...]
    draft: TreeOverlay
    skipped: tuple[Skipped, ...] = ()

    @property
    def ports(self) -> tuple[Port, ...]:
        """Return the ports in order of application."""
        return tuple(step.port for step in self.steps)


def choose_for_release(
    release: Release,
    names: Sequence[str | Port] | None = None,
    *,
    series: Series | None = None,
    store: Store | None = None,
    carrier: Carrier | None = None,
) -> PortChoice:
    """Choose ports for a release, which is fetched if the store does not have it.

    ``names`` are ids of the series, paths of foreign patch files or directories, or ports in memory
    (one with the id of a shipped patch replaces it). None selects every patch that applies. With
    ``carrier``, a patch that has no port for the release is carried.
    """
    store = store or open_store()
    release = trees.ensure_fetched(store, release)
    series = series_module.load() if series is None else series
    tree = trees.StoreTree(store, store.tree_of(release))
    return choose_for_tree(series, tree, release.name, names, carrier)


def choose_for_tree(
    series: Series,
    tree: Tree,
    release: str,
    names: Sequence[str | Port] | None = None,
    carrier: Carrier | None = None,
) -> PortChoice:
    """Choose ports for a stock tree.

    With names, all of them and their requirements must apply; otherwise, NoPortApplies lists each
    conflict. Without names, patches that do not apply are skipped with the reason. Raises
    NoPortApplies if none applies.
    """
    if names is None:
        return _every(series, tree, release, carrier)
    definitions = _known(series, names)
    wanted = [patch.id for patch in named(series, names)]
    while True:
        more = _attempt(definitions, tree, release, wanted, carrier)
        if isinstance(more, PortChoice):
            return more
        wanted += more


def candidates(definition: Definition, release: str) -> tuple[Port, ...]:
    """Return the ports in order of trial: the one written for this very release first."""
    if release.startswith("git:") and (known := lockfile.bases(definition.lock).get(release)):
        release = known.key
    return tuple(sorted(definition.ports, key=lambda port: port.base != release))


def choose(
    definition: Definition,
    draft: TreeOverlay,
    stock: Tree,
    release: str,
    applied: Sequence[str],
    carrier: Carrier | None = None,
) -> AppliedPort | Skipped:
    """Choose and apply one port of a patch to a draft, or state why none fits.

    A port is a candidate if its markers hold in the stock tree. It is chosen if all required
    patches are applied and every hunk has a certain place. Otherwise, ``carrier`` may carry the
    patch.
    """
    if not definition.covers_release(release):
        return Skipped(definition.id, f"is meant for {definition.meant_for}, not for {release}")
    conflicts: list[PatchConflict] = []
    reasons: list[str] = []
    unmarked: list[tuple[str, Marker]] = []
    for port in candidates(definition, release):
        missed = port.failed_markers(stock)
        if missed and not _is_candidate(port, stock):
            unmarked.append((port.base, missed[0]))
            continue
        lacking = [id_ for id_ in port.requires if id_ not in applied]
        if lacking:
            reasons.insert(0, f"requires {lacking[0]}, which is not applied here")
            continue
        try:
            return AppliedPort(port, draft.apply(port.patch, port.name))
        except PatchConflict as error:
            if missed and error.contained:
                unmarked.append((port.base, missed[0]))
            else:
                conflicts.append(error)
    if conflicts:
        reasons = [str(error) for error in conflicts]
    elif unmarked and not reasons:
        reasons = [_skipped(unmarked, stock)]
    manual: tuple[Manual, ...] = ()
    if carrier is not None and definition.may_be_carried(stock):
        found = carrier.carry(definition, draft, applied)
        if isinstance(found, AppliedPort):
            return found
        manual = found
        reasons += [f"cannot be carried from {each.base}: {each.reason}" for each in manual]
    return Skipped(definition.id, "; ".join(reasons) or "has no port", tuple(conflicts), manual)


def choose_each(
    definitions: Sequence[Definition],
    draft: TreeOverlay,
    stock: Tree,
    release: str,
    carrier: Carrier | None = None,
) -> Iterator[AppliedPort | Skipped]:
    """Choose and apply a port of each patch, or state why none fits; see `choose`.

    A patch that the release contains counts as applied for those that require it.
    """
    done: list[str] = []
    contained: dict[str, Skipped] = {}
    for number, definition in enumerate(definitions):
        if definition.id in contained:
            yield contained[definition.id]
            continue
        found = choose(definition, draft, stock, release, done, carrier)
        if isinstance(found, Skipped) and (found.conflicts or found.manual):
            ids = contained_ids(definitions[number:], stock, release)
            contained |= {id_: _contained(id_, ids, release) for id_ in ids}
            done += ids
            found = contained.get(definition.id, found)
        elif isinstance(found, AppliedPort):
            done.append(definition.id)
        yield found


def contained_ids(definitions: Sequence[Definition], stock: Tree, release: str) -> tuple[str, ...]:
    """Return the ids of the first patches of a list that a tree contains together.

    Several are contained if upstream merged them as one commit: undoing the last one shows the
    lines of the one before. Nothing is returned if the tree does not contain the first patch.
    """
    ports: list[Port] = []
    for definition in definitions:
        tried = candidates(definition, release)
        for port in tried if not ports else tried[-1:]:
            draft = TreeOverlay(stock)
            try:
                for each in reversed((*ports, port)):
                    draft.apply(each.patch.reversed, each.name)
            except PatchConflict:
                continue
            return tuple(each.id for each in (*ports, port))
        ports += tried[-1:]
    return ()


def _contained(id_: str, ids: Sequence[str], release: str) -> Skipped:
    others = [other for other in ids if other != id_]
    merged = f", together with {', '.join(others)}" if others else ""
    reason = f"{release} contains all changes of the patch{merged}: drop it for this release"
    return Skipped(id_, reason, (PatchConflict(reason, contained=True),))


def _is_candidate(port: Port, stock: Tree) -> bool:
    """Return whether a port is a candidate, apart from files that it adds and the tree has.

    Somebody copied them: the port is not skipped silently, but reported as partly applied.
    """
    failed = port.failed_markers(stock)
    if not failed:
        return True
    added = {
        file.path: b"".join(line for hunk in file.hunks for line in hunk.new)
        for file in port.patch.files
        if file.old is None
    }
    for marker in failed:
        entry = stock.entry(marker.file)
        if entry is None or marker.exists is not False or entry.data != added.get(marker.file):
            return False
    return True


def _skipped(unmarked: Sequence[tuple[str, Marker]], tree: Tree) -> str:
    """Return why no port is a candidate: the first marker that does not hold, of the first port."""
    base, marker = unmarked[0]
    reason = f"skipped port {base}: {marker.problem(tree)}"
    others = [base for base, _ in unmarked[1:]]
    if others:
        reason += f"; the markers of {', '.join(others)} do not match either"
    return reason


def _every(series: Series, tree: Tree, release: str, carrier: Carrier | None) -> PortChoice:
    draft = TreeOverlay(tree)
    steps: list[AppliedPort] = []
    skipped: list[Skipped] = []
    for found in choose_each(tuple(series), draft, tree, release, carrier):
        if isinstance(found, AppliedPort):
            steps.append(found)
        else:
            skipped.append(found)
    if not steps:
        says = "".join(f"\n  {skip.id}: {skip.reason}" for skip in skipped)
        raise NoPortApplies(
            f"No patch of the series applies to {release}.{says}",
            [error for skip in skipped for error in skip.conflicts],
        )
    return PortChoice(tuple(steps), draft, tuple(skipped))


def _attempt(
    definitions: dict[str, Definition],
    tree: Tree,
    release: str,
    wanted: Sequence[str],
    carrier: Carrier | None,
) -> PortChoice | list[str]:
    """Return a plan, or the ids that a port turned out to require."""
    draft = TreeOverlay(tree)
    steps: list[AppliedPort] = []
    for id_, definition in definitions.items():
        if id_ not in wanted:
            continue
        meant = [t for t in candidates(definition, release) if _is_candidate(t, tree)]
        if meant and meant[0].base == release:
            # the port for this release states what it requires here
            meant = meant[:1]
        if not meant and carrier is not None and definition.may_be_carried(tree):
            meant = list(carrier.ports(definition)[:1])
        if definition.covers_release(release):
            more = [need for port in meant for need in port.requires if need not in wanted]
            unknown = [need for need in more if need not in definitions]
            if unknown:
                raise UsageError(f"{id_} requires {unknown[0]}, which is not in the series.")
            if more:
                return list(dict.fromkeys(more))
        done = [step.port.id for step in steps]
        found = choose(definition, draft, tree, release, done, carrier)
        if isinstance(found, Skipped):
            if len(found.conflicts) == 1 and len(meant) == 1 and not found.manual:
                raise found.conflicts[0]
            raise NoPortApplies(
                f"{id_} does not apply to {release}: {found.reason}", found.conflicts
            )
        steps.append(found)
    return PortChoice(tuple(steps), draft)


def named(series: Series, names: Sequence[str | Port]) -> list[Definition]:
    """Return the definitions that names mean: ids, files, directories or ports."""
    found: list[Definition] = []
    for name in names:
        if isinstance(name, Port):
            found.append(foreign_series.definition_of(name))
        elif name.startswith(foreign_series.GIT):
            found += foreign_series.load(name)
        elif os.sep in name or name.endswith((".patch", ".diff")):
            found += foreign_series.load(Path(name))
        else:
            found.append(series.definition(name))
    return found


def only(series: Series, names: Sequence[str | Port] | None) -> Series:
    """Return the patches that names mean, with all that they may require, in order."""
    if names is None:
        return series
    known = _known(series, names)
    wanted = {definition.id for definition in named(series, names)}
    while True:
        ports = [port for id_ in wanted for port in known[id_].ports]
        more = {need for port in ports for need in port.requires if need in known} - wanted
        if not more:
            return series_module.Series(tuple(d for d in known.values() if d.id in wanted))
        wanted |= more


def load_series(patches: Path | str | None = None) -> Series:
    """Return the shipped series, or another one with the shipped patches that it requires."""
    if not patches:
        return series_module.load()
    series = foreign_series.load(patches)
    return with_requirements(series, series_module.load()) if _needs(series) else series


def lock_of(patches: Path | str | None) -> Path | None:
    """Return the lock file of another series than the shipped one, if there may be one."""
    return load_series(patches).lock if patches else None


def with_requirements(series: Series, shipped: Series) -> Series:
    """Return a foreign series after the shipped patches that it requires and does not contain."""
    found = only(shipped, sorted(_needs(series) & set(shipped.order)))
    before = tuple(patch for patch in found if patch.id not in series.order)
    return replace(series, definitions=(*before, *series)) if before else series


def _needs(series: Series) -> set[str]:
    """Return the ids that the patches of a series require and it does not contain."""
    wanted = {need for patch in series for port in patch.ports for need in port.requires}
    return wanted - set(series.order)


def _known(series: Series, names: Sequence[str | Port]) -> dict[str, Definition]:
    # a port in memory replaces the shipped patch of its id; others follow the series
    known = {definition.id: definition for definition in series.every}
    known.update({definition.id: definition for definition in named(series, names)})
    return known
