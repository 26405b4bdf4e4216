"""Read git patches: mail header, files and hunks, every byte kept as it stood.

Own model of a patch because it must come out as it went in: headers are never normalised, and a
hunk can be taken out without touching any other line. Reading the text is `reading`'s work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.patching import reading

if TYPE_CHECKING:
    from pathlib import Path

_MAIL = re.compile(rb"^From [0-9a-f]{40,64} Mon Sep 17 00:00:00 2001\r?$", re.MULTILINE)


@dataclass(frozen=True)
class Hunk:
    """Hold one hunk: its ranges, its ``@@`` line and its lines as they stand."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    head: bytes
    lines: tuple[bytes, ...]
    line: int = 0

    @property
    def old(self) -> tuple[bytes, ...]:
        """Return the lines that must be there, with their line ends."""
        return reading.side(self.lines, b"-")

    @property
    def new(self) -> tuple[bytes, ...]:
        """Return the lines that will be there, with their line ends."""
        return reading.side(self.lines, b"+")

    @property
    def added(self) -> tuple[bytes, ...]:
        """Return the added lines without their mark."""
        return tuple(line[1:] for line in self.lines if line[:1] == b"+")

    @property
    def removed(self) -> tuple[bytes, ...]:
        """Return the removed lines without their mark."""
        return tuple(line[1:] for line in self.lines if line[:1] == b"-")

    @property
    def context(self) -> tuple[int, int]:
        """Count the context lines before the first and after the last change."""
        marks = [line[:1] for line in self.lines if line[:1] != b"\\"]
        changed = [number for number, mark in enumerate(marks) if mark in (b"+", b"-")]
        return (changed[0], len(marks) - 1 - changed[-1]) if changed else (len(marks), 0)

    @property
    def data(self) -> bytes:
        """Return the hunk as it stands in the patch."""
        return self.head + b"".join(self.lines)

    def moved(self, delta: int) -> Hunk:
        """Return the hunk with its place after the patch moved by that many lines."""
        if not delta:
            return self
        start = self.new_start + delta
        return replace(self, new_start=start, head=reading.restarted(self.head, start))


@dataclass(frozen=True)
class FilePatch:
    """Hold what a patch does to one file.

    ``old`` is None for a new file, ``new`` is None for a deleted one; modes are git's ("100644"),
    or None where the patch does not name them. ``line`` is where the part begins in the patch.
    """

    header: bytes
    hunks: tuple[Hunk, ...]
    old: str | None
    new: str | None
    old_mode: str | None = None
    new_mode: str | None = None
    copied: bool = False
    line: int = 0

    @property
    def path(self) -> str:
        """Return the path after the patch, or the one that it deletes."""
        return self.new or self.old or ""

    @property
    def data(self) -> bytes:
        """Return the file's part as it stands in the patch."""
        return self.header + b"".join(hunk.data for hunk in self.hunks)


@dataclass(frozen=True)
class Patch:
    """Hold one patch: the header (mail header and message), its files, and what follows them."""

    header: bytes
    files: tuple[FilePatch, ...]
    trailer: bytes = b""

    @property
    def data(self) -> bytes:
        """Return the patch as it stood, byte for byte."""
        return self.header + b"".join(file.data for file in self.files) + self.trailer

    @property
    def paths(self) -> tuple[str, ...]:
        """Return every path that the patch reads or writes, in order."""
        found = [path for file in self.files for path in (file.old, file.new) if path]
        return tuple(dict.fromkeys(found))

    def file(self, path: str) -> FilePatch:
        """Return the part for a file, by its path before or after the patch."""
        for file in self.files:
            if path in (file.old, file.new):
                return file
        known = ", ".join(self.paths)
        raise UsageError(f"The patch does not touch {path}; it touches {known}.")

    def without(self, path: str, number: int) -> Patch:
        """Return the patch without one hunk; the hunks of a file are counted from 1.

        Later hunks of the file move accordingly; a file whose last hunk goes is left out.
        """
        target = self.file(path)
        if not 1 <= number <= len(target.hunks):
            raise UsageError(f"{path} has hunks 1 to {len(target.hunks)}, not {number}.")
        gone = target.hunks[number - 1]
        delta = gone.old_count - gone.new_count
        before, after = target.hunks[: number - 1], target.hunks[number:]
        left = (*before, *(hunk.moved(delta) for hunk in after))
        files = tuple(
            replace(file, hunks=left) if file is target else file
            for file in self.files
            if file is not target or left
        )
        return replace(self, files=files)

    def only(self, *paths: str) -> Patch:
        """Return the patch for these files alone."""
        for path in paths:
            self.file(path)
        kept = tuple(file for file in self.files if file.old in paths or file.new in paths)
        return replace(self, files=kept)


def read(path: Path) -> Patch:
    """Read a file that holds one patch; raise PatchFormatError with the line that is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PatchFormatError(f"{path} cannot be read: {error.strerror}", str(path)) from error
    return parse(data, path.name)


def split(data: bytes) -> tuple[bytes, ...]:
    """Cut a mailbox into its mails; text that is no mailbox is one piece."""
    starts = [match.start() for match in _MAIL.finditer(data)]
    if not starts:
        return (data,)
    ends = [*starts[1:], len(data)]
    pieces = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    return (data[: starts[0]] + pieces[0], *pieces[1:])


def parse(data: bytes, name: str = "patch") -> Patch:
    """Parse the text of one patch; ``name`` is the file named in errors.

    Raises PatchFormatError for text without a change, wrong line counts, binary parts, paths that
    leave the tree, and mailboxes with more than one patch (see `split`).
    """
    reader = reading.Reader(data, name)
    header = reader.until_file()
    files: list[FilePatch] = []
    lead = b""
    while reader.at_file():
        files.append(_file(reader, lead))
        lead = reader.between()
    if not files:
        raise PatchFormatError(
            f"{name} holds no change: expected a line that starts with `diff --git`.", name, 1
        )
    if len(_MAIL.findall(data)) > 1:
        raise PatchFormatError(f"{name} is a mailbox of several patches: split it.", name)
    patch = Patch(header, tuple(files), lead)
    if patch.data != data:  # the promise of this module: checked, not assumed
        raise PatchFormatError(f"{name} cannot be kept byte for byte.", name)
    return patch


def _file(reader: reading.Reader, lead: bytes) -> FilePatch:
    line = reader.at + 1
    facts = reading.file_header(reader)
    hunks: list[Hunk] = []
    while reader.at_hunk():
        start = reader.at + 1
        ranges, head, lines = reading.hunk(reader)
        hunks.append(Hunk(*ranges, head, lines, start))
    if facts.created and facts.deleted:
        raise reader.wrong("a file cannot be made and deleted at once.")
    if (facts.created and any(hunk.old_count for hunk in hunks)) or (
        facts.deleted and any(hunk.new_count for hunk in hunks)
    ):
        raise reader.wrong("a new file has no old lines, a deleted one no new lines.")
    return FilePatch(
        header=lead + facts.raw,
        hunks=tuple(hunks),
        old=None if facts.created else facts.old,
        new=None if facts.deleted else facts.new,
        old_mode=facts.old_mode,
        new_mode=facts.new_mode,
        copied=facts.copied,
        line=line,
    )
