"""Write and read the header of a patch file: mail lines and message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from email.errors import MessageError
from email.header import decode_header, make_header
from email.utils import parseaddr, parsedate_to_datetime
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import hunks
from pyllamakv.source import git_command

if TYPE_CHECKING:
    from pyllamakv.patching.definition import Definition, Port

LICENCE = "MIT; the lines around the changes are llama.cpp's (MIT)"
_MAIL_DATE = "Fri, 20 Nov 2026 00:00:00 +0000"
_FIELD = re.compile(r"(From|Date|Subject): (.*)")
_OTHER_FIELD = re.compile(r"[A-Za-z][\w-]*:")
#: Fields of DEP-3, the header of Debian's patches, by what a mail calls them.
_DEP3 = {"Author": "From", "Description": "Subject", "Last-Update": "Date"}
_DEP3_FIELD = re.compile(r"([A-Z][A-Za-z-]*): ?(.*)")
#: What quilt and Subversion write before the part of a file.
_INDEX = re.compile(r"^Index: .*\n=+\n", re.MULTILINE)
_TAG = re.compile(r"\A\[PATCH[^\]]*\] *")
#: What git leaves of a name; without any of it there is no name.
_LETTER = re.compile(r"""[^\x00-\x20.,:;<>"\\']""")
#: A zero byte ends a text in git. Half of a surrogate pair has no bytes, except those that Python
#: uses for bytes outside of UTF-8.
_UNSAYABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
#: A variable has no room for more than 128 KiB.
_LONGEST = 1000


@dataclass(frozen=True)
class MailHeader:
    """The facts of a patch's header about its commit; empty if absent."""

    name: str = ""
    email: str = ""
    date: str = ""
    subject: str = ""
    body: str = ""


def message(definition: Definition, port: Port) -> str:
    """Write the commit message of a port from its patch's description.

    An imported patch gets no statement about its licence, and no line twice.
    """
    facts = [
        f"Patch: {definition.id}",
        f"Base: {port.base}",
        *(f"Requires: {id_}" for id_ in port.requires),
        f"Origin: {definition.origin}",
        f"Upstream-Status: {definition.upstream}",
        *(f"Scenario: {name}" for name in definition.scenarios),
        *(() if definition.author else (f"Licence: {LICENCE}",)),
    ]
    said = definition.why.splitlines() if definition.author else []
    why = (definition.why, "") if definition.why else ()
    lines = [definition.title, "", *why, *(line for line in facts if line not in said)]
    return "\n".join(lines) + "\n"


def write(definition: Definition, port: Port) -> bytes:
    """Write the header of a port's file, as `git format-patch` would."""
    body = message(definition, port).split("\n", 1)[1]
    lines = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {definition.author or f'{git_command.NAME} <{git_command.EMAIL}>'}",
        f"Date: {definition.date or _MAIL_DATE}",
        f"Subject: [PATCH] {definition.title}",
    ]
    return ("\n".join(lines) + "\n" + body + "\n").encode()


def parse(data: bytes) -> MailHeader:
    """Read author, date, subject and message from a header of git, or of DEP-3.

    Text without such lines is a body. Text that is not UTF-8 is Latin-1.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = _INDEX.sub("", text.replace("\r\n", "\n"))
    found: dict[str, str] = {}
    lines = text.split("\n")
    if hunks.MAIL.fullmatch(lines[0].encode("utf-8", "replace")):
        lines = lines[1:]
    key = ""
    taken = 0
    for line in lines:
        match = _FIELD.match(line)
        if match:
            key = match.group(1)
            found[key] = match.group(2)
        elif line.startswith((" ", "\t")) and taken:
            if key:
                found[key] += " " + line.strip()
        elif _OTHER_FIELD.match(line):
            key = ""
        else:
            break
        taken += 1
    debian = _dep3(text)
    if debian is not None:
        return debian
    if not found:
        return MailHeader(body=_body(text))
    taken += _in_body(lines[taken:], found)
    name, email = _author(_decoded(found.get("From", "")))
    return MailHeader(
        name=name,
        email=email,
        date=found.get("Date", ""),
        subject=_TAG.sub("", _decoded(found.get("Subject", ""))),
        body=_body("\n".join(lines[taken:])),
    )


def _dep3(text: str) -> MailHeader | None:
    """Read the header of a Debian patch (https://dep-team.pages.debian.net/deps/dep3/).

    The message is the description after its first line, and the fields that have no place in a
    commit, such as ``Forwarded``.
    """
    head, _, rest = text.strip().partition("\n\n")
    fields: list[tuple[str, str]] = []
    for line in head.split("\n"):
        match = _DEP3_FIELD.fullmatch(line)
        if match:
            fields.append((match[1], match[2]))
        elif line.startswith((" ", "\t")) and fields:
            name, value = fields[-1]
            fields[-1] = (name, f"{value}\n{line.strip()}")
        elif line != "---":
            return None
    found = {_DEP3.get(name, name): value for name, value in reversed(fields)}
    if not any(name in _DEP3 for name, _ in fields):
        return None
    subject, _, description = found.get("Subject", "").partition("\n")
    left = [f"{name}: {value}" for name, value in fields if _DEP3.get(name, name) not in
            ("From", "Date", "Subject")]  # fmt: skip
    lines = ["" if line == "." else line for line in description.split("\n")]
    name, email = _author(_decoded(found.get("From", "")))
    parts = ["\n".join(lines), _body(rest), "\n".join(left)]
    body = "\n\n".join(part for part in parts if part)
    return MailHeader(name, email, found.get("Date", ""), subject.strip(), body)


def _in_body(lines: list[str], found: dict[str, str]) -> int:
    """Read the header at the start of a body, which has precedence, and return its length.

    Git writes it if another person than the author sends the mail.
    """
    start = next((at for at, line in enumerate(lines) if line.strip()), len(lines))
    end, said = start, {}
    while end < len(lines) and (match := _FIELD.match(lines[end])):
        said[match[1]] = match[2]
        end += 1
    if not said or (end < len(lines) and lines[end].strip()):
        return 0
    found.update(said)
    return end


def author_and_message(port: Port) -> tuple[dict[str, str], str]:
    """Return the variables that name author and date of a port's commit to git, and its message.

    Raises PatchFormatError for a header with characters that no commit can hold.
    """
    mail = parse(port.patch.header)
    author = {}
    if _LETTER.search(mail.name) and mail.email:
        author = {"GIT_AUTHOR_NAME": mail.name, "GIT_AUTHOR_EMAIL": mail.email}
    message = f"{mail.subject or port.title}\n\n{mail.body}".strip() + "\n"
    for what, said in (("author", "".join(author.values())), ("message", message)):
        if _UNSAYABLE.search(said) or (what == "author" and len(said) > _LONGEST):
            msg = (
                f"{port.name}: the {what} in the patch's header holds zero bytes, half characters "
                f"or an author of more than {_LONGEST} characters; a commit cannot contain that"
            )
            raise PatchFormatError(msg, port.name)
    if mail.date:
        author["GIT_AUTHOR_DATE"] = _date(mail.date)
    return author, message


def _date(said: str) -> str:
    """Return a date in git's format, or nothing if it cannot be parsed."""
    try:
        iso = re.fullmatch(r"\d{4}-\d\d-\d\d", said)
        when = datetime.fromisoformat(f"{said}T00:00Z") if iso else parsedate_to_datetime(said)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return git_command.DATE
    return when.isoformat() if 1970 < when.year < 2099 else git_command.DATE


def _body(text: str) -> str:
    return re.split(r"^---\s*$", text, maxsplit=1, flags=re.MULTILINE)[0].strip()


def _author(value: str) -> tuple[str, str]:
    try:
        return parseaddr(value)
    except RecursionError:  # of comments within comments
        return value, ""


def _decoded(value: str) -> str:
    try:
        return str(make_header(decode_header(value)))
    except (LookupError, ValueError, MessageError):
        return value
