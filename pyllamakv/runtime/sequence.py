"""A sequence of a context: decode, generate, fork, trim, shift and save it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.protocol import MemoryType, Pooling
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    Cancelled,
    Closed,
    PartialRemovalRefused,
    SequenceChanged,
    SharedCells,
    StaleLogits,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime import decode_failure, embedding, generation, state, swa
from pyllamakv.runtime.batch import Feed
from pyllamakv.runtime.ggml_types import number_type
from pyllamakv.runtime.ledger import POSITION_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyllamakv.binding.protocol import ContextInfo, ContextParams, SamplerParams
    from pyllamakv.runtime.batch import LogitsChoice
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.generated_text import TextStream
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.logits import Embedding, Logits
    from pyllamakv.runtime.parts import ModelParts
    from pyllamakv.runtime.sampler import TokenSampler

#: Metadata key of models with several positions per token, by architecture.
_SECTIONS = "{}.rope.dimension_sections"


class Sequence(ClosedOnExit):
    """A sequence of a context. `Context.sequence` and `fork` create it.

    Position ranges are p0 <= p < p1; None is an open end.
    """

    _internal = frozenset(("check", "check_end", "ledger", "open"))

    def __init__(self, context: Context, number: int) -> None:
        #: The context of the sequence.
        self.context = context
        #: The number of the sequence, from 0.
        self.id = number
        self.ledger: Ledger = context.ledgers[number]
        self._group = context.decoder.single(number)
        self.open = True

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, ordered by position."""
        return self.ledger.tokens.copy()

    @property
    def positions(self) -> list[int]:
        """The position of each token."""
        return self.ledger.positions.copy()

    @property
    def next_pos(self) -> int:
        """The position of the next token."""
        return self.ledger.next

    @property
    def text(self) -> str:
        """Return the tokens as text."""
        return self.context.model.detokenize(self.tokens)

    @property
    def pos_min(self) -> int:
        """The lowest position that the library reports, or -1.

        In a model with a sliding window, this is the lowest position in the sliding-window cache:
        layers with full attention have the earlier ones as well.
        """
        with self.context.lock:
            self.check(self.context)
            return self.context.native.seq_pos_min(self.context.handle, self.id)

    @property
    def pos_max(self) -> int:
        """The highest position in the cache, or -1."""
        with self.context.lock:
            self.check(self.context)
            return self.context.native.seq_pos_max(self.context.handle, self.id)

    def feed(self, tokens: Any, logits: LogitsChoice = "last") -> Feed:
        """Return the next tokens, for a decode. Decodes nothing; reusable.

        ``tokens`` is a list, another ordered sequence or an array of whole numbers;
        `Model.tokenize` converts a text. Raises ArgumentTypeError for anything else.
        """
        self.check(self.context)
        arguments.choice("logits", logits, ("last", "all", "none"))
        return Feed(self, tokens, logits)

    def step(self, token: int) -> None:
        """Decode the next token, with logits. This is the cheapest decode.

        Raises as `Context.decode` does.
        """
        context = self.context
        with context.step_lock as handle:
            if not self.open:
                self.check(context)
            if type(token) is not int:
                token = arguments.integer("token", token)
            decoder = context.decoder
            if not 0 <= token < context.n_vocab:
                decoder.check_token(token)
            decoder.step(handle, self._group, [token])

    def prefill(self, tokens: Any, *, logits: bool = True) -> None:
        """Decode any number of tokens in batches of n_batch, with logits of the last token.

        ``tokens`` are as in `feed`. If a batch fails, the batches before it remain, and
        ``len(sequence)`` shows the progress. Raises PromptTooLong, before any decode, if the cache
        has fewer cells than tokens.
        """
        logits = arguments.flag("logits", logits)
        rest = self.feed(tokens).tokens
        context = self.context
        cancels, size = context.cancels, context.info.n_batch
        if not len(rest):
            msg = "no tokens to decode"
            raise UsageError(msg)
        if context.guard:
            decode_failure.check_length(context, len(self) + len(rest))
        with context.lock:
            end = self.ledger.marks[-1:]
            for start in range(0, len(rest), size):
                if start:
                    context.lock.let_readers()
                if cancels != context.cancels:
                    msg = f"cancelled with {len(rest) - start} tokens left; the others remain"
                    raise Cancelled(msg, code=2)
                self.check_end(end, f"{len(rest) - start} tokens of the prompt are left")
                final = start + size >= len(rest)
                wanted: LogitsChoice = "last" if logits and final else "none"
                context.decode(Feed(self, rest[start : start + size], wanted))
                end = self.ledger.marks[-1:]

    def generate(
        self,
        max_tokens: int | None = None,
        sampler: TokenSampler | SamplerParams | None = None,
        *,
        stop: str | Iterable[str] = (),
        stop_at_end: bool = True,
    ) -> TextStream:
        """Generate from a sequence that has tokens; yield text when it is complete.

        Ends after ``max_tokens`` (None: no limit), before a stop string, or at an
        end-of-generation token, which is not stored. Yielded tokens are in the sequence, and so
        are those of the stop string. Without ``sampler``, generation is greedy. The iterator also
        has the reason of the end, the tokens, and their numbers.
        """
        self.check(self.context)
        return generation.generate(self, max_tokens, sampler, stop, stop_at_end=stop_at_end)

    def logits(self) -> Logits:
        """Return a view of the logits (n_vocab,) after the last token, from the last decode.

        Raises StaleLogits if that decode had no logits of this token.
        """
        self.check(self.context)
        with self.context.read_lock:
            if self.ledger.logits_epoch != self.context.epoch:
                msg = "the last decode has no logits of this sequence's last token"
                raise StaleLogits(msg)
            return self.context.logits(self.ledger.logits_at)

    def embedding(self) -> Embedding:
        """Return a view of the pooled embedding (n,) of this sequence's tokens in the last batch.

        Raises UsageError if the context does not pool, or if the last batch had none of them, and
        StaleLogits before the first decode.
        """
        self.check(self.context)
        self.context.need_pooling(pools=True)
        return embedding.read(self.context, self.id)

    def fork(self, n_tokens: int | None = None) -> Sequence:
        """Create a sequence that shares the cells of the first ``n_tokens`` tokens (None: all).

        Raises UsageError if all sequences are in use, and PartialRemovalRefused if the memory
        cannot divide the sequence there.
        """
        self.check(self.context)
        n_tokens = _count(n_tokens)
        other: Sequence | None = None
        try:
            with Uninterrupted():
                other = self.context.sequence()
                _share_prefix(self, other, n_tokens)
        except BaseException:
            if other is not None:
                other.close()
            raise
        return other

    @Uninterrupted()
    def share(self, other: Sequence, p0: int | None = None, p1: int | None = None) -> int:
        """Share the cells of another sequence at p0 <= p < p1; return their number.

        Raises UsageError if this sequence has tokens there, and Unsupported if the memory cannot
        share a part.
        """
        _check_range(p0, p1)
        return _share_span(self, checked(other, "other"), p0, p1)

    @Uninterrupted()
    def copy_to(self, other: Sequence, n_tokens: int | None = None) -> int:
        """Replace ``other`` by the first ``n_tokens`` tokens of this sequence; return the number.

        Both share the cells, as after `fork`. Copying to itself changes nothing. Raises
        PartialRemovalRefused with nothing changed.
        """
        self.check(self.context)
        checked(other, "other").check(self.context)
        n_tokens = _count(n_tokens)
        if other is not self:
            with self.context.lock:
                if n_tokens != 0:
                    _check_fork(self, n_tokens)
                other.remove()
                if n_tokens != 0 and len(self):
                    _share_prefix(self, other, n_tokens)
        return len(other)

    def trim(self, n_tokens: int) -> int:
        """Keep the first ``n_tokens`` tokens; return the number of removed ones.

        Raises PartialRemovalRefused with nothing changed.
        """
        self.check(self.context)
        n_tokens = arguments.integer("n_tokens", n_tokens, 0)
        if n_tokens >= len(self):
            return 0
        return self.remove(self.ledger.positions[n_tokens] if n_tokens else None, None)

    @Uninterrupted()
    def remove(self, p0: int | None = None, p1: int | None = None) -> int:
        """Remove the tokens at p0 <= p < p1; return their number. Other positions do not change.

        Raises PartialRemovalRefused, with nothing changed, if the memory cannot remove a part.
        """
        first, end = _check_range(p0, p1)
        context = self.context
        with context.lock:
            self.check(context)
            if first == end >= 0:
                return 0
            if context.info.n_swa:
                swa.check(context, self.id, self.ledger.without(p0, p1), "removing them")
            if not context.native.seq_rm(context.handle, self.id, first, end):
                raise _refused(self.id, p0, p1)
            context.defrag_policy.freed()
            return self.ledger.remove(p0, p1)

    @Uninterrupted()
    def shift(
        self, p0: int | None, p1: int | None, delta: int, *, allow_shared: bool = False
    ) -> None:
        """Move the tokens at p0 <= p < p1 by ``delta`` positions. The cache rotates their keys.

        Raises SharedCells if another sequence shares the cells, because its positions would change
        too; with ``allow_shared``, only for shared states and cells in streams. Raises Unsupported
        if the memory cannot shift, and UsageError if positions would collide.
        """
        first, end = _check_range(p0, p1)
        delta = arguments.integer("delta", delta)
        allow_shared = arguments.flag("allow_shared", allow_shared)
        if abs(delta) >= POSITION_LIMIT:
            msg = f"no position can be shifted by {arguments.shown(delta)}: they are 0 to 2^30 - 1"
            raise UsageError(msg)
        context = self.context
        with context.lock:
            self.check(context)
            self._check_shift(p0, p1, allow_shared)
            if context.guard:
                self.ledger.check_move(p0, p1, delta)
            context.native.seq_add(context.handle, self.id, first, end, delta)
            self._move(p0, p1, lambda p: p + delta)

    @Uninterrupted()
    def divide(
        self, p0: int | None, p1: int | None, divisor: int, *, allow_shared: bool = False
    ) -> None:
        """Divide the positions p0 <= p < p1, rounding down. The cache rotates the keys.

        Several tokens may then have the same position, as in self-extend. Raises SharedCells and
        Unsupported in the cases in which `shift` raises them.
        """
        first, end = _check_range(p0, p1)
        divisor = arguments.integer("divisor", divisor, 1)
        allow_shared = arguments.flag("allow_shared", allow_shared)
        context = self.context
        with context.lock:
            self.check(context)
            self._check_shift(p0, p1, allow_shared)
            by = min(divisor, POSITION_LIMIT)
            context.native.seq_div(context.handle, self.id, first, end, by)
            self._move(p0, p1, lambda p: p // divisor)

    def save(self, *, portable: bool = True) -> bytes:
        """Return the tokens and their content of the cache, for `restore`.

        A portable state contains the digest of the model's files, and fits every process that
        loads them; see `Model.digest`. With ``portable=False``, it fits this `Model` object alone,
        and needs no digest. If a file of the model has changed after the load, a warning is logged,
        and the state is unverified. Raises Unsupported if the build cannot save a sequence, and
        StateError if it fails.
        """
        return state.save(self, portable=arguments.flag("portable", portable))

    def restore(self, saved: bytes, *, accept_unverified_model: bool = False) -> None:
        """Replace the sequence by a result of `save` with the same model and cache types.

        A state of the same `Model` object needs no digest. ``accept_unverified_model`` accepts a
        state of a model whose digest is unknown, or if that of this model is; a state with another
        digest is always refused. Raises StateForeign or another StateError, with nothing changed,
        if the state does not fit.
        """
        accept = arguments.flag("accept_unverified_model", accept_unverified_model)
        if not isinstance(saved, bytes | bytearray | memoryview):
            raise arguments.wrong_type("saved", saved, "the bytes that Sequence.save() returned")
        state.restore(self, bytes(saved), accept_unverified_model=accept)

    @Uninterrupted()
    def close(self) -> None:
        """Remove the tokens and free the id. Further use raises Closed."""
        if not self.open:
            return
        context = self.context
        if context.closed:
            self.open = False
            return
        with context.lock:
            # If the worker has ended, there is nothing to remove.
            with suppress(WorkerDied):
                if context.info.memory is not MemoryType.NONE:
                    context.native.seq_rm(context.handle, self.id, -1, -1)
            context.defrag_policy.freed()
            self.ledger.clear()
            self.open = False
            context.release_sequence(self)

    def check(self, context: Context) -> None:
        """Raise Closed or UsageError unless this is an open sequence of an open ``context``."""
        self.context.check()
        if not self.open:
            msg = f"sequence {self.id} was closed; context.sequence() opens another one"
            raise Closed(msg)
        if context is not self.context:
            msg = f"sequence {self.id} belongs to another context"
            raise UsageError(msg)

    def check_end(self, marks: list[int], why: str) -> None:
        """Raise SequenceChanged, with the reason, unless ``marks`` are those of the last token.

        Raises Closed if this was closed. The list is empty for an empty sequence.
        """
        self.check(self.context)
        if self.ledger.marks[-1:] != marks:
            msg = (
                f"something else changed the end of sequence {self.id} meanwhile, and {why}: it "
                f"has {len(self)} tokens now; continue it with a new call"
            )
            raise SequenceChanged(msg)

    def __len__(self) -> int:
        return len(self.ledger.tokens)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Sequence {self.id}, {len(self)} tokens{'' if self.open else ', closed'}>"

    def _check_shift(self, p0: int | None, p1: int | None, allow_shared: bool) -> None:
        if not self.context.info.can_shift:
            why = shift_refusal(self.context.model, self.context.params, self.context.info)
            raise Unsupported(why, "shift")
        if (allow_shared and not self.context.stream_per_sequence) or not self.context.guard:
            return
        others = self.ledger.shared_with(enumerate(self.context.ledgers), p0, p1)
        names = ", ".join(map(str, others))
        if others and self.context.stream_per_sequence:
            msg = (
                f"sequence {self.id} may share its state with sequence {names}, which would move "
                "too, unlike its cells; restore its own save() to copy the state"
            )
            raise SharedCells(msg, others)
        if others:
            msg = (
                f"sequence {self.id} shares these cells with sequence {names}, where positions "
                "would change too; restore its own save() to copy the cells, or pass "
                "allow_shared=True"
            )
            raise SharedCells(msg, others)

    def _move(self, p0: int | None, p1: int | None, change: Callable[[int], int]) -> None:
        # llama.cpp changes the position of a whole cell, for every sequence that shares it.
        marks = self.ledger.marks_in(p0, p1)
        for i in self.ledger.shared_with(enumerate(self.context.ledgers), p0, p1):
            self.context.ledgers[i].follow(marks, change)
        self.ledger.move(p0, p1, change)


def _check_range(p0: int | None, p1: int | None) -> tuple[int, int]:
    """Return a range as llama.cpp takes it, -1 for an open end; UsageError for a wrong one."""
    p0, p1 = arguments.whole_or_none("p0", p0, 0), arguments.whole_or_none("p1", p1, 0)
    if p0 is not None and p1 is not None and p0 > p1:
        msg = (
            f"p0 {arguments.shown(p0)} is larger than p1 {arguments.shown(p1)}; a range is "
            "p0 <= p < p1"
        )
        raise UsageError(msg)
    # Every index above all positions is equivalent to the first one.
    return (
        -1 if p0 is None else min(p0, POSITION_LIMIT),
        -1 if p1 is None else min(p1, POSITION_LIMIT),
    )


def checked(value: Any, name: str = "sequence") -> Sequence:
    """Check that an argument is a sequence, of any context, and return it."""
    return arguments.instance(name, value, Sequence, "a Sequence")


def _count(n_tokens: int | None) -> int | None:
    return arguments.whole_or_none("n_tokens", n_tokens, 0)


def _check_fork(source: Sequence, n_tokens: int | None) -> None:
    """Raise PartialRemovalRefused unless the first ``n_tokens`` tokens can be had alone."""
    context, positions = source.context, source.ledger.positions
    if n_tokens is None or n_tokens >= len(positions):
        return
    if context.info.can_remove_partly is False:
        raise _refused(source.id, positions[n_tokens], None)
    if context.info.n_swa:
        with context.lock:
            swa.check(context, source.id, positions[:n_tokens], "a fork")


def _share_prefix(source: Sequence, other: Sequence, n_tokens: int | None) -> None:
    """Copy the first ``n_tokens`` tokens of another sequence (None: all) to an empty one."""
    context, native, ledger = source.context, source.context.native, source.ledger
    cut = None if n_tokens is None or n_tokens >= len(ledger) else ledger.positions[n_tokens]
    with context.lock:
        if context.info.n_swa:
            swa.check(context, source.id, ledger.positions[:n_tokens], "a fork")
        if cut is None or context.partitions == 1:
            native.seq_cp(context.handle, source.id, other.id, -1, -1 if cut is None else cut)
        else:
            # If there are or may be several streams, llama.cpp asserts that whole sequences are
            # copied.
            native.seq_cp(context.handle, source.id, other.id, -1, -1)
            native.update(context.handle)
            if not native.seq_rm(context.handle, other.id, cut, -1):
                raise _refused(source.id, cut, None)
            context.defrag_policy.freed()
        other.ledger.copy_from(ledger, None, cut, share=context.shares)
        if cut is None:
            other.ledger.take_logits(ledger)


def _share_span(sequence: Sequence, other: Sequence, p0: int | None, p1: int | None) -> int:
    """Share a range of another sequence's cells; `Sequence.share` describes it."""
    context = sequence.context
    with context.lock:
        sequence.check(context)
        other.check(context)
        if context.stream_per_sequence or context.info.memory is not MemoryType.ATTENTION:
            why = (
                "each sequence has cells of its own"
                if context.stream_per_sequence
                else "it keeps states"
            )
            msg = f"this memory cannot share a part of a sequence: {why}; fork all of it"
            raise Unsupported(msg, "share")
        start, end = other.ledger.span(p0, p1)
        if start == end:
            return 0
        first, last = other.ledger.positions[start], other.ledger.positions[end - 1]
        taken = sequence.ledger.span(first, last + 1)
        if other is sequence or taken[0] != taken[1]:
            msg = (
                f"sequence {sequence.id} has tokens at positions {first}..{last} already; remove "
                "them first"
            )
            raise UsageError(msg)
        context.native.seq_cp(context.handle, other.id, sequence.id, first, last + 1)
        sequence.ledger.copy_from(other.ledger, first, last + 1, share=True)
        return end - start


def shift_refusal(model: ModelParts, params: ContextParams, info: ContextInfo) -> str:
    """Return why a context whose ``info.can_shift`` is False cannot shift positions."""
    keys = number_type(params.type_k)
    why = "llama.cpp cannot rotate the keys of this model"
    if info.memory is MemoryType.NONE:
        why = "the model has no memory"
    elif keys.name == "bf16" or keys.quantized:
        why = f"this release cannot rotate keys of type {keys.name}; create it with type_k='f16'"
    elif model.meta(_SECTIONS.format(model.file.architecture)) is not None:
        why = "a token of this model has several positions"
    elif info.pooling is Pooling.MEAN:
        # The library reports both in one flag. b4980 asserts in a shift with means.
        why = (
            "this release cannot do so with pooling='mean', for which another pooling helps, or "
            "cannot rotate the keys of this model"
        )
    return f"the memory of this context cannot shift positions: {why}"


def _refused(number: int, p0: int | None, p1: int | None) -> PartialRemovalRefused:
    """Create the error for a memory that cannot remove a part of a sequence."""
    msg = (
        f"this memory cannot remove a part of sequence {number} (positions {p0}..{p1}); nothing "
        "was changed: remove the whole sequence and decode the rest again"
    )
    return PartialRemovalRefused(msg)
