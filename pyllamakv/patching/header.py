"""Write and read the header of a patch file: mail lines and message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.errors import MessageError
from email.header import decode_header, make_header
from email.utils import parseaddr
from typing import TYPE_CHECKING

from pyllamakv.source import gitting

if TYPE_CHECKING:
    from pyllamakv.patching.definition import Definition, PatchText

LICENCE = "MIT; the lines around the changes are llama.cpp's (MIT)"
_MAIL_DATE = "Fri, 20 Nov 2026 00:00:00 +0000"
_FIELD = re.compile(r"(From|Date|Subject): (.*)")
_TAG = re.compile(r"\A\[PATCH[^\]]*\] *")


@dataclass(frozen=True)
class Mail:
    """Hold what a patch's header says about its commit; empty where it says nothing."""

    name: str = ""
    email: str = ""
    date: str = ""
    subject: str = ""
    body: str = ""


def message(definition: Definition, text: PatchText) -> str:
    """Write the commit message of a text from its patch's description."""
    lines = [
        definition.title,
        "",
        definition.why,
        "",
        f"Patch: {definition.id}",
        f"Base: {text.base}",
        *(f"Requires: {id_}" for id_ in text.requires),
        f"Origin: {definition.origin}",
        f"Upstream-Status: {definition.upstream}",
        *(f"Scenario: {name}" for name in definition.scenarios),
        f"Licence: {LICENCE}",
    ]
    return "\n".join(lines) + "\n"


def write(definition: Definition, text: PatchText) -> bytes:
    """Write the header of a text's file, as `git format-patch` would."""
    body = message(definition, text).split("\n", 1)[1]
    lines = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {gitting.NAME} <{gitting.EMAIL}>",
        f"Date: {_MAIL_DATE}",
        f"Subject: [PATCH] {definition.title}",
    ]
    return ("\n".join(lines) + "\n" + body + "\n").encode()


def parse(data: bytes) -> Mail:
    """Read author, date, subject and message from a header; text without mail lines is a body."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    found: dict[str, str] = {}
    lines = text.split("\n")
    if lines and lines[0].startswith("From ") and "Mon Sep 17" in lines[0]:
        lines = lines[1:]
    key = ""
    taken = 0
    for line in lines:
        match = _FIELD.match(line)
        if match:
            key = match.group(1)
            found[key] = match.group(2)
        elif line.startswith((" ", "\t")) and key:
            found[key] += " " + line.strip()
        elif re.match(r"[A-Za-z-]+: ", line) and found:
            key = ""
        else:
            break
        taken += 1
    if not found:
        return Mail(body=_body(text))
    name, email = _author(_decoded(found.get("From", "")))
    return Mail(
        name=name,
        email=email,
        date=found.get("Date", ""),
        subject=_TAG.sub("", _decoded(found.get("Subject", ""))),
        body=_body("\n".join(lines[taken:])),
    )


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
