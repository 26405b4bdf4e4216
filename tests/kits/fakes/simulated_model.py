"""Simulate a model whose tokens are bytes: token = byte + 3, 1 begins, 2 ends."""

from __future__ import annotations

from fakes.simulated_cache import N_EMBD, N_LAYER

from pyllamakv.binding.protocol import ModelInfo
from pyllamakv.errors import ModelError

N_VOCAB = 259


class SimulatedModels:
    """Answer the calls on models."""

    def model_load(self, path: str, params: object) -> int:
        if path.endswith("refused.gguf"):
            raise ModelError("unknown model architecture")
        return self._new("model")

    def model_free(self, model: int) -> None:
        self._free(model, "model")

    def model_info(self, model: int) -> ModelInfo:
        return ModelInfo(
            n_vocab=N_VOCAB, n_ctx_train=512, n_embd=N_EMBD, n_layer=N_LAYER, n_head=1,
            n_head_kv=1, n_embd_k_gqa=N_EMBD, n_embd_v_gqa=N_EMBD, has_vocab=True, token_bos=1,
            token_eos=2, token_eot=-1, token_nl=13, add_bos=True, is_recurrent=False,
            n_params=1000, n_bytes=4000, n_cls_out=0, n_embd_out=N_EMBD,
        )  # fmt: skip

    def model_meta(self, model: int, key: str) -> str | None:
        return self.meta.get(key)

    def tokenize(
        self, model: int, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        return [1] * add_special + [byte + 3 for byte in text]

    def token_piece(self, model: int, token: int, special: bool) -> bytes:
        return bytes([token - 3]) if token >= 3 else b"</s>" if special else b""

    def token_is_eog(self, model: int, token: int) -> bool:
        return token == 2
