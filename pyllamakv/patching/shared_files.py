"""Compose a port with the shared files of its patch, and separate them again.

A shared file exists once, as a regular file, below ``shared/`` of the series directory. The
composed patch is applied, digested and exported: message, hooks and shared files, in git's
order.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import hunks
from pyllamakv.patching.hunks import Patch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyllamakv.patching.hunks import FilePatch

#: The folder beside the patches that holds the shared files, each at its path in llama.cpp.
FOLDER = "shared"


def path_of(series: Path, name: str) -> Path:
    """Return where a series folder keeps a shared file; ``name`` is its path in llama.cpp."""
    return series / FOLDER / name


def read(series: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of shared files by their path in llama.cpp.

    Raises PatchFormatError for a name that leaves the folder, a file that cannot be read, and one
    that is empty or does not end with a line feed, which no added file of a patch can be.
    """
    found = {}
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/") or "\0" in name:
            raise PatchFormatError(f"{name!r} is not a path below {FOLDER}/.", str(series))
        path = path_of(series, name)
        try:
            data = path.read_bytes()
        except OSError as error:
            msg = f"shared file {FOLDER}/{name} cannot be read: {error.strerror}"
            raise PatchFormatError(msg, str(path)) from error
        if not data.endswith(b"\n"):
            msg = f"{FOLDER}/{name} is empty or does not end with a line feed"
            raise PatchFormatError(msg, str(path))
        found[name] = data
    return found


def compose(header: bytes, hooks: Patch, shared: Mapping[str, bytes]) -> Patch:
    """Return the patch of a port: header, hooks, and each shared file as an added file."""
    files = {file.path: file for file in hooks.files}
    files.update({name: _added(name, data) for name, data in shared.items()})
    ordered = sorted(files, key=os.fsencode)  # as git orders the files of a commit
    return Patch(header, tuple(files[name] for name in ordered))


def separate(patch: Patch, shared: Iterable[str]) -> tuple[bytes, dict[str, bytes]]:
    """Split a composed patch into its hooks and the shared files that it adds.

    Raises PatchFormatError if it does not add one of the shared files, or has no hooks.
    """
    names = set(shared)
    contents = {
        file.path: b"".join(line for hunk in file.hunks for line in hunk.new)
        for file in patch.files
        if file.path in names and file.old is None
    }
    if missing := sorted(names - contents.keys()):
        msg = f"the change does not add {missing[0]}, which patch.toml lists as a shared file"
        raise PatchFormatError(msg, missing[0])
    hooks = b"".join(file.data for file in patch.files if file.path not in names)
    if not hooks:
        raise PatchFormatError("the change has shared files and no hooks that use them")
    return hooks, contents


def _added(name: str, data: bytes) -> FilePatch:
    """Return the part of a patch that adds a file, as `git format-patch --full-index` writes it."""
    lines = data.split(b"\n")[:-1]
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    count = f"1,{len(lines)}" if len(lines) > 1 else "1"
    head = (
        f"diff --git a/{name} b/{name}\n"
        "new file mode 100644\n"
        f"index {'0' * 40}..{blob}\n"
        "--- /dev/null\n"
        f"+++ b/{name}\n"
        f"@@ -0,0 +{count} @@\n"
    )
    text = head.encode() + b"".join(b"+%s\n" % line for line in lines)
    (file,) = hunks.parse(text, name).files
    return file
