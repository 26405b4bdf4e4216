"""Say in types how a library decodes, gives logits and samples: a part of `protocol.Native`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import (
        ContextHandle,
        ModelHandle,
        SamplerHandle,
        SamplerParams,
    )


class Decoder(Protocol):
    """Decode batches in a context, and choose tokens from what they left."""

    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32],
        pos: NDArray[np.int32],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32],
        logits: NDArray[np.int8] | None,
    ) -> int:
        """Run one batch; return llama_decode's own code: 0, 1, 2 or a negative one.

        Raises `NativeError` when llama.cpp threw or an argument was refused.
        """

    def decode_one(self, context: ContextHandle, token: int, pos: int, seq_id: int) -> int:
        """Run one token of one sequence with logits: `decode` without arrays."""

    def decode_each(
        self,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
    ) -> int:
        """Run one token of each of several sequences, all with logits: `decode` without arrays."""

    def logits(self, context: ContextHandle, index: int, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n_vocab,) of a place in the last batch: a view where it can be one.

        A negative index counts from the end of the outputs, as in llama.cpp. The caller guards
        against staleness.
        """

    def logits_all(self, context: ContextHandle, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n, n_vocab) of every place of the last batch that has any, in order.

        A view where the library lays the rows out one after the other, else a copy.
        """

    def cancel(self, context: ContextHandle) -> None:
        """End the decode that runs; callable from any thread."""

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""

    def cancel_polls(self, context: ContextHandle) -> int:
        """Return how often the last decode polled the abort callback."""

    # samplers
    def sampler_new(self, model: ModelHandle, params: SamplerParams) -> SamplerHandle:
        """Make a sampler."""

    def sampler_free(self, sampler: SamplerHandle) -> None:
        """Free a sampler."""

    def sampler_reset(self, sampler: SamplerHandle) -> None:
        """Forget what a sampler has seen."""

    def sample(self, sampler: SamplerHandle, context: ContextHandle, index: int) -> int:
        """Choose a token from the logits of a place in the last batch, and accept it."""

    def sample_all(self, sampler: SamplerHandle, context: ContextHandle, room: int) -> list[int]:
        """Choose a token for every place of the last batch with logits, in order.

        Raises `NativeError` when there are more than ``room``, or none.
        """

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
        """Decode a token of each sequence and choose the next ones, ``steps`` times in one call.

        Returns the last decode's code and the tokens chosen after each step that was decoded; with
        ``stop`` those of the last step may hold an end of generation.
        """
