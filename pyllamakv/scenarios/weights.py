"""Draw what the models of all architectures are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyllamakv.scenarios.synthetic import Shape

Tensor = NDArray[np.float32]
Tensors = dict[str, Tensor]


class Draw:
    """Draw weights, always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return weights whose products have ``scale`` times the size of what they multiply."""
        values = self._generator.standard_normal(shape) * (scale / np.sqrt(shape[-1]))
        return np.asarray(values, dtype=np.float32)


def gain(shape: Shape) -> float:
    """Return the size of what a layer adds, next to what all of them add."""
    # The residual stream of a deep model must not drown what a single layer's cache says.
    return float(1.0 / np.sqrt(shape.n_layer))


def ones(n: int, value: float = 1.0) -> Tensor:
    """Return as many weights of one value."""
    return np.full(n, value, dtype=np.float32)


def attention(shape: Shape, draw: Draw) -> Tensors:
    """Return the tensors of attention with heads of queries, keys and values."""
    width, size = shape.n_embd, head(shape)
    inner, kv = size * shape.n_head, size * max(shape.n_head_kv, 1)
    return {
        "attn_norm.weight": ones(width),
        # Attention neither flat (damage would average out) nor on one cell alone (damage
        # elsewhere would not show).
        "attn_q.weight": draw.matrix(inner, width, scale=1.3),
        "attn_k.weight": draw.matrix(kv, width, scale=1.3),
        "attn_v.weight": draw.matrix(kv, width, scale=2.0),
        "attn_output.weight": draw.matrix(width, inner, scale=3.0 * gain(shape)),
    }


def forward(shape: Shape, draw: Draw) -> Tensors:
    """Return the tensors of a dense network behind the attention."""
    width, ff = shape.n_embd, shape.n_ff
    return {
        "ffn_norm.weight": ones(width),
        "ffn_gate.weight": draw.matrix(ff, width),
        "ffn_up.weight": draw.matrix(ff, width),
        "ffn_down.weight": draw.matrix(width, ff, scale=gain(shape)),
    }


def head(shape: Shape) -> int:
    """Return the width of a head."""
    return shape.head or shape.n_embd // shape.n_head
