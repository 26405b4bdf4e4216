"""Extract the git objects of llama.cpp from an sdist without running its code.

Members are selected by their full names and written under generated names, so links, unusual paths,
configs and hooks of the archive are never written. An sdist without the embedded clone is read as a
plain tree instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pyllamakv.errors import ArchiveError
from pyllamakv.source import git_command
from pyllamakv.source.files import translate_disk_errors
from pyllamakv.source.quarantine import quarantine
from pyllamakv.source.tarball import content, copy_member, is_plain, open_tar
from pyllamakv.source.tree_export import GENERATED_FILES

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyllamakv.source.quarantine import Quarantine
    from pyllamakv.source.store import Store


class PlainFile(NamedTuple):
    """One file: its path with slashes, git's mode for it, and its content or link target."""

    path: str
    mode: str
    data: bytes


def import_files(
    held: Quarantine,
    files: Iterable[PlainFile],
    message: str,
    *,
    seconds: int = git_command.SECONDS,
) -> str:
    """Create a commit without parents from files; return it, or "" without files.

    ``seconds`` is the time of the commit. The same arguments give the same commit. Files that
    upstream's build writes into its tree, and files of git, are ignored. Raises ArchiveError for a
    path outside of the tree.
    """
    stream = held.folder / "stream"
    marks = held.folder / "marks"
    name = "refs/heads/incoming"
    count = 0
    text = (message.strip() + "\n").encode()
    who = f"{git_command.NAME} <{git_command.EMAIL}> {seconds} +0000"
    with translate_disk_errors(stream), stream.open("wb") as out:
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
    # A separate repository, so that a killed import leaves no ref in the store.
    own = held.folder / "import"
    own.mkdir()
    env = {"GIT_OBJECT_DIRECTORY": str(held.objects)}
    words = ("fast-import", "--quiet", "--done", f"--export-marks={marks}")
    with translate_disk_errors(own):
        git_command.git(own, "init", "-q", "--bare", ".")
        git_command.git(own, *words, input=stream, env=env)
    return marks.read_text("ascii").split()[1]


def _belongs(path: str) -> bool:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        msg = f"the archive has a path outside of it: {path!r}"
        raise ArchiveError(msg)
    return path not in GENERATED_FILES and ".git" not in (part.lower() for part in parts)


def _quoted(path: str) -> bytes:
    raw = path.encode("utf-8", "surrogateescape")
    raw = raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"' + raw + b'"'


_CLONE = re.compile(
    r"[^/]+/\.git/modules/vendor/llama\.cpp/"
    r"(?P<name>HEAD|packed-refs|refs/heads/[\w.-]+"
    r"|objects/pack/pack-(?P<pack>[0-9a-f]{40})\.pack"
    r"|objects/(?P<high>[0-9a-f]{2})/(?P<low>[0-9a-f]{38}))"
)
_TREE = re.compile(r"[^/]+/vendor/llama\.cpp/(?P<path>.+)", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")

#: HEAD and the references of a clone together; upstream's tags take a third of it.
_TEXTS = 1 << 20


def import_sdist(
    store: Store, archive: Path, *, commit: str = "", tree: str = ""
) -> tuple[str, str]:
    """Import an sdist's llama.cpp; return its commit and tree. Creates no ref.

    ``commit`` and ``tree``, if given, must match. Raises ArchiveError for an archive that is
    truncated, hostile or without llama.cpp, and HashMismatch for another commit or tree.
    """
    with quarantine(store) as held:
        head = _take_clone(archive, held)
        if head:
            return head, held.admit(head, expected_commit=commit, expected_tree=tree)
        head = import_files(
            held, plain_files(archive, _TREE), f"llama.cpp as unpacked in {archive.name}"
        )
        if not head:
            msg = f"{archive.name} has neither a git clone nor a tree under vendor/llama.cpp"
            raise ArchiveError(msg)
        return head, held.admit(head, expected_commit=commit, expected_tree=tree)


def _take_clone(archive: Path, held: Quarantine) -> str:
    texts: dict[str, str] = {}
    left = _TEXTS
    packs = []
    seen: set[str] = set()
    with open_tar(archive) as tar:
        for member, found in _members(tar, _CLONE):
            part = found.groupdict()
            name = part["name"]  # of two clones, one would count here and the other there
            if name in seen:
                msg = f"{archive.name} has a clone's {name} twice; the archive was refused"
                raise ArchiveError(msg)
            seen.add(name)
            if part["pack"]:
                packs.append(copy_member(tar, member, held.folder / f"{part['pack']}.pack"))
            elif part["high"]:
                held.add_loose(part["high"] + part["low"], content(tar, member))
            else:
                texts[name] = content(tar, member, left).decode("ascii", "replace")
                left -= member.size
    if not packs and not seen - {"HEAD"}:
        return ""
    for pack in packs:
        held.add_pack(pack)
    return _head(texts, archive)


def _head(texts: dict[str, str], archive: Path) -> str:
    value = texts.get("HEAD", "").strip()
    if value.startswith("ref: "):
        name = value.removeprefix("ref: ")
        packed = (line.split(" ", 1) for line in texts.get("packed-refs", "").splitlines())
        known = {pair[1].strip(): pair[0] for pair in packed if len(pair) == 2}
        value = texts.get(name, known.get(name, "")).strip()
    if not _COMMIT.fullmatch(value):
        msg = f"the clone in {archive.name} names no commit in its HEAD"
        raise ArchiveError(msg)
    return value


def plain_files(archive: Path, pattern: re.Pattern[str]) -> Iterator[PlainFile]:
    """Yield the files and links of an archive whose names match; ``path`` is their path.

    Raises ArchiveError for hard links, devices and other special files.
    """
    with open_tar(archive) as tar:
        for member in tar:
            found = pattern.fullmatch(member.name)
            if not found or member.isdir():
                continue
            path = found["path"]
            if member.issym():
                yield PlainFile(path, "120000", member.linkname.encode("utf-8", "surrogateescape"))
            elif is_plain(member):
                mode = "100755" if member.mode & 0o100 else "100644"
                yield PlainFile(path, mode, content(tar, member))
            else:
                msg = f"{archive.name} has {member.name}, which is not a plain file"
                raise ArchiveError(msg)


def _members(
    tar: tarfile.TarFile, pattern: re.Pattern[str]
) -> Iterator[tuple[tarfile.TarInfo, re.Match[str]]]:
    for member in tar:
        found = pattern.fullmatch(member.name)
        if not found:
            continue
        if not is_plain(member):
            msg = f"{member.name} in the archive is not a plain file; the archive was refused"
            raise ArchiveError(msg)
        yield member, found
