"""Speak to models and samplers of a library in this process."""

from __future__ import annotations

import itertools
from typing import Any

from pyllamakv.binding import structs
from pyllamakv.binding.codes import OWN
from pyllamakv.binding.core import Core, struct
from pyllamakv.binding.protocol import (
    Capability,
    ModelHandle,
    ModelInfo,
    ModelParams,
    SamplerHandle,
    SamplerParams,
)
from pyllamakv.native._plk import ffi


class Models(Core):
    """Keep the models of a library; a model's contexts and samplers go before it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ids = itertools.count(1)
        self._models: dict[int, Any] = {}
        self._samplers: dict[int, tuple[Any, int]] = {}

    def _model(self, handle: int) -> Any:
        return self._models.get(handle) or self._gone("model")

    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise ModelError."""
        raw = struct("plk_model_params")
        alive = structs.fill(raw, params, lambda text: ffi.new("char[]", text))
        out = ffi.new("plk_model **")
        code = self._lib.plk_model_load(str(path).encode(), raw, out)
        del alive
        self._done(code, f"load {path}", "model")
        self._drain()
        handle = ModelHandle(next(self._ids))
        self._models[handle] = out[0]
        return handle

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after the samplers that live on it. May be repeated."""
        for sampler in [s for s, (_raw, owner) in self._samplers.items() if owner == model]:
            self.sampler_free(SamplerHandle(sampler))
        raw = self._models.pop(model, None)
        if raw is not None:
            self._lib.plk_model_free(raw)

    def model_info(self, model: ModelHandle) -> ModelInfo:
        """Describe a model."""
        raw = struct("plk_model_info")
        self._done(self._lib.plk_model_read(self._model(model), raw), "read the model", "model")
        return structs.read(ModelInfo, raw)

    def model_meta(self, model: ModelHandle, key: str) -> str | None:
        """Return a value of the model file's metadata, or None."""
        room = 1024
        while True:
            text = ffi.new("char[]", room)
            length = self._lib.plk_model_meta(self._model(model), key.encode(), text, room)
            if length < OWN:
                raise self._error(length, f"read {key}", "model")
            if length < room:
                found = bytes(ffi.buffer(text, max(0, length)))
                return found.decode("utf-8", "replace") if length >= 0 else None
            room = length + 1

    def tokenize(
        self, model: ModelHandle, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the tokens of a text."""
        raw = self._model(model)
        room = len(text) + 8
        for _attempt in range(2):
            tokens = ffi.new("int32_t[]", room)
            count = self._lib.plk_tokenize(
                raw, text, len(text), tokens, room, add_special, parse_special
            )
            if count >= 0:
                return ffi.unpack(tokens, count)  # type: ignore[no-any-return]
            if -count <= room:
                break  # not a need but a code
            room = -count
        raise self._error(count, f"tokenize {len(text)} bytes", "model")

    def token_piece(self, model: ModelHandle, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""
        raw = self._model(model)
        room = 128
        for _attempt in range(2):
            piece = ffi.new("char[]", room)
            count = self._lib.plk_token_piece(raw, token, piece, room, special)
            if count >= 0:
                return bytes(ffi.buffer(piece, count))
            if -count <= room:
                break
            room = -count
        raise self._error(count, f"read token {token}", "model")

    def token_is_eog(self, model: ModelHandle, token: int) -> bool:
        """Tell whether a token ends a generation."""
        code = self._lib.plk_token_is_eog(self._model(model), token)
        self._done(code, f"read token {token}", "model")
        return bool(code)

    # samplers
    def _sampler(self, handle: int) -> Any:
        found = self._samplers.get(handle)
        return found[0] if found else self._gone("sampler")

    def sampler_new(self, model: ModelHandle, params: SamplerParams) -> SamplerHandle:
        """Make a sampler over a model's vocabulary."""
        raw = struct("plk_sampler_params")
        structs.fill(raw, params, lambda text: ffi.new("char[]", text))
        out = ffi.new("plk_sampler **")
        code = self._lib.plk_sampler_new(self._model(model), raw, out)
        self._done(code, "make a sampler", "sampler", capability=Capability.SAMPLER)
        handle = SamplerHandle(next(self._ids))
        self._samplers[handle] = (out[0], model)
        return handle

    def sampler_free(self, sampler: SamplerHandle) -> None:
        """Free a sampler. May be repeated."""
        raw, _model = self._samplers.pop(sampler, (None, 0))
        if raw is not None:
            self._lib.plk_sampler_free(raw)

    def sampler_reset(self, sampler: SamplerHandle) -> None:
        """Forget the tokens that a sampler has seen."""
        self._lib.plk_sampler_reset(self._sampler(sampler))
