"""Write a new port into a series: its hooks, and its table in ``patch.toml`` with markers.

Markers are proposed: lines that the base of the port has and the other bases lack.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from pyllamakv.errors import SourceError, UnknownRelease, UsageError
from pyllamakv.patching import cpp_lines, hunk_locator, patch_export, trees
from pyllamakv.patching.definition import Marker, file_of
from pyllamakv.source import lockfile
from pyllamakv.source.files import write_bytes_atomic, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.hunks import FilePatch, Patch
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: Minimum length of a line that is used as a marker.
_LENGTH = range(16, 96)


def check_writable(series: Series, definition: Definition, release: Release) -> None:
    """Raise UsageError if a port for a release cannot be added to the series."""
    if definition.folder is None or series.folder is None:
        msg = (
            f"{definition.id} is a foreign patch without a series directory; name a directory "
            f"with --to"
        )
    elif release.kind == "path":
        msg = (
            f"{release.name} is a directory, which may change: commit it and name git:URL@COMMIT, "
            f"or name a directory for the port with --to"
        )
    elif not os.access(definition.folder, os.W_OK):
        msg = f"{definition.folder} cannot be written to; name a directory with --to"
    else:
        return
    raise UsageError(msg)


def write_port(
    definition: Definition,
    text: Port,
    era: str,
    stock: trees.StoreTree,
    store: Store,
    progress: Progress | None = None,
) -> tuple[Path, tuple[str, ...]]:
    """Write the port's files and add its table; return the hooks' file and what to review.

    The bases of the other ports are fetched, because the markers are compared with them.
    """
    assert definition.folder is not None  # `refuse` looked
    path = file_of(definition, text.base)
    notes: list[str] = []
    file = definition.folder / "patch.toml"
    new = text.base not in [known.base for known in definition.ports]
    others, problems = _others(definition, store, progress) if new else ([], [])
    for each, data in patch_export.parts(definition, text.base, text.patch).items():
        if each != path and data != each.read_bytes():
            notes.append(f"review {each}: it changed for every port of {definition.id}")
        write_bytes_atomic(each, data)
    if new:
        found = propose_markers(text.patch, stock, others)
        more = [id_ for id_ in text.requires if id_ not in definition.requires]
        table = port_table(text.base, era, more, found)
        write_text_atomic(file, file.read_text("utf-8").rstrip("\n") + "\n" + table)
        notes.append(f"review the proposed markers of port {text.base} in {file}")
        notes += problems
    if not definition.covers_release(text.base):
        notes.append(f"{file} is meant for {definition.meant_for}: this excludes {text.base}")
    return path, tuple(notes)


def _others(
    definition: Definition, store: Store, progress: Progress | None
) -> tuple[list[trees.StoreTree], list[str]]:
    """Return the trees of the bases that the patch has ports for, and notes on those without."""
    known = lockfile.bases(definition.lock)
    found: list[trees.StoreTree] = []
    notes: list[str] = []
    for port in definition.ports:
        try:
            if port.base not in known:
                raise UnknownRelease("it is in no lock file", name=port.base)
            base = trees.ensure_fetched(store, known[port.base], progress)
            found.append(trees.StoreTree(store, store.tree_of(base)))
        except SourceError as error:
            notes.append(f"the proposed markers were not compared with {port.base}: {error}")
    return found, notes


def propose_markers(
    patch: Patch, tree: Tree, others: Iterable[Tree] = (), fits: Sequence[Tree] = ()
) -> tuple[Marker, ...]:
    """Return markers that hold in the stock ``tree``: one line per changed file that it has.

    They hold in the trees of ``fits`` as well. New files must be absent.

    Among the lines that a file's hunks need, the one is chosen that is missing in most of the
    ``others``, and of those the longest, because it is the most specific.
    """
    seen = tuple(others)
    found: list[Marker] = []
    absent: list[Marker] = []
    for file in patch.files:
        if file.old is None:
            absent.append(Marker(file.path, exists=False))
            continue
        if any(each.entry(file.old) is None for each in (tree, *fits)):
            continue  # another patch adds the file: the port requires that patch
        line = _marker_line(file, file.old, tree, seen, fits)
        if line:
            found.append(Marker(file.old, has=(line,)))
        else:
            found.append(Marker(file.old, exists=True))
    return (*found, *absent)


def _marker_line(
    file: FilePatch, path: str, tree: Tree, others: Sequence[Tree], fits: Sequence[Tree]
) -> str:
    there = tree.entry(path)
    if there is None:
        return ""
    lines = hunk_locator.lines_of(there.data)
    elsewhere = [e.data if e else b"" for e in (other.entry(path) for other in others)]
    shared = [e.data for each in fits if (e := each.entry(path))]
    best: tuple[tuple[int, int], str] = ((-1, -1), "")
    for raw in dict.fromkeys(line for hunk in file.hunks for line in hunk.old):
        line = raw.strip()
        if len(line) not in _LENGTH or not line.isascii() or not cpp_lines.is_significant(raw):
            continue
        if lines.count(raw) != 1 or any(line not in data for data in shared):
            continue
        lacking = sum(line not in data for data in elsewhere)
        best = max(best, ((lacking, len(line)), line.decode()))
    return best[1]


def port_table(base: str, era: str, requires: Sequence[str], markers: Sequence[Marker]) -> str:
    """Return the ``[[port]]`` table of a port for ``patch.toml``."""
    rows = [f"\n[[port]]\nbase = {_toml_text(base)}\nera = {_toml_text(era)}\n"]
    if requires:
        rows.append(f"requires = [{', '.join(map(_toml_text, requires))}]\n")
    if not markers:
        return "".join(rows)
    rows.append("markers = [\n")
    for marker in markers:
        parts = [f"file = {_toml_text(marker.file)}"]
        if marker.has:
            parts.append(f"has = {_toml_text(marker.has[0])}")
        if marker.exists is not None:
            parts.append(f"exists = {'true' if marker.exists else 'false'}")
        rows.append(f"  {{ {', '.join(parts)} }},\n")
    rows.append("]\n")
    return "".join(rows)


def _toml_text(value: str) -> str:
    # for the characters that occur, a TOML string is written as in JSON
    return json.dumps(value, ensure_ascii=False)
