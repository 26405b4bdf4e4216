"""Refuse trees that are small as git keeps them and endless once they are written out."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError, GitError
from pyllamakv.source import gitting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: More than any release has, fetched or written out: llama.cpp has two thousand files, 100 MB.
FILES, BYTES = 200_000, 4 << 30
_CHUNK = 1 << 20


def check(folder: Path, tree: str, env: Mapping[str, str] | None = None) -> None:
    """Raise ArchiveError for a tree with more files or bytes than any release has.

    ``folder`` is the repository. The list is read as it comes: trees that hold each other ten times
    over name more files than memory has room for.
    """
    command = ["git", "ls-tree", "-r", "-l", "-z", "--full-tree", tree]
    full = {**gitting.environment(), **(env or {})}
    files = size = 0
    with subprocess.Popen(command, cwd=folder, env=full, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rest = b""
        while files <= FILES and size <= BYTES and (chunk := process.stdout.read(_CHUNK)):
            *lines, rest = (rest + chunk).split(b"\0")
            files += len(lines)
            size += sum(_size(line) for line in lines)
        over = files > FILES or size > BYTES
        if over:
            process.kill()
    if over:
        msg = (
            f"tree {tree} has more than {FILES} files or {BYTES} bytes; no release comes near "
            "that, so it was not taken"
        )
        raise ArchiveError(msg)
    if process.returncode:
        raise GitError(command, process.returncode, f"tree {tree} cannot be listed")


def _size(line: bytes) -> int:
    words = line.split(b"\t", 1)[0].split()
    return int(words[3]) if len(words) > 3 and words[3].isdigit() else 0
