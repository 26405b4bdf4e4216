"""Join the bytes of tokens into text, also if a token ends inside a character.

Models that were trained on UTF-16 text write a character above U+FFFF as two surrogates of three
bytes each; such a pair becomes the character. Other invalid bytes become U+FFFD, never an
exception.
"""

from __future__ import annotations

import codecs
import re

#: A surrogate of three bytes, or its first bytes, or the first half of a pair, at the end.
_OPEN_PAIR = re.compile(rb"\xed(?:[\xa0-\xaf](?:[\x80-\xbf](?:\xed(?:[\xb0-\xbf])?)?)?)?\Z")
_PAIR = re.compile(rb"\xed([\xa0-\xaf])([\x80-\xbf])\xed([\xb0-\xbf])([\x80-\xbf])")
_ALONE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_UNKNOWN = "\ufffd"
_HANDLER = "pyllamakv-surrogates"


def _repair(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    data, start = error.object, error.start
    pair = _PAIR.match(data, start)
    if pair is not None:
        high, high_low, low, low_low = (group[0] for group in pair.groups())
        upper = (high & 0x0F) << 6 | high_low & 0x3F
        lower = (low & 0x0F) << 6 | low_low & 0x3F
        return chr(0x10000 + (upper << 10) + lower), pair.end()
    alone = _ALONE.match(data, start)
    return (_UNKNOWN, alone.end() if alone is not None else error.end)


codecs.register_error(_HANDLER, _repair)


class IncrementalDetokenizer:
    """Turn pieces of bytes into text: what `feed` and `flush` return, joined, is all of it."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        #: Bytes of an incomplete character.
        self.held = b""

    def feed(self, piece: bytes) -> str:
        """Return the text that is complete after this piece; the rest waits."""
        if not self.held and piece.isascii():
            return piece.decode("ascii")
        data = self.held + piece
        half = _OPEN_PAIR.search(data)
        end = half.start() if half is not None else len(data)
        text, used = codecs.utf_8_decode(data[:end], _HANDLER, half is not None)
        self.held = data[used:]
        return text

    def flush(self) -> str:
        """Return the text of the remaining bytes at the end."""
        text, _ = codecs.utf_8_decode(self.held, _HANDLER, True)
        self.held = b""
        return text


def decode(data: bytes) -> str:
    """Return all of ``data`` as text."""
    return codecs.utf_8_decode(data, _HANDLER, True)[0]


def encode(text: str) -> bytes:
    """Return ``text`` in UTF-8; pairs of surrogates join, lone ones become U+FFFD."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return joined.encode("utf-8")
