"""Fill a cache through llama_cpp, scatter its free cells, and decode: a program for its Python.

The argument is a model; the output is one line of JSON. The functions have had several names; the
newest one that exists is used.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

#: Half of them are more holes than upstream's own defragmentation of a deep model fills at once.
CELLS = 768


def main() -> None:
    """Print the status of `llama_decode`, and the distance of its logits from a fresh cache's."""
    import llama_cpp

    model = _first(llama_cpp, "llama_model_load_from_file", "llama_load_model_from_file")(
        sys.argv[1].encode(), llama_cpp.llama_model_default_params()
    )
    cache = Cache(llama_cpp, model, CELLS)
    half = CELLS // 2
    for position in range(half):
        cache.decode([(position % 32, position, 0), (position % 32, position, 1)])
    cache.remove(1)
    rest = [(position % 32, position, 2) for position in range(half)]
    code = cache.decode(rest)
    difference = None
    if not code:
        fresh = Cache(llama_cpp, model, 2 * CELLS)
        for position in range(half):
            fresh.decode([(position % 32, position, 0)])
        fresh.decode(rest)
        pairs = zip(cache.logits(), fresh.logits(), strict=True)
        difference = max(abs(one - other) for one, other in pairs)
    facts = {
        "version": llama_cpp.__version__,
        "library": str(llama_cpp.llama_cpp._lib._name),
        "code": code,
        "difference": difference,
    }
    sys.stdout.write(json.dumps(facts) + "\n")


class Cache:
    """A context and its decoded tokens, as (token, position, sequence)."""

    def __init__(self, api: Any, model: Any, cells: int) -> None:
        self.api = api
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = CELLS // 2
        params.n_threads = params.n_threads_batch = 1
        # 0.3.14 reserves for a multiple of the sequences, beyond a cache with another size.
        for name, value in (("n_seq_max", 4), ("kv_unified", True)):
            if hasattr(params, name):
                setattr(params, name, value)
        make = _first(api, "llama_init_from_model", "llama_new_context_with_model")
        self.model = model
        self.ctx = make(model, params)
        self.batch = api.llama_batch_init(CELLS // 2, 0, 1)

    def decode(self, feed: list[tuple[int, int, int]]) -> int:
        """Return the status of `llama_decode`."""
        batch = self.batch
        batch.n_tokens = len(feed)
        for k, (token, position, sequence) in enumerate(feed):
            batch.token[k], batch.pos[k] = token, position
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, sequence
            batch.logits[k] = k == len(feed) - 1
        return int(self.api.llama_decode(self.ctx, batch))

    def remove(self, sequence: int) -> None:
        """Remove a sequence from the cache."""
        api = self.api
        if hasattr(api, "llama_memory_seq_rm"):
            api.llama_memory_seq_rm(api.llama_get_memory(self.ctx), sequence, -1, -1)
            return
        remove = _first(api, "llama_kv_self_seq_rm", "llama_kv_cache_seq_rm")
        remove(self.ctx, sequence, -1, -1)

    def logits(self) -> list[float]:
        """Return the logits of the last token."""
        api = self.api
        if hasattr(api, "llama_vocab_n_tokens"):
            count = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        else:
            count = api.llama_n_vocab(self.model)
        found = api.llama_get_logits_ith(self.ctx, -1)
        return list(ctypes.cast(found, ctypes.POINTER(ctypes.c_float * count)).contents)


def _first(api: Any, *names: str) -> Any:
    return next(getattr(api, name) for name in names if hasattr(api, name))


if __name__ == "__main__":
    main()
