"""Choose the patches of llama-server that a server is built with.

They are applied after the patches of its variant, to the sources of the server alone: the libraries
and the id of the variant do not depend on them. The stock server gets none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyllamakv.building import variant
from pyllamakv.patching import apply, port_choice, shared_files, trees
from pyllamakv.patching import series as series_module
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.port_choice import AppliedPort, PortChoice
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store


@dataclass(frozen=True)
class ServerSources:
    """The tree of a server, the patches of the server in it, and the reason for each other one.

    ``carried`` has the base of the port from which a patch was carried, and ``paths`` the files
    that a patch touches.
    """

    tree: str
    patches: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)


def choose(
    release: Release,
    names: Sequence[str] | None,
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> ServerSources:
    """Apply the patches of a variant, and those of the server that fit, to a release.

    ``names`` as in `apply.apply`. A patch without a port for the release, or whose required patch
    is not applied, is left out. Raises the errors of `apply.apply`.
    """
    store = store or open_store()
    series = series_module.load() if series is None else series
    stock_only = names is not None and not names
    library = names if len(series) else ()
    patched = apply.apply(release, library, series=series, store=store, progress=progress)
    if stock_only:
        return ServerSources(patched.tree)
    release = trees.ensure_fetched(store, release, progress)
    stock = trees.StoreTree(store, store.tree_of(release))
    draft = TreeOverlay(stock)
    for step in patched.steps:
        draft.apply(step.port.patch, step.port.name)
    carrier = Carrier(store, release, series.every, progress=progress)
    steps: list[AppliedPort] = []
    left_out: dict[str, str] = {}
    for definition in series.server:
        if not definition.covers_release(release.name):
            continue
        done = [*patched.patches, *(step.port.id for step in steps)]
        found = port_choice.choose(definition, draft, stock, release.name, done, carrier)
        if isinstance(found, AppliedPort):
            steps.append(found)
        else:
            # The first reason; the others are the reasons why it cannot be carried.
            left_out[definition.id] = found.reason.split("; ", 1)[0]
    plan = PortChoice((*patched.steps, *steps), draft)
    tree = apply.write(store, release, plan).tree if steps else patched.tree
    ports = [step.port for step in steps]
    carried = {port.id: port.carried_from for port in ports if port.carried_from}
    paths = {port.id: tuple(port.patch.paths) for port in ports}
    return ServerSources(tree, tuple(paths), left_out, carried, paths)


def digest() -> str:
    """Return a digest of the shipped patches of the server."""
    series = series_module.load()
    assert series.folder is not None  # the shipped series is a directory
    folders = [patch.folder for patch in series.server if patch.folder is not None]
    whole = hashlib.sha256(variant.files_digest(folders).encode())
    for patch in series.server:
        for data in shared_files.read(series.folder, patch.shared).values():
            whole.update(hashlib.sha256(data).digest())
    return whole.hexdigest()
