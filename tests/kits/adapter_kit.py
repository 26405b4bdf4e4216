"""Write LoRA adapters for generated models, and the models that they merge with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import gguf
import numpy as np
import runtime_kit

from pyllamakv.scenarios import architectures, synthetic_models
from pyllamakv.scenarios.architectures import Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.adapter import Adapter
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model

    Pair = tuple[NDArray[np.float32], NDArray[np.float32]]

#: The model that tests adapt: `bytes` with two layers.
SHAPE = Shape("adapted", n_layer=2, n_vocab=320, vocab="bytes")
#: The tensors of a layer that adapters usually change.
NAMES = tuple(
    f"blk.{layer}.{name}.weight"
    for layer in range(SHAPE.n_layer)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down")
)

META = {"general.type": "adapter", "adapter.type": "lora"}


@dataclass
class AdapterFile:
    """What an adapter file contains; tests change a part of it."""

    rank: int = 4
    alpha: float = 8.0
    seed: int = 1
    names: tuple[str, ...] = NAMES
    meta: dict[str, str] = field(default_factory=META.copy)
    #: The model that the adapter is for; its architecture unless another one is given.
    shape: Shape = SHAPE
    architecture: str = ""
    #: Replaces or adds tensors by their complete names; None removes one.
    tensors: dict[str, NDArray[Any] | None] = field(default_factory=dict)
    #: The type of ``adapter.lora.alpha``.
    alpha_type: gguf.GGUFValueType = gguf.GGUFValueType.FLOAT32

    def pairs(self) -> dict[str, Pair]:
        """Return A (rank, n_in) and B (n_out, rank) by the name of the adapted tensor."""
        rng = np.random.default_rng(self.seed)
        shapes = {name: each.shape for name, each in architectures.tensors(self.shape).items()}
        return {
            name: (
                rng.normal(0, 0.2, (self.rank, shapes[name][1])).astype(np.float32),
                rng.normal(0, 0.2, (shapes[name][0], self.rank)).astype(np.float32),
            )
            for name in self.names
        }

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, self.architecture or self.shape.architecture)
        for key, value in self.meta.items():
            writer.add_string(key, value)
        writer.add_key_value("adapter.lora.alpha", self.alpha, self.alpha_type)
        found: dict[str, NDArray[Any] | None] = {}
        for name, (a, b) in self.pairs().items():
            found |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        for name, tensor in (found | self.tensors).items():
            if tensor is not None:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def base(folder: Path) -> Path:
    """Return the model that the adapters are for."""
    return synthetic_models.generate(SHAPE, folder)


def merged(folder: Path, *adapters: tuple[AdapterFile, float]) -> Path:
    """Write the model whose weights contain adapters with these scales."""
    weights = architectures.tensors(SHAPE)
    for file, scale in adapters:
        for name, (a, b) in file.pairs().items():
            weights[name] = weights[name] + np.float32(scale * file.alpha / file.rank) * (b @ a)
    path = folder / "merged.gguf"
    with mock.patch.object(architectures, "tensors", lambda _shape: weights):
        synthetic_models.write(SHAPE, path)
    return path


def simulated_model(folder: Path, **native: Any) -> Model:
    """Return the model that the adapters are for, in a simulated library."""
    return runtime_kit.library(**native).load_model(base(folder))


def simulated(folder: Path, **options: Any) -> tuple[Context, Adapter]:
    """Return a context of 256 cells and 4 sequences in a simulated library, and an adapter."""
    model = simulated_model(folder)
    adapter = model.load_adapter(AdapterFile().write(folder / "one.gguf"))
    return model.context(256, n_seq_max=4, **options), adapter
