"""Write an encoder with a classification head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

#: Shape of the encoder.
N_VOCAB, WIDTH, FEED, CONTEXT = 32, 32, 64, 64


def encoder(
    path: Path, pooling: int | None = None
) -> tuple[Path, Callable[[NDArray[np.float32]], NDArray[np.float32]]]:
    """Write a BERT of one layer; return its path and its head, a function of one embedding."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    weights = {
        "token_embd.weight": draw(N_VOCAB, WIDTH),
        "token_types.weight": draw(2, WIDTH),
        "position_embd.weight": draw(CONTEXT, WIDTH),
        "cls.weight": draw(WIDTH, WIDTH),
        "cls.bias": draw(WIDTH),
        "cls.output.weight": draw(1, WIDTH),
        "cls.output.bias": draw(1),
    }
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        weights |= {f"blk.0.{name}.weight": draw(WIDTH, WIDTH), f"blk.0.{name}.bias": draw(WIDTH)}
    weights |= {"blk.0.ffn_up.weight": draw(FEED, WIDTH), "blk.0.ffn_up.bias": draw(FEED)}
    weights |= {"blk.0.ffn_down.weight": draw(WIDTH, FEED), "blk.0.ffn_down.bias": draw(WIDTH)}
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        weights |= {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": draw(WIDTH)}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_uint32("bert.pooling_type", pooling)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def head(first: NDArray[np.float32]) -> NDArray[np.float32]:
        hidden = np.tanh(weights["cls.weight"] @ first + weights["cls.bias"])
        return weights["cls.output.weight"] @ hidden + weights["cls.output.bias"]

    return path, head
