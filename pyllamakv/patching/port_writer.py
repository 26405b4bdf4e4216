"""Put a new port into a series: its hooks, and its table in ``patch.toml``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyllamakv.errors import SourceError, UsageError
from pyllamakv.patching import markers, patch_export, trees
from pyllamakv.patching.definition import file_of
from pyllamakv.source import lock, releases
from pyllamakv.source.files import write_atomic, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.patching.definition import Definition, PatchText
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store


def refuse(series: Series, definition: Definition, release: Release) -> None:
    """Raise UsageError where a text for a release cannot be put into the series."""
    if definition.folder is None or series.folder is None:
        msg = f"{definition.id} is a foreign patch without a series folder; name a folder with --to"
    elif not releases.is_name(release.name):
        msg = f"{release.name} names no archive, so no text is kept for it; name a folder with --to"
    elif not os.access(definition.folder, os.W_OK):
        msg = f"{definition.folder} cannot be written to; name a folder with --to"
    else:
        return
    raise UsageError(msg)


def put(
    definition: Definition,
    text: PatchText,
    era: str,
    stock: trees.StoreTree,
    store: Store,
) -> tuple[Path, tuple[str, ...]]:
    """Write the port's files and add its table; return the hooks' file and what to review."""
    assert definition.folder is not None  # `refuse` looked
    path = file_of(definition, text.base)
    notes = []
    file = definition.folder / "patch.toml"
    for each, data in patch_export.parts(definition, text.base, text.patch).items():
        if each != path and data != each.read_bytes():
            notes.append(f"review {each}: it changed for every port of {definition.id}")
        write_whole(each, data)
    if text.base not in [known.base for known in definition.texts]:
        found = markers.propose(text.patch, stock, _others(definition, store))
        more = [id_ for id_ in text.requires if id_ not in definition.requires]
        table = markers.table(text.base, era, more, found)
        write_atomic(file, file.read_text("utf-8").rstrip("\n") + "\n" + table)
        notes.append(f"look at the markers proposed for {text.base} in {file}")
    if not definition.wants(text.base):
        notes.append(f"`releases` in {file} is {definition.releases!r}: it leaves {text.base} out")
    return path, tuple(notes)


def _others(definition: Definition, store: Store) -> list[trees.StoreTree]:
    """Return the trees of the bases that the patch has texts for."""
    known = lock.known()
    found = []
    for text in definition.texts:
        try:
            tree = store.tree_of(known[text.base])
        except (KeyError, SourceError):
            continue
        found.append(trees.StoreTree(store, tree))
    return found
