"""Decode tokens of several sequences in one context, and own its KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.handle import Handle
from pyllamakv.binding.protocol import Capability, Status
from pyllamakv.errors import UsageError
from pyllamakv.runtime import decoding, generation, stepping
from pyllamakv.runtime.backing import Kept
from pyllamakv.runtime.batch import Batch, Feed, lay_out
from pyllamakv.runtime.defrag_policy import Keeper
from pyllamakv.runtime.freeing import free_quietly
from pyllamakv.runtime.kv import KV
from pyllamakv.runtime.ledger import Ledger
from pyllamakv.runtime.logits import Logits, LogitsRows
from pyllamakv.runtime.needs import require
from pyllamakv.runtime.outputs import Outputs
from pyllamakv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from pyllamakv.binding.protocol import (
        ContextHandle,
        ContextInfo,
        ContextParams,
        Counters,
        SamplerParams,
    )
    from pyllamakv.runtime.batch import Arrays
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import Picker, Sampler

Work = Feed | Batch | Iterable[Feed]


class Context:
    """Hold one context. `Model.context` makes it; one thread at a time may use it.

    ``ledgers`` is the record of every sequence, by id; ``epoch`` counts decodes.
    """

    def __init__(self, model: Model, handle: ContextHandle, params: ContextParams) -> None:
        self.model = model
        self.native = native = model.native
        self.handle = handle
        self.params = params
        self.guard = params.guard
        self.info: ContextInfo = native.context_info(handle)
        self.ledgers = tuple(Ledger() for _ in range(self.info.n_seq_max))
        self.kept = Kept(native, self.ledgers) if params.kv_keep else None
        free = partial(free_quietly, self.kept.free if self.kept else native.context_free)
        #: Who holds this is at work; a second thread gets Busy.
        self.turn: Handle[Any] = Handle(handle, free, "context", model.life, exclusive=True)
        self.n_vocab, self.epoch = model.info.n_vocab, 0
        n_streams = self.info.n_streams
        #: Whether each sequence has a stream of cells of its own, as llama.cpp made the context:
        #: LLAMA_SET_ROWS=0 makes it share the cells whatever was asked for (0.3.15 and 0.3.16).
        self.streams = n_streams > 1
        #: Whether a fork may have cells or a state in common with its source. A state is common to
        #: both until one of them decodes, also where their cells are not.
        self.shares = not self.streams or self.info.memory.keeps_states
        #: Into how many equal parts the cells are divided; at worst one for each sequence.
        self.partitions = self.info.n_seq_max if n_streams < 0 else max(1, n_streams)
        self.decode_one = native.decode_one  # bound once: for every token
        self._taken: set[int] = set()
        self.emptied: tuple[int, ...] = ()  # by a failed decode, where a memory cannot go back
        self._marks = 0
        #: How often `cancel` was called.
        self.cancels = 0
        self.outputs = Outputs()
        self.keeper = Keeper(self, "never")  # defragments by itself, as the policy says
        self.group: stepping.Group | None = None  # that stepped last

    @property
    def kv(self) -> KV:
        """Give access to the cells."""
        return KV(self)

    # Sequences...

    def sequence(self, number: int | None = None) -> Sequence:
        """Hand out a sequence that nobody uses: the lowest empty one, or this number.

        Raises UsageError when it is in use or out of range, or all are in use.
        """
        number = arguments.whole_or_none("number", number)
        with self.turn:
            n, free = self.info.n_seq_max, self.vacant
            if number is not None and (number in self._taken or not 0 <= number < n):
                why = "in use" if number in self._taken else f"out of range: there are 0..{n - 1}"
                msg = f"sequence {arguments.shown(number)} is {why}"
                raise UsageError(msg)
            if number is None and not free:
                msg = (
                    f"all {n} sequences are in use; close one, or make the context with a larger "
                    "n_seq_max"
                )
                raise UsageError(msg)
            chosen = free[0] if number is None else number
            self._taken.add(chosen)
        return Sequence(self, chosen)

    @property
    def vacant(self) -> list[int]:
        """Return the ids of the sequences that nobody uses and that hold nothing."""
        return [i for i, own in enumerate(self.ledgers) if i not in self._taken and not len(own)]

    def sequence_id(self, sequence: Sequence | int) -> int:
        """Return the checked id of a sequence, or of a number that stands for one."""
        if isinstance(sequence, Sequence):
            sequence.check(self)
            return sequence.id
        sequence = arguments.whole("sequence", sequence)
        if not 0 <= sequence < self.info.n_seq_max:
            msg = (
                f"sequence {arguments.shown(sequence)} is out of range: there are "
                f"0..{self.info.n_seq_max - 1}"
            )
            raise UsageError(msg)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Take back a closed sequence's id; `Sequence.close` calls this, the turn is held."""
        self._taken.discard(sequence.id)
        self.group = None

    def new_marks(self, n: int) -> int:
        """Reserve marks for ``n`` cells and return the first; the turn is held."""
        self._marks += n
        return self._marks - n

    def clear(self) -> None:
        """Empty the cache and every sequence."""
        with self.turn:
            self.native.clear(self.handle, True)
            for ledger in self.ledgers:
                ledger.clear()

    # Decoding...

    def decode(self, work: Work) -> None:
        """Decode one batch: a feed, several feeds, or a `Batch`.

        Raises NoKVSlot, Cancelled or DecodeError; then every sequence has the tokens it had, and
        the same work may be decoded again. Raises UsageError for a batch that cannot be right.
        """
        if isinstance(work, Feed) and work.logits == "last" and len(work.tokens) == 1:
            self.step(work.sequence, int(work.tokens[0]))
            return
        with self.turn:
            batch = lay_out(self, work)
            code = self._run(batch, positions=isinstance(work, Batch))
            if code:
                raise decoding.failure(self, code, batch.seq.tolist(), len(batch.token))

    def try_decode(self, work: Work) -> Status:
        """Decode like `decode`, and return the status where that would raise for 1 and 2."""
        with self.turn:
            batch = lay_out(self, work)
            code = self._run(batch, positions=isinstance(work, Batch))
            if code not in (0, 1, 2):
                raise decoding.failure(self, code, batch.seq.tolist(), len(batch.token))
            return Status(code)

    def step(self, sequence: Sequence, token: int) -> None:
        """Decode one token that follows in a sequence, with logits: `decode` at its cheapest."""
        stepping.one(self, sequence, token)

    def step_all(self, sequences: Iterable[Sequence], tokens: Any) -> None:
        """Decode one token that follows in each of these sequences, in one batch, all with logits.

        Place i is sequence i's, also for `logits_all` and ``pick_all``. Raises as `decode` does.
        """
        stepping.each(self, sequences, tokens)

    def advance(
        self, sequences: Iterable[Sequence], tokens: Any, steps: int, sampler: Sampler
    ) -> list[list[int]]:
        """Repeat `step_all` and the sampler's ``pick_all`` ``steps`` times, in one call of C.

        Returns the tokens chosen after each step; decode the last of them next. Ends early after
        a step that chose an end of generation. When a step fails, those before it stay.
        """
        return stepping.advance(self, sequences, tokens, steps, sampler)

    def prefill(self, sequence: Sequence, tokens: Any, *, logits: bool = True) -> None:
        """Decode any number of tokens in pieces of n_batch; logits of the very last one.

        When a piece fails, those before it stay, and ``len(sequence)`` says how far it came.
        """
        generation.prefill(self, sequence, tokens, logits=logits)

    def generate(
        self,
        sequence: Sequence,
        max_tokens: int | None = None,
        sampler: Picker | SamplerParams | None = None,
        *,
        stop_at_end: bool = True,
    ) -> Iterator[str]:
        """Go on with a sequence that has tokens; yield text as it becomes complete.

        Ends after ``max_tokens`` (None: without limit), or at an end-of-generation token, which is
        not kept. What was yielded is in the sequence. ``sampler`` None is greedy.
        """
        return generation.generate(self, sequence, max_tokens, sampler, stop_at_end)

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Compute with so many threads from now on; ``n_threads_batch`` for more than a token."""
        n_threads = arguments.whole("n_threads", n_threads, 1, arguments.INT32)
        n_threads_batch = arguments.whole_or_none(
            "n_threads_batch", n_threads_batch, 1, arguments.INT32
        )
        with self.turn as handle:
            self.native.threads(handle, n_threads, n_threads_batch or n_threads)

    def cancel(self) -> None:
        """End the decode that runs, and `prefill` and `generate`; callable from any thread."""
        self.turn.interrupt(self.native.cancel)
        self.cancels += 1

    # What the last decode left...

    def logits(self, index: int = -1) -> Logits:
        """View the logits of a place in the last batch; negative: counted from the last with any.

        Raises StaleLogits when there are none, UsageError when that place asked for none.
        """
        if type(index) is not int:
            index = arguments.whole("index", index)
        with self.turn as handle:
            outputs = self.outputs
            if not outputs.every or not -outputs.n <= index < outputs.n:
                outputs.check(index)
            return Logits(self, self.native.logits(handle, index, self.n_vocab), self.epoch)

    def logits_all(self) -> LogitsRows:
        """View the logits (n, n_vocab) of every place of the last batch that has any, in order.

        Raises StaleLogits when there are none.
        """
        with self.turn as handle:
            if not self.outputs.n:
                self.outputs.count()
            return LogitsRows(self, self.native.logits_all(handle, self.n_vocab), self.epoch)

    @property
    def counters(self) -> Counters:
        """Count slot searches, defragmentations and moves; Unsupported without `kv-counters`."""
        with self.turn:
            require(self, Capability.COUNTERS, "count what the cache does")
            return self.native.counters(self.handle)

    # Lifetime...

    @property
    def closed(self) -> bool:
        """Tell whether this context, its model or its library was closed."""
        return self.turn.closed

    def check(self) -> None:
        """Raise Closed when this was closed."""
        _ = self.turn.raw

    def close(self) -> None:
        """Free the context; a second call does nothing. Raises Busy while a decode runs."""
        self.turn.close()

    def __enter__(self) -> Context:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_ctx {self.info.n_ctx}"
        return f"<Context {state}, {self.info.n_seq_max} sequences>"

    def _run(self, batch: Arrays, *, positions: bool) -> int:
        if self.guard:
            decoding.check_batch(self, batch, positions=positions)
        if self.keeper.dirty:
            self.keeper.before_decode()
        self.epoch += 1
        self.outputs.n = 0
        try:
            code = self.native.decode(self.handle, *batch)
            if code == 1 and self.keeper.heal(batch.seq.tolist(), len(batch.token)):
                code = self.native.decode(self.handle, *batch)
        except BaseException as error:
            decoding.threw(self, error, batch.seq.tolist())
            raise
        if code == 0:
            self._marks = decoding.record(self.ledgers, batch, self._marks, self.epoch)
            self.outputs.take(batch)
        else:
            self.emptied = decoding.settle(self, batch.seq.tolist(), halfway=code != 1)
        return code
