"""Import the llama.cpp inside sdists of xllamacpp: plain files without git objects.

The commit is synthetic. Its date is the newest modification time of the tree in the archive, which
is when the packager checked out upstream. It is used because it is in the archive, so a local file
gives the same commit as a download; the upload time is known to the index only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError
from pyllamakv.source.package_sources import XLLAMACPP, build_tag
from pyllamakv.source.quarantine import quarantine
from pyllamakv.source.sdist_import import import_files, plain_files
from pyllamakv.source.tarball import open_tar

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.store import Store

#: Files that every llama.cpp in these sdists has; older sdists contain two headers only.
_REQUIRED = (
    "include/llama.h",
    "CMakeLists.txt",
    "src/CMakeLists.txt",
    "src/llama.cpp",
    "common/CMakeLists.txt",
    "ggml/CMakeLists.txt",
    "ggml/include/ggml.h",
    "ggml/src/CMakeLists.txt",
)
#: Upstream's first commit (2023-03-10), and the largest time that is plausible (2100-01-01).
_FIRST, _LAST = 1_678_406_400, 4_102_444_800


def import_package(
    store: Store, archive: Path, version: str, *, commit: str = "", tree: str = ""
) -> tuple[str, str, str]:
    """Import the tree of an sdist; return its commit, tree and upstream's tag (``b11549``).

    The tag is empty for versions before 2026, whose archives do not state the build. The same
    archive gives the same ids. ``commit`` and ``tree``, if given, must match. No ref is created.
    Raises ArchiveError for an archive without a complete llama.cpp, without a build number where
    the version must have one, or without a plausible date, and HashMismatch for other ids.
    """
    tag = build_tag(version)
    if not tag and not build_tag(version.rpartition(".")[0]) and re.match("20[0-9]{2}", version):
        msg = f"{archive.name} states no build number of llama.cpp; expected YYYY.M.BUILD"
        raise ArchiveError(msg)
    prefix = f"{XLLAMACPP.project}-{version}/thirdparty/llama.cpp/"
    date = _date(archive, prefix)
    pattern = re.compile(re.escape(prefix) + "(?P<path>.+)", re.DOTALL)
    message = f"llama.cpp in {XLLAMACPP.package(version)}"
    with quarantine(store) as held:
        head = import_files(held, plain_files(archive, pattern), message, seconds=date)
        return head, held.admit(head, expected_commit=commit, expected_tree=tree), tag


def _date(archive: Path, prefix: str) -> int:
    """Return the newest modification time of a tree, after checking that the tree is complete."""
    missing = set(_REQUIRED)
    newest = 0
    with open_tar(archive) as tar:
        for member in tar:
            if not member.name.startswith(prefix):
                continue
            if not member.isfile():
                continue
            missing.discard(member.name.removeprefix(prefix))
            # A comparison with a time that is not a number is false.
            if _FIRST <= member.mtime <= _LAST:
                newest = max(newest, int(member.mtime))
    if missing:
        msg = (
            f"{archive.name} has no complete llama.cpp: {prefix}{min(missing)} is missing "
            f"({len(missing)} of {len(_REQUIRED)} required files are)"
        )
        raise ArchiveError(msg)
    if not newest:
        msg = f"{archive.name} has no file with a plausible modification time; it gives the date"
        raise ArchiveError(msg)
    return newest
