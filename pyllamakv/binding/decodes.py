"""Decode batches in a library in this process, read their logits, and sample from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pyllamakv.binding.codes import OWN, Code
from pyllamakv.binding.core import NULL, struct
from pyllamakv.binding.models import Models
from pyllamakv.binding.protocol import Capability, ContextHandle, SamplerHandle
from pyllamakv.native._plk import ffi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import Buffer

_INT32: Final = np.dtype(np.int32)
_INT8: Final = np.dtype(np.int8)


def _flat(values: Any, dtype: Any) -> Any:
    """Return an array that C can read in place; copied only where it cannot."""
    if values.dtype is not dtype or not values.flags.c_contiguous:
        return np.ascontiguousarray(values, dtype)
    return values


class _Each:
    """Keep the batch that has one token of each of these sequences."""

    __slots__ = ("_keep", "batch", "pos", "seq", "token")

    def __init__(self, seq: tuple[int, ...]) -> None:
        n = len(seq)
        self.seq = seq
        self.token, self.pos = ffi.new("int32_t[]", n), ffi.new("int32_t[]", n)
        self._keep = ffi.new("int32_t[]", seq), ffi.new("int8_t[]", [1] * n)
        self.batch = struct("plk_batch")
        self.batch.n_tokens = n
        self.batch.token, self.batch.pos = self.token, self.pos
        self.batch.seq_id, self.batch.logits = self._keep


class Scratch:
    """Keep what calls on one context use again and again: one thread at a time."""

    __slots__ = (
        "batch", "buffers", "cells", "each", "model", "n_vocab", "place",
        "raw", "rows", "tokens", "view", "words",
    )  # fmt: skip

    def __init__(self, raw: Any, model: int, n_vocab: int, n_seq_max: int) -> None:
        self.raw = raw
        self.model = model
        self.n_vocab = n_vocab
        self.words = max(1, (n_seq_max + 63) // 64)
        self.buffers: list[Buffer] = []
        self.batch = struct("plk_batch")
        self.cells = struct("plk_cells_info")
        self.each = _Each(())
        self.rows = ffi.new("int32_t *")
        self.tokens = ffi.new("int32_t[]", n_seq_max)
        # The logits that were viewed last: they mostly lie in the same place.
        self.place: Any = NULL
        self.view: NDArray[np.float32] = np.empty((0, n_vocab), np.float32)

    def look(self, place: Any, n: int) -> NDArray[np.float32]:
        """Return a read-only view of ``n`` rows of logits at a place."""
        if place != self.place or n != len(self.view):
            flat = np.frombuffer(ffi.buffer(place, 4 * n * self.n_vocab), np.float32)
            self.place, self.view = place, flat.reshape(n, self.n_vocab)
            self.view.flags.writeable = False
        return self.view


class Decodes(Models):
    """Decode in contexts that `local.Local` makes and frees."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._contexts: dict[int, Any] = {}
        self._scratch: dict[int, Scratch] = {}
        # Bound once: decode_one is called for every token.
        self._one: Any = self._lib.plk_decode_one

    def _context(self, handle: int) -> Any:
        return self._contexts.get(handle) or self._gone("context")

    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32],
        pos: NDArray[np.int32],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32],
        logits: NDArray[np.int8] | None,
    ) -> int:
        """Run one batch; return llama_decode's own code."""
        raw = self._context(context)
        batch = self._scratch[context].batch
        token, pos, seq_id = _flat(token, _INT32), _flat(pos, _INT32), _flat(seq_id, _INT32)
        n_tokens = len(token)
        ids = n_tokens
        if seq_count is not None:
            seq_count = _flat(seq_count, _INT32)
            ids = int(seq_count.sum()) if len(seq_count) == n_tokens else -1
        if logits is not None:
            logits = _flat(logits, _INT8)
        # C reads as many as it is told: what is too short must not reach it.
        wanted = n_tokens if logits is None else len(logits)
        if not len(pos) == wanted == n_tokens or len(seq_id) != ids:
            raise self._error(
                Code.EINVAL, f"decode {n_tokens} tokens: the arrays differ in length", "decode"
            )
        keep = (
            ffi.from_buffer("int32_t[]", token),
            ffi.from_buffer("int32_t[]", pos),
            ffi.from_buffer("int32_t[]", seq_id),
            NULL if seq_count is None else ffi.from_buffer("int32_t[]", seq_count),
            NULL if logits is None else ffi.from_buffer("int8_t[]", logits),
        )
        batch.n_tokens = n_tokens
        batch.token, batch.pos, batch.seq_id, batch.seq_count, batch.logits = keep
        code: int = self._lib.plk_decode(raw, batch)
        if code < OWN:
            raise self._error(code, f"decode {n_tokens} tokens", "decode")
        return code

    def decode_one(self, context: ContextHandle, token: int, pos: int, seq_id: int) -> int:
        """Run one token of one sequence with logits."""
        try:
            code: int = self._one(self._contexts[context], token, pos, seq_id)
        except KeyError:
            self._gone("context")
        if code < OWN:
            raise self._error(code, f"decode token {token} at {pos} of sequence {seq_id}", "decode")
        return code

    def decode_each(
        self,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
    ) -> int:
        """Run one token of each of several sequences, all with logits."""
        scratch = self._scratch.get(context) or self._gone("context")
        each, n = scratch.each, len(seq_id)
        if each.seq is not seq_id:
            each = scratch.each = _Each(seq_id)
        # cffi refuses more or fewer than there is room for.
        each.token[0:n] = token
        each.pos[0:n] = pos
        code: int = self._lib.plk_decode(scratch.raw, each.batch)
        if code < OWN:
            raise self._error(code, f"decode a token of each of {n} sequences", "decode")
        return code

    def logits(self, context: ContextHandle, index: int, n_vocab: int) -> NDArray[np.float32]:
        """Return a read-only view (n_vocab,) of logits; it lives until the next decode."""
        scratch = self._scratch.get(context) or self._gone("context")
        if not 0 < n_vocab <= scratch.n_vocab:
            raise self._error(
                Code.EINVAL, f"read {n_vocab} logits of a smaller vocabulary", "decode"
            )
        found = self._lib.plk_logits(scratch.raw, index)
        if found == NULL:
            raise self._error(
                Code.EINVAL, f"read the logits of place {index}: there are none", "decode"
            )
        row: NDArray[np.float32] = scratch.look(found, 1)[0]
        return row if len(row) == n_vocab else row[:n_vocab]

    def logits_all(self, context: ContextHandle, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n, n_vocab) of every place with any: a view where that is possible."""
        scratch = self._scratch.get(context) or self._gone("context")
        if n_vocab != scratch.n_vocab:
            raise self._error(
                Code.EINVAL,
                f"read rows of {n_vocab} logits of a vocabulary of {scratch.n_vocab}",
                "decode",
            )
        found = self._lib.plk_logits_all(scratch.raw, scratch.rows)
        n = scratch.rows[0]
        if found != NULL:
            return scratch.look(found, n)
        if n <= 0:
            raise self._error(Code.EINVAL, "read the logits: there are none", "decode")
        rows = np.stack([self.logits(context, place - n, n_vocab) for place in range(n)])
        rows.flags.writeable = False
        return rows

    def cancel(self, context: ContextHandle) -> None:
        """End the decode that runs; callable from any thread."""
        self._lib.plk_cancel(self._context(context))

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""
        self._lib.plk_cancel_after(self._context(context), polls)

    def cancel_polls(self, context: ContextHandle) -> int:
        """Return how often the last decode polled the abort callback."""
        return int(self._lib.plk_cancel_polls(self._context(context)))

    def sample(self, sampler: SamplerHandle, context: ContextHandle, index: int) -> int:
        """Choose a token from the logits of a place, and remember it."""
        token: int = self._lib.plk_sample(self._sampler(sampler), self._context(context), index)
        self._done(token, f"sample at place {index}", "sampler", capability=Capability.SAMPLER)
        return token

    def sample_all(self, sampler: SamplerHandle, context: ContextHandle, room: int) -> list[int]:
        """Choose a token for every place with logits, in order."""
        raw, scratch = self._context(context), self._scratch[context]
        if room > len(scratch.tokens):
            scratch.tokens = ffi.new("int32_t[]", room)
        tokens = scratch.tokens
        count: int = self._lib.plk_sample_all(self._sampler(sampler), raw, tokens, room)
        self._done(count, "sample at every place", "sampler", capability=Capability.SAMPLER)
        found: list[int] = ffi.unpack(tokens, count)
        return found

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode a token of each sequence and choose the next ones, ``steps`` times in one call."""
        n, done = len(seq_id), ffi.new("int32_t *")
        tokens = ffi.new("int32_t[]", (steps + 1) * n)
        tokens[0:n] = token
        code: int = self._lib.plk_run(
            self._sampler(sampler), self._context(context), n, ffi.new("int32_t[]", seq_id),
            ffi.new("int32_t[]", pos), tokens, steps, stop, done,
        )  # fmt: skip
        if code < OWN and not done[0]:
            raise self._error(code, f"decode {steps} steps of {n} sequences", "decode")
        flat = ffi.unpack(tokens, (done[0] + 1) * n)
        return code, [flat[at : at + n] for at in range(n, len(flat), n)]
