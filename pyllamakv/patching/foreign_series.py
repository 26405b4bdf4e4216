"""Read foreign patches: a file, a directory of files, or a series of any layout.

Foreign patches are applied like the shipped ones: strictly, with a report for each hunk.
"""

from __future__ import annotations

import base64
import email
import os
import quopri
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.patching import hunks, mail_header
from pyllamakv.patching import series as series_module
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.series import Series
from pyllamakv.source import git_command, lockfile

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDINGS = (".patch", ".diff", ".eml", ".mbox")
#: A cover letter, which introduces a series and has no change.
_COVER_LETTER = re.compile(rb"^Subject: *\[[^\]\n]*\b0+/\d+\]", re.MULTILINE)
_CHANGE = re.compile(rb"^diff --git ", re.MULTILINE)
_SCENARIO = re.compile(rb"^Scenario: (\S+)\r?$", re.MULTILINE)
_ENCODING = re.compile(
    rb"^Content-Transfer-Encoding: *(quoted-printable|base64) *$", re.IGNORECASE | re.MULTILINE
)
_MULTIPART = re.compile(rb"^Content-Type: *multipart/", re.IGNORECASE | re.MULTILINE)
#: Prefix of commits in a repository.
GIT = "git:"


def load(path: Path | str, *, strip: int = 1, refused: dict[str, str] | None = None) -> Series:
    """Read a patch file, a mailbox of several patches, a directory, or commits of a repository.

    Commits are ``git:REPOSITORY@FROM..TO``, or ``git:REPOSITORY@BRANCH``: those since the newest
    known release in the branch. A directory contains `series.toml` (the layout of this package), a
    quilt `series` file (one name per line, ``#`` starts a comment, ``-pN`` after a name is the
    number of directories that its paths begin with) or plain patch files, which are sorted by name.
    ``strip`` is this number for the other files. Raises PatchFormatError for files that cannot be
    read, all in one message; with ``refused``, they are left out, and their names and reasons are
    added to it.
    """
    wrong: dict[str, PatchFormatError] = {}
    ports: list[Port] = []
    folder = Path(path)
    if str(path).startswith(GIT):
        folder = Path()
        ports = _parsed(*_commits(str(path)), wrong)
    elif os.path.isfile(path):  # noqa: PTH113 - pathlib raises where a text is no path
        folder = folder.parent
        ports = _ports(Path(path), strip, wrong)
    elif not os.path.isdir(path):  # noqa: PTH112
        raise UsageError(f"There is no patch file or directory {path}.")
    elif (folder / "series.toml").is_file():
        series = series_module.load(folder)
        if not series.every.order:
            msg = f"{folder / 'series.toml'} lists no patch: add one with `pyllamakv patch import`."
            raise UsageError(msg)
        return series
    else:
        files = _files(folder, strip, wrong)
        for file, number in files:
            ports += _ports(file, number, wrong)
    if not ports and not wrong:
        raise UsageError(f"{path} has no patch: expected series.toml, series or *.patch files.")
    if refused is not None and ports:
        refused |= {name: str(error) for name, error in wrong.items()}
    elif len(wrong) == 1:
        raise next(iter(wrong.values()))
    elif wrong:
        listed = "".join(f"\n  {error}" for error in wrong.values())
        raise PatchFormatError(f"{len(wrong)} patches of {path} cannot be read:{listed}", str(path))
    return Series(_distinct(ports), folder)


def _files(folder: Path, strip: int, wrong: dict[str, PatchFormatError]) -> list[tuple[Path, int]]:
    """Return the patch files of a directory in order, with the directories to strip.

    A file that has a change and is not among them is added to ``wrong``: it would be lost.
    """
    if (folder / "series").is_file():
        return [(folder / name, number) for name, number in _quilt(folder / "series", strip)]
    there = sorted(folder.iterdir())
    names = [file for file in there if file.suffix in _ENDINGS]
    lost = [file for file in there if file not in names and _has_change(file)]
    lost += (file for ending in _ENDINGS for file in sorted(folder.glob(f"*/*{ending}")))
    for file in lost if names else ():
        name = str(file.relative_to(folder))
        msg = f"{name} is not read: move it to {folder} with the ending .patch, or remove it."
        wrong[name] = PatchFormatError(msg, name)
    return [(file, strip) for file in names]


def _has_change(file: Path) -> bool:
    """Return whether a file starts like a patch; hidden files and copies of an editor do not."""
    if file.name.startswith(".") or file.name.endswith("~") or not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            return bool(_CHANGE.search(opened.read(1 << 20)))
    except OSError:
        return False


def absolute(path: Path | str) -> str:
    """Return patches of the user by a name that means the same in every working directory.

    Raises UsageError for a file or directory that does not exist.
    """
    if not str(path).startswith(GIT):
        if not os.path.exists(path):  # noqa: PTH110 - pathlib raises where a text is no path
            raise UsageError(f"There is no patch file or directory {path}.")
        return str(Path(path).resolve())
    place, at, revisions = str(path).removeprefix(GIT).rpartition("@")
    return f"{GIT}{Path(place).expanduser().resolve()}{at}{revisions}"


def _commits(source: str) -> tuple[bytes, Path]:
    """Return commits of a user's repository as mails, and a file name for them.

    The repository is not changed, and none of it runs.
    """
    place, _, revisions = source.removeprefix(GIT).rpartition("@")
    folder = Path(place).expanduser()
    if not place or not revisions or revisions.startswith("-") or not folder.is_dir():
        raise UsageError(f"{source} is not {GIT}REPOSITORY@FROM..TO with a local repository.")
    first, _, last = revisions.rpartition("..")
    for name in (first.rstrip("."), last):
        words = ("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}")
        if name and git_command.run(folder, *words).returncode:
            raise UsageError(f"{folder} has no branch, tag or commit {name}.")
    if ".." not in revisions:
        revisions = f"{_newest_release(folder, revisions)}..{revisions}"
    _check_merges(folder, revisions)
    options = ("--stdout", "--no-ext-diff", "--no-textconv", "--no-signature", "--full-index")
    done = git_command.run(folder, "format-patch", *options, revisions, bounded=True)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip()
        raise UsageError(f"git cannot read {revisions} in {folder}: {reason}")
    if not done.stdout:
        raise UsageError(f"{revisions} in {folder} has no commit.")
    name = revisions.rpartition("..")[2].rpartition("/")[2]
    return done.stdout, Path(f"{name}.patch")


def _check_merges(folder: Path, revisions: str) -> None:
    """Refuse merges that have changes of their own: no mail contains them."""
    first, _, last = revisions.rpartition("..")
    merges = git_command.run(folder, "rev-list", "--merges", revisions, bounded=True).stdout
    # Without context, changes of both sides that are near each other are two hunks.
    words = ("--stdin", "--cc", "--unified=0", "--no-ext-diff", "--no-textconv", "--abbrev=12")
    done = git_command.run(
        folder, "diff-tree", *words, "--format=merge %h %s", input=merges, bounded=True
    )
    commit = ""
    for line in done.stdout.decode("utf-8", "replace").split("\n"):
        if line.startswith("merge "):
            commit = line
        elif line.startswith("diff --cc "):
            msg = (
                f"{revisions} in {folder}: no mail contains what {commit} changes in "
                f"{line.removeprefix('diff --cc ')}, as after a conflict: rebase the branch (`git "
                f"rebase {first}`), or use one patch, of `git diff {first}...{last}`"
            )
            raise UsageError(msg)


def _newest_release(folder: Path, branch: str) -> str:
    releases = sorted(lockfile.known().values(), key=lambda release: release.order, reverse=True)
    for release in releases:
        if not git_command.run(
            folder, "merge-base", "--is-ancestor", release.commit, branch
        ).returncode:
            return release.commit
    msg = f"no known release is part of {branch} in {folder}: name a range, FROM..{branch}"
    raise UsageError(msg)


def _ports(file: Path, strip: int, wrong: dict[str, PatchFormatError]) -> list[Port]:
    """Read the patches of a file, and add the errors of those that cannot be read to ``wrong``."""
    try:
        data = file.read_bytes()
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror}"
        wrong[file.name] = PatchFormatError(msg, str(file))
        return []
    return _parsed(data, file, wrong, strip)


def _parsed(
    data: bytes, file: Path, wrong: dict[str, PatchFormatError], strip: int = 1
) -> list[Port]:
    """Parse one patch, or the mails of a mailbox without cover letters."""
    mails = hunks.split(_unix_line_ends(data))
    ports: list[Port] = []
    for number, mail in enumerate(mails, 1):
        stem = f"{file.stem}-{number}" if len(mails) > 1 else file.stem
        name = file.name
        if len(mails) > 1:
            subject = mail_header.parse(mail.partition(b"\n\n")[0]).subject
            name = f"{stem} ({subject})" if subject else stem
        try:
            patch = hunks.parse(_decoded(mail, file), name).stripped(strip - 1)
        except PatchFormatError as error:
            if _CHANGE.search(mail) or not _COVER_LETTER.search(mail.partition(b"\n\n")[0]):
                wrong[name] = error
        else:
            ports.append(Port.of(patch, file, stem=stem))
    return ports


def _decoded(mail: bytes, file: Path) -> bytes:
    """Return a mail without the transfer encoding that a mail program chose."""
    header, blank, body = mail.partition(b"\n\n")
    if _MULTIPART.search(header):
        return _joined(mail)
    found = _ENCODING.search(header)
    if found is None:
        return mail
    try:
        decode = quopri.decodestring if found[1][:1] in b"qQ" else base64.b64decode
        body = _unix_line_ends(decode(body))
    except ValueError as error:
        raise PatchFormatError(
            f"{file.name} is not {found[1].decode()}: {error}", file.name
        ) from error
    return header[: found.start(1)] + b"8bit" + header[found.end(1) :] + blank + body


def _joined(mail: bytes) -> bytes:
    """Return a mail whose patch is attached (`git format-patch --attach`) as one text."""
    first, _, rest = mail.partition(b"\n")
    separator = first + b"\n" if first.startswith(b"From ") else b""
    message = email.message_from_bytes(rest if separator else mail)
    header = b"".join(
        f"{key}: {message[key]}\n".encode("utf-8", "surrogateescape")
        for key in ("From", "Date", "Subject")
        if message[key]
    )
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    texts = [bytes(part.get_payload(decode=True) or b"") for part in parts]
    return separator + header + b"\n" + b"".join(map(_unix_line_ends, texts))


def _unix_line_ends(data: bytes) -> bytes:
    """Return a file whose every line ends in CRLF with LF, as before a mail program changed it.

    In a patch for files with CRLF, at least the lines that git wrote end in LF. An end that the
    last line lacks, because an editor removed it, is added.
    """
    *lines, last = data.split(b"\n")
    if lines and all(line.endswith(b"\r") for line in lines):
        data = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    return data + b"\n" if last else data


def definition_of(port: Port) -> Definition:
    """Return a file as a patch that is a candidate for every tree.

    ``Scenario: ID`` lines in its header name the scenarios that it claims to pass.
    """
    named = (name.decode("utf-8", "replace") for name in _SCENARIO.findall(port.patch.header))
    return Definition(
        id=port.id,
        title=port.title,
        ports=(port,),
        requires=port.requires,
        scenarios=tuple(named),
    )


def _quilt(path: Path, strip: int) -> list[tuple[str, int]]:
    try:
        listing = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchFormatError(f"{path} cannot be read: {error}", str(path)) from error
    if "\0" in listing:
        raise PatchFormatError(
            f"{path} is not a list of patches: it contains zero bytes", str(path)
        )
    lines = (line.split("#", 1)[0].split() for line in listing.splitlines())
    names = [(words[0], _strip(path, words[1:], strip)) for words in lines if words]
    for name in (PurePosixPath(text) for text, _ in names):
        if name.is_absolute() or ".." in name.parts:
            msg = f"{path} lists {name}, outside of its directory; list files in it"
            raise PatchFormatError(msg, str(path))
    return names


def _strip(path: Path, options: Sequence[str], default: int) -> int:
    """Return the number of ``-pN`` in a line of `series`; ``-pab`` is quilt's name of 1."""
    if not options:
        return default
    match = re.fullmatch(r"-p(?:([0-9])|ab)", " ".join(options))
    if match is None:
        msg = (
            f"{path}: only -pN is read after a name, not {' '.join(options)}; write a reversed "
            "patch (-R) as a patch of its own"
        )
        raise PatchFormatError(msg, str(path))
    return int(match[1] or 1)


def _distinct(ports: list[Port]) -> tuple[Definition, ...]:
    ids = [port.id for port in ports]
    twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
    if twice:
        raise UsageError(f"Two files define the patch {twice[0]}; rename one of them.")
    return tuple(definition_of(port) for port in ports)
