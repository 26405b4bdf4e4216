"""Describe a patch: what it is for, where it belongs, and its text for each base release."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import hunks, tables
from pyllamakv.source.releases import is_name, sdist_version

if TYPE_CHECKING:
    from pyllamakv.patching.draft import Tree
    from pyllamakv.patching.hunks import Patch

_TRAILER = re.compile(rb"^(Patch|Base|Requires): (.+?)\r?$", re.MULTILINE)
_SUBJECT = re.compile(rb"^Subject: (?:\[PATCH[^\]]*\] )?(.+?)\r?$", re.MULTILINE)
#: What an id may be; it names a folder.
ID: Final = re.compile(r"(?=.{1,60}\Z)[a-z0-9]+(-[a-z0-9]+)*")
_NOT_ID = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Marker:
    """State what a tree must hold for a text to be meant for it; all parts must hold."""

    file: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    exists: bool | None = None

    def holds(self, tree: Tree) -> bool:
        """Tell whether the tree is as the marker says."""
        entry = tree.entry(self.file)
        if self.exists is not None and self.exists != (entry is not None):
            return False
        data = b"" if entry is None else entry.data
        return all(text.encode() in data for text in self.has) and not any(
            text.encode() in data for text in self.lacks
        )

    def __str__(self) -> str:
        parts = [f"has `{text}`" for text in self.has]
        parts += [f"lacks `{text}`" for text in self.lacks]
        if self.exists is not None:
            parts.append("exists" if self.exists else "does not exist")
        return f"{self.file} " + " and ".join(parts)


@dataclass(frozen=True)
class PatchText:
    """Hold one text of a patch: the change as written against one base release.

    ``requires`` lists the ids that must be applied before; ``path`` is the file it came from.
    """

    id: str
    patch: Patch
    base: str = ""
    era: str = ""
    markers: tuple[Marker, ...] = ()
    requires: tuple[str, ...] = ()
    title: str = ""
    path: Path | None = None

    @classmethod
    def from_file(cls, path: Path | str, id: str | None = None) -> PatchText:
        """Read any git patch; id, base and requirements come from its header where it has them."""
        path = Path(path)
        return cls.of(hunks.read(path), path, id=id)

    @classmethod
    def of(
        cls, patch: Patch, path: Path, *, id: str | None = None, stem: str | None = None
    ) -> PatchText:
        """Return the text that a patch of a file is.

        ``id`` goes before the one that its header says, ``stem`` stands where it says none.
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
        return f"{self.id} ({self.base})" if self.base else self.id

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the change itself; the words around it do not count."""
        body = b"".join(file.data for file in self.patch.files)
        return hashlib.sha256(self.id.encode() + b"\0" + body).hexdigest()

    def without(self, file: str, hunk: int) -> PatchText:
        """Return the text without one hunk of a file, hunks counted from 1."""
        return replace(self, patch=self.patch.without(file, hunk))

    def misses(self, tree: Tree) -> tuple[Marker, ...]:
        """Return the markers that do not hold in a tree; none means that the text is meant."""
        return tuple(marker for marker in self.markers if not marker.holds(tree))


@dataclass(frozen=True)
class Definition:
    """Hold one patch: identity, reasons and texts (see docs/patches.md for each field)."""

    id: str
    title: str
    why: str = ""
    origin: str = ""
    upstream: str = ""
    releases: str = ""
    requires: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    logic: tuple[str, ...] = ()
    texts: tuple[PatchText, ...] = ()
    folder: Path | None = None

    def wants(self, name: str) -> bool:
        """Tell whether the patch is meant for a release of this name.

        Only sdist versions are compared; for other releases the markers of the texts decide.
        """
        version = sdist_version(name)
        if version is None:
            return True
        return SpecifierSet(self.releases).contains(version, prereleases=True)

    def text(self, base: str) -> PatchText:
        """Return the text for a base release."""
        for text in self.texts:
            if text.base == base:
                return text
        known = ", ".join(text.base for text in self.texts) or "none"
        raise PatchFormatError(f"{self.id} has no text for {base}; it has texts for {known}.")


_KEYS = {"schema", "id", "title", "why", "origin", "upstream", "releases", "requires",
         "scenarios", "logic", "text"}  # fmt: skip


def load(folder: Path, *, missing_ok: bool = False) -> Definition:
    """Read ``patch.toml`` of a patch and its texts; raise PatchFormatError for what is wrong.

    With ``missing_ok`` a text whose file is not written yet is empty.
    """
    path = folder / "patch.toml"
    table = tables.load(path, _KEYS, schema=1)
    id_ = table.string("id")
    if id_ != folder.name or not ID.fullmatch(id_):
        raise table.wrong(f"id is {id_!r}; expected the folder's name, of a-z, 0-9 and -")
    releases = table.string("releases", "")
    try:
        SpecifierSet(releases)
    except InvalidSpecifier as error:
        raise table.wrong(f"releases is {releases!r}; expected a specifier like <=0.3.8") from error
    requires = table.strings("requires", ())
    return Definition(
        id=id_,
        title=table.string("title"),
        why=table.string("why").strip(),
        origin=table.string("origin"),
        upstream=table.string("upstream"),
        releases=releases,
        requires=requires,
        scenarios=table.strings("scenarios"),
        logic=table.strings("logic", ()),
        texts=tuple(
            _text(part, folder, id_, table.string("title"), requires, missing_ok=missing_ok)
            for part in table.tables("text", {"base", "era", "requires", "markers"})
        ),
        folder=folder,
    )


def _text(
    table: tables.Table,
    folder: Path,
    id_: str,
    title: str,
    requires: tuple[str, ...],
    *,
    missing_ok: bool,
) -> PatchText:
    base = table.string("base")
    if not is_name(base):
        raise table.wrong(f"base {base!r} is no name of a release")
    path = folder / base / f"{id_}.patch"
    if not path.is_file() and not missing_ok:
        raise table.wrong(f"base {base} has no file {base}/{id_}.patch")
    markers = tuple(_marker(part) for part in table.tables("markers", {*_MARKER}))
    more = table.strings("requires", ())
    return PatchText(
        id=id_,
        patch=hunks.read(path) if path.is_file() else hunks.Patch(b"", ()),
        base=base,
        era=table.string("era"),
        markers=markers,
        requires=tuple(dict.fromkeys((*requires, *more))),
        title=title,
        path=path,
    )


_MARKER = ("file", "has", "lacks", "exists")


def _marker(table: tables.Table) -> Marker:
    exists: Any = table.data.get("exists")
    marker = Marker(
        file=table.string("file"),
        has=table.strings("has", ()),
        lacks=table.strings("lacks", ()),
        exists=exists if isinstance(exists, bool) else None,
    )
    if not (marker.has or marker.lacks) and marker.exists is None:
        raise table.wrong("a marker says at least one of has, lacks, exists")
    return marker
