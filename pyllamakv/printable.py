"""Make any text safe to print: on a terminal, which interprets control characters, and in XML."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Escape unprintable characters, such as ESC as ``\x1b``, except those in ``keep``."""
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )
