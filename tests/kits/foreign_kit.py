"""Create foreign patches from a shipped port with one fault.

A complete foreign patch has the size of the shipped one, and would be stale after its next change.
Only the fault is stored (`data/foreign`), or found in the port (the lost hunk).
"""

from __future__ import annotations

from pathlib import Path

from pyllamakv.patching import series
from pyllamakv.patching.definition import Port

RELEASE = "0.3.9"
FAULTS = Path(__file__).resolve().parents[1] / "data" / "foreign"
MAIL = b"""\
From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
From: A Packager <packager@example.org>
Date: Mon, 3 Mar 2025 10:00:00 +0000
Subject: [PATCH %d/%d] %s

%s
---

"""


def shipped() -> Port:
    """Return the shipped port of full-defrag."""
    return series.load().definition("full-defrag").port(RELEASE)


def change(text: Port) -> bytes:
    """Return the changes only: a plain diff without a header."""
    return b"".join(file.data for file in text.patch.files)


def mail(change: bytes, subject: bytes, number: int = 1, of: int = 1) -> bytes:
    """Return a change as a mail for `git am`."""
    return MAIL % (number, of, subject, b"For our product.") + change


def without_retry() -> Port:
    """Return the shipped port without the hunk that defragments if a decode finds no slot."""
    text = shipped()
    hunks = text.patch.file("src/llama-context.cpp").hunks
    retry = [n for n, hunk in enumerate(hunks, 1) if b"defrag_sched_slot(" in b"".join(hunk.added)]
    assert len(retry) == 1, "the retry is one hunk of src/llama-context.cpp"
    return text.without("src/llama-context.cpp", retry[0])


def retry_lost(folder: Path) -> Path:
    """Write a patch, as a mail, without the retry hunk."""
    file = folder / "defragment-when-full.patch"
    file.write_bytes(mail(change(without_retry()), b"Defragment when no slot is found"))
    return file


def values_by_column(folder: Path) -> Path:
    """Write a quilt series of two patches that corrupts V under flash attention."""
    place = folder / "quilt"
    place.mkdir()
    (place / "defrag.diff").write_bytes(change(shipped()))
    fault = Port.from_file(FAULTS / "values-by-column.patch")
    (place / "cleanup.diff").write_bytes(change(fault))
    (place / "series").write_text("defrag.diff\ncleanup.diff -p1 # after the review\n")
    return place
