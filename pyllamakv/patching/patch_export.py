"""Write patch files from commits and directories, and check that each can be read back.

A patched release is also exported as a plain series of mails, for users who build llama.cpp
themselves: `git am` applies them to upstream's commit, and quilt accepts the directory.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pyllamakv.errors import PatchError, PatchFormatError, UnknownRelease, UsageError
from pyllamakv.patching import apply, hunks, mail_header, shared_files, trees
from pyllamakv.patching.definition import file_of
from pyllamakv.patching.strict_apply import DraftEntry, TreeOverlay
from pyllamakv.source import git_command, spec_resolver
from pyllamakv.source import tree_export as folders
from pyllamakv.source.files import write_bytes_atomic
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release

#: Everything that could depend on git's version, configuration or the time is switched off.
FLAGS = (
    "--stdout",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "--no-numbered",
    "--no-renames",
    "--unified=3",
)

#: The list of the mails in their order, which quilt reads; its first line identifies it.
SERIES_FILE = "series"
_OURS = "# llama.cpp"

Kind = Literal["same", "header", "positions", "content", "failed"]


@dataclass(frozen=True)
class ExportCheck:
    """Describe how the file of a port differs from the export of its commit.

    ``positions`` means blob ids and ``@@`` lines only; ``failed`` that there is no commit.
    """

    id: str
    base: str
    kind: Kind
    detail: str = ""

    @property
    def same(self) -> bool:
        """Return whether the file equals its export."""
        return self.kind == "same"


@dataclass(frozen=True)
class _Ground:
    """The base of a port, with the patches that it requires."""

    store: Store
    commit: str
    tree: str


def select_ports(
    series: Series, ids: Sequence[str] = (), base: str | None = None
) -> tuple[tuple[Definition, Port], ...]:
    """Return the ports of the named patches (default: all), for one base or for all."""
    definitions = [series.definition(id_) for id_ in ids] or list(series.every)
    pairs = [(d, t) for d in definitions for t in d.ports if base in (None, t.base)]
    if base is not None and not pairs:
        raise UsageError(f"No port exists for {base}.")
    return tuple(pairs)


def check(
    series: Series,
    pairs: Sequence[tuple[Definition, Port]] | None = None,
    *,
    store: Store | None = None,
) -> tuple[ExportCheck, ...]:
    """Export ports again and compare with their files; bases are fetched when they are absent."""
    store = store or open_store()
    found = []
    for definition, text in select_ports(series) if pairs is None else pairs:
        try:
            data = export_port(series, definition, text, store=store)
        except PatchError as error:
            found.append(ExportCheck(definition.id, text.base, "failed", str(error)))
            continue
        kind, detail = _compared(text.patch.data, data)
        found.append(ExportCheck(definition.id, text.base, kind, detail))
    return tuple(found)


def write(
    series: Series,
    pairs: Sequence[tuple[Definition, Port]],
    folder: Path | None = None,
    *,
    store: Store | None = None,
) -> tuple[Path, ...]:
    """Write hooks and shared files of ports, from their commits or from a folder.

    Returns the files that changed. A shared file is written for every port that adds it.
    """
    store = store or open_store()
    made: dict[Path, bytes] = {}
    for definition, text in pairs:
        if folder is None:
            data = export_port(series, definition, text, store=store)
        else:
            data = from_folder(series, definition, text.base, folder, store=store)
        if text.path is None or definition.folder is None:
            raise UsageError(f"{text.name} has no file to write to.")
        patch = hunks.parse(data, text.name)
        made.update(parts(definition, text.base, patch))
    changed = [path for path, data in made.items() if not _holds(path, data)]
    for path in changed:  # only when every one could be made
        write_bytes_atomic(path, made[path])
    return tuple(changed)


def parts(definition: Definition, base: str, patch: hunks.Patch) -> dict[Path, bytes]:
    """Return the files that keep a port: its hooks, and the shared files that it adds."""
    assert definition.folder is not None
    hooks, contents = shared_files.separate(patch, definition.shared)
    series = definition.folder.parent
    found = {file_of(definition, base): hooks}
    found.update({shared_files.path_of(series, name): data for name, data in contents.items()})
    return found


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def export_port(
    series: Series, definition: Definition, text: Port, *, store: Store | None = None
) -> bytes:
    """Return the file of a port, exported from its commit on its base release."""
    ground = _ground(series, text, store or open_store())
    draft = TreeOverlay(trees.StoreTree(ground.store, ground.tree))
    draft.apply(text.patch, text.name)
    return _formatted(ground, definition, text, draft)


def from_folder(
    series: Series,
    definition: Definition,
    base: str,
    folder: Path,
    *,
    store: Store | None = None,
) -> bytes:
    """Return the file of a port whose changes were made in a directory.

    The folder is compared with the base release plus the patches that the port requires. Raises
    UsageError when nothing differs, and for the tree of another release or of other patches: their
    differences would become a part of the port.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no directory {folder}.")
    text = definition.port(base)
    ground = _ground(series, text, store or open_store())
    if not _starts_from(ground, folder):
        name = _release(base, series.lock).name
        needs = " ".join(text.requires)
        only = f", or of {needs} alone" if needs else ""
        raise UsageError(
            f"{folder} is the tree of another release or of other patches: change a tree of "
            f"`pyllamakv patch apply {name} {text.id} --to DIR`{only}."
        )
    keep = (*folders.GENERATED_FILES, ".git")
    differs = ground.store.compare(ground.tree, folder, keep=keep)
    if not differs:
        raise UsageError(f"{folder} equals {base} with the patches that {text.name} requires.")
    draft = TreeOverlay(trees.StoreTree(ground.store, ground.tree))
    draft.changes.update(dict.fromkeys(differs.missing))
    draft.changes.update({path: _entry(folder / path) for path in differs.changed})
    draft.changes.update({path: _entry(folder / path) for path in differs.untracked})
    return _formatted(ground, definition, text, draft)


def _starts_from(ground: _Ground, folder: Path) -> bool:
    """Return whether a directory was exported from a tree, or from it with one more patch.

    It is also returned for a directory that is not known to be an export.
    """
    stamp = folders.stamped(folder)
    words = ("for-each-ref", "--format=%(tree) %(parent)", "refs/patched", "refs/upstream")
    listed = git_command.git(ground.store.path, *words).split("\n")
    known = [
        parent for tree, _, parent in (line.partition(" ") for line in listed) if tree == stamp
    ]
    parents = {ground.store.tree_of(parent) for parent in known if parent}
    return not known or stamp == ground.tree or ground.tree in parents


def format_patch(store: Store, commit: str, prefix: str = "PATCH") -> bytes:
    """Export one commit of the store; the same bytes on any machine."""
    tag = f"--subject-prefix={prefix}"
    return git_command.git_bytes(store.path, "format-patch", *FLAGS, tag, "-1", commit)


def _release(name: str, lock: Path | None) -> Release:
    """Return a base release, from the package index if no lock file has it.

    The blob ids in the port show whether it is the same release.
    """
    try:
        return spec_resolver.resolve(name, lock)
    except UnknownRelease:
        from pyllamakv.source import fetch

        return fetch.fetch_unlisted(name)


def _ground(series: Series, text: Port, store: Store) -> _Ground:
    release = trees.ensure_fetched(store, _release(text.base, series.lock))
    return _Ground(store, *apply.apply_requirements(series, text.requires, release, store=store))


def _formatted(ground: _Ground, definition: Definition, text: Port, draft: TreeOverlay) -> bytes:
    tree = trees.write(ground.store, ground.tree, draft)
    return export_tree(ground.store, ground.commit, tree, definition, text)


def export_tree(store: Store, parent: str, tree: str, definition: Definition, text: Port) -> bytes:
    """Return the file of a port that changes the tree of a commit to ``tree``.

    The header comes from the definition; a foreign patch, which has none, keeps its own words.
    """
    head = mail_header.write(definition, text) if definition.origin else text.patch.header
    ours = replace(text, patch=replace(text.patch, header=head))
    return format_patch(store, apply.commit_port(store, tree, parent, ours))


def _entry(file: Path) -> DraftEntry:
    if file.is_symlink():
        return DraftEntry(os.fsencode(file.readlink()), "120000")
    program = file.stat().st_mode & stat.S_IXUSR
    return DraftEntry(file.read_bytes(), "100755" if program else "100644")


def _compared(file: bytes, data: bytes) -> tuple[Kind, str]:
    if file == data:
        return "same", ""
    try:
        there, made = hunks.parse(file), hunks.parse(data)
    except PatchFormatError as error:
        return "content", str(error)
    line = _first_difference(file, data)
    if [f.data for f in there.files] == [f.data for f in made.files]:
        # git encodes names and folds long subjects.
        if mail_header.parse(there.header) == mail_header.parse(made.header):
            return "same", ""
        return "header", f"line {line}: the header is written from patch.toml"
    if _changes(there) == _changes(made):
        return "positions", f"line {line}: blob ids, positions or context as git writes them differ"
    return "content", f"line {line} differs"


def _changes(patch: hunks.Patch) -> list[tuple[str, list[bytes]]]:
    return [
        (file.path, [line for hunk in file.hunks for line in hunk.lines if line[:1] in b"+-"])
        for file in patch.files
    ]


def _first_difference(one: bytes, other: bytes) -> int:
    pairs = zip(one.split(b"\n"), other.split(b"\n"), strict=False)
    for number, (a, b) in enumerate(pairs, 1):
        if a != b:
            return number
    return min(one.count(b"\n"), other.count(b"\n")) + 1


@dataclass(frozen=True)
class Mail:
    """One patch as a mail: the name of its file, and its bytes."""

    name: str
    data: bytes


def mail_series(store: Store, base: str, patched: PatchedRelease) -> tuple[Mail, ...]:
    """Return the mails that patch the base commit of a release; the same bytes on any machine.

    Raises UsageError for a release that no patch changes.
    """
    if not patched.ports:
        reasons = "; ".join(f"{skip.id}: {skip.reason}" for skip in patched.skipped)
        raise UsageError(f"no patch changes {patched.release}: {reasons or 'none was named'}")
    listed = git_command.git(store.path, "rev-list", "--reverse", f"{base}..{patched.commit}")
    commits = listed.split()
    return tuple(
        Mail(
            f"{number:04d}-{port.id}.patch",
            format_patch(store, commit, f"PATCH {number}/{len(commits)}"),
        )
        for number, (commit, port) in enumerate(zip(commits, patched.ports, strict=True), 1)
    )


def listing(found: tuple[Mail, ...], base: str, release: str) -> str:
    """Return the text of the file that lists and describes the mails."""
    head = f"{_OURS} {base} ({release}); there: git am *.patch"
    return "\n".join([head, *(mail.name for mail in found)]) + "\n"


def write_mails(
    found: tuple[Mail, ...], folder: Path, *, base: str, release: str
) -> tuple[Path, ...]:
    """Write the mails and their list into a directory, replacing an earlier series.

    Raises UsageError, and writes nothing, if the directory contains other files.
    """
    old = _earlier(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    for mail in found:
        write_bytes_atomic(folder / mail.name, mail.data)
    # Written last, so that every listed mail exists.
    write_bytes_atomic(folder / SERIES_FILE, listing(found, base, release).encode())
    return tuple(folder / mail.name for mail in found)


def _earlier(folder: Path) -> list[Path]:
    """Return the files of an earlier series in a folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name an empty or a new one.")
    there = set(folder.iterdir()) if folder.is_dir() else set()
    lines: list[str] = []
    if folder / SERIES_FILE in there:
        lines = (folder / SERIES_FILE).read_text("utf-8", "replace").splitlines()
    ours = {folder / SERIES_FILE, *(folder / name for name in lines[1:])}
    if not lines or not lines[0].startswith(_OURS):
        ours = set()
    if foreign := sorted(there - ours):
        raise UsageError(
            f"{folder} holds {foreign[0].name}, which is not part of an exported "
            "series; name an empty or a new directory."
        )
    return sorted(there)
