"""Write states of sequences as the library saves them, in every layout."""

from __future__ import annotations

import struct

import numpy as np

#: Numbers of ggml types.
F16, Q8_0 = 1, 8


def section(layout: str, pos: list[int], k: np.ndarray, v: np.ndarray, *, trans: bool) -> bytes:
    """Write the state of one stream; ``k`` and ``v`` are (layers, cells, bytes of a row)."""
    own = int(layout != "plain")
    parts = [struct.pack("<I", len(pos))]
    if not pos and layout != "plain":
        return parts[0]
    for each in pos:
        parts.append(struct.pack("<iI", each, own))
        parts.append(struct.pack("<ii", 3, 4) if "places" in layout else b"")
        parts.append(struct.pack("<i", 5) if "tokens" in layout else b"")
        parts.append(struct.pack("<i", 2) * own)
    parts.append(struct.pack("<II", int(trans), len(k)))
    parts.append(struct.pack("<II", 128, 64) if "rotations" in layout else b"")
    for layer in k:
        parts += [struct.pack("<iQ", F16, layer.shape[1]), layer.tobytes()]
    for layer in v if "without V" not in layout else ():
        cells, width = layer.shape
        if trans:
            columns = layer.reshape(cells, width // 2, 2).transpose(1, 0, 2)
            parts += [struct.pack("<iII", F16, 2, width // 2), columns.tobytes()]
        else:
            parts += [struct.pack("<iQ", F16, width), layer.tobytes()]
    return b"".join(parts)


def state(layout: str, streams: list[bytes]) -> bytes:
    """Join the streams of one cache."""
    head = b"" if layout == "plain" else struct.pack("<I", len(streams))
    return head + b"".join(streams)


def rows(cells: int, width: int, seed: int = 0) -> np.ndarray:
    """Make rows of two layers."""
    return np.random.default_rng(seed).integers(0, 256, (2, cells, width), dtype=np.uint8)
