"""Architectures with latent attention, with an indexer that picks cells, or with both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.scenarios import weights

if TYPE_CHECKING:
    from pyllamakv.scenarios.synthetic import Shape
    from pyllamakv.scenarios.weights import Tensors

#: Ranks and widths of multi-head latent attention: what is kept per token is LATENT + ROTATED wide.
LATENT, ROTATED, PLAIN, RANK = 32, 32, 32, 32

#: Heads of an indexer (with few of them many cells score 0 alike), width of its key, cells picked.
INDEXERS, INDEXED, PICKED = 16, 128, 64

#: Positions in a block, blocks that are picked, experts of a layer, width of its indexer's key.
BLOCK, BLOCKS, EXPERTS, NARROW = 32, 2, 2, 32


def deepseek2_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of multi-head latent attention."""
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


def deepseek2(shape: Shape, draw: weights.Draw, _: int) -> Tensors:
    """Return a layer of multi-head latent attention."""
    width, heads = shape.n_embd, shape.n_head
    return {
        "attn_norm.weight": weights.ones(width),
        "attn_q_a.weight": draw.matrix(RANK, width),
        "attn_q_a_norm.weight": weights.ones(RANK),
        "attn_q_b.weight": draw.matrix(heads * (PLAIN + ROTATED), RANK, scale=1.3),
        "attn_kv_a_mqa.weight": draw.matrix(LATENT + ROTATED, width, scale=1.3),
        "attn_kv_a_norm.weight": weights.ones(LATENT),
        "attn_k_b.weight": draw.matrix(heads, LATENT, PLAIN, scale=1.3),
        "attn_v_b.weight": draw.matrix(heads, PLAIN, LATENT, scale=2.0),
        "attn_output.weight": draw.matrix(width, heads * PLAIN, scale=3.0 * weights.gain(shape)),
    } | weights.forward(shape, draw)


def deepseek32_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of the same with an indexer."""
    return deepseek2_keys(shape) | {
        "expert_gating_func": 2,
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXED,
        "attention.indexer.top_k": PICKED,
    }


def deepseek32(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    """Return a layer of the same with an indexer."""
    return deepseek2(shape, draw, layer) | {
        "indexer.k_norm.weight": weights.ones(INDEXED),
        "indexer.k_norm.bias": weights.ones(INDEXED, 0.0),
        "indexer.proj.weight": draw.matrix(INDEXERS, shape.n_embd),
        "indexer.attn_k.weight": draw.matrix(INDEXED, shape.n_embd),
        "indexer.attn_q_b.weight": draw.matrix(INDEXERS * INDEXED, RANK),
    }


def dots3note_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of the same where every other layer has a window and no indexer."""
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


def dots3note(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    """Return a layer with an indexer, or with a window."""
    made = deepseek2 if layer % 2 else deepseek32
    return made(shape, draw, layer) | {
        "attn_k_norm.weight": weights.ones(ROTATED),
        "attn_gate.weight": draw.matrix(shape.n_head, shape.n_embd),
    }


def minimax_m3_keys(shape: Shape) -> dict[str, Any]:
    """Return the keys of attention to blocks that an indexer picks, behind a dense layer."""
    return {
        "rope.dimension_count": weights.head(shape) // 2,
        "attention.key_length": weights.head(shape),
        "attention.value_length": weights.head(shape),
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


def minimax_m3(shape: Shape, draw: weights.Draw, layer: int) -> Tensors:
    """Return a dense layer, or one with experts whose indexer picks blocks."""
    size, width, ff = weights.head(shape), shape.n_embd, shape.n_ff
    found = weights.attention(shape, draw) | {
        "attn_q_norm.weight": weights.ones(size),
        "attn_k_norm.weight": weights.ones(size),
    }
    if not layer:
        return found | weights.forward(shape, draw)
    shared = weights.forward(shape, draw)
    return found | {
        "ffn_norm.weight": shared.pop("ffn_norm.weight"),
        **{name.replace(".weight", "_shexp.weight"): tensor for name, tensor in shared.items()},
        "ffn_gate_inp.weight": draw.matrix(EXPERTS, width),
        "exp_probs_b.bias": weights.ones(EXPERTS, 0.0),
        "ffn_gate_exps.weight": draw.matrix(EXPERTS, ff, width),
        "ffn_up_exps.weight": draw.matrix(EXPERTS, ff, width),
        "ffn_down_exps.weight": draw.matrix(EXPERTS, width, ff, scale=weights.gain(shape)),
        "indexer.q_proj.weight": draw.matrix(shape.n_head_kv * NARROW, width),
        "indexer.k_proj.weight": draw.matrix(NARROW, width),
        "indexer.q_norm.weight": weights.ones(NARROW),
        "indexer.k_norm.weight": weights.ones(NARROW),
    }
