"""Choose which variables of the environment a trace carries: those that change what is computed.

A trace may come from elsewhere, and a replay sets its variables: so each is known by name, and its
value is a short word that opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

BACKING = "LLAMA_KV_BACKING"

#: What the patches read, and what llama.cpp reads itself and computes by.
KNOWN = (
    "LLAMA_ATTN_ROT_DISABLE",
    "LLAMA_GRAPH_REUSE_DISABLE",
    BACKING,
    "LLAMA_KV_BACKING_HUGE",
    "LLAMA_KV_CACHE_DEBUG",
    "LLAMA_KV_DEFRAG_MOVER",
    "LLAMA_KV_DEFRAG_PLAN",
    "LLAMA_KV_DEFRAG_THREADS",
    "LLAMA_SET_ROWS",
)

#: mmap-kv takes any other word for a file, which it would make and cut to its size.
BACKINGS = ("heap", "mmap")

_WORD = re.compile(r"[A-Za-z0-9_-]{0,16}", re.ASCII)


def recorded(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what this process, and ``more``, set of the variables that a trace carries.

    A path in `BACKING` stays out of it: to replay a trace writes no file.
    """
    found = {**os.environ, **(more or {})}
    return {name: found[name] for name in KNOWN if name in found and _fits(name, found[name])}


def wrong(environment: Mapping[str, str]) -> str:
    """Return what is wrong with the variables of a trace; empty when nothing is."""
    for name, value in environment.items():
        if name not in KNOWN:
            return f"may set {', '.join(KNOWN)}, not {name[:80]!r}"
        if not _fits(name, value):
            words = " or ".join(BACKINGS) if name == BACKING else "a word of at most 16 letters"
            return f"may set {name} to {words}, not to {value[:80]!r}"
    return ""


def _fits(name: str, value: str) -> bool:
    return value in BACKINGS if name == BACKING else _WORD.fullmatch(value) is not None
