"""Simulate a KV cache with contiguous slots: cells, holes, shifts, and a value in every row."""

from __future__ import annotations

import struct

import numpy as np

N_LAYER = 2
N_EMBD = 32


class Cache:
    """Hold the cells; ``rows`` (layers, cells) holds a number in place of K and V."""

    def __init__(self, size: int, n_seq_max: int, *, contiguous: bool, v_transposed: bool) -> None:
        self.size = size
        self.contiguous = contiguous
        self.v_transposed = v_transposed
        self.pos = np.full(size, -1, dtype=np.int32)
        self.shift = np.zeros(size, dtype=np.int32)
        self.seqs = np.zeros((size, (n_seq_max + 63) // 64), dtype=np.uint64)
        self.token = np.zeros(size, dtype=np.int64)
        self.rows = np.zeros((N_LAYER, size), dtype=np.float16)

    def has(self, seq: int) -> np.ndarray:
        """Return which cells a sequence uses; every used cell for a negative one."""
        if seq < 0:
            return self.pos >= 0
        return (self.seqs[:, seq // 64] >> np.uint64(seq % 64)) & np.uint64(1) == 1

    def ranged(self, seq: int, p0: int, p1: int) -> np.ndarray:
        """Return which cells of a sequence lie at p0 <= p < p1."""
        high = np.iinfo(np.int32).max if p1 < 0 else p1
        return self.has(seq) & (self.pos >= max(p0, 0)) & (self.pos < high)

    def find(self, n: int) -> np.ndarray | None:
        """Return ``n`` free cells, together where slots are contiguous, or None."""
        free = np.flatnonzero(self.pos < 0)
        if len(free) < n:
            return None
        if not self.contiguous:
            return free[:n]
        for start in free:
            if start + n <= self.size and (self.pos[start : start + n] < 0).all():
                return np.arange(start, start + n)
        return None

    def put(
        self, cells: np.ndarray, tokens: list[int], pos: list[int], ids: list[list[int]]
    ) -> None:
        """Fill free cells."""
        self.token[cells], self.pos[cells] = tokens, pos
        for cell, each in zip(cells, ids, strict=True):
            for seq in each:
                self.seqs[cell, seq // 64] |= np.uint64(1 << (seq % 64))
        # Positions at the end of what C takes are more than a half float holds.
        with np.errstate(over="ignore"):
            for layer in range(N_LAYER):
                self.rows[layer, cells] = np.array(tokens) + layer / 2 + np.array(pos) / 1024

    def drop(self, cells: np.ndarray, seq: int) -> None:
        """Take cells from a sequence; cells without a sequence are free."""
        if seq < 0:
            self.seqs[cells] = 0
        else:
            self.seqs[cells, seq // 64] &= ~np.uint64(1 << (seq % 64))
        self.free_unused()

    def free_unused(self) -> None:
        """Free the cells that no sequence uses."""
        empty = (self.seqs == 0).all(axis=1)
        self.pos[empty] = -1
        self.shift[empty] = 0

    def compact(self) -> tuple[int, int]:
        """Move used cells from the end into holes from the start; return moves and cells."""
        used = int((self.pos >= 0).sum())
        holes = np.flatnonzero(self.pos[:used] < 0)
        movers = np.flatnonzero(self.pos[used:] >= 0)[::-1] + used
        for array in (self.pos, self.shift, self.seqs, self.token):
            array[holes] = array[movers]
        self.rows[:, holes] = self.rows[:, movers]
        self.pos[movers], self.shift[movers], self.seqs[movers] = -1, 0, 0
        return len(movers), len(movers)

    def save(self, seq: int) -> bytes:
        """Write a sequence as llama.cpp of 0.3.9 does."""
        cells = np.flatnonzero(self.has(seq))
        parts = [struct.pack("<I", len(cells))]
        parts += [struct.pack("<iI", int(self.pos[cell]), 0) for cell in cells]
        parts.append(struct.pack("<II", int(self.v_transposed), N_LAYER))
        wide = [np.repeat(self.rows[i, cells, None], N_EMBD, axis=1) for i in range(N_LAYER)]
        for rows in wide:
            parts += [struct.pack("<iQ", 1, 2 * N_EMBD), rows.tobytes()]
        for rows in wide:
            if self.v_transposed:
                parts += [struct.pack("<iII", 1, 2, N_EMBD), rows.T.tobytes()]
            else:
                parts += [struct.pack("<iQ", 1, 2 * N_EMBD), rows.tobytes()]
        return b"".join(parts)

    def load(self, seq: int, data: bytes) -> int:
        """Read what `save` wrote; 0, with the sequence emptied, when it does not fit."""
        self.drop(self.has(seq), seq)
        n = struct.unpack_from("<I", data)[0]
        size = 4 + 8 * n + 8 + 2 * N_LAYER * (12 + 2 * N_EMBD * n)
        if len(data) != size:
            return 0
        cells = self.find(n)
        if cells is None:
            return 0
        pos = [struct.unpack_from("<i", data, 4 + 8 * i)[0] for i in range(n)]
        self.put(cells, [0] * n, pos, [[seq]] * n)
        at = 4 + 8 * n + 8
        for layer in range(N_LAYER):
            rows = np.frombuffer(data, np.float16, n * N_EMBD, at + 12).reshape(n, N_EMBD)
            self.rows[layer, cells] = rows[:, 0]
            at += 12 + 2 * N_EMBD * n
        values = self.rows[0, cells].astype(float)
        self.token[cells] = np.round(values - np.array(pos) / 1024).astype(np.int64)
        return len(data)
