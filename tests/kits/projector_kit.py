"""Write a multimodal projector (`--mmproj`) for a generated model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

#: Width of the vision encoder, and of its feed-forward layers.
_WIDTH, _WIDE = 16, 24


def write(path: Path, n_embd: int) -> Path:
    """Write a projector of images of 28 x 28 to ``n_embd`` values, and return its path."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    for key, value in {
        "embedding_length": _WIDTH,
        "attention.head_count": 2,
        "feed_forward_length": _WIDE,
        "block_count": 2,
        "projection_dim": _WIDTH,
        "image_size": 28,
        "patch_size": 14,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (_WIDTH, 3, 14, 14),
        "v.position_embd.weight": (4, _WIDTH),
        "mm.0.weight": (n_embd, _WIDTH),
        "mm.0.bias": (n_embd,),
        "mm.2.weight": (n_embd, n_embd),
        "mm.2.bias": (n_embd,),
    }
    for layer in range(2):
        block = f"v.blk.{layer}"
        shapes |= {f"{block}.attn_{name}.weight": (_WIDTH,) * 2 for name in ("q", "k", "v", "out")}
        shapes |= {
            f"{block}.ln{n}.{name}": (_WIDTH,) for n in (1, 2) for name in ("weight", "bias")
        }
        shapes |= {f"{block}.ffn_up.weight": (_WIDE, _WIDTH)}
        shapes |= {f"{block}.ffn_down.weight": (_WIDTH, _WIDE)}
    rng = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
