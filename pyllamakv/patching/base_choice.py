"""Find the release on which a patch is committed before a cherry-pick onto another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.errors import NoPortApplies, PatchConflict
from pyllamakv.patching import apply, port_choice, trees
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import lockfile

if TYPE_CHECKING:
    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store


@dataclass(frozen=True)
class NearestPort:
    """The commit of a port on a release where it applies strictly."""

    release: Release
    port: Port
    commit: str


def nearest(definition: Definition, series: Series, onto: Release, *, store: Store) -> NearestPort:
    """Return the commit that a patch is picked from for a target.

    Tried are the releases that the store has, and the bases of the ports: those with the most lines
    of the target in the changed files first. Markers are ignored: a port that applies strictly is a
    valid start. Raises NoPortApplies.
    """
    bases = {port.base for port in definition.ports}
    there = lockfile.bases(series.lock).values()
    known = {r.commit: r for r in there if store.has(r) or r.key in bases}
    known[onto.commit] = onto
    line = sorted(known.values(), key=lambda release: release.order)
    at = line.index(onto)
    paths = {file.old for p in definition.ports for file in p.patch.files if file.old}

    def distance(release: Release) -> tuple[float, int]:
        lost = 1.0
        if store.has(release):
            trees_of = store.tree_of(release), store.tree_of(onto)
            lost = trees.lost_share(store, *trees_of, paths)
        return lost, abs(line.index(release) - at)

    conflicts: list[PatchConflict] = []
    for release in sorted(line, key=distance):
        for port in port_choice.candidates(definition, release.key):
            try:
                found = trees.ensure_fetched(store, release)
                commit, tree = apply.apply_requirements(series, port.requires, found, store=store)
                draft = TreeOverlay(trees.StoreTree(store, tree))
                draft.apply(port.patch, port.name)
            except PatchConflict as error:
                conflicts.append(error)
                continue
            except NoPortApplies as error:
                conflicts += error.conflicts
                continue
            made = apply.commit_port(store, trees.write(store, tree, draft), commit, port)
            return NearestPort(found, port, made)
    msg = (
        f"No port of {definition.id} applies strictly to any "
        "fetched release; run `pyllamakv upstream fetch` for more releases"
    )
    port = definition.ports[0]
    if port.requires:
        needs = " ".join(port.requires)
        msg += (
            f", or, if {needs} was edited, make the change again in the tree of `pyllamakv patch "
            f"apply RELEASE {needs} --to DIR` with the release of port {port.base}, and run "
            f"`pyllamakv patch export {definition.id} --base {port.base} --from DIR`"
        )
    raise NoPortApplies(msg, conflicts)
