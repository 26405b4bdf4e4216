"""Read git patches: mail header, files and hunks, every byte kept as it stood.

Own parser because a patch must come out as it went in: headers are never normalised, and a hunk
can be taken out of a patch without touching any other line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_RANGE = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\Z", re.DOTALL)
_MAIL = re.compile(rb"From [0-9a-f]{40,64} Mon Sep 17 00:00:00 2001\r?\n")
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a",
            b"b": b"\b", b"f": b"\f", b"v": b"\v"}  # fmt: skip
_QUOTED = re.compile(rb'\\([0-7]{3}|[ntr"\\abfv])')


@dataclass(frozen=True)
class Hunk:
    """Hold one hunk: its ranges, the rest of its ``@@`` line, and its lines as they stand."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: bytes
    lines: tuple[bytes, ...]
    head: bytes

    @property
    def old(self) -> tuple[bytes, ...]:
        """Return the lines that must be there, with their line ends."""
        return _side(self.lines, b"-")

    @property
    def new(self) -> tuple[bytes, ...]:
        """Return the lines that will be there, with their line ends."""
        return _side(self.lines, b"+")

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
        """Return how many context lines stand before the first and after the last change."""
        marks = [line[:1] for line in self.lines if line[:1] != b"\\"]
        changed = [number for number, mark in enumerate(marks) if mark in b"+-"]
        return (changed[0], len(marks) - 1 - changed[-1]) if changed else (len(marks), 0)

    @property
    def data(self) -> bytes:
        """Return the hunk as it stands in the patch."""
        return self.head + b"".join(self.lines)

    def moved(self, delta: int) -> Hunk:
        """Return the hunk with its new position moved by that many lines."""
        if not delta:
            return self
        start = self.new_start + delta
        old = _span(self.old_start, self.old_count, self.head, 0)
        new = _span(start, self.new_count, self.head, 1)
        head = b"@@ -" + old + b" +" + new + b" @@" + self.section
        return replace(self, new_start=start, head=head)


@dataclass(frozen=True)
class FilePatch:
    """Hold what a patch does to one file.

    ``old`` is None for a new file, ``new`` is None for a deleted one; modes are git's, or None
    where the patch does not name them.
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
        """Return the patch without one hunk; hunks of a file are counted from 1.

        Later hunks of the file are renumbered; a file whose last hunk goes is left out.
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
    return parse(data, str(path))


def split(data: bytes) -> tuple[bytes, ...]:
    """Cut a mailbox into its mails; text that is no mailbox is one piece."""
    starts = [m.start() for m in _MAIL.finditer(data) if _at_line_start(data, m.start())]
    if not starts:
        return (data,)
    ends = [*starts[1:], len(data)]
    pieces = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    return (data[: starts[0]] + pieces[0], *pieces[1:])


def parse(data: bytes, name: str = "patch") -> Patch:
    """Parse the text of one patch; ``name`` is the file named in errors."""
    reader = _Reader(data.splitlines(keepends=True) if b"\r" not in data else _lines(data), name)
    header = reader.until_file()
    files: list[FilePatch] = []
    while reader.at_file():
        files.append(_file(reader))
        reader.skip_blank(files)
    trailer = reader.rest()
    if not files:
        raise PatchFormatError(
            f"{name} holds no change: expected a line that starts with `diff --git`.", name, 1
        )
    patch = Patch(header, tuple(files), trailer)
    if patch.data != data:  # the promise of this module, so it is checked, not assumed
        raise PatchFormatError(f"{name} cannot be kept byte for byte.", name)
    return patch


def _lines(data: bytes) -> list[bytes]:
    # bytes.splitlines also cuts at a lone carriage return, which git does not
    cut = [line + b"\n" for line in data.split(b"\n")]
    last = cut.pop()[:-1]
    return [*cut, last] if last else cut


def _at_line_start(data: bytes, start: int) -> bool:
    return start == 0 or data[start - 1 : start] == b"\n"


def _span(start: int, count: int, head: bytes, side: int) -> bytes:
    match = _RANGE.match(head)
    explicit = match is not None and match.group(2 + 2 * side) is not None
    return b"%d,%d" % (start, count) if explicit else b"%d" % start


def _side(lines: tuple[bytes, ...], mark: bytes) -> tuple[bytes, ...]:
    found: list[bytes] = []
    taken = False
    for line in lines:
        if line[:1] == b"\\":
            if taken:
                found[-1] = found[-1].removesuffix(b"\n")
            continue
        taken = line[:1] in (b" ", mark, b"\n", b"\r")
        if taken:
            # some mailers strip the blank of an empty context line; git accepts that too
            found.append(line[1:] if line[:1] in (b" ", mark) else line)
    return tuple(found)


class _Reader:
    """Walk the lines of a patch and know where it is."""

    def __init__(self, lines: list[bytes], name: str) -> None:
        self.lines = lines
        self.name = name
        self.at = 0

    def peek(self, ahead: int = 0) -> bytes:
        at = self.at + ahead
        return self.lines[at] if at < len(self.lines) else b""

    def take(self) -> bytes:
        self.at += 1
        return self.lines[self.at - 1]

    def wrong(self, message: str) -> PatchFormatError:
        return PatchFormatError(f"{self.name}:{self.at + 1}: {message}", self.name, self.at + 1)

    def at_file(self) -> bool:
        return self.peek().startswith(b"diff --git ") or self.at_plain()

    def at_plain(self) -> bool:
        return (
            self.peek().startswith(b"--- ")
            and self.peek(1).startswith(b"+++ ")
            and self.peek(2).startswith(b"@@ -")
        )

    def until_file(self) -> bytes:
        start = self.at
        while self.at < len(self.lines) and not self.at_file():
            self.at += 1
        return b"".join(self.lines[start : self.at])

    def skip_blank(self, files: list[FilePatch]) -> None:
        # lines between files (a plain diff's `Index:` and the like) belong to the next header
        start = self.at
        between = self.until_file()
        if not self.at_file() or not between:
            self.at = start
            return
        if re.search(rb"^@@ -", between, re.MULTILINE):
            self.at = start
            raise self.wrong("a hunk follows one whose line counts end here.")
        files[-1] = files[-1]
        self.at = start

    def rest(self) -> bytes:
        found = b"".join(self.lines[self.at :])
        if re.search(rb"^@@ -", found, re.MULTILINE):
            raise self.wrong("expected the end of the patch; the line counts of a hunk are wrong.")
        self.at = len(self.lines)
        return found


def _file(reader: _Reader) -> FilePatch:
    raise NotImplementedError
