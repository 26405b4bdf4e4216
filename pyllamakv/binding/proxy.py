"""Spell the operations of `protocol.Native` as messages: what `remote.Remote` sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.mapped import RawMapping
    from pyllamakv.binding.protocol import (
        About,
        Buffer,
        ContextHandle,
        ContextInfo,
        ContextParams,
        Counters,
        Device,
        ModelHandle,
        ModelInfo,
        ModelParams,
        RawCells,
        RawDefrag,
        SamplerHandle,
        SamplerParams,
    )


class Proxy:
    """Turn each operation into one message, and its answer into a result."""

    about: About

    def _ask(self, operation: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def _release(self, operation: str, handle: int) -> None:
        raise NotImplementedError

    def many(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Run operations, each (name, arguments), in one round trip; the first error ends it."""
        found: list[Any] = self._ask("many", [list(call) for call in calls])
        return found

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log."""
        return [(level, text) for level, text in self._ask("logs")]

    def log_level(self, lowest: int) -> int:
        """Keep only records of this level and above from now on; return the level before."""
        found: int = self._ask("log_level", lowest)
        return found

    def devices(self) -> list[Device]:
        """List the devices."""
        found: list[Device] = self._ask("devices")
        return found

    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise ModelError."""
        found: ModelHandle = self._ask("model_load", path, params)
        return found

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after the contexts and samplers that live on it. May be repeated."""
        self._release("model_free", model)

    def model_info(self, model: ModelHandle) -> ModelInfo:
        """Describe a model."""
        found: ModelInfo = self._ask("model_info", model)
        return found

    def model_meta(self, model: ModelHandle, key: str) -> str | None:
        """Return a value of the model file's metadata, or None."""
        found: str | None = self._ask("model_meta", model, key)
        return found

    def tokenize(
        self, model: ModelHandle, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the tokens of a text."""
        found: list[int] = self._ask("tokenize", model, text, add_special, parse_special)
        return found

    def token_piece(self, model: ModelHandle, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""
        found: bytes = self._ask("token_piece", model, token, special)
        return found

    def token_is_eog(self, model: ModelHandle, token: int) -> bool:
        """Tell whether a token ends a generation."""
        found: bool = self._ask("token_is_eog", model, token)
        return found

    def context_new(self, model: ModelHandle, params: ContextParams) -> ContextHandle:
        """Make a context or raise ContextError."""
        found: ContextHandle = self._ask("context_new", model, params)
        return found

    def context_free(self, context: ContextHandle) -> None:
        """Free a context. May be repeated."""
        self._release("context_free", context)

    def context_info(self, context: ContextHandle) -> ContextInfo:
        """Describe a context as it was made."""
        found: ContextInfo = self._ask("context_info", context)
        return found

    def buffers(self, context: ContextHandle) -> list[Buffer]:
        """Return what the library said that it allocated for a context."""
        found: list[Buffer] = self._ask("buffers", context)
        return found

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set how many threads compute from now on."""
        self._ask("threads", context, n_threads, n_threads_batch)

    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32],
        pos: NDArray[np.int32],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32],
        logits: NDArray[np.int8] | None,
    ) -> int:
        """Run one batch; return llama_decode's own code."""
        found: int = self._ask("decode", context, token, pos, seq_count, seq_id, logits)
        return found

    def decode_one(self, context: ContextHandle, token: int, pos: int, seq_id: int) -> int:
        """Run one token of one sequence with logits."""
        found: int = self._ask("decode_one", context, token, pos, seq_id)
        return found

    def decode_each(
        self,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
    ) -> int:
        """Run one token of each of several sequences, all with logits."""
        found: int = self._ask("decode_each", context, token, pos, seq_id)
        return found

    def logits(self, context: ContextHandle, index: int, n_vocab: int) -> NDArray[np.float32]:
        """Return a read-only copy (n_vocab,) of logits."""
        found: NDArray[np.float32] = self._ask("logits", context, index, n_vocab)
        found.flags.writeable = False
        return found

    def logits_all(self, context: ContextHandle, n_vocab: int) -> NDArray[np.float32]:
        """Return a read-only copy (n, n_vocab) of the logits of every place that has any."""
        found: NDArray[np.float32] = self._ask("logits_all", context, n_vocab)
        found.flags.writeable = False
        return found

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""
        self._ask("cancel_after", context, polls)

    def cancel_polls(self, context: ContextHandle) -> int:
        """Return how often the last decode polled the abort callback."""
        found: int = self._ask("cancel_polls", context)
        return found

    def clear(self, context: ContextHandle, data: bool) -> None:
        """Forget every sequence; with ``data`` the contents too."""
        self._ask("clear", context, data)

    def seq_rm(self, context: ContextHandle, seq: int, p0: int, p1: int) -> bool:
        """Remove positions; False when the memory refuses a partial removal."""
        found: bool = self._ask("seq_rm", context, seq, p0, p1)
        return found

    def seq_cp(self, context: ContextHandle, src: int, dst: int, p0: int, p1: int) -> None:
        """Share positions of one sequence with another."""
        self._ask("seq_cp", context, src, dst, p0, p1)

    def seq_keep(self, context: ContextHandle, seq: int) -> None:
        """Remove every other sequence."""
        self._ask("seq_keep", context, seq)

    def seq_add(self, context: ContextHandle, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions by a distance."""
        self._ask("seq_add", context, seq, p0, p1, delta)

    def seq_div(self, context: ContextHandle, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions."""
        self._ask("seq_div", context, seq, p0, p1, divisor)

    def seq_pos_min(self, context: ContextHandle, seq: int) -> int:
        """Return the first position of a sequence, -1 when it is empty."""
        found: int = self._ask("seq_pos_min", context, seq)
        return found

    def seq_pos_max(self, context: ContextHandle, seq: int) -> int:
        """Return the last position of a sequence, -1 when it is empty."""
        found: int = self._ask("seq_pos_max", context, seq)
        return found

    def defrag(self, context: ContextHandle) -> RawDefrag:
        """Defragment or raise Unsupported."""
        found: RawDefrag = self._ask("defrag", context)
        return found

    def update(self, context: ContextHandle) -> None:
        """Apply what is pending: shifts and stream copies."""
        self._ask("update", context)

    def cells(self, context: ContextHandle, cache: int) -> RawCells:
        """Read the cells of one stream of one cache, or raise Unsupported."""
        found: RawCells = self._ask("cells", context, cache)
        return found

    def counters(self, context: ContextHandle) -> Counters:
        """Read the counters or raise Unsupported."""
        found: Counters = self._ask("counters", context)
        return found

    def mapping(self, context: ContextHandle) -> RawMapping:
        """Read what mapped memory takes, or raise Unsupported."""
        found: RawMapping = self._ask("mapping", context)
        return found

    def mapping_trim(self, context: ContextHandle) -> int:
        """Give the memory behind the last used cell back; return how many bytes."""
        found: int = self._ask("mapping_trim", context)
        return found

    def mapping_flush(self, context: ContextHandle, tokens: NDArray[np.int32] | None) -> None:
        """Write a kept cache to its file, with a token for each cell of all caches."""
        self._ask("mapping_flush", context, tokens)

    def mapping_tokens(self, context: ContextHandle) -> NDArray[np.int32]:
        """Return the tokens that the last flush was given."""
        found: NDArray[np.int32] = self._ask("mapping_tokens", context)
        return found

    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return everything that the cache holds of a sequence."""
        found: bytes = self._ask("state_save", context, seq)
        return found

    def state_load(self, context: ContextHandle, seq: int, state: bytes) -> int:
        """Restore a sequence; return the bytes read, 0 when the library refused."""
        found: int = self._ask("state_load", context, seq, state)
        return found

    def sampler_new(self, model: ModelHandle, params: SamplerParams) -> SamplerHandle:
        """Make a sampler over a model's vocabulary."""
        found: SamplerHandle = self._ask("sampler_new", model, params)
        return found

    def sampler_free(self, sampler: SamplerHandle) -> None:
        """Free a sampler. May be repeated."""
        self._release("sampler_free", sampler)

    def sampler_reset(self, sampler: SamplerHandle) -> None:
        """Forget the tokens that a sampler has seen."""
        self._ask("sampler_reset", sampler)

    def sample(self, sampler: SamplerHandle, context: ContextHandle, index: int) -> int:
        """Choose a token from the logits of a place, and remember it."""
        found: int = self._ask("sample", sampler, context, index)
        return found

    def sample_all(self, sampler: SamplerHandle, context: ContextHandle, room: int) -> list[int]:
        """Choose a token for every place with logits, in order."""
        found: list[int] = self._ask("sample_all", sampler, context, room)
        return found

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode a token of each sequence and choose the next ones, ``steps`` times."""
        code, rows = self._ask("run", sampler, context, token, pos, seq_id, steps, stop)
        return code, rows
