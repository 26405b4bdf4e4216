"""Read git patches: mail header, files and hunks, preserving every byte.

A separate model of a patch is necessary because the output must equal the input: headers are never
normalised, and a hunk can be removed without changing any other line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.source import tree_limits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: The line before a mail of a mailbox: git writes a commit and a fixed date, mail programs and
#: archives write a sender and a date.
MAIL = re.compile(
    rb"^From \S+ +[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?: [+-]\d{4})? \d{4}"
    rb"(?: [+-]\d{4})?\r?$",
    re.MULTILINE,
)
_Ranges = tuple[int, int, int, int]

#: Line numbers have at most nine digits: Python does not convert numbers of thousands of digits.
_RANGE = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
}  # fmt: skip
_QUOTED = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_MODE = re.compile(rb"[0-7]{6}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_PREFIX = re.compile(r"\A[abciow]/")
#: The id of a file without content.
_EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
_INDEX = re.compile(rb"^index ([0-9a-f]{7,64})\.\.([0-9a-f]{7,64})(?: \d{6})?\r?$", re.MULTILINE)
#: The last line of `git diff --stat`, which `git format-patch` writes after the message.
_STAT = re.compile(
    rb"^ (\d{1,9}) files? changed(?:, (\d{1,9}) insertions?\(\+\))?"
    rb"(?:, (\d{1,9}) deletions?\(-\))?\r?$",
    re.MULTILINE,
)
_NOTHING = "/dev/null"
_MODES = ("100644", "100755", "120000")


@dataclass(frozen=True)
class Hunk:
    """One hunk: its ranges, its ``@@`` line, and its lines unchanged."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    head: bytes
    lines: tuple[bytes, ...]
    line: int = 0

    @property
    def old(self) -> tuple[bytes, ...]:
        """Return the context and removed lines, with their line ends."""
        return _side(self.lines, b"-")

    @property
    def new(self) -> tuple[bytes, ...]:
        """Return the context and added lines, with their line ends."""
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
        """Count the context lines before the first and after the last change."""
        marks = [line[:1] for line in self.lines if line[:1] != b"\\"]
        changed = [number for number, mark in enumerate(marks) if mark in (b"+", b"-")]
        return (changed[0], len(marks) - 1 - changed[-1]) if changed else (len(marks), 0)

    @property
    def data(self) -> bytes:
        """Return the text of the hunk in the patch."""
        return self.head + b"".join(self.lines)

    @property
    def reversed(self) -> Hunk:
        """Return the hunk that undoes this one."""
        marks = {b"+": b"-", b"-": b"+"}
        lines = tuple(marks.get(line[:1], line[:1]) + line[1:] for line in self.lines)
        ranges = self.new_start, self.new_count, self.old_start, self.old_count
        return Hunk(*ranges, self.head, lines, self.line)

    def moved(self, delta: int) -> Hunk:
        """Return the hunk with its place after the patch moved by that many lines."""
        if not delta:
            return self
        start = self.new_start + delta
        return replace(self, new_start=start, head=_restarted(self.head, start))


@dataclass(frozen=True)
class FilePatch:
    """The changes of a patch to one file.

    ``old`` is None for a new file, ``new`` is None for a deleted one. Modes are git's ("100644"),
    or None if the patch does not contain them. ``line`` is where the part starts in the patch.
    ``names`` are both names as they are written, if the part has no `diff --git` line, as in the
    output of `diff -ru` and quilt.
    """

    header: bytes
    hunks: tuple[Hunk, ...]
    old: str | None
    new: str | None
    old_mode: str | None = None
    new_mode: str | None = None
    copied: bool = False
    line: int = 0
    names: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return the path of the patched file, or of the deleted one."""
        return self.new or self.old or ""

    @property
    def blobs(self) -> tuple[str, str] | None:
        """Return the ids of the old and the new content, possibly abbreviated, if it has them."""
        match = _INDEX.search(self.header)
        return (match[1].decode(), match[2].decode()) if match else None

    @property
    def data(self) -> bytes:
        """Return the text of the file's part in the patch."""
        return self.header + b"".join(hunk.data for hunk in self.hunks)


@dataclass(frozen=True)
class Patch:
    """One patch: the header (mail header and message), its files, and the text after them."""

    header: bytes
    files: tuple[FilePatch, ...]
    trailer: bytes = b""

    @property
    def signed(self) -> bool:
        """Return whether the text ends with a signature, as mails of git do: it is not cut off."""
        return self.trailer.lstrip(b"\r\n").startswith(b"--")

    @property
    def data(self) -> bytes:
        """Return the patch unchanged, byte for byte."""
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

    @property
    def reversed(self) -> Patch:
        """Return the changes that undo those of the patch, to be applied in memory."""
        files = [
            replace(
                file,
                header=b"",
                hunks=tuple(hunk.reversed for hunk in file.hunks),
                old=file.new,
                new=file.old,
                old_mode=file.new_mode,
                new_mode=file.old_mode,
            )
            for file in reversed(self.files)
            if not file.copied
        ]
        return replace(self, files=tuple(files))

    def stripped(self, count: int) -> Patch:
        """Return the patch for paths without directories after the first one, as with ``-pN``.

        Paths that `diff -ru` and quilt wrote are counted as they are written. Raises
        PatchFormatError for a path with fewer directories.
        """
        if count <= 0:
            return self

        def path(file: FilePatch, name: str | None) -> str | None:
            if name is None:
                return None
            written = [each for each in file.names if each != _NOTHING]
            parts = written[-1].split("/")[1:] if written else name.split("/")
            if len(parts) <= count:
                msg = f"{name} has no {count} directories to strip"
                raise PatchFormatError(msg, name, file.line)
            if _leaves(parts[count:]):
                msg = f"the path {written[-1]!r} leaves the tree; a patch may touch its files only."
                raise PatchFormatError(msg, name, file.line)
            return "/".join(parts[count:])

        files = (replace(f, old=path(f, f.old), new=path(f, f.new)) for f in self.files)
        return replace(self, files=tuple(files))

    def without(self, path: str, number: int) -> Patch:
        """Return the patch without one hunk; the hunks of a file are numbered from 1.

        Later hunks of the file are renumbered. A file without hunks is omitted.
        """
        target = self.file(path)
        if not 1 <= number <= len(target.hunks):
            raise UsageError(f"{path} has hunks 1 to {len(target.hunks)}, not {number}.")
        gone = target.hunks[number - 1]
        delta = gone.old_count - gone.new_count
        before, after = target.hunks[: number - 1], target.hunks[number:]
        left = (*before, *(hunk.moved(delta) for hunk in after))
        # The index line states the content that all hunks make.
        header = re.sub(rb"^index [^\n]*\n", b"", target.header, flags=re.MULTILINE)
        files = tuple(
            replace(file, header=header, hunks=left) if file is target else file
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
    """Read a file with one patch. Raises PatchFormatError with the line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PatchFormatError(f"{path} cannot be read: {error.strerror}", str(path)) from error
    return parse(data, path.name)


def split(data: bytes) -> tuple[bytes, ...]:
    """Cut a mailbox into its mails; text that is no mailbox is one piece."""
    starts = [match.start() for match in MAIL.finditer(data)]
    if not starts:
        return (data,)
    ends = [*starts[1:], len(data)]
    pieces = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    return (data[: starts[0]] + pieces[0], *pieces[1:])


def parse(data: bytes, name: str = "patch") -> Patch:
    """Parse the text of one patch; ``name`` is the file named in errors.

    Raises PatchFormatError for text without a change, wrong line counts, text that ends too early,
    binary parts, paths that leave the tree, and mailboxes with more than one patch (see `split`).
    """
    reader = _PatchReader(data, name)
    header = reader.until_file()
    files: list[FilePatch] = []
    lead = b""
    while reader.at_file():
        files.append(_file(reader, lead))
        lead = reader.between()
    if not files:
        raise PatchFormatError(
            f"{name} has no change: expected a line that starts with `diff --git`.", name, 1
        )
    if len(MAIL.findall(data)) > 1:
        raise PatchFormatError(f"{name} is a mailbox of several patches: split it.", name)
    patch = Patch(header, _without_directories(reader, files), lead)
    if patch.data != data:  # Check that the output equals the input.
        raise PatchFormatError(f"{name} cannot be stored byte for byte.", name)
    if not patch.signed:
        _check_complete(patch, name)
    return patch


def _check_complete(patch: Patch, name: str) -> None:
    """Refuse a patch that has less than the diffstat of its mail states."""
    stats = _STAT.findall(patch.header)
    if not stats:
        return
    stated = tuple(int(number or 0) for number in stats[-1])
    hunks = [hunk for file in patch.files for hunk in file.hunks]
    found = (
        len(patch.files),
        sum(len(hunk.added) for hunk in hunks),
        sum(len(hunk.removed) for hunk in hunks),
    )
    if any(has < said for has, said in zip(found, stated, strict=True)):
        what = "{} files, {} added and {} removed lines"
        msg = (
            f"{name} is cut off: its diffstat states {what.format(*stated)}, it has "
            f"{what.format(*found)}. Get the patch again; if you edited it, remove the diffstat."
        )
        raise PatchFormatError(msg, name)


def _without_directories(reader: _PatchReader, files: Sequence[FilePatch]) -> tuple[FilePatch, ...]:
    """Return plain parts without the two directories that were compared.

    The names of one part show them: ``old/llama.cpp/src/x`` and ``new/src/x``. The names of an
    added or deleted file may need those of another part.
    """
    found = {place for file in files for place in _compared(file.names) if place}
    places = sorted(found, key=len, reverse=True)

    def stripped(file: FilePatch, path: str | None) -> str | None:
        if path is None:
            return None
        place = next((each for each in places if path.startswith(f"{each}/")), "")
        rest = path[len(place) + 1 :] if place else _PREFIX.sub("", path)
        return _checked(reader, rest, file.line)

    return tuple(
        replace(file, old=stripped(file, file.old), new=stripped(file, file.new))
        if file.names
        else file
        for file in files
    )


def _compared(names: Sequence[str]) -> tuple[str, ...]:
    """Return the directories that two names of one file begin with: what differs in them."""
    if _NOTHING in names or len({name.rpartition("/")[2] for name in names}) != 1:
        return ()
    old, new = (name.split("/") for name in names)
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return "/".join(old), "/".join(new)


def _file(reader: _PatchReader, lead: bytes) -> FilePatch:
    line = reader.at + 1
    facts = _file_header(reader)
    hunks: list[Hunk] = []
    while reader.at_hunk():
        start = reader.at + 1
        ranges, head, lines = _hunk(reader)
        hunks.append(Hunk(*ranges, head, lines, start))
    if not hunks:
        _check_without_hunks(reader, facts)
    if facts.names and hunks:
        # `diff -N` names a file that is not there, with an empty range.
        facts.created |= hunks[0].old_start == hunks[0].old_count == 0
        facts.deleted |= hunks[0].new_start == hunks[0].new_count == 0
    if facts.created and facts.deleted:
        raise reader.wrong("a file cannot be created and deleted at once.")
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
        names=facts.names,
    )


def _check_without_hunks(reader: _PatchReader, facts: _FileFacts) -> None:
    """Refuse a part that states a change of content, or nothing, and has no hunk."""
    index = _INDEX.search(facts.raw)
    ids = (index[1].decode(), index[2].decode()) if index else ("", "")
    if facts.created or facts.deleted:
        # Of an empty file: the ids of nothing and of no content.
        whole = bool(index) and all(not id_.strip("0") or _EMPTY.startswith(id_) for id_ in ids)
    else:
        moved = facts.old_mode != facts.new_mode or facts.old != facts.new or facts.copied
        whole = moved and ids[0] == ids[1]
    if facts.headed or not whole:
        raise reader.wrong("the part of a file has no hunk: the patch is cut off.")


@dataclass
class _FileFacts:
    """Collect the facts in the header of one file."""

    raw: bytes = b""
    old: str | None = None
    new: str | None = None
    old_mode: str | None = None
    new_mode: str | None = None
    created: bool = False
    deleted: bool = False
    copied: bool = False
    #: Whether the part has the lines `---` and `+++`, which hunks follow.
    headed: bool = False
    #: Both names of a part without a `diff --git` line, as `diff -ru` and quilt write it.
    names: tuple[str, ...] = ()


class _PatchReader:
    """Iterate over the lines of a patch, with the line number."""

    def __init__(self, data: bytes, name: str) -> None:
        # not splitlines: a lone carriage return ends no line for git
        cut = [line + b"\n" for line in data.split(b"\n")]
        last = cut.pop()[:-1]
        self.lines = [*cut, last] if last else cut
        self.name = name
        self.at = 0

    def peek(self, ahead: int = 0) -> bytes:
        """Return a line without taking it; nothing after the end."""
        at = self.at + ahead
        return self.lines[at] if at < len(self.lines) else b""

    def take(self) -> bytes:
        """Return the next line and advance."""
        self.at += 1
        return self.lines[self.at - 1]

    def wrong(self, message: str, line: int = 0) -> PatchFormatError:
        """Create the error for a line, by default the present one."""
        at = line or self.at + 1
        return PatchFormatError(f"{self.name}:{at}: {message}", self.name, at)

    def at_file(self) -> bool:
        """Return whether a file's part starts here."""
        return self.peek().startswith(b"diff --git ") or self.at_names(strict=True)

    def at_names(self, *, strict: bool = False) -> bool:
        """Return whether the two lines with file names are here; ``strict``: before a hunk."""
        names = self.peek().startswith(b"--- ") and self.peek(1).startswith(b"+++ ")
        return names and (not strict or _RANGE.match(self.peek(2)) is not None)

    def at_hunk(self) -> bool:
        """Return whether a hunk starts here."""
        return self.peek().startswith(b"@@ ")

    def until_file(self) -> bytes:
        """Take everything before the next file's part."""
        start = self.at
        while self.at < len(self.lines) and not self.at_file():
            self.at += 1
        return b"".join(self.lines[start : self.at])

    def between(self) -> bytes:
        """Read the text between the parts of two files, or after the last one.

        Lines that look like a hunk's are refused: the counts of the hunk are wrong then, and git
        would ignore the lines silently.
        """
        start = self.at
        while self.at < len(self.lines) and not self.at_file():
            line = self.peek()
            if line.rstrip() == b"--":  # the signature: whatever follows is free text
                return b"".join(self.lines[start : self.at]) + self.until_file()
            if line[:1] in (b" ", b"+", b"-", b"\\") or line.startswith(b"@@ -"):
                raise self.wrong("the hunk before has more lines than its counts state.")
            if not line.endswith(b"\n") and (
                b"diff --git ".startswith(line) or b"@@ -".startswith(line)
            ):
                raise self.wrong(f"the patch is cut off: it ends with {line!r}.")
            self.at += 1
        return b"".join(self.lines[start : self.at])


def _file_header(reader: _PatchReader) -> _FileFacts:
    """Take the header of one file's part, up to its first hunk."""
    facts = _FileFacts()
    start = reader.at
    named: tuple[str, str] | None = None
    plain = reader.at_names()
    if not plain:
        named = _git_names(reader, reader.take())
        while not (reader.at_names() or reader.at_hunk()) and _extended(reader, facts):
            reader.at += 1
    if reader.at_names():
        old, new = (_name(reader, reader.take()[4:], whole=plain) for _ in range(2))
        facts.created = facts.created or old == _NOTHING
        facts.deleted = facts.deleted or new == _NOTHING
        if plain and old == f"{new}.orig":
            old = new
        facts.names = (old, new) if plain else ()
        facts.headed = True
        facts.old, facts.new = facts.old or old, facts.new or new
    elif facts.old is None or facts.new is None:
        if named is None:
            raise reader.wrong("the names of the file are missing.")
        facts.old, facts.new = facts.old or named[0], facts.new or named[1]
    facts.raw = b"".join(reader.lines[start : reader.at])
    for mode in {facts.old_mode, facts.new_mode} - {None}:
        if mode not in _MODES:
            raise reader.wrong(f"the mode {mode} is not that of a file, a program or a link.")
    return facts


def _extended(reader: _PatchReader, facts: _FileFacts) -> bool:
    line = reader.peek().rstrip(b"\r\n")
    words = line.split(b" ")
    match words[:2]:
        case [b"old", b"mode"]:
            facts.old_mode = _mode(reader, words[-1])
        case [b"new", b"mode"]:
            facts.new_mode = _mode(reader, words[-1])
        case [b"deleted", b"file"]:
            facts.deleted, facts.old_mode = True, _mode(reader, words[-1])
        case [b"new", b"file"]:
            facts.created, facts.new_mode = True, _mode(reader, words[-1])
        case [b"rename" | b"copy" as what, b"from"]:
            facts.old = _whole(reader, line)
            facts.copied = what == b"copy"
        case [b"rename" | b"copy", b"to"]:
            facts.new = _whole(reader, line)
        case [b"index", _]:
            if len(words) > 2:
                mode = _mode(reader, words[2])
                facts.old_mode = facts.old_mode or mode
                facts.new_mode = facts.new_mode or mode
        case [b"similarity" | b"dissimilarity", b"index"]:
            pass
        case [b"GIT", b"binary"] | [b"Binary", b"files"]:
            raise reader.wrong("binary changes are refused: a patch is text that can be read.")
        case _:
            return False
    return True


def _hunk(reader: _PatchReader) -> tuple[_Ranges, bytes, tuple[bytes, ...]]:
    """Parse one hunk: its ranges, its ``@@`` line and its lines."""
    match = _RANGE.match(reader.peek())
    if match is None:
        raise reader.wrong("expected `@@ -start,count +start,count @@`.")
    old_start, old, new_start, new = (1 if n is None else int(n) for n in match.groups())
    head = reader.take()
    start = reader.at
    left_old, left_new = old, new
    while left_old > 0 or left_new > 0:
        line = reader.peek()
        mark = line[:1]
        if line and not line.endswith(b"\n"):
            raise reader.wrong("the last line has no line end: the patch is cut off.")
        if mark in (b" ", b"\n") or (mark == b"\r" and line == b"\r\n"):
            left_old, left_new = left_old - 1, left_new - 1
        elif mark == b"-":
            left_old -= 1
        elif mark == b"+":
            left_new -= 1
        elif mark != b"\\":
            what = f"{line!r}" if line else "the end of the patch"
            raise reader.wrong(f"the hunk's counts require more lines, found {what}.")
        if left_old < 0 or left_new < 0:
            raise reader.wrong("the lines of the hunk do not match its counts.")
        reader.at += 1
    if reader.peek()[:1] == b"\\":
        reader.at += 1
    return (old_start, old, new_start, new), head, tuple(reader.lines[start : reader.at])


def _side(lines: tuple[bytes, ...], mark: bytes) -> tuple[bytes, ...]:
    """Return the lines of one side of a hunk: its context and those with ``mark``."""
    found: list[bytes] = []
    taken = False
    for line in lines:
        if line[:1] == b"\\":
            if taken:
                found[-1] = found[-1].removesuffix(b"\n")
            continue
        # some mailers strip the blank of an empty context line; git accepts that too
        bare = line in (b"\n", b"\r\n")
        taken = bare or line[:1] in (b" ", mark)
        if taken:
            found.append(line if bare else line[1:])
    return tuple(found)


def _restarted(head: bytes, start: int) -> bytes:
    """Return a hunk's ``@@`` line with another start after the patch."""
    match = _RANGE.match(head)
    assert match is not None
    return head[: match.start(3)] + b"%d" % start + head[match.end(3) :]


def _git_names(reader: _PatchReader, line: bytes) -> tuple[str, str] | None:
    # ambiguous when names hold blanks: only used where nothing else names the file, and then
    # both names are the same
    rest = line.rstrip(b"\r\n").removeprefix(b"diff --git ")
    if rest.startswith(b'"'):
        parts = _STRING.findall(rest)
        if len(parts) != 2:
            raise reader.wrong("expected two names.")
        old, new = (_checked(reader, _PREFIX.sub("", _unquoted(part))) for part in parts)
        return old, new
    half = len(rest) // 2
    old, new = _decoded(rest[:half]), _decoded(rest[half + 1 :])
    old, new = _PREFIX.sub("", old), _PREFIX.sub("", new)
    return (_checked(reader, old), new) if old == new and old else None


def _whole(reader: _PatchReader, line: bytes) -> str:
    """Return the name after two words."""
    words = line.split(b" ", 2)
    if len(words) < 3 or not words[2]:
        raise reader.wrong("expected the name of a file.")
    return _checked(reader, _unquoted(words[2]))


def _mode(reader: _PatchReader, word: bytes) -> str:
    if not _MODE.fullmatch(word):
        raise reader.wrong("expected a mode of six octal digits, such as 100644.")
    return word.decode()


def _name(reader: _PatchReader, raw: bytes, *, whole: bool) -> str:
    """Return a path, without a prefix such as ``a/``; with ``whole``, as written and unchecked."""
    text = raw.rstrip(b"\r\n")
    quoted = _STRING.match(text)
    path = _unquoted(quoted.group()) if quoted else _decoded(text.split(b"\t", 1)[0])
    if not path:
        raise reader.wrong("expected the name of a file.")
    # Only as the complete name, this means that there is no file.
    if path == _NOTHING:
        return path
    return path if whole else _checked(reader, _PREFIX.sub("", path))


def _unquoted(text: bytes) -> str:
    if not (text.startswith(b'"') and text.endswith(b'"') and len(text) > 1):
        return _decoded(text)

    def plain(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _ESCAPES.get(code, code)

    return _decoded(_QUOTED.sub(plain, text[1:-1]))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _leaves(parts: Sequence[str]) -> bool:
    """Return whether a path, by its parts, may be of a file outside of the tree."""
    return any(part.lower() in ("", ".", "..", ".git") for part in parts)


def _checked(reader: _PatchReader, path: str, line: int = 0) -> str:
    """Return a path of a file in the tree; ``line`` is its place, by default the present one."""
    if "\0" in path or _leaves(path.split("/")):
        raise reader.wrong(
            f"the path {path!r} leaves the tree; a patch may touch its files only.", line
        )
    if len(os.fsencode(path)) > tree_limits.MAX_PATH_BYTES:
        raise reader.wrong(
            f"the path {path[:60]!r}… is longer than {tree_limits.MAX_PATH_BYTES} bytes.", line
        )
    return path
