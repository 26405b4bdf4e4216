"""Write carried patches into the series, as ports for the release that they were carried to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyllamakv.patching import apply, port_choice, port_writer, trees
from pyllamakv.source import lockfile
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class AcceptedPort:
    """A port that was written: its patch, base, the port that it was merged from, and its file."""

    id: str
    base: str
    carried_from: str
    path: Path
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "patch": self.id,
            "base": self.base,
            "carried_from": self.carried_from,
            "path": str(self.path),
            "notes": list(self.notes),
        }


def accept(
    release: Release,
    *,
    patches: Path | str | None = None,
    server: bool = False,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[AcceptedPort, ...]:
    """Write a port for each patch that is carried to a release; empty if none is.

    ``patches`` is the directory of the series (default: the shipped one). ``server`` includes the
    patches of llama-server. The trees of the patched release stay the same. Raises UsageError if
    the series cannot be written, and the errors of applying; nothing is written then.
    """
    store = store or open_store()
    series = port_choice.load_series(patches)
    if server:
        series = series.every
    made = apply.apply(release, series=series, store=store, progress=progress)
    own = {patch.id for patch in series if patch.folder and patch.folder.parent == series.folder}
    ports = [port for port in made.ports if port.carried_from and port.id in own]
    for port in ports:
        port_writer.check_writable(series, series.definition(port.id), release)
    stock = trees.StoreTree(store, store.tree_of(release))
    found = []
    for port in ports:
        definition = series.definition(port.id)
        plain = replace(port, carried_from="")
        path, notes = port_writer.write_port(definition, plain, release.era, stock, store, progress)
        found.append(AcceptedPort(port.id, release.key, port.carried_from, path, notes))
    if found and series.folder:
        lockfile.pin(series.folder, release)
    return tuple(found)
