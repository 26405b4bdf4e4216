"""Compose batches: tokens, positions, sequences, and which tokens have logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle, Native
    from pyllamakv.scenarios.cell_ledger import CellLedger

#: The contents of a batch. A key is a sequence, or a tuple of sequences that share the cells; its
#: value is the number of tokens, or the tokens. The key type of a Mapping is invariant, hence Any.
Feeds = Mapping[Any, int | Sequence[int]]


@dataclass(frozen=True)
class BatchRows:
    """The arrays of one batch, and the tokens that each row of logits belongs to."""

    token: NDArray[np.int32]
    pos: NDArray[np.int32]
    owners: tuple[tuple[int, ...], ...]
    logits: NDArray[np.int8]

    @property
    def inputs(self) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return what the library decodes, and the positions."""
        return self.token, self.pos

    def run(self, native: Native, context: ContextHandle) -> int:
        """Decode the batch and return llama.cpp's own status."""
        counts = np.array([len(seqs) for seqs in self.owners], dtype=np.int32)
        flat = np.array([seq for seqs in self.owners for seq in seqs], dtype=np.int32)
        single = bool((counts == 1).all())
        return native.decode(context, *self.inputs, None if single else counts, flat, self.logits)

    def read(
        self, native: Native, context: ContextHandle, n_vocab: int
    ) -> dict[int, NDArray[np.float32]]:
        """Return a copy of the batch's logits, by index."""
        return {
            int(place): np.array(native.logits(context, int(place), n_vocab), dtype=np.float32)
            for place in np.flatnonzero(self.logits)
        }


@dataclass(frozen=True)
class ImageRows(BatchRows):
    """A batch of embeddings at one position, each with a row and a column: a part of an image.

    ``places`` (4, n) has the position, the row, the column and 0 of each embedding.
    """

    embd: NDArray[np.float32]
    places: NDArray[np.int32]

    @property
    def inputs(self) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the embeddings, and all their positions."""
        return self.embd, self.places


def image_rows(seq: int, pos: int, rows: Sequence[int], columns: int, n_embd: int) -> ImageRows:
    """Return some rows of an image of generated embeddings at a position of a sequence.

    Rows and columns of M-RoPE count from the position.
    """
    places = np.array([(pos, pos + y, pos + x, 0) for y in rows for x in range(columns)], np.int32)
    n = len(places)
    embd = np.random.default_rng([seq, pos, *rows]).standard_normal((n, n_embd), np.float32)
    return ImageRows(
        np.full(n, -1, np.int32),
        np.full(n, pos, np.int32),
        ((seq,),) * n,
        np.array([0] * (n - 1) + [1], np.int8),
        embd,
        np.ascontiguousarray(places.T),
    )


def compose(
    ledger: CellLedger, feeds: Feeds, n_vocab: int, *, interleave: bool = False
) -> BatchRows:
    """Return a batch that continues each sequence; the last token of each asks for logits."""
    rows: list[list[tuple[int, int, tuple[int, ...], int]]] = []
    for key, what in feeds.items():
        owners = (key,) if isinstance(key, int) else tuple(key)
        start = ledger.next(owners[0])
        tokens = _made_up(owners[0], start, what, n_vocab)
        last = len(tokens) - 1
        rows.append([(t, start + n, owners, int(n == last)) for n, t in enumerate(tokens)])
    order = list(_interleaved(rows)) if interleave else [item for row in rows for item in row]
    return BatchRows(
        np.array([item[0] for item in order], dtype=np.int32),
        np.array([item[1] for item in order], dtype=np.int32),
        tuple(item[2] for item in order),
        np.array([item[3] for item in order], dtype=np.int8),
    )


def filler_token(seq: int, pos: int, n_vocab: int) -> int:
    """Return the generated token for a position of a sequence."""
    mixed = (seq * 0x9E3779B1 + pos * 0x85EBCA77 + 0xC2B2AE3D) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed ^= mixed >> 12
    return mixed % n_vocab


def _made_up(seq: int, start: int, what: int | Sequence[int], n_vocab: int) -> list[int]:
    if isinstance(what, int):
        return [filler_token(seq, start + n, n_vocab) for n in range(what)]
    return [int(token) for token in what]


def _interleaved(rows: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for n in range(max(map(len, rows), default=0)):
        for row in rows:
            if n < len(row):
                yield row[n]
