"""Decode tokens of several sequences in one context, and own its KV cache.

`Context` owns all state of decoding: its methods alone change it. `intercept` replaces its library
for a block, to record or to watch every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.owner import FunctionLock, Lock, ReadLock, free_quietly
from pyllamakv.binding.protocol import (
    Capability,
    DecodeStatus,
    Pooling,
    SamplerParams,
)
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    UsageError,
)
from pyllamakv.runtime import adapter, embedding, generation
from pyllamakv.runtime.backing import KVFile
from pyllamakv.runtime.batch import (
    Batch,
    Feed,
    as_int32,
    as_list,
)
from pyllamakv.runtime.decoder import Decoder
from pyllamakv.runtime.defrag_policy import DefragPolicy
from pyllamakv.runtime.generated_text import TextStream
from pyllamakv.runtime.generation import PromptCache
from pyllamakv.runtime.kv import KV
from pyllamakv.runtime.ledger import Ledger
from pyllamakv.runtime.logits import Logits, LogitsRows, Outputs
from pyllamakv.runtime.sampler import (
    Sampler,
)
from pyllamakv.runtime.sequence import Sequence, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import (
        ContextHandle,
        ContextInfo,
        ContextParams,
        Counters,
    )
    from pyllamakv.runtime.adapter import Adapter, AdapterScales
    from pyllamakv.runtime.defrag_policy import DefragCosts, PolicyName
    from pyllamakv.runtime.logits import Embedding
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import TokenSampler

Work = Feed | Batch | Iterable[Feed]


class PrefixKeeper(Protocol):
    """Keep decoded tokens for later prompts, in sequences of a context or elsewhere.

    Their K and V depend on the adapters: a keeper adds itself to `Context.keepers`, and drops
    everything before a change.
    """

    def droppable_sequences(self) -> Iterable[int]:
        """Return the sequences that `drop_prefixes` empties.

        Raises UsageError, with the reason, if something is in use.
        """

    def drop_prefixes(self) -> None:
        """Drop everything. Called only after `droppable_sequences`."""


class Context(ClosedOnExit):
    """A context of llama.cpp. `Model.context` creates it; one thread at a time may use it.

    ``ledgers`` records the content of every sequence, by id. ``epoch`` counts decodes. With
    ``adapt_threads``, ``params.n_threads`` is the most threads: it uses as many as CPUs are idle.
    """

    _internal = frozenset(
        (
            *("adapters_key", "cancels", "check", "decoder", "defrag_policy", "embeds", "epoch"),
            *("guard", "handle", "keepers", "kv_file", "ledgers", "lock", "n_vocab", "native"),
            *("need_pooling", "new_marks", "outputs", "partitions", "read_lock"),
            *("release_sequence", "sequence_id", "shares", "start_adapters", "start_policy"),
            *("step_lock", "use_threads"),
        )
    )

    def __init__(
        self,
        model: Model,
        handle: ContextHandle,
        params: ContextParams,
        *,
        adapt_threads: bool = False,
    ) -> None:
        #: The model of the context.
        self.model = model
        self.native = native = model.native
        self.handle = handle
        #: The requested parameters.
        self.params = params
        self.guard = params.guard
        #: The properties of the context that llama.cpp created.
        self.info: ContextInfo = native.context_info(handle)
        self.ledgers = tuple(Ledger() for _ in range(self.info.n_seq_max))
        self.kv_file = KVFile(native, self.ledgers, params.kv_path) if params.kv_keep else None
        self.outputs = Outputs(embeds=params.embeddings)
        free = partial(
            _free, self.outputs, self.kv_file.free if self.kv_file else native.context_free
        )
        #: Held by the operation that uses the context. Other threads, signal handlers and callbacks
        #: get Busy.
        self.lock: Lock[Any] = Lock(handle, free, "context", model.owner)
        #: The same lock for reads of results, which a sampler called by an operation needs.
        reads = Context.logits, Context.logits_all, Sequence.logits, embedding.read
        self.read_lock = ReadLock(self.lock, *reads)
        #: The same lock for `Sequence.step`.
        self.step_lock = FunctionLock(self.lock, Sequence.step)
        self.n_vocab = model.info.n_vocab
        #: Whether decodes compute embeddings of all tokens, and no logits.
        self.embeds = params.embeddings
        n_streams = self.info.n_streams
        #: Whether each sequence has its own stream of cells in the created context. On 0.3.15 and
        #: 0.3.16, LLAMA_SET_ROWS=0 overrides the request, and sequences share the cells.
        self.stream_per_sequence = n_streams > 1
        #: Whether a fork may share cells or a state with its source. A state is shared until one of
        #: them decodes, even if their cells are separate.
        self.shares = not self.stream_per_sequence or self.info.memory.keeps_states
        #: Number of equal parts of the cells; if unknown, one per sequence.
        self.partitions = self.info.n_seq_max if n_streams < 0 else max(1, n_streams)
        self._taken: set[int] = set()
        #: Number of calls of `cancel`.
        self.cancels = 0
        self.decoder: Decoder = Decoder(self, adapt_threads=adapt_threads)
        self._adapters: AdapterScales = ()
        #: Identifies the adapters and scales in use; empty without any.
        self.adapters_key = ""
        #: The cache managers of this context.
        self.keepers: weakref.WeakSet[PrefixKeeper] = weakref.WeakSet()

    @property
    def kv(self) -> KV:
        """Access the cells."""
        return KV(self)

    @property
    def epoch(self) -> int:
        """The number of decodes so far; a failed one may count twice."""
        return self.outputs.epoch

    @property
    def emptied(self) -> tuple[int, ...]:
        """The ids of the sequences that the last failed decode emptied.

        Their memory cannot return to an earlier position.
        """
        return self.decoder.emptied

    @property
    def defrag_policy(self) -> DefragPolicy:
        """What decides when the cache is defragmented."""
        return self.decoder.policy

    # Sequences...

    def sequence(self, number: int | None = None) -> Sequence:
        """Open an unused sequence: the lowest empty one, or the one with this number.

        Raises UsageError if it is in use or out of range, or if all are in use.
        """
        number = arguments.whole_or_none("number", number)
        with self.lock:
            n, free = self.info.n_seq_max, self.vacant
            if number is not None and (number in self._taken or not 0 <= number < n):
                why = "in use" if number in self._taken else f"out of range: there are 0..{n - 1}"
                msg = f"sequence {arguments.shown(number)} is {why}"
                raise UsageError(msg)
            if number is None and not free:
                msg = (
                    f"all {n} sequences are in use; close one, or create the context with a larger "
                    "n_seq_max"
                )
                raise UsageError(msg)
            return self._new_sequence(free[0] if number is None else number)

    def _new_sequence(self, number: int) -> Sequence:
        try:
            self._taken.add(number)
            return Sequence(self, number)
        except BaseException:  # of a signal handler
            self._taken.discard(number)
            raise

    @property
    def vacant(self) -> list[int]:
        """Return the ids of unused, empty sequences."""
        taken = self._taken
        return [i for i, own in enumerate(self.ledgers) if not own.tokens and i not in taken]

    def sequence_id(self, sequence: Sequence | int) -> int:
        """Check a sequence, or the number of one, and return its id."""
        if isinstance(sequence, Sequence):
            sequence.check(self)
            return sequence.id
        sequence = arguments.integer("sequence", sequence)
        if not 0 <= sequence < self.info.n_seq_max:
            msg = (
                f"sequence {arguments.shown(sequence)} is out of range: there are "
                f"0..{self.info.n_seq_max - 1}"
            )
            raise UsageError(msg)
        return sequence

    def release_sequence(self, sequence: Sequence) -> None:
        """Free the id of a closed sequence, for `Sequence.close`.

        The caller holds the context's lock.
        """
        self._taken.discard(sequence.id)
        self.decoder.forget_groups()

    def new_marks(self, n: int) -> int:
        """Reserve marks for ``n`` cells and return the first.

        The caller holds the context's lock.
        """
        return self.decoder.new_marks(n)

    @Uninterrupted()
    def clear(self) -> None:
        """Remove all tokens of all sequences."""
        with self.lock:
            self.native.clear(self.handle, True)
            for ledger in self.ledgers:
                ledger.clear()

    # Adapters...

    @property
    def adapters(self) -> dict[Adapter, float]:
        """Return the LoRA adapters in use with their scales, without scales of 0."""
        return dict(self._adapters)

    def set_adapters(self, adapters: Mapping[Adapter, float]) -> None:
        """Use these LoRA adapters with their scales; an empty mapping removes all.

        K and V depend on the adapters, so the sequences must be empty. Cache managers drop all that
        they keep. Raises UsageError, with nothing changed, if other sequences have tokens, if a
        lease or pinned prefix is in use, or if the context has a kept file or a prefix store (pass
        ``adapters`` to `Model.context` instead); Unsupported if the release has no adapters, or no
        room for so many.
        """
        chosen = adapter.checked_adapters(self.model, adapters)
        with self.lock:
            if adapter.identify(chosen) == self.adapters_key:
                return
            if self.kv_file is not None:
                msg = "this context has a kept file: pass adapters to model.context instead"
                raise UsageError(msg)
            keepers = list(self.keepers)
            dropped = {number for each in keepers for number in each.droppable_sequences()}
            used = [i for i, own in enumerate(self.ledgers) if len(own) and i not in dropped]
            if used:
                msg = (
                    f"sequences {used} have tokens that were evaluated with other adapters: remove "
                    "them first, or use a context for each choice of adapters"
                )
                raise UsageError(msg)
            for each in keepers:
                each.drop_prefixes()
            self.start_adapters(chosen)

    def start_adapters(self, chosen: AdapterScales) -> None:
        """Use checked adapters in a context without tokens, for `Model.context`."""
        with self.lock as handle:
            raw = [each.owner.raw for each, _ in chosen]
            self.native.adapters_set(handle, raw, [scale for _, scale in chosen])
            self._adapters, self.adapters_key = chosen, adapter.identify(chosen)
            self.outputs.begin()  # logits of the former adapters are stale

    def start_policy(self, policy: PolicyName, costs: DefragCosts | None, *, trims: bool) -> None:
        """Defragment by a policy, for `Model.context`."""
        self.decoder.use_policy(DefragPolicy(self, policy, costs, trims=trims))

    # Decoding...

    def decode(self, work: Work) -> None:
        """Decode one batch: a feed, several feeds, or a `Batch`.

        Raises NoKVSlot, Cancelled or DecodeError. Then `emptied` lists the sequences whose memory
        could not return to its former state; all others keep the tokens that they had, and their
        tokens may be decoded again. Raises UsageError for an invalid batch.
        """
        if (
            isinstance(work, Feed)
            and work.logits == "last"
            and len(work.tokens) == 1
            and not self.embeds
        ):
            work.sequence.check(self)
            work.sequence.step(int(work.tokens[0]))
            return
        work = as_list(work)
        with self.lock:
            self.decoder.decode(work)

    def try_decode(self, work: Work) -> DecodeStatus:
        """Decode like `decode`, but return NO_SLOT or ABORTED instead of raising for them."""
        work = as_list(work)
        with self.lock:
            return DecodeStatus(self.decoder.decode(work, tuple(DecodeStatus)))

    def step_all(self, sequences: Iterable[Sequence], tokens: Any) -> None:
        """Decode the next token of each sequence in one batch, all with logits.

        Row i belongs to sequence i, also for `logits_all` and ``sample_all``. Raises as `decode`
        does.
        """
        sequences, tokens = _as_lists(sequences, tokens)
        with self.lock as handle:
            group = self.decoder.group(sequences, self._check_item)
            self.decoder.step(handle, group, self.decoder.tokens(group, tokens))

    def advance(
        self, sequences: Iterable[Sequence], tokens: Any, steps: int, sampler: Sampler
    ) -> list[list[int]]:
        """Run `step_all` and the sampler's ``sample_all`` ``steps`` times in one call of C.

        Returns the sampled tokens of each step; decode those of the last step next. Ends early
        after a step that sampled an end-of-generation token. If a step fails, the steps before it
        remain; if sampling fails (NoTokenAllowed), the decoded step remains as well. For a single
        sequence, `Sequence.generate` with this sampler then continues with the token sampled last.
        An exception of a signal handler (Ctrl-C) counts as a failed step. A note of the exception
        has the number of completed steps and the tokens sampled last, unless `emptied` lists
        sequences.
        """
        steps = arguments.integer("steps", steps, 1, arguments.INT32)
        arguments.instance("sampler", sampler, Sampler, "a Sampler in C (model.sampler)")
        sampler.check_context(self)
        sampler.check_in_c()
        sequences, tokens = _as_lists(sequences, tokens)
        with self.lock as handle, sampler.lock as raw:
            group = self.decoder.group(sequences, self._check_item)
            tokens = self.decoder.tokens(group, tokens)
            sampler.check(len(tokens))
            failed, chosen = self.decoder.run(raw, handle, group, tokens, steps)
            if failed is not None:
                marks = group.ledgers[0].marks
                if chosen and len(tokens) == 1 and marks:
                    sampler.keep_ahead(sequences[0], marks[-1], chosen[-1][0])
                if not self.emptied:
                    last = f"; the next tokens are {chosen[-1]}" if chosen else ""
                    failed.add_note(f"{len(chosen)} of {steps} steps are complete{last}")
                raise failed
            return chosen

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        max_tokens: int | None = None,
        sampler: TokenSampler | SamplerParams | None = None,
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        stop: str | Iterable[str] = (),
        stop_at_end: bool = True,
        sequence: Sequence | None = None,
        cache: PromptCache | None = None,
        salt: str | None = None,
        template: str | None = None,
        **options: Any,
    ) -> TextStream:
        """Generate the reply to the messages of a chat; yield text when it is complete.

        ``sequence`` keeps the tokens for the next call, which evaluates only what differs.
        ``cache`` is a `PrefixCache` of this context, which reuses prefixes of all chats with the
        same ``salt``, and evicts others for the reply. Without both, a sequence is opened, and
        closed at the end. ``template`` and ``options`` are those of `Model.apply_chat_template`,
        the others those of `Sequence.generate`. Raises as both do, PromptTooLong, as
        `PrefixCache.acquire` does, and UsageError if the grammar or schema of the sampler has begun
        another text.
        """
        if sequence is not None:
            checked(sequence).check(self)
        generation.check_cache(self, sequence, cache, salt)
        return generation.chat(
            self,
            messages,
            max_tokens,
            sampler,
            tools=tools,
            stop=stop,
            stop_at_end=stop_at_end,
            sequence=sequence,
            cache=cache,
            salt=salt,
            template=template,
            options=options,
        )

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Set the number of compute threads; ``n_threads_batch`` is for more than one token.

        Afterwards, the numbers no longer depend on the load of the machine. Raises UsageError for
        numbers below 1.
        """
        n_threads = arguments.integer("n_threads", n_threads, 1, arguments.INT32)
        n_threads_batch = arguments.whole_or_none(
            "n_threads_batch", n_threads_batch, 1, arguments.INT32
        )
        with self.lock:
            self.decoder.keep_threads()
            self.use_threads(n_threads, n_threads_batch or n_threads)

    def use_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Compute with these numbers of threads. The caller holds the context's lock."""
        self.native.threads(self.handle, n_threads, n_threads_batch)
        self.info = self.native.context_info(self.handle)

    def cancel(self) -> None:
        """Cancel the running decode, prefill or generation. May be called from any thread."""
        self.lock.interrupt(self.native.cancel)
        self.cancels += 1

    # Results of the last decode.

    def logits(self, index: int = -1) -> Logits:
        """Return a view of the logits of one row of the last batch; negative: from the end.

        Raises StaleLogits if there are none, and UsageError if that token requested none.
        """
        if type(index) is not int:
            index = arguments.integer("index", index)
        with self.read_lock as handle:
            outputs = self.outputs
            if outputs.embeds or not outputs.every or not -outputs.n <= index < outputs.n:
                outputs.check(index)
            return Logits(self.lock, outputs, self.native.logits(handle, index, self.n_vocab))

    def logits_all(self) -> LogitsRows:
        """Return a view of the logits (n, n_vocab) of every token of the last batch with any.

        Raises StaleLogits if there are none.
        """
        with self.read_lock as handle:
            if not self.outputs.n or self.embeds:
                self.outputs.count()
            rows = self.native.logits_all(handle, self.n_vocab)
            return LogitsRows(self.lock, self.outputs, rows)

    def embedding(self, index: int = -1) -> Embedding:
        """Return a view of the embedding (n,) of a token of the last batch; negative: from the end.

        The context has embeddings without pooling; with pooling, use `Sequence.embedding`. Raises
        StaleLogits if there are none, and UsageError for an invalid index.
        """
        index = arguments.integer("index", index, -arguments.INT32, arguments.INT32)
        self.need_pooling(pools=False)
        return embedding.read(self, index)

    def embed(
        self, inputs: Iterable[str | Iterable[int]], *, normalize: bool = False
    ) -> NDArray[np.float32]:
        """Return the pooled embeddings (n_inputs, n) of texts or tokens, as a new array.

        The inputs are decoded together in new sequences, which are closed. ``normalize`` scales
        rows to length 1. Raises PromptTooLong, before any decode, if an input has more tokens than
        a micro-batch; UsageError without pooling or without a free sequence; and as `decode` does.
        """
        return embedding.embed(self, inputs, normalize)

    def need_pooling(self, *, pools: bool) -> None:
        """Raise UsageError unless the context has embeddings that are pooled, or are not."""
        found = self.info.pooling
        if not self.embeds:
            raise UsageError("this context has no embeddings: create it with embeddings=True")
        if (found > Pooling.NONE) != pools:
            use = "ctx.embedding(index)" if pools else "sequence.embedding()"
            raise UsageError(f"the pooling of this context is {found.name.lower()!r}: use {use}")

    @property
    def counters(self) -> Counters:
        """Return slot searches, defragmentations and moves.

        Raises Unsupported without the patch ``kv-counters``.
        """
        with self.lock:
            self.native.about.require(Capability.COUNTERS, "count what the cache does")
            return self.native.counters(self.handle)

    def _check_item(self, sequence: Any) -> None:
        """Raise UsageError unless an item of a list is a sequence of this context."""
        arguments.instance("an item of sequences", sequence, Sequence, "a Sequence").check(self)

    # Lifetime...

    @property
    def closed(self) -> bool:
        """Whether this context, its model or its library was closed."""
        return self.lock.closed

    def check(self) -> None:
        """Raise Closed if this was closed."""
        _ = self.lock.raw

    def close(self) -> None:
        """Free the context; a second call does nothing. Raises Busy while a decode runs."""
        self.lock.close()

    def __enter__(self) -> Context:
        self.check()
        return self

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_ctx {self.info.n_ctx}"
        return f"<Context {state}, {self.info.n_seq_max} sequences>"


def _free(outputs: Outputs, free: Callable[[Any], None], handle: ContextHandle) -> None:
    """Free a context, whose outputs are gone."""
    outputs.begin()
    free_quietly(free, handle)


def _as_lists(sequences: Iterable[Sequence], tokens: Any) -> tuple[list[Sequence], Any]:
    """Return the items of other iterables than lists, before the context is locked."""
    if type(sequences) is not list:
        sequences = arguments.items("sequences", sequences, "sequences of this context")
    return sequences, tokens if type(tokens) is list else as_int32(tokens, "tokens").tolist()


@contextmanager
def intercept(context: Context, make: Callable[[], Any]) -> Iterator[None]:
    """Replace the library of a context by the result of ``make`` until the end of the block.

    The replacement forwards each call. The caller holds the context's lock while ``make`` runs.
    """
    with context.lock:
        native = context.native
        context.native = make()
    try:
        yield
    finally:
        context.native = native
