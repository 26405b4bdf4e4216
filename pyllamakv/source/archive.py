"""Take the git objects of llama.cpp out of an sdist of llama-cpp-python; run nothing of it.

Members are picked by their whole name and written under names of our own, so links, odd paths,
configs and hooks of the archive never reach the disk. An sdist without the embedded clone is read
as a plain tree instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError
from pyllamakv.source.plain import PlainFile, import_files
from pyllamakv.source.quarantine import quarantine
from pyllamakv.source.tarball import content, copy_member, is_plain, open_tar

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.source.quarantine import Quarantine
    from pyllamakv.source.store import Store

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
    """Import an sdist's llama.cpp; return its commit and tree. No ref is made.

    ``commit`` and ``tree``, where given, must be the ones found. Raises ArchiveError for an archive
    that is truncated, hostile or holds no llama.cpp, HashMismatch for another commit or tree.
    """
    with quarantine(store) as held:
        head = _take_clone(archive, held)
        if head:
            return head, held.admit(head, expected_commit=commit, expected_tree=tree)
        head = import_files(held, _plain_files(archive), f"llama.cpp as unpacked in {archive.name}")
        if not head:
            msg = f"{archive.name} holds neither a git clone nor a tree under vendor/llama.cpp"
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
                msg = f"{archive.name} holds a clone's {name} twice; it is not to be trusted"
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


def _plain_files(archive: Path) -> Iterator[PlainFile]:
    with open_tar(archive) as tar:
        for member in tar:
            found = _TREE.fullmatch(member.name)
            if not found or member.isdir():
                continue
            path = found["path"]
            if member.issym():
                yield PlainFile(path, "120000", member.linkname.encode("utf-8", "surrogateescape"))
            elif is_plain(member):
                mode = "100755" if member.mode & 0o100 else "100644"
                yield PlainFile(path, mode, content(tar, member))
            else:
                msg = f"{archive.name} holds {member.name}, which is no plain file"
                raise ArchiveError(msg)


def _members(
    tar: tarfile.TarFile, pattern: re.Pattern[str]
) -> Iterator[tuple[tarfile.TarInfo, re.Match[str]]]:
    for member in tar:
        found = pattern.fullmatch(member.name)
        if not found:
            continue
        if not is_plain(member):
            msg = f"{member.name} in the archive is no plain file; it is not to be trusted"
            raise ArchiveError(msg)
        yield member, found
