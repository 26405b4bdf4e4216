"""Name the upstream releases, and find the one that a spec means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["sdist", "npm", "xllamacpp", "git", "path"]

#: Kinds of releases that come as archives of a package index and are named by tag or version.
ARCHIVE_KINDS: Final = ("sdist", "npm", "xllamacpp")

#: The release of `make check` and `make test`: the last one on which stock fails with default
#: settings.
TEST_RELEASE = "0.3.9"

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Release:
    """Describe one upstream state of llama.cpp, identified by its commit."""

    name: str
    kind: Kind
    #: The upstream commit; a synthetic one if the source has no git history.
    commit: str
    tree: str
    era: str
    #: When upstream made the commit, ISO 8601 in UTC; releases are ordered by it.
    date: str
    #: File name of the archive and its SHA-256, for releases that come as archives.
    archive: str | None = None
    sha256: str | None = None
    #: Where the archive comes from: ``llama-cpp-python==0.3.9``, ``node-llama-cpp@3.7.0`` or
    #: ``xllamacpp==2026.10.11549``.
    package: str | None = None
    #: The git URL or folder, for releases that come from one.
    url: str | None = None

    @property
    def key(self) -> str:
        """Return a name that is safe in file names and refs."""
        if self.kind in ARCHIVE_KINDS:
            return self.name
        return f"{self.kind}-{self.commit[:12]}"

    @property
    def order(self) -> tuple[str, list[tuple[int, str]], str]:
        """Return the sorting key: date, then name with its numbers counted as numbers."""
        return self.date, natural_sort_key(self.name), self.commit


def natural_sort_key(text: str) -> list[tuple[int, str]]:
    """Split a name so that numbers sort as numbers: ``0.3.9`` before ``0.3.10``.

    Only ASCII digits count as numbers, up to the length that Python always converts.
    """
    words = re.findall(r"[0-9]{1,64}|[^0-9]+", text)
    return [(int(word), "") if "0" <= word[0] <= "9" else (-1, word) for word in words]


def is_safe_name(name: str) -> bool:
    """Return whether a name is safe in file names and refs."""
    return bool(_SAFE.fullmatch(name)) and ".." not in name and not name.endswith((".lock", "."))


def sdist_version(name: str) -> Version | None:
    """Return the version of llama-cpp-python that a release's name is, or None for another name.

    A name that begins with ``v`` is a tag of llama.cpp, whose versions are not comparable.
    """
    try:
        return Version(name) if name[:1].isdigit() else None
    except InvalidVersion:
        return None


def canonical_name(name: str, known: Mapping[str, Release]) -> str:
    """Return a release's name as the lock spells it: ``0.3.9`` for ``v0.3.9``.

    A name in ``known`` is returned as it is; a package (``node-llama-cpp@3.7.0``), a key
    (``git-3f1a…``) and a commit of at least 7 digits are replaced by the name of the release. Only
    a version of llama-cpp-python may have a ``v`` in front: the tags of llama.cpp begin with one.
    """
    if name in known:
        return name
    if packaged := next((each.name for each in known.values() if each.package == name), None):
        return packaged
    commit = name.removeprefix("git-").lower()
    if re.fullmatch(r"[0-9a-f]{7,40}", commit):
        same = [each for each in known.values() if each.commit.startswith(commit)]
        if len({each.commit for each in same}) == 1:
            return same[0].name
    name = name.removeprefix("llama-cpp-python==")
    return name[1:] if name not in known and re.fullmatch(r"v\d.*", name) else name
