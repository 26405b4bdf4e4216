"""Say which keys and tensors a generated model of an architecture has.

One architecture per kind of memory that llama.cpp has had. The tensors' names are those of every
release that knows the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyllamakv.harness.synthetic import Shape

Tensor = NDArray[np.float32]
Tensors = dict[str, Tensor]

#: Sizes of a recurrent state: columns of the convolution, width of the state, rank of the step.
SSM_CONV, SSM_STATE, SSM_RANK = 4, 16, 8

#: Ranks and widths of multi-head latent attention: what is kept per token is LATENT + ROTATED wide.
LATENT, ROTATED, PLAIN, RANK = 32, 32, 32, 32

#: Heads of an indexer (with few of them many cells score 0 alike), width of its key, cells picked.
INDEXERS, INDEXED, PICKED = 16, 128, 64


class Draw:
    """Draw weights, always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return weights whose products have ``scale`` times the size of what they multiply."""
        values = self._generator.standard_normal(shape) * (scale / np.sqrt(shape[-1]))
        return np.asarray(values, dtype=np.float32)


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata of a shape without the architecture in front: ints, floats, lists."""
    common: dict[str, Any] = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": shape.n_vocab,
    }
    return common | _ARCHITECTURES[shape.architecture][0](shape)


def tensors(shape: Shape) -> Tensors:
    """Return the weights of a shape, f32, by name."""
    draw = Draw(shape.seed)
    width = shape.n_embd
    # A gemma multiplies its embeddings by this by itself.
    size = 1.0 if shape.architecture == "gemma2" else np.sqrt(width)
    found = {"token_embd.weight": draw.matrix(shape.n_vocab, width, scale=size)}
    for layer in range(shape.n_layer):
        block = _ARCHITECTURES[shape.architecture][1](shape, draw, layer)
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    found["output_norm.weight"] = np.ones(width, dtype=np.float32)
    if shape.architecture == "gemma2":
        # It has no output of its own: the embeddings must tell the tokens apart by themselves.
        found["token_embd.weight"] *= np.float32(np.sqrt(width) / 2)
    else:
        found["output.weight"] = draw.matrix(shape.n_vocab, width, scale=4.0)
    return found


def _gain(shape: Shape) -> float:
    # The residual stream of a deep model must not drown what a single layer's cache says.
    return float(1.0 / np.sqrt(shape.n_layer))


def _ones(n: int, value: float = 1.0) -> Tensor:
    return np.full(n, value, dtype=np.float32)


def _attention(shape: Shape, draw: Draw) -> Tensors:
    width, head = shape.n_embd, _head(shape)
    inner, kv = head * shape.n_head, head * max(shape.n_head_kv, 1)
    return {
        "attn_norm.weight": _ones(width),
        # Attention neither flat (damage would average out) nor on one cell alone (damage
        # elsewhere would not show).
        "attn_q.weight": draw.matrix(inner, width, scale=1.3),
        "attn_k.weight": draw.matrix(kv, width, scale=1.3),
        "attn_v.weight": draw.matrix(kv, width, scale=2.0),
        "attn_output.weight": draw.matrix(width, inner, scale=3.0 * _gain(shape)),
    }


def _forward(shape: Shape, draw: Draw) -> Tensors:
    width, ff = shape.n_embd, shape.n_ff
    return {
        "ffn_norm.weight": _ones(width),
        "ffn_gate.weight": draw.matrix(ff, width),
        "ffn_up.weight": draw.matrix(ff, width),
        "ffn_down.weight": draw.matrix(width, ff, scale=_gain(shape)),
    }


def _head(shape: Shape) -> int:
    return shape.head or shape.n_embd // shape.n_head


def _llama_keys(shape: Shape) -> dict[str, Any]:
    keys = {"rope.dimension_count": _head(shape)}
    if shape.head:
        keys |= {"attention.key_length": shape.head, "attention.value_length": shape.head}
    return keys


def _llama(shape: Shape, draw: Draw, _: int) -> Tensors:
    return _attention(shape, draw) | _forward(shape, draw)


def _gemma2_keys(shape: Shape) -> dict[str, Any]:
    head = _head(shape)
    return {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.sliding_window": shape.window,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma2(shape: Shape, draw: Draw, layer: int) -> Tensors:
    # What a layer adds is as large as the weights of the norm that follows it. One sliding and one
    # full layer speak, the others whisper: the noise of so many quantised layers would add up.
    size = 4.0 if layer < 2 else 0.1
    after = {
        "post_attention_norm.weight": _ones(shape.n_embd, size),
        "post_ffw_norm.weight": _ones(shape.n_embd, size / 2),
    }
    return _attention(shape, draw) | _forward(shape, draw) | after


def _ssm_keys(shape: Shape) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": SSM_CONV,
        "ssm.inner_size": 2 * shape.n_embd,
        "ssm.state_size": SSM_STATE,
        "ssm.time_step_rank": SSM_RANK,
    }


def _mamba_keys(shape: Shape) -> dict[str, Any]:
    return _ssm_keys(shape) | {"attention.head_count": 0, "attention.head_count_kv": 0}


def _mamba(shape: Shape, draw: Draw, _: int) -> Tensors:
    width, inner = shape.n_embd, 2 * shape.n_embd
    decay = -np.arange(1, SSM_STATE + 1, dtype=np.float32)
    return {
        "attn_norm.weight": _ones(width),
        "ssm_in.weight": draw.matrix(2 * inner, width),
        "ssm_conv1d.weight": draw.matrix(inner, SSM_CONV),
        "ssm_conv1d.bias": _ones(inner, 0.0),
        "ssm_x.weight": draw.matrix(SSM_RANK + 2 * SSM_STATE, inner, scale=2.0),
        "ssm_dt.weight": draw.matrix(inner, SSM_RANK),
        # Steps so small that a state remembers some dozens of tokens.
        "ssm_dt.bias": _ones(inner, -3.0),
        "ssm_a": np.repeat(decay[None], inner, axis=0),
        "ssm_d": _ones(inner),
        "ssm_out.weight": draw.matrix(width, inner, scale=3.0 * _gain(shape)),
    }


def _jamba_keys(shape: Shape) -> dict[str, Any]:
    heads = [shape.n_head_kv if _attends(layer) else 0 for layer in range(shape.n_layer)]
    return _ssm_keys(shape) | {"attention.head_count_kv": heads}


def _attends(layer: int) -> bool:
    return layer % 2 == 1


def _jamba(shape: Shape, draw: Draw, layer: int) -> Tensors:
    if _attends(layer):
        return _attention(shape, draw) | _forward(shape, draw)
    norms = {
        "ssm_dt_norm.weight": _ones(SSM_RANK),
        "ssm_b_norm.weight": _ones(SSM_STATE),
        "ssm_c_norm.weight": _ones(SSM_STATE),
    }
    return _mamba(shape, draw, layer) | norms | _forward(shape, draw)


def _deepseek2_keys(shape: Shape) -> dict[str, Any]:
    return {
        "rope.dimension_count": ROTATED,
        "rope.scaling.yarn_log_multiplier": 0.1,
        # All layers are dense; what they would say of experts must be there all the same.
        "leading_dense_block_count": shape.n_layer,
        "expert_feed_forward_length": shape.n_ff,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "attention.q_lora_rank": RANK,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROTATED,
        "attention.value_length": LATENT,
        "attention.key_length_mla": PLAIN + ROTATED,
        "attention.value_length_mla": PLAIN,
    }


def _deepseek2(shape: Shape, draw: Draw, _: int) -> Tensors:
    width, heads = shape.n_embd, shape.n_head
    return {
        "attn_norm.weight": _ones(width),
        "attn_q_a.weight": draw.matrix(RANK, width),
        "attn_q_a_norm.weight": _ones(RANK),
        "attn_q_b.weight": draw.matrix(heads * (PLAIN + ROTATED), RANK, scale=1.3),
        "attn_kv_a_mqa.weight": draw.matrix(LATENT + ROTATED, width, scale=1.3),
        "attn_kv_a_norm.weight": _ones(LATENT),
        "attn_k_b.weight": draw.matrix(heads, LATENT, PLAIN, scale=1.3),
        "attn_v_b.weight": draw.matrix(heads, PLAIN, LATENT, scale=2.0),
        "attn_output.weight": draw.matrix(width, heads * PLAIN, scale=3.0 * _gain(shape)),
    } | _forward(shape, draw)


def _deepseek32_keys(shape: Shape) -> dict[str, Any]:
    return _deepseek2_keys(shape) | {
        "expert_gating_func": 2,
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": PICKED,
    }


def _deepseek32(shape: Shape, draw: Draw, layer: int) -> Tensors:
    return _deepseek2(shape, draw, layer) | {
        "indexer.k_norm.weight": _ones(INDEXED),
        "indexer.k_norm.bias": _ones(INDEXED, 0.0),
        "indexer.proj.weight": draw.matrix(INDEXERS, shape.n_embd),
        "indexer.attn_k.weight": draw.matrix(INDEXED, shape.n_embd),
        "indexer.attn_q_b.weight": draw.matrix(INDEXERS * INDEXED, RANK),
    }


_Keys = Callable[["Shape"], dict[str, Any]]
_Block = Callable[["Shape", Draw, int], Tensors]

_ARCHITECTURES: dict[str, tuple[_Keys, _Block]] = {
    "llama": (_llama_keys, _llama),
    "gemma2": (_gemma2_keys, _gemma2),
    "mamba": (_mamba_keys, _mamba),
    "jamba": (_jamba_keys, _jamba),
    "deepseek2": (_deepseek2_keys, _deepseek2),
    "deepseek32": (_deepseek32_keys, _deepseek32),
}
