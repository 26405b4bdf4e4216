"""Write GGUF files of a few hundred bytes, whole or damaged, without any library."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def gguf_bytes(
    *,
    architecture: str | None = "llama",
    version: int = 3,
    tensor: bool = True,
    more: tuple[str, int, bytes] | None = None,
) -> bytes:
    """Return a GGUF with one f32 tensor of 32 x 4, as little as a header needs.

    ``more`` is a name, a type and the bytes of another value.
    """

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    meta = text("general.name") + struct.pack("<I", 8) + text("tiny")
    meta += text("some.list") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    meta += text("some.numbers") + struct.pack("<IIQ", 9, 5, 2) + struct.pack("<ii", 1, 2)
    n_meta = 3
    if architecture is not None:
        meta += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
        n_meta += 1
    if more is not None:
        name, kind, value = more
        meta += text(name) + struct.pack("<I", kind) + value
        n_meta += 1
    head = b"GGUF" + struct.pack("<IQQ", version, int(tensor), n_meta) + meta
    if not tensor:
        return head
    head += text("weight") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)
    return head + b"\0" * (-len(head) % 32) + b"\0" * (32 * 4 * 4)


def write_gguf(path: Path, **options: object) -> Path:
    """Write such a file and return its path; one with these bytes is left as it is."""
    content = gguf_bytes(**options)
    if not path.is_file() or path.read_bytes() != content:
        path.write_bytes(content)
    return path
