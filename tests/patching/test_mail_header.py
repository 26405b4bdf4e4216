"""Test that headers of patch files are written from descriptions, and read in any format."""

from __future__ import annotations

import pytest

from pyllamakv.patching import mail_header
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.hunks import Patch
from pyllamakv.patching.mail_header import MailHeader
from pyllamakv.source import git_command

SHAPE = Definition(
    "p", "Do it", "Why it is.\n\nMore.", "own work", "not submitted", scenarios=("a", "b")
)
TEXT = Port("p", Patch(b"", ()), "0.3.9", requires=("q",))


def test_written_header_is_read_back() -> None:
    """It has identity, title, reasons and one line per fact."""
    mail = mail_header.parse(mail_header.write(SHAPE, TEXT))
    assert (mail.name, mail.email, mail.subject) == (git_command.NAME, git_command.EMAIL, "Do it")
    assert f"{mail.subject}\n\n{mail.body}\n" == mail_header.message(SHAPE, TEXT)
    facts = ["Patch: p", "Base: 0.3.9", "Requires: q", "Origin: own work", "Scenario: b"]
    assert set(facts) <= set(mail.body.splitlines())


@pytest.mark.parametrize(
    ("data", "mail"),
    [
        (b"", MailHeader()),
        (b"Just words.\n", MailHeader(body="Just words.")),
        (
            b"From: A B <a@b>\nDate: x\nSubject: [PATCH v2 3/4] One\n two\nX-Mailer: y\n\n"
            b"Body\n---\nstat",
            MailHeader("A B", "a@b", "x", "One two", "Body"),
        ),
        (b"Subject: =?UTF-8?q?=C3=A4?=\r\n\r\nBody\r\n", MailHeader(subject="ä", body="Body")),
        (b"From: =?nonsense?q?x?= <a@b>\n\n", MailHeader("=?nonsense?q?x?=", "a@b")),
        (
            b"From a@b Mon Mar  3 10:00:00 2025\nReturn-Path: <c@d>\nReceived: from x\n\tby y\n"
            b"From: A B <a@b>\nContent-Type: text/plain;\n charset=x\nSubject: [PATCH] One\n\nBody",
            MailHeader("A B", "a@b", "", "One", "Body"),
        ),
        (b"From now on: more.\n", MailHeader(body="From now on: more.")),
    ],
)
def test_folded_and_encoded_headers_are_read(data: bytes, mail: MailHeader) -> None:
    """Folded, encoded, CRLF and missing headers are read."""
    assert mail_header.parse(data) == mail


DEP3 = """Description: Clear the cells
 The first reason.
 .
 And more.
Author: Jürgen B <j@b.example>
Forwarded: not-needed
Last-Update: 2026-11-20

"""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_debian_header_has_author_date_and_message(encoding: str) -> None:
    """Fields that a commit lacks stay in the message; Latin-1 is decoded."""
    index = "---\nIndex: llama.cpp/src/x.cpp\n=====================\n"
    assert mail_header.parse((DEP3 + index).encode(encoding)) == MailHeader(
        "Jürgen B",
        "j@b.example",
        "2026-11-20",
        "Clear the cells",
        "The first reason.\n\nAnd more.\n\nForwarded: not-needed",
    )


def test_a_debian_date_is_that_of_the_commit() -> None:
    """It has no time and no time zone."""
    port = Port("p", Patch(DEP3.encode(), ()), "")
    author, message = mail_header.author_and_message(port)
    assert author == {
        "GIT_AUTHOR_NAME": "Jürgen B",
        "GIT_AUTHOR_EMAIL": "j@b.example",
        "GIT_AUTHOR_DATE": "2026-11-20T00:00:00+00:00",
    }
    assert message.startswith("Clear the cells\n\nThe first reason.\n")


def test_the_lines_of_quilt_are_no_message() -> None:
    """`Index:` lines precede the part of each file, the first one follows the message."""
    data = b"Why.\n\nIndex: a/src/x.cpp\n===================================\n"
    assert mail_header.parse(data) == MailHeader(body="Why.")


def test_an_author_in_latin_1_is_read() -> None:
    """The name is kept."""
    data = "From: Jürgen B <j@b.example>\nSubject: [PATCH] x\n\nBody\n".encode("latin-1")
    assert mail_header.parse(data) == MailHeader("Jürgen B", "j@b.example", "", "x", "Body")


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        (b"From: B <b@c>\nDate: Tue\n\nWhy.", "B", "Why."),
        (b"\nFrom: B <b@c>\n", "B", ""),
        (b"From: here on it fails.\nAnd more.", "A", "From: here on it fails.\nAnd more."),
        (b"Why.\n\nFrom: B <b@c>", "A", "Why.\n\nFrom: B <b@c>"),
    ],
)
def test_the_author_in_the_body_has_precedence(body: bytes, name: str, message: str) -> None:
    """The sender of the mail may be another person, as in `git am`."""
    found = mail_header.parse(b"From: A <a@b>\nDate: Mon\nSubject: [PATCH] x\n\n" + body)
    assert (found.name, found.body, found.subject) == (name, message, "x")
