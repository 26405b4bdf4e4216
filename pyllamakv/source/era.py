"""Determine the era of a tree, a period of upstream's history, from the content of its files.

The era labels ports and results, and selects the releases of a matrix or of a sample. Which port
applies and how a release is built never depend on it. It is not derived from a version number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: The eras in upstream's order.
ERAS = ("monolith", "split", "context", "unified", "memory", "streams", "rows")
UNKNOWN = "unknown"

_MONOLITHS = ("src/llama.cpp", "llama.cpp")
_CACHES = (
    "src/llama-kv-cache.cpp",
    "src/llama-kv-cache.h",
    "src/llama-kv-cache-unified.cpp",
    "src/llama-kv-cache-unified.h",
)
_CONTEXT = "src/llama-context.cpp"
_API = "include/llama.h"


def detect(store: Store, what: Release | str) -> str:
    """Return the era of a tree, or ``unknown`` for a tree without a known KV cache."""
    found = store.read_many(what, [*_MONOLITHS, *_CACHES, _CONTEXT, _API])
    text = {path: (data or b"").decode("utf-8", "replace") for path, data in found.items()}
    cache = "".join(text[path] for path in _CACHES)
    if not cache:
        whole = "".join(text[path] for path in _MONOLITHS)
        return "monolith" if "llama_kv_cache_find_slot" in whole else UNKNOWN
    # The planner's method, then its flag: one of them is in every release that can defragment.
    if "defrag_prepare" not in cache and "do_defrag" not in cache:
        return "rows" if "llama_memory_i" in cache else UNKNOWN
    if "n_stream" in cache:
        return "streams"
    if "llama_get_memory" in text[_API]:
        return "memory"
    if "defrag_prepare" not in cache:
        return "split"
    # The context ran the planner at first; later the cache class did, on request of the context.
    return "context" if "defrag_prepare" in text[_CONTEXT] else "unified"
