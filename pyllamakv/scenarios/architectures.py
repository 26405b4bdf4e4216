"""Define the metadata and tensors of generated models, by architecture.

One architecture per memory type of llama.cpp. Tensor names are those that every release with the
architecture uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Version of the files' content; increased with every change of `write`.
GENERATOR = 2


@dataclass(frozen=True)
class Shape:
    """The dimensions of a generated model; widths are counts of elements.

    A head has ``n_embd / n_head`` elements, or ``head`` if that is not 0 (llama and gemma2).
    ``n_head_kv`` heads (a K or V row) are a multiple of 32, a block of q8_0 and q4_0. ``vocab`` is
    "none" (token ids only) or "bytes" (SentencePiece with one token per byte). ``window`` is the
    number of positions that a sliding-window layer attends to.
    """

    name: str
    n_layer: int = 1
    n_embd: int = 32
    n_head: int = 1
    n_head_kv: int = 1
    n_ff: int = 32
    n_vocab: int = 64
    n_ctx: int = 8192
    vocab: str = "none"
    seed: int = 20261120
    architecture: str = "llama"
    window: int = 0
    head: int = 0

    @property
    def digest(self) -> str:
        """Return a text that identifies this shape and the format version of this module."""
        facts = asdict(self)
        if not self.head:
            del facts["head"]  # which files had names before there was such a width
        text = json.dumps([GENERATOR, facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


Tensor = NDArray[np.float32]
Tensors = dict[str, Tensor]


class WeightGenerator:
    """Generate random weights, equal for equal seeds."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return weights whose products have ``scale`` times the size of their input."""
        values = self._generator.standard_normal(shape) * (scale / np.sqrt(shape[-1]))
        return np.asarray(values, dtype=np.float32)


def gain(shape: Shape) -> float:
    """Return the relative size of a layer's contribution."""
    # In a deep model, the residual stream must not hide the contribution of a single layer's cache.
    return float(1.0 / np.sqrt(shape.n_layer))


def ones(n: int, value: float = 1.0) -> Tensor:
    """Return ``n`` weights of one value."""
    return np.full(n, value, dtype=np.float32)


def attention(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the attention tensors with the given heads of queries, keys and values."""
    width, size = shape.n_embd, head(shape)
    inner, kv = size * shape.n_head, size * max(shape.n_head_kv, 1)
    return {
        "attn_norm.weight": ones(width),
        # Attention is neither uniform (damage would average out) nor concentrated on one cell
        # (damage elsewhere would not show).
        "attn_q.weight": draw.matrix(inner, width, scale=1.3),
        "attn_k.weight": draw.matrix(kv, width, scale=1.3),
        "attn_v.weight": draw.matrix(kv, width, scale=2.0),
        "attn_output.weight": draw.matrix(width, inner, scale=3.0 * gain(shape)),
    }


def feed_forward(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the tensors of a dense feed-forward network."""
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


#: Ranks and widths of multi-head latent attention: LATENT + ROTATED values are cached per token.
LATENT, ROTATED, PLAIN, RANK = 32, 32, 32, 32

#: Heads of an indexer (with few heads, many cells have a score of 0), width of its key, cells
#: selected.
INDEXERS, INDEXED, PICKED = 16, 128, 64

#: Positions in a block, blocks that are selected, experts of a layer, width of its indexer's key.
BLOCK, BLOCKS, EXPERTS, NARROW = 32, 2, 2, 32


def deepseek2_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of multi-head latent attention."""
    return {
        "rope.dimension_count": ROTATED,
        "rope.scaling.yarn_log_multiplier": 0.1,
        # All layers are dense, but the keys about experts are required.
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


def deepseek2(shape: Shape, draw: WeightGenerator, _: int) -> Tensors:
    """Return a layer of multi-head latent attention."""
    width, heads = shape.n_embd, shape.n_head
    return {
        "attn_norm.weight": ones(width),
        "attn_q_a.weight": draw.matrix(RANK, width),
        "attn_q_a_norm.weight": ones(RANK),
        "attn_q_b.weight": draw.matrix(heads * (PLAIN + ROTATED), RANK, scale=1.3),
        "attn_kv_a_mqa.weight": draw.matrix(LATENT + ROTATED, width, scale=1.3),
        "attn_kv_a_norm.weight": ones(LATENT),
        "attn_k_b.weight": draw.matrix(heads, LATENT, PLAIN, scale=1.3),
        "attn_v_b.weight": draw.matrix(heads, PLAIN, LATENT, scale=2.0),
        "attn_output.weight": draw.matrix(width, heads * PLAIN, scale=3.0 * gain(shape)),
    } | feed_forward(shape, draw)


def deepseek32_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of multi-head latent attention with an indexer."""
    return deepseek2_keys(shape) | {
        "expert_gating_func": 2,
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": PICKED,
    }


def deepseek32(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a layer of multi-head latent attention with an indexer."""
    return deepseek2(shape, draw, layer) | {
        "indexer.k_norm.weight": ones(INDEXED),
        "indexer.k_norm.bias": ones(INDEXED, 0.0),
        "indexer.proj.weight": draw.matrix(INDEXERS, shape.n_embd),
        "indexer.attn_k.weight": draw.matrix(INDEXED, shape.n_embd),
        "indexer.attn_q_b.weight": draw.matrix(INDEXERS * INDEXED, RANK),
    }


def dots3note_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of a deepseek32 model in which every second layer has a window instead."""
    windows = [layer % 2 == 1 for layer in range(shape.n_layer)]
    return deepseek32_keys(shape) | {
        "attention.kv_lora_rank_swa": LATENT,
        "attention.key_length_mla_swa": PLAIN + ROTATED,
        "attention.value_length_mla_swa": PLAIN,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": windows,
        "rope.freq_base_swa": 10000.0,
        "attention.indexer.types": [not window for window in windows],
    }


def dots3note(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a layer with an indexer, or with a window."""
    made = deepseek2 if layer % 2 else deepseek32
    return made(shape, draw, layer) | {
        "attn_k_norm.weight": ones(ROTATED),
        "attn_gate.weight": draw.matrix(shape.n_head, shape.n_embd),
    }


def minimax_m3_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of block-sparse attention with an indexer, after a dense layer."""
    return {
        "rope.dimension_count": head(shape) // 2,
        "attention.key_length": head(shape),
        "attention.value_length": head(shape),
        "leading_dense_block_count": 1,
        "expert_count": EXPERTS,
        "expert_used_count": 1,
        "expert_feed_forward_length": shape.n_ff,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "attention.indexer.head_count": shape.n_head_kv,
        "attention.indexer.key_length": NARROW,
        "attention.indexer.top_k": BLOCKS,
        "attention.indexer.block_size": BLOCK,
        "attention.indexer.local_blocks": 1,
    }


def minimax_m3(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a dense layer, or one with experts whose indexer selects blocks."""
    size, width = head(shape), shape.n_embd
    found = attention(shape, draw) | {
        "attn_q_norm.weight": ones(size),
        "attn_k_norm.weight": ones(size),
    }
    if not layer:
        return found | feed_forward(shape, draw)
    return (
        found
        | experts(shape, draw)
        | {
            "indexer.q_proj.weight": draw.matrix(shape.n_head_kv * NARROW, width),
            "indexer.k_proj.weight": draw.matrix(NARROW, width),
            "indexer.q_norm.weight": ones(NARROW),
            "indexer.k_norm.weight": ones(NARROW),
        }
    )


#: Residual streams, ranks of their mixers, tokens per compressed row by layer (0: none), compressed
#: rows that are selected.
STREAMS, MIX_RANK, RATIOS, SUMMARIES = 4, 8, (0, 4, 128), 16


def deepseek4_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of a window, beyond which compressed rows of 4 and of 128 tokens serve."""
    return {
        "rope.dimension_count": ROTATED,
        "attention.key_length": head(shape),
        "attention.value_length": head(shape),
        "attention.q_lora_rank": RANK,
        "attention.sliding_window": shape.window,
        "attention.output_group_count": 1,
        "attention.output_lora_rank": RANK,
        "attention.compress_rope_freq_base": 10000.0,
        "attention.compress_ratios": [RATIOS[layer % 3] for layer in range(shape.n_layer)],
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": SUMMARIES,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "expert_count": EXPERTS,
        "expert_used_count": 1,
        "expert_feed_forward_length": shape.n_ff,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [10.0] * shape.n_layer,
    }


def deepseek4(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a layer with a window alone, or also with compressed rows."""
    width, size, heads = shape.n_embd, head(shape), shape.n_head
    ratio = RATIOS[layer % 3]
    found = {
        "attn_norm.weight": ones(width),
        "attn_sinks.weight": ones(heads, 0.0),
        "attn_q_a.weight": draw.matrix(RANK, width),
        "attn_q_a_norm.weight": ones(RANK),
        "attn_q_b.weight": draw.matrix(heads * size, RANK, scale=1.3),
        "attn_kv.weight": draw.matrix(size, width),
        "attn_kv_a_norm.weight": ones(size, 1.3),
        "attn_output_a.weight": draw.matrix(RANK, heads * size, scale=2.0),
        "attn_output_b.weight": draw.matrix(width, RANK, scale=2.0 * gain(shape)),
    } | experts(shape, draw)
    found |= _streams(shape, draw)
    if ratio:
        found |= _compressor("attn", size, ratio, shape, draw)
    if ratio == min(filter(None, RATIOS)):
        found |= _compressor("indexer", INDEXED, ratio, shape, draw) | {
            "indexer.proj.weight": draw.matrix(INDEXERS, width),
            "indexer.attn_q_b.weight": draw.matrix(INDEXERS * INDEXED, RANK),
        }
    return found


def _streams(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the mixers of the residual streams of a layer."""
    mixes = (2 + STREAMS) * STREAMS
    found: Tensors = {}
    for part in ("attn", "ffn"):
        found |= {
            f"hc_{part}_fn.weight": draw.matrix(mixes, STREAMS * shape.n_embd),
            f"hc_{part}_base.weight": ones(mixes, 0.0),
            f"hc_{part}_scale.weight": ones(3),
        }
    return found


def _compressor(name: str, size: int, ratio: int, shape: Shape, draw: WeightGenerator) -> Tensors:
    # The shorter blocks overlap: each row is computed from two of them.
    columns = size * (2 if ratio == min(filter(None, RATIOS)) else 1)
    return {
        f"{name}_compressor_kv.weight": draw.matrix(columns, shape.n_embd),
        f"{name}_compressor_gate.weight": draw.matrix(columns, shape.n_embd),
        f"{name}_compressor_ape.weight": draw.matrix(ratio, columns),
        f"{name}_compressor_norm.weight": ones(size, 1.3),
    }


def deepseek4_top(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the tensors that join the residual streams."""
    return {
        "output_norm.weight": ones(shape.n_embd),
        "output_hc_fn.weight": draw.matrix(STREAMS, STREAMS * shape.n_embd),
        "output_hc_base.weight": ones(STREAMS, 0.0),
        "output_hc_scale.weight": ones(1),
    }


def experts(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the tensors of a feed-forward network with experts, one of which all tokens share."""
    width, ff = shape.n_embd, shape.n_ff
    shared = feed_forward(shape, draw)
    return {
        "ffn_norm.weight": shared.pop("ffn_norm.weight"),
        **{name.replace(".weight", "_shexp.weight"): tensor for name, tensor in shared.items()},
        "ffn_gate_inp.weight": draw.matrix(EXPERTS, width),
        "exp_probs_b.bias": ones(EXPERTS, 0.0),
        "ffn_gate_exps.weight": draw.matrix(EXPERTS, ff, width),
        "ffn_up_exps.weight": draw.matrix(EXPERTS, ff, width),
        "ffn_down_exps.weight": draw.matrix(EXPERTS, width, ff, scale=gain(shape)),
    }


#: Tokens per pool of an indexer, tokens of the pools that are selected.
POOL, POOLED = 4, 32


def qwen4exp_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of recurrent layers, and of attention to pools that an indexer selects."""
    pools = [POOL if _attends(layer) else 0 for layer in range(shape.n_layer)]
    return _qwen2vl_keys(shape) | {
        "attention.key_length": head(shape),
        "attention.value_length": head(shape),
        "full_attention_interval": 2,
        "ssm.conv_kernel": SSM_CONV,
        "ssm.inner_size": 2 * SSM_WIDTH,
        "ssm.state_size": SSM_WIDTH,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 1,
        "hyper_connection.count": STREAMS,
        "hyper_connection.low_rank": MIX_RANK,
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": POOLED,
        "attention.compress_ratios": pools,
        "expert_count": EXPERTS,
        "expert_used_count": 1,
        "expert_feed_forward_length": shape.n_ff,
        "expert_shared_feed_forward_length": shape.n_ff,
    }


def qwen4exp(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a recurrent layer, or one whose indexer selects pools."""
    width, size, streams = shape.n_embd, head(shape), STREAMS * shape.n_embd
    found = experts(shape, draw) | {"ffn_gate_inp_shexp.weight": draw.matrix(width)}
    for name in ("ffn_norm.weight", "exp_probs_b.bias"):
        del found[name]
    for part in ("attn", "ffn"):
        found |= _mixer(f"hc_{part}", shape, draw)
        found[f"hc_{part}_inject.weight"] = draw.matrix(STREAMS, streams)
    if _attends(layer):
        heads = attention(shape, draw)
        del heads["attn_norm.weight"]
        # The rows of a head are followed by those of its gate.
        query = heads["attn_q.weight"].reshape(shape.n_head, size, width)
        gate = draw.matrix(shape.n_head, size, width)
        heads["attn_q.weight"] = np.concatenate([query, gate], axis=1).reshape(-1, width)
        return (
            found
            | heads
            | {
                "attn_q_norm.weight": ones(size),
                "attn_k_norm.weight": ones(size),
                "indexer.q_proj.weight": draw.matrix(INDEXERS * INDEXED, width),
                "indexer.k_proj.weight": draw.matrix(INDEXED, width),
                "indexer.q_norm.weight": ones(INDEXED),
                "indexer.k_norm.weight": ones(INDEXED),
            }
        )
    return found | {
        "attn_qkv.weight": draw.matrix(4 * SSM_WIDTH, width),
        "attn_gate.weight": draw.matrix(2 * SSM_WIDTH, width),
        "ssm_conv1d.weight": draw.matrix(4 * SSM_WIDTH, SSM_CONV),
        "ssm_dt.bias": ones(2, -3.0),
        "ssm_a": ones(2, -1.0),
        "ssm_beta.weight": draw.matrix(2, width),
        "ssm_alpha.weight": draw.matrix(2, width),
        "ssm_norm.weight": ones(SSM_WIDTH),
        "ssm_out.weight": draw.matrix(width, 2 * SSM_WIDTH, scale=3.0 * gain(shape)),
    }


def _mixer(name: str, shape: Shape, draw: WeightGenerator) -> Tensors:
    streams = STREAMS * shape.n_embd
    return {
        f"{name}_norm.weight": ones(streams),
        f"{name}_down.weight": draw.matrix(MIX_RANK, streams, scale=4.0),
        f"{name}_up.weight": draw.matrix(streams, MIX_RANK),
    }


def qwen4exp_top(shape: Shape, draw: WeightGenerator) -> Tensors:
    """Return the tensors that join the residual streams; they include the last norm."""
    return _mixer("output_hc", shape, draw)


def glm5_next_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of linear attention, and of latent attention to pools without positions."""
    return {
        "attention.head_count_kv": _hybrid_heads(shape),
        "attention.key_length": LATENT,
        "attention.value_length": LATENT,
        "attention.key_length_mla": PLAIN,
        "attention.value_length_mla": PLAIN,
        "attention.q_lora_rank": RANK,
        "attention.kv_lora_rank": LATENT,
        "rope.dimension_count": 0,
        "ssm.conv_kernel": SSM_CONV,
        "kda.head_dim": SSM_WIDTH,
        "leading_dense_block_count": shape.n_layer,
        "expert_feed_forward_length": shape.n_ff,
        "expert_shared_count": 1,
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": POOLED,
        "attention.indexer.kpool": POOL,
        "attention.indexer.kpool_select_tail": True,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
    }


def glm5_next(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a layer of linear attention, or of latent attention whose indexer selects pools."""
    width, heads, inner = shape.n_embd, shape.n_head, SSM_WIDTH * shape.n_head
    found = {"attn_norm.weight": ones(width)} | feed_forward(shape, draw) | _streams(shape, draw)
    if _attends(layer):
        return found | {
            "attn_q_a.weight": draw.matrix(RANK, width),
            "attn_q_a_norm.weight": ones(RANK),
            "attn_q_b.weight": draw.matrix(heads * PLAIN, RANK, scale=1.3),
            "attn_kv_a_mqa.weight": draw.matrix(LATENT, width, scale=1.3),
            "attn_kv_a_norm.weight": ones(LATENT),
            "attn_k_b.weight": draw.matrix(heads, LATENT, PLAIN, scale=1.3),
            "attn_v_b.weight": draw.matrix(heads, PLAIN, LATENT, scale=2.0),
            "attn_output.weight": draw.matrix(width, heads * PLAIN, scale=3.0 * gain(shape)),
            "indexer.k_norm.weight": ones(INDEXED),
            "indexer.k_norm.bias": ones(INDEXED, 0.0),
            "indexer.proj.weight": draw.matrix(INDEXERS, width),
            "indexer.attn_k.weight": draw.matrix(INDEXED, width),
            "indexer.attn_q_b.weight": draw.matrix(INDEXERS * INDEXED, RANK),
            "indexer_compressor_gate.weight": draw.matrix(INDEXED, width),
            "indexer_compressor_ape.weight": draw.matrix(POOL, INDEXED),
        }
    for name in "qkv":
        found |= {
            f"ssm_conv1d_{name}.weight": draw.matrix(inner, 1, SSM_CONV),
            f"attn_{name}.weight": draw.matrix(inner, width),
        }
    return found | {
        "ssm_f_a.weight": draw.matrix(SSM_WIDTH, width),
        "ssm_f_b.weight": draw.matrix(inner, SSM_WIDTH),
        "ssm_g_a.weight": draw.matrix(SSM_WIDTH, width),
        "ssm_g_b.weight": draw.matrix(inner, SSM_WIDTH),
        "ssm_beta.weight": draw.matrix(heads, width),
        "ssm_a": ones(heads, -1.0),
        "ssm_dt.bias": ones(inner, -3.0),
        "ssm_norm.weight": ones(SSM_WIDTH),
        "attn_output.weight": draw.matrix(width, inner, scale=3.0 * gain(shape)),
    }


def lfm2_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of short convolutions, and of attention with a window in other layers."""
    return _llama_keys(shape) | {
        "attention.head_count_kv": _hybrid_heads(shape),
        "attention.sliding_window": shape.window,
        "shortconv.l_cache": SSM_CONV,
    }


def lfm2(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    """Return a layer of attention, or a short convolution."""
    width = shape.n_embd
    if _attends(layer):
        norms = {f"attn_{name}_norm.weight": ones(head(shape)) for name in "qk"}
        return attention(shape, draw) | norms | feed_forward(shape, draw)
    return {
        "attn_norm.weight": ones(width),
        "shortconv.conv.weight": draw.matrix(width, SSM_CONV, scale=2.0),
        "shortconv.in_proj.weight": draw.matrix(3 * width, width),
        "shortconv.out_proj.weight": draw.matrix(width, width, scale=2.0 * gain(shape)),
    } | feed_forward(shape, draw)


def lfm2_top(shape: Shape, _: WeightGenerator) -> Tensors:
    """Return the last norm, which this architecture names differently."""
    return {"token_embd_norm.weight": ones(shape.n_embd)}


#: Width of the heads of a linear attention.
SSM_WIDTH = 32

#: Sizes of a recurrent state: columns of the convolution, width of the state, rank of the step.
SSM_CONV, SSM_STATE, SSM_RANK = 4, 16, 8


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata of a shape without the architecture prefix: ints, floats, lists."""
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
    draw = WeightGenerator(shape.seed)
    width = shape.n_embd
    # gemma multiplies its embeddings by this factor.
    size = 1.0 if shape.architecture == "gemma2" else np.sqrt(width)
    found = {"token_embd.weight": draw.matrix(shape.n_vocab, width, scale=size)}
    for layer in range(shape.n_layer):
        block = _ARCHITECTURES[shape.architecture][1](shape, draw, layer)
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    top = _TOPS.get(shape.architecture)
    found |= top(shape, draw) if top else {"output_norm.weight": ones(width)}
    if shape.architecture == "gemma2":
        # The model has no output tensor: the embeddings alone must distinguish the tokens.
        found["token_embd.weight"] *= np.float32(np.sqrt(width) / 2)
    else:
        found["output.weight"] = draw.matrix(shape.n_vocab, width, scale=4.0)
    return found


def _llama_keys(shape: Shape) -> dict[str, Any]:
    keys = {"rope.dimension_count": head(shape)}
    if shape.head:
        keys |= {"attention.key_length": shape.head, "attention.value_length": shape.head}
    return keys


def _llama(shape: Shape, draw: WeightGenerator, _: int) -> Tensors:
    return attention(shape, draw) | feed_forward(shape, draw)


def _qwen2vl_keys(shape: Shape) -> dict[str, Any]:
    # Of each head's pairs, some rotate by the time of a position, some by its row, some by its
    # column.
    pairs = head(shape) // 2
    rows = 3 * pairs // 8
    return _llama_keys(shape) | {"rope.dimension_sections": [pairs - 2 * rows, rows, rows, 0]}


def _qwen2vl(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    found = _llama(shape, draw, layer)
    biases = {f"attn_{name}.bias": draw.matrix(len(found[f"attn_{name}.weight"])) for name in "qkv"}
    return found | biases


def _gemma2_keys(shape: Shape) -> dict[str, Any]:
    width = head(shape)
    return {
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": shape.window,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma2(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    # A layer's output is as large as the weights of the norm after it. One sliding and one full
    # layer have large weights, the others small ones: the noise of this many quantized layers would
    # accumulate.
    size = 4.0 if layer < 2 else 0.1
    after = {
        "post_attention_norm.weight": ones(shape.n_embd, size),
        "post_ffw_norm.weight": ones(shape.n_embd, size / 2),
    }
    return attention(shape, draw) | feed_forward(shape, draw) | after


def _ssm_keys(shape: Shape) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": SSM_CONV,
        "ssm.inner_size": 2 * shape.n_embd,
        "ssm.state_size": SSM_STATE,
        "ssm.time_step_rank": SSM_RANK,
    }


def _mamba_keys(shape: Shape) -> dict[str, Any]:
    return _ssm_keys(shape) | {"attention.head_count": 0, "attention.head_count_kv": 0}


def _mamba(shape: Shape, draw: WeightGenerator, _: int) -> Tensors:
    width, inner = shape.n_embd, 2 * shape.n_embd
    decay = -np.arange(1, SSM_STATE + 1, dtype=np.float32)
    return {
        "attn_norm.weight": ones(width),
        "ssm_in.weight": draw.matrix(2 * inner, width),
        "ssm_conv1d.weight": draw.matrix(inner, SSM_CONV),
        "ssm_conv1d.bias": ones(inner, 0.0),
        "ssm_x.weight": draw.matrix(SSM_RANK + 2 * SSM_STATE, inner, scale=2.0),
        "ssm_dt.weight": draw.matrix(inner, SSM_RANK),
        # Steps so small that a state depends on some dozens of tokens.
        "ssm_dt.bias": ones(inner, -3.0),
        "ssm_a": np.repeat(decay[None], inner, axis=0),
        "ssm_d": ones(inner),
        "ssm_out.weight": draw.matrix(width, inner, scale=3.0 * gain(shape)),
    }


def _jamba_keys(shape: Shape) -> dict[str, Any]:
    return _ssm_keys(shape) | {"attention.head_count_kv": _hybrid_heads(shape)}


def _hybrid_heads(shape: Shape) -> list[int]:
    return [shape.n_head_kv if _attends(layer) else 0 for layer in range(shape.n_layer)]


def _attends(layer: int) -> bool:
    return layer % 2 == 1


def _jamba(shape: Shape, draw: WeightGenerator, layer: int) -> Tensors:
    if _attends(layer):
        return attention(shape, draw) | feed_forward(shape, draw)
    norms = {
        "ssm_dt_norm.weight": ones(SSM_RANK),
        "ssm_b_norm.weight": ones(SSM_STATE),
        "ssm_c_norm.weight": ones(SSM_STATE),
    }
    return _mamba(shape, draw, layer) | norms | feed_forward(shape, draw)


_Keys = Callable[["Shape"], dict[str, Any]]
_Block = Callable[["Shape", WeightGenerator, int], Tensors]

_ARCHITECTURES: dict[str, tuple[_Keys, _Block]] = {
    "llama": (_llama_keys, _llama),
    "qwen2vl": (_qwen2vl_keys, _qwen2vl),
    "gemma2": (_gemma2_keys, _gemma2),
    "mamba": (_mamba_keys, _mamba),
    "jamba": (_jamba_keys, _jamba),
    "deepseek2": (deepseek2_keys, deepseek2),
    "deepseek32": (deepseek32_keys, deepseek32),
    "dots3note": (dots3note_keys, dots3note),
    "minimax-m3": (minimax_m3_keys, minimax_m3),
    "deepseek4": (deepseek4_keys, deepseek4),
    "qwen4exp": (qwen4exp_keys, qwen4exp),
    "glm5-next": (glm5_next_keys, glm5_next),
    "lfm2": (lfm2_keys, lfm2),
}

#: The tensors after the last layer, of architectures with more than a norm named output_norm.
_TOPS: dict[str, Callable[[Shape, WeightGenerator], Tensors]] = {
    "deepseek4": deepseek4_top,
    "qwen4exp": qwen4exp_top,
    "lfm2": lfm2_top,
}
