"""Say which keys and tensors a generated model of an architecture has.

One architecture per kind of memory that llama.cpp has had. The tensors' names are those of every
release that knows the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.scenarios import indexed, weights
from pyllamakv.scenarios.weights import Tensors

if TYPE_CHECKING:
    from pyllamakv.scenarios.synthetic import Shape

#: Sizes of a recurrent state: columns of the convolution, width of the state, rank of the step.
SSM_CONV, SSM_STATE, SSM_RANK = 4, 16, 8


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
    draw = weights.Draw(shape.seed)
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


def _llama_keys(shape: Shape) -> dict[str, Any]:
    keys = {"rope.dimension_count": weights.head(shape)}
    if shape.head:
        keys |= {"attention.key_length": shape.head, "attention.value_length": shape.head}
    return keys


def _llama(shape: Shape, draw: weights.Draw, _: int) -> Tensors:
    return weights.attention(shape, draw) | weights.forward(shape, draw)


def _qwen2vl_keys(shape: Shape) -> dict[str, Any]:
    # Of each head's pairs some turn by the time of a position, some by its row, some by its column.
    pairs = weights.head(shape) // 2
    rows = 3 * pairs // 8
    return _llama_keys(shape) | {"rope.dimension_sections": [pairs - 2 * rows, rows, rows, 0]}


def _qwen2vl(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    found = _llama(shape, draw, layer)
    biases = {f"attn_{name}.bias": draw.matrix(len(found[f"attn_{name}.weight"])) for name in "qkv"}
    return found | biases


def _gemma2_keys(shape: Shape) -> dict[str, Any]:
    head = weights.head(shape)
    return {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.sliding_window": shape.window,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma2(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    # What a layer adds is as large as the weights of the norm that follows it. One sliding and one
    # full layer speak, the others whisper: the noise of so many quantised layers would add up.
    size = 4.0 if layer < 2 else 0.1
    after = {
        "post_attention_norm.weight": weights.ones(shape.n_embd, size),
        "post_ffw_norm.weight": weights.ones(shape.n_embd, size / 2),
    }
    return weights.attention(shape, draw) | weights.forward(shape, draw) | after


def _ssm_keys(shape: Shape) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": SSM_CONV,
        "ssm.inner_size": 2 * shape.n_embd,
        "ssm.state_size": SSM_STATE,
        "ssm.time_step_rank": SSM_RANK,
    }


def _mamba_keys(shape: Shape) -> dict[str, Any]:
    return _ssm_keys(shape) | {"attention.head_count": 0, "attention.head_count_kv": 0}


def _mamba(shape: Shape, draw: weights.Draw, _: int) -> Tensors:
    width, inner = shape.n_embd, 2 * shape.n_embd
    decay = -np.arange(1, SSM_STATE + 1, dtype=np.float32)
    return {
        "attn_norm.weight": weights.ones(width),
        "ssm_in.weight": draw.matrix(2 * inner, width),
        "ssm_conv1d.weight": draw.matrix(inner, SSM_CONV),
        "ssm_conv1d.bias": weights.ones(inner, 0.0),
        "ssm_x.weight": draw.matrix(SSM_RANK + 2 * SSM_STATE, inner, scale=2.0),
        "ssm_dt.weight": draw.matrix(inner, SSM_RANK),
        # Steps so small that a state remembers some dozens of tokens.
        "ssm_dt.bias": weights.ones(inner, -3.0),
        "ssm_a": np.repeat(decay[None], inner, axis=0),
        "ssm_d": weights.ones(inner),
        "ssm_out.weight": draw.matrix(width, inner, scale=3.0 * weights.gain(shape)),
    }


def _jamba_keys(shape: Shape) -> dict[str, Any]:
    heads = [shape.n_head_kv if _attends(layer) else 0 for layer in range(shape.n_layer)]
    return _ssm_keys(shape) | {"attention.head_count_kv": heads}


def _attends(layer: int) -> bool:
    return layer % 2 == 1


def _jamba(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    if _attends(layer):
        return weights.attention(shape, draw) | weights.forward(shape, draw)
    norms = {
        "ssm_dt_norm.weight": weights.ones(SSM_RANK),
        "ssm_b_norm.weight": weights.ones(SSM_STATE),
        "ssm_c_norm.weight": weights.ones(SSM_STATE),
    }
    return _mamba(shape, draw, layer) | norms | weights.forward(shape, draw)


_Keys = Callable[["Shape"], dict[str, Any]]
_Block = Callable[["Shape", weights.Draw, int], Tensors]

_ARCHITECTURES: dict[str, tuple[_Keys, _Block]] = {
    "llama": (_llama_keys, _llama),
    "qwen2vl": (_qwen2vl_keys, _qwen2vl),
    "gemma2": (_gemma2_keys, _gemma2),
    "mamba": (_mamba_keys, _mamba),
    "jamba": (_jamba_keys, _jamba),
    "deepseek2": (indexed.deepseek2_keys, indexed.deepseek2),
    "deepseek32": (indexed.deepseek32_keys, indexed.deepseek32),
    "dots3note": (indexed.dots3note_keys, indexed.dots3note),
    "minimax-m3": (indexed.minimax_m3_keys, indexed.minimax_m3),
}
