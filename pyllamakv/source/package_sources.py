"""Name the packages that contain llama.cpp, and how their versions, archives and specs look."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyllamakv.source.releases import Kind

#: Maximum length of a version, which is part of file names.
_LONGEST = 100
_PREFIXED = re.compile(r"[0-9][\w.+-]*", re.ASCII)
_PLAIN = re.compile(r"[0-9]+(\.[0-9]+)+[\w.+-]*", re.ASCII)


@dataclass(frozen=True)
class PackageSource:
    """Describe one project on a package index whose archives contain llama.cpp."""

    kind: Kind
    project: str
    #: Separator of project and version in the name of a package.
    separator: str
    suffix: str
    #: The first version whose archive contains llama.cpp completely, if older ones exist.
    since: Version | None = None
    #: Whether `upstream add` also accepts a version without the project.
    plain: bool = False

    def package(self, version: str) -> str:
        """Return the name of a version as lock files have it: ``node-llama-cpp@3.7.0``."""
        return f"{self.project}{self.separator}{version}"

    def spec(self, version: str) -> str:
        """Return what `upstream add` takes for a version."""
        return version if self.plain else self.package(version)

    def version_of(self, spec: str) -> str | None:
        """Return the version that a spec names, or None if it names none of this project."""
        version = spec.removeprefix(self.package(""))
        if len(version) > _LONGEST or (version == spec and not self.plain):
            return None
        pattern = _PLAIN if version == spec else _PREFIXED
        return version if pattern.fullmatch(version) else None

    def archive_version(self, file_name: str) -> str | None:
        """Return the version in the name of an archive, or None for another file."""
        stem = "[-_.]".join(map(re.escape, re.split("[-_.]", self.project)))
        pattern = rf"{stem}-(?P<version>[0-9][\w.+-]*){re.escape(self.suffix)}"
        found = re.fullmatch(pattern, file_name, re.IGNORECASE | re.ASCII)
        return found["version"] if found and len(found["version"]) <= _LONGEST else None


LLAMA_CPP_PYTHON = PackageSource("sdist", "llama-cpp-python", "==", ".tar.gz", plain=True)
NODE_LLAMA_CPP = PackageSource("npm", "node-llama-cpp", "@", ".tgz", Version("3.0.0"))
XLLAMACPP = PackageSource("xllamacpp", "xllamacpp", "==", ".tar.gz", Version("0.2.2"))

SOURCES = (LLAMA_CPP_PYTHON, NODE_LLAMA_CPP, XLLAMACPP)


def find_package(spec: str) -> tuple[PackageSource, str] | None:
    """Return the source and the version that a spec names, or None for another spec."""
    for source in SOURCES:
        if version := source.version_of(spec):
            return source, version
    return None


def find_archive(file_name: str) -> tuple[PackageSource, str] | None:
    """Return the source and the version of an archive by its name, or None for another file."""
    for source in SOURCES:
        if version := source.archive_version(file_name):
            return source, version
    return None


def build_tag(version: str) -> str:
    """Return upstream's tag in a version of xllamacpp: ``b11549`` for ``2026.10.11549``.

    Returns an empty text for a version that has no build number: one before 2026, and a second
    package of the same build (``2026.4.8672.1``).
    """
    found = re.fullmatch(r"20[0-9]{2}\.[0-9]{1,2}\.(?P<build>[1-9][0-9]{0,8})", version)
    return f"b{found['build']}" if found else ""


def free_name(source: PackageSource, version: str, tag: str, taken: Collection[str]) -> str:
    """Return the name of a release: upstream's tag, unless it has none or the tag is taken."""
    if source.plain:
        return version
    return tag if tag and tag not in taken else f"{source.project}-{version}"
