"""Turn plain files, from an archive or a folder, into a commit with fixed ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.errors import ArchiveError
from pyllamakv.source import gitting
from pyllamakv.source.export import KEEP
from pyllamakv.source.files import disk_room

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.source.quarantine import Quarantine


class PlainFile(NamedTuple):
    """Hold one file: its path with slashes, git's mode for it, and its content or link target."""

    path: str
    mode: str
    data: bytes


def import_files(held: Quarantine, files: Iterable[PlainFile], message: str) -> str:
    """Make a commit without parents from files; return it, or "" when there are none.

    The same files and message give the same commit. Files that upstream's build writes into its
    tree, and anything of git's own, are left out. Raises ArchiveError for a path that leads out.
    """
    stream = held.folder / "stream"
    marks = held.folder / "marks"
    name = "refs/heads/incoming"
    count = 0
    text = (message.strip() + "\n").encode()
    who = f"{gitting.NAME} <{gitting.EMAIL}> {gitting.SECONDS} +0000"
    with disk_room(stream), stream.open("wb") as out:
        out.write(f"commit {name}\nmark :1\ncommitter {who}\ndata {len(text)}\n".encode())
        out.write(text)
        for file in files:
            if not _belongs(file.path):
                continue
            count += 1
            out.write(f"M {file.mode} inline ".encode() + _quoted(file.path))
            out.write(f"\ndata {len(file.data)}\n".encode() + file.data + b"\n")
        out.write(b"done\n")
    if not count:
        return ""
    # A repository of its own: a killed import must leave no ref to what is thrown away.
    own = held.folder / "import"
    own.mkdir()
    env = {"GIT_OBJECT_DIRECTORY": str(held.objects)}
    words = ("fast-import", "--quiet", "--done", f"--export-marks={marks}")
    with disk_room(own):
        gitting.git(own, "init", "-q", "--bare", ".")
        gitting.git(own, *words, input=stream, env=env)
    return marks.read_text("ascii").split()[1]


def _belongs(path: str) -> bool:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        msg = f"the archive holds a path that leads outside: {path!r}"
        raise ArchiveError(msg)
    return path not in KEEP and ".git" not in (part.lower() for part in parts)


def _quoted(path: str) -> bytes:
    raw = path.encode("utf-8", "surrogateescape")
    raw = raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"' + raw + b'"'
