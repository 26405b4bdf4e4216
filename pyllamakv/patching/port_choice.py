"""Choose the ports for a release: by markers, then by strict apply, including requirements."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import foreign_series, trees
from pyllamakv.patching import series as series_module
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Placement, Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class AppliedPort:
    """One patch that applies: its port, and the place of each hunk."""

    port: Port
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Skipped:
    """A patch of the series that is skipped on a release, with the reason."""

    id: str
    reason: str
    conflicts: tuple[PatchConflict, ...] = ()


@dataclass(frozen=True)
class PortChoice:
    """The ports for a release, in order, the resulting tree, and the skipped patches."""

    steps: tuple[AppliedPort, ...]
    draft: TreeOverlay
    skipped: tuple[Skipped, ...] = ()

    @property
    def texts(self) -> tuple[Port, ...]:
        """Return the texts in order of application."""
        return tuple(step.port for step in self.steps)


def choose_for_release(
    release: Release,
    names: Sequence[str | Port] | None = None,
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> PortChoice:
    """Choose ports for a release, which is fetched if the store does not have it.

    ``names`` are ids of the series, paths of foreign patch files or directories, or ports in memory
    (one with the id of a shipped patch replaces it). None selects every patch that applies.
    """
    store = store or open_store()
    release = trees.ensure_fetched(store, release, progress)
    series = series_module.load() if series is None else series
    tree = trees.StoreTree(store, store.tree_of(release))
    return choose_for_tree(series, tree, release.name, names)


def choose_for_tree(
    series: Series,
    tree: Tree,
    release: str,
    names: Sequence[str | Port] | None = None,
) -> PortChoice:
    """Choose ports for a stock tree.

    With names, all of them and their requirements must apply; otherwise, NoPortApplies lists each
    conflict. Without names, patches that do not apply are skipped with the reason. Raises
    NoPortApplies if none applies.
    """
    if names is None:
        return _every(series, tree, release)
    definitions = _known(series, names)
    wanted = [patch.id for patch in named(series, names)]
    while True:
        more = _attempt(definitions, tree, release, wanted)
        if isinstance(more, PortChoice):
            return more
        wanted += more


def candidates(definition: Definition, release: str) -> tuple[Port, ...]:
    """Return the texts in order of trial: the one written for this very release first."""
    return tuple(sorted(definition.ports, key=lambda text: text.base != release))


def choose(
    definition: Definition, draft: TreeOverlay, stock: Tree, release: str, applied: Sequence[str]
) -> AppliedPort | Skipped:
    """Choose and apply one port of a patch to a draft, or state why none fits.

    A port is a candidate if its markers hold in the stock tree. It is chosen if all required
    patches are applied and every hunk has a certain place.
    """
    if not definition.covers_release(release):
        return Skipped(definition.id, f"is meant for {definition.releases}, not for {release}")
    conflicts: list[PatchConflict] = []
    reasons: list[str] = []
    for text in candidates(definition, release):
        missed = text.failed_markers(stock)
        if missed:
            reasons.append(f"the text for {text.base} is not meant for this tree: {missed[0]}")
            continue
        lacking = [id_ for id_ in text.requires if id_ not in applied]
        if lacking:
            reasons.insert(0, f"requires {lacking[0]}, which is not applied here")
            continue
        try:
            return AppliedPort(text, draft.apply(text.patch, text.name))
        except PatchConflict as error:
            conflicts.append(error)
    if conflicts:
        reasons = [str(error) for error in conflicts]
    return Skipped(definition.id, "; ".join(reasons) or "has no text", tuple(conflicts))


def _every(series: Series, tree: Tree, release: str) -> PortChoice:
    draft = TreeOverlay(tree)
    steps: list[AppliedPort] = []
    skipped: list[Skipped] = []
    for definition in series:
        done = [step.port.id for step in steps]
        found = choose(definition, draft, tree, release, done)
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
    definitions: dict[str, Definition], tree: Tree, release: str, wanted: Sequence[str]
) -> PortChoice | list[str]:
    """Return a plan, or the ids that a text turned out to require."""
    draft = TreeOverlay(tree)
    steps: list[AppliedPort] = []
    for id_, definition in definitions.items():
        if id_ not in wanted:
            continue
        meant = [t for t in candidates(definition, release) if not t.failed_markers(tree)]
        if meant and meant[0].base == release:
            # the port for this release states what it requires here
            meant = meant[:1]
        if definition.covers_release(release):
            more = [need for text in meant for need in text.requires if need not in wanted]
            unknown = [need for need in more if need not in definitions]
            if unknown:
                raise UsageError(f"{id_} requires {unknown[0]}, which is not in the series.")
            if more:
                return list(dict.fromkeys(more))
        found = choose(definition, draft, tree, release, [step.port.id for step in steps])
        if isinstance(found, Skipped):
            if len(found.conflicts) == 1 and len(meant) == 1:
                raise found.conflicts[0]
            raise NoPortApplies(
                f"{id_} does not apply to {release}: {found.reason}", found.conflicts
            )
        steps.append(found)
    return PortChoice(tuple(steps), draft)


def named(series: Series, names: Sequence[str | Port]) -> list[Definition]:
    """Return the definitions that names mean: ids, files, folders or texts."""
    found: list[Definition] = []
    for name in names:
        if isinstance(name, Port):
            found.append(foreign_series.definition_of(name))
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
        texts = [text for id_ in wanted for text in known[id_].ports]
        more = {need for text in texts for need in text.requires if need in known} - wanted
        if not more:
            return series_module.Series(tuple(d for d in known.values() if d.id in wanted))
        wanted |= more


def _known(series: Series, names: Sequence[str | Port]) -> dict[str, Definition]:
    # a port in memory replaces the shipped patch of its id; others follow the series
    known = {definition.id: definition for definition in series}
    known.update({definition.id: definition for definition in named(series, names)})
    return known
