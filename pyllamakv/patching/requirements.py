"""Determine the patches that a rebased port still requires on its release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.patching import trees
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.definition import Port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyllamakv.patching.definition import Definition
    from pyllamakv.patching.rebase_session import Session
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store


def needed_on(
    series: Series, port: Port, release: Release, store: Store, to: Path | None
) -> tuple[str, ...]:
    """Return the requirements of a port, without patches that the release does not need."""
    tree = trees.StoreTree(store, store.tree_of(release))
    carrier = Carrier(store, release, series)

    def meant(id_: str) -> bool:
        patch = series.definition(id_)
        if not patch.covers_release(release.name):
            return False
        if any(not port.failed_markers(tree) for port in patch.ports):
            return True
        return patch.may_be_carried(tree) and carrier.covers(patch)

    # The requirements of a patch apply to each of its ports.
    always = series.definition(port.id).requires
    return tuple(
        id_
        for id_ in port.requires
        if id_ in always or meant(id_) or (to and (to / f"{id_}.patch").is_file())
    )


def patches(requires: Sequence[str], to: Path | None) -> list[str | Port]:
    """Return a required port; one just written to a directory has precedence over the series."""
    files = {id_: to / f"{id_}.patch" for id_ in requires} if to else {}
    return [
        Port.from_file(files[id_], id_) if id_ in files and files[id_].is_file() else id_
        for id_ in requires
    ]


def dropped(definition: Definition, session: Session) -> tuple[str, ...]:
    """Return the patches that a rebased port no longer requires."""
    needed = next((port.requires for port in definition.ports if port.base == session.base), ())
    return tuple(
        f"it no longer requires {id_}, which does not cover {session.onto}"
        for id_ in needed
        if id_ not in session.requires
    )
