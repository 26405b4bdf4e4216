"""Describe a patch: its purpose, its releases, and its port for each base release."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import hunks, mail_header, shared_files, strict_toml
from pyllamakv.source import lockfile
from pyllamakv.source.releases import is_safe_name, sdist_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyllamakv.patching.hunks import Patch
    from pyllamakv.patching.strict_apply import Tree

_TRAILER = re.compile(rb"^(Patch|Base|Requires): (.+?)\r?$", re.MULTILINE)
_SUBJECT = re.compile(rb"^Subject: (?:\[PATCH[^\]]*\] )?(.+?)\r?$", re.MULTILINE)
#: A valid id, which is also the name of a directory.
ID: Final = re.compile(r"(?=.{1,60}\Z)[a-z0-9]+(-[a-z0-9]+)*")
_NOT_ID = re.compile(r"[^a-z0-9]+")
#: What a patch changes: the libraries, or llama-server alone.
TARGETS: Final = ("library", "server")


@dataclass(frozen=True)
class Marker:
    """A condition on a tree for a port to be a candidate; all parts must hold."""

    file: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    exists: bool | None = None

    def holds(self, tree: Tree) -> bool:
        """Return whether the condition holds in a tree."""
        entry = tree.entry(self.file)
        if self.exists is not None and self.exists != (entry is not None):
            return False
        data = b"" if entry is None else entry.data
        return all(text.encode() in data for text in self.has) and not any(
            text.encode() in data for text in self.lacks
        )

    def problem(self, tree: Tree) -> str:
        """Return which part of the condition does not hold in a tree."""
        entry = tree.entry(self.file)
        if entry is None:
            if self.exists is not False and (self.has or self.exists):
                return f"{self.file} does not exist"
        elif self.exists is False:
            return f"{self.file} exists, but must not"
        data = b"" if entry is None else entry.data
        for text in self.has:
            if text.encode() not in data:
                return f"required marker `{text}` not found in {self.file}"
        found = next((text for text in self.lacks if text.encode() in data), "")
        return f"excluded marker `{found}` found in {self.file}"

    def __str__(self) -> str:
        parts = [f"has `{text}`" for text in self.has]
        parts += [f"lacks `{text}`" for text in self.lacks]
        if self.exists is not None:
            parts.append("exists" if self.exists else "does not exist")
        return f"{self.file} " + " and ".join(parts)


@dataclass(frozen=True)
class Port:
    """One port of a patch: the change as written against one base release.

    ``patch`` is composed of message, hooks and shared files; ``requires`` lists the ids that must
    be applied before; ``path`` is the file of the hooks, or of the whole patch of a foreign one.
    """

    id: str
    patch: Patch
    base: str = ""
    era: str = ""
    markers: tuple[Marker, ...] = ()
    requires: tuple[str, ...] = ()
    title: str = ""
    path: Path | None = None
    #: The base of the port that this one was merged from, for a carried patch.
    carried_from: str = ""

    @classmethod
    def from_file(cls, path: Path | str, id: str | None = None) -> Port:
        """Read any git patch; id, base and requirements come from its header, if present."""
        path = Path(path)
        return cls.of(hunks.read(path), path, id=id)

    @classmethod
    def of(
        cls, patch: Patch, path: Path, *, id: str | None = None, stem: str | None = None
    ) -> Port:
        """Return the port from a patch file.

        ``id`` has precedence over the header, and ``stem`` is used if the header has none.
        """
        said: dict[bytes, list[str]] = {}
        for key, value in _TRAILER.findall(patch.header):
            said.setdefault(key, []).append(value.decode("utf-8", "replace"))
        subject = _SUBJECT.search(patch.header)
        name = id or said.get(b"Patch", [stem or path.stem])[0]
        return cls(
            id=_NOT_ID.sub("-", name.lower()).strip("-") or "patch",
            patch=patch,
            base=said.get(b"Base", [""])[0],
            requires=tuple(said.get(b"Requires", ())),
            title=subject.group(1).decode("utf-8", "replace") if subject else path.stem,
            path=path,
        )

    @property
    def name(self) -> str:
        """Return the name that reports use: id and base."""
        if self.carried_from:
            return f"{self.id} ({self.base}, carried from {self.carried_from})"
        return f"{self.id} ({self.base})" if self.base else self.id

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the changes, without header and message."""
        body = b"".join(file.data for file in self.patch.files)
        return hashlib.sha256(self.id.encode() + b"\0" + body).hexdigest()

    def without(self, file: str, hunk: int) -> Port:
        """Return the port without one hunk of a file, hunks counted from 1."""
        return replace(self, patch=self.patch.without(file, hunk))

    def failed_markers(self, tree: Tree) -> tuple[Marker, ...]:
        """Return the markers that do not hold in a tree; without any, the port is a candidate."""
        return tuple(marker for marker in self.markers if not marker.holds(tree))


@dataclass(frozen=True)
class Definition:
    """One patch: identity, reasons and ports (see docs/patches.md for each field).

    ``author`` ("Name <email>") and ``date`` (as in a mail) are those of an imported patch, whose
    mails keep them. ``since`` and ``until`` are the first and last release, compared by date, for
    bounds that are not versions of llama-cpp-python. ``target`` is one of `TARGETS`.
    """

    id: str
    title: str
    why: str = ""
    origin: str = ""
    upstream: str = ""
    author: str = ""
    date: str = ""
    releases: str = ""
    since: str = ""
    until: str = ""
    requires: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    target: str = TARGETS[0]
    #: Conditions of which one must hold for the patch to be carried; see `may_be_carried`.
    carry: tuple[Marker, ...] = ()
    ports: tuple[Port, ...] = ()
    folder: Path | None = None

    def covers_release(self, name: str) -> bool:
        """Return whether the patch is meant for a release of this name.

        ``releases`` is for sdist versions only; for other releases the markers of the ports decide.
        """
        version = sdist_version(name)
        if version and not SpecifierSet(self.releases).contains(version, prereleases=True):
            return False
        known = lockfile.bases(self.lock) if self.since or self.until else {}
        first, here, last = map(known.get, (self.since, name, self.until))
        for key, bound, release in (("since", self.since, first), ("until", self.until, last)):
            # A base that another machine added is a release, too.
            if bound and release is None and all(port.base != bound for port in self.ports):
                msg = (
                    f"{self.id}: {key} is {bound!r}, which is no known release: correct it in "
                    "patch.toml, or add the release with `pyllamakv upstream add`."
                )
                raise PatchFormatError(msg, self.id)
        if first and last and first.date > last.date:
            msg = f"{self.id}: since is {self.since}, which is newer than until, {self.until}."
            raise PatchFormatError(msg, self.id)
        if here is None:
            return True
        return not (first and here.date < first.date) and not (last and here.date > last.date)

    @property
    def lock(self) -> Path | None:
        """Return the lock file of the series that the patch is in, if it is in one."""
        return self.folder.parent / lockfile.SERIES_LOCK if self.folder else None

    @property
    def covered(self) -> tuple[str, str, str]:
        """Return the bounds of the releases that the patch is meant for, as in ``patch.toml``."""
        return self.releases, self.since, self.until

    @property
    def meant_for(self) -> str:
        """Return the releases that the patch is meant for, in words; empty for all."""
        since = f"{self.since} and later" if self.since else ""
        until = f"releases through {self.until}" if self.until else ""
        return ", ".join(filter(None, (self.releases, since, until)))

    def may_be_carried(self, tree: Tree) -> bool:
        """Return whether the patch of a series may be merged into a stock tree without a port.

        By default, a port's markers must hold. An imported patch is meant for every tree.
        """
        if self.folder is None:
            return False
        if self.carry:
            return any(marker.holds(tree) for marker in self.carry)
        return bool(self.author) or any(not port.failed_markers(tree) for port in self.ports)

    def port(self, base: str) -> Port:
        """Return the port for a base release."""
        for port in self.ports:
            if port.base == base:
                return port
        known = ", ".join(port.base for port in self.ports) or "none"
        raise PatchFormatError(f"{self.id} has no port for {base}; it has ports for {known}.")


_KEYS = {"schema", "id", "title", "why", "origin", "upstream", "author", "date", "releases",
         "since", "until", "requires", "scenarios", "shared", "target", "carry",
         "port"}  # fmt: skip


def load(folder: Path, *, missing_ok: bool = False) -> Definition:
    """Read ``patch.toml`` of a patch, its hooks and its shared files.

    With ``missing_ok``, a port without a file is empty. Raises PatchFormatError with the file.
    """
    path = folder / "patch.toml"
    table = strict_toml.load(path, _KEYS, schema=1)
    id_ = table.string("id")
    if id_ != folder.name or not ID.fullmatch(id_):
        raise table.wrong(f"id is {id_!r}; expected the directory's name, of a-z, 0-9 and -")
    releases = table.string("releases", "")
    try:
        covered = SpecifierSet(releases)
    except InvalidSpecifier as error:
        raise table.wrong(f"releases is {releases!r}; expected a specifier like <=0.3.8") from error
    bounds = [bound.version.removesuffix(".*") for bound in covered]
    tried = ("0", *(f"{bound}{more}" for bound in bounds for more in ("", ".1")), "9999")
    if not any(covered.contains(version, prereleases=True) for version in tried):
        raise table.wrong(f"releases is {releases!r}, which no version can match")
    target = table.string("target", TARGETS[0])
    if target not in TARGETS:
        raise table.wrong(f"target is {target!r}; expected {' or '.join(TARGETS)}")
    # Scenarios run in the libraries. An imported patch may have none.
    unproven = target == "server" or table.data.get("author")
    definition = Definition(
        id=id_,
        title=table.string("title"),
        why=table.string("why", "" if table.data.get("author") else None).strip(),
        origin=table.string("origin"),
        upstream=table.string("upstream"),
        author=table.string("author", ""),
        date=table.string("date", ""),
        releases=releases,
        since=table.string("since", ""),
        until=table.string("until", ""),
        requires=table.strings("requires", ()),
        scenarios=table.strings("scenarios", () if unproven else None),
        shared=table.strings("shared", ()),
        target=target,
        carry=tuple(_marker(part) for part in table.tables("carry", {*_MARKER}, optional=True)),
        folder=folder,
    )
    shared = shared_files.read(folder.parent, definition.shared)
    tables = table.tables("port", {"base", "era", "requires", "markers"})
    ports = tuple(_port(part, definition, shared, missing_ok=missing_ok) for part in tables)
    return replace(definition, ports=ports)


def file_of(definition: Definition, base: str) -> Path:
    """Return the file that keeps the hooks of a port."""
    assert definition.folder is not None  # a foreign patch has no ports of its own
    return definition.folder / f"{base}.patch"


def _port(
    table: strict_toml.Table,
    definition: Definition,
    shared: Mapping[str, bytes],
    *,
    missing_ok: bool,
) -> Port:
    base = table.string("base")
    if not is_safe_name(base):
        raise table.wrong(f"base {base!r} is not the name of a release")
    path = file_of(definition, base)
    if not path.is_file() and not missing_ok:
        raise table.wrong(f"base {base} has no file {path.name}")
    found = table.tables("markers", {*_MARKER}, optional=True)
    markers = tuple(_marker(part) for part in found)
    more = table.strings("requires", ())
    port = Port(
        id=definition.id,
        patch=hunks.Patch(b"", ()),
        base=base,
        era=table.string("era"),
        markers=markers,
        requires=tuple(dict.fromkeys((*definition.requires, *more))),
        title=definition.title,
        path=path,
    )
    if not path.is_file():
        return port
    hooks = hunks.read(path)
    if hooks.header or hooks.trailer.strip():
        msg = f"{path} has text besides its hooks: the message belongs in patch.toml"
        raise PatchFormatError(msg, str(path), 1)
    for file in hooks.files:
        if file.path in shared:
            msg = f"{path} changes {file.path}: change {shared_files.FOLDER}/{file.path} instead"
            raise PatchFormatError(msg, str(path), file.line)
    head = mail_header.write(definition, port)
    return replace(port, patch=shared_files.compose(head, hooks, shared))


_MARKER = ("file", "has", "lacks", "exists")


def _marker(table: strict_toml.Table) -> Marker:
    exists: Any = table.data.get("exists")
    marker = Marker(
        file=table.string("file"),
        has=table.strings("has", ()),
        lacks=table.strings("lacks", ()),
        exists=exists if isinstance(exists, bool) else None,
    )
    if not (marker.has or marker.lacks) and marker.exists is None:
        raise table.wrong("a marker needs at least one of has, lacks, exists")
    return marker
