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
from pyllamakv.binding.owner import Lock, ReadLock, free_quietly
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
from pyllamakv.runtime import adapter, decode_failure, embedding
from pyllamakv.runtime.backing import KVFile
from pyllamakv.runtime.batch import (
    Batch,
    Feed,
    as_int32,
    as_list,
)
from pyllamakv.runtime.decoder import Decoder
from pyllamakv.runtime.defrag_policy import DefragPolicy
from pyllamakv.runtime.generated_text import GeneratedText, TextStream
from pyllamakv.runtime.interrupts import Uninterrupted
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
            "use_threads",
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
        free = partial(free_quietly, self.kv_file.free if self.kv_file else native.context_free)
        #: Held by the operation that uses the context. Other threads, signal handlers and callbacks
        #: get Busy.
        self.lock: Lock[Any] = Lock(handle, free, "context", model.owner)
        #: The same lock for reads of results, which a sampler called by an operation needs.
        self.read_lock = ReadLock(self.lock)
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
        self.outputs = Outputs(embeds=params.embeddings)
        self.decoder = Decoder(self, adapt_threads=adapt_threads)
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
        sequence, `generate` with this sampler then continues with the token sampled last. An
        exception of a signal handler (Ctrl-C) removes steps that the sampler has counted: reset it.
        """
        steps = arguments.integer("steps", steps, 1, arguments.INT32)
        arguments.instance("sampler", sampler, Sampler, "a Sampler in C (model.sampler)")
        sampler.check_context(self)
        sampler.check_in_c()
        sequences, tokens = _as_lists(sequences, tokens)
        with self.lock as handle, sampler.life as raw:
            group = self._group_of(sequences)
            given, ids = self._given(group, tokens), group.ids
            sampler.check(len(ids))
            chosen: list[list[int]] = []
            defragged, cancels = False, self.cancels
            while True:
                places = self._begin(group)
                left = min(steps - len(chosen), _STEPS)
                try:
                    code, rows = self.native.run(raw, handle, given, places, ids, left, True)
                except BaseException as error:
                    self._rollback_after_error(error, ids)
                    raise
                for row in [given, *rows][: len(rows)]:
                    self._record_step(group, row)
                if rows and min(rows[-1]) < 0:
                    # The last step was decoded, but no token could be sampled after it.
                    raise codes.error(code, f"sample after {len(chosen) + len(rows)} steps")
                chosen += rows
                if not code:
                    ended = len(rows) < left or any(map(self.model.is_eog, rows[-1]))
                    if ended or len(chosen) == steps:
                        return chosen
                    defragged, given = False, rows[-1]
                    if self.cancels == cancels:
                        continue
                    code = int(DecodeStatus.ABORTED)
                self.epoch += 1
                self.outputs.n = 0
                # Moving cells again helps only if something was decoded since.
                if (
                    code != 1
                    or (defragged and not rows)
                    or not self.defrag_policy.defrag_after_failure(ids)
                ):
                    failed = self._failed(code, ids)
                    ledger = group.ledgers[0]
                    if chosen and len(ids) == 1 and ledger.marks:
                        sampler.keep_ahead(group.sequences[0], ledger.marks[-1], chosen[-1][0])
                    raise failed
                defragged, given = True, rows[-1] if rows else given

    def prefill(self, sequence: Sequence, tokens: Any, *, logits: bool = True) -> None:
        """Decode any number of tokens in batches of n_batch, with logits of the last token.

        If a batch fails, the batches before it remain, and ``len(sequence)`` shows the progress.
        Raises PromptTooLong, before any decode, if the cache has fewer cells than tokens.
        """
        checked(sequence).check(self)
        logits = arguments.flag("logits", logits)
        rest = sequence.feed(tokens).tokens
        cancels, size = self.cancels, self.info.n_batch
        if not len(rest):
            msg = "no tokens to decode"
            raise UsageError(msg)
        if self.guard:
            decode_failure.check_length(self, len(sequence) + len(rest))
        with self.lock:
            end = sequence.ledger.marks[-1:]
            for start in range(0, len(rest), size):
                if start:
                    self.lock.let_readers()
                if cancels != self.cancels:
                    msg = f"cancelled with {len(rest) - start} tokens left; the others remain"
                    raise Cancelled(msg, code=2)
                sequence.check_end(end, f"{len(rest) - start} tokens of the prompt are left")
                final = start + size >= len(rest)
                wanted: LogitsChoice = "last" if logits and final else "none"
                self.decode(Feed(sequence, rest[start : start + size], wanted))
                end = sequence.ledger.marks[-1:]

    def generate(
        self,
        sequence: Sequence,
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
        checked(sequence).check(self)
        max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
        stop_at_end = arguments.flag("stop_at_end", stop_at_end)
        check_sampler(sampler)
        strings = check_stop_strings(stop, has_vocab=self.model.info.has_vocab)
        if not len(sequence):
            msg = "the sequence has no tokens; decode a prompt first"
            raise UsageError(msg)
        output = GeneratedText(
            self.model, len(sequence), max_tokens, strings, stop_at_end=stop_at_end, known={}
        )
        output.reuse(len(sequence))
        return TextStream(output, lambda out: self._generate(out, sequence, sampler))

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

        ``sequence`` keeps the tokens for the next call, which evaluates only what differs. None
        opens a sequence and closes it at the end. ``template`` and ``options`` are those of
        `Model.apply_chat_template`, the others those of `generate`. Raises as both do,
        PromptTooLong, and UsageError if the grammar or schema of the sampler has begun another
        text.
        """
        if sequence is not None:
            checked(sequence).check(self)
        max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
        stop_at_end = arguments.flag("stop_at_end", stop_at_end)
        check_sampler(sampler)
        strings = check_stop_strings(stop, has_vocab=self.model.info.has_vocab)
        for name in options:
            if option := sampler_option(name):
                msg = f"{name} is an option of samplers: pass sampler=model.sampler({option}=…)"
                raise UsageError(msg)
        tokens = self.model.tokenize_chat(messages, tools, template=template, **options)
        if not tokens:
            msg = "the chat template rendered no text"
            raise UsageError(msg)
        output = GeneratedText(
            self.model, len(tokens), max_tokens, strings, stop_at_end=stop_at_end, known={}
        )
        return TextStream(output, lambda out: self._chat(out, tokens, sampler, sequence))

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
        """Cancel the running decode, `prefill` or `generate`. May be called from any thread."""
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

    def _run(self, batch: BatchArrays, *, positions: bool) -> int:
        if self.guard:
            check_batch(self, batch, positions=positions)
        if self.embeds:
            if self.guard:
                embedding.check_batch(self, batch)
            every = np.ones(len(batch.token), np.int8)
            batch = BatchArrays(batch.token, batch.pos, batch.counts, batch.seq, every)
        if monotonic() >= self._threads_due:
            self._adapt_threads()
        if self.defrag_policy.dirty:
            self.defrag_policy.before_decode()
        self.epoch += 1
        self.outputs.n = 0
        try:
            code = self.native.decode(self.handle, *batch)
            if code == 1 and self.defrag_policy.defrag_after_failure(
                batch.seq.tolist(), len(batch.token)
            ):
                code = self.native.decode(self.handle, *batch)
        except BaseException as error:
            self._rollback_after_error(error, batch.seq.tolist())
            raise
        if code == 0:
            if self.info.memory is not MemoryType.NONE:  # an encoder keeps nothing
                self._marks = record_batch(self.ledgers, batch, self._marks, self.epoch)
            self.outputs.take(batch)
        else:
            self.emptied = roll_back(self, batch.seq.tolist(), halfway=code != 1)
        return code

    # One token of each of several sequences. This code uses plain lists and no numpy: between two
    # decodes, the CPU caches contain the model, so each line costs several times more than in
    # isolation.

    def _group_of(self, sequences: Iterable[Sequence]) -> StepGroup:
        """Return the group of these sequences, reusing the last one if it is the same."""
        last = self._group
        if type(sequences) is list:
            wanted = sequences.copy()
        else:
            wanted = arguments.items("sequences", sequences, "sequences of this context")
        try:
            if last is not None and last.sequences == wanted:
                return last
        except Exception:  # what is no sequence may refuse to be compared
            last = None
        made = self._group = StepGroup(self, wanted)
        return made

    def _check_token(self, token: int) -> None:
        """Raise UsageError for a token that is not in the vocabulary."""
        if not 0 <= token < self.n_vocab and (self.guard or abs(token) > arguments.INT32):
            msg = (
                f"token {arguments.shown(token)} is out of range: this model has tokens "
                f"0..{self.n_vocab - 1}"
            )
            raise UsageError(msg)

    def _given(self, group: StepGroup, tokens: Any) -> list[int]:
        """Return the checked tokens of a step."""
        given: list[int] = tokens
        if type(tokens) is not list or set(map(type, tokens)) != _INTEGERS:
            given = as_int32(tokens, "tokens").tolist()
        if len(given) != len(group.ids):
            msg = f"expected one token for each of {len(group.ids)} sequences, not {len(given)}"
            raise UsageError(msg)
        if min(given) < 0 or max(given) >= self.n_vocab:
            for token in given:
                self._check_token(token)
        return given

    def _begin(self, group: StepGroup) -> list[int]:
        """Begin a step; return the position of each sequence's next token."""
        if monotonic() >= self._threads_due:
            self._adapt_threads()
        if self.defrag_policy.dirty:
            self.defrag_policy.before_decode()
        self.epoch += 1
        self.outputs.n = 0
        return [ledger.next for ledger in group.ledgers]

    def _record_step(self, group: StepGroup, tokens: list[int]) -> None:
        n, mark, outputs = len(tokens), self._marks, self.outputs
        self._marks = mark + n
        record_step(group.ledgers, tokens, mark, self.epoch)
        outputs.n, outputs.every = n, True

    # Failed decodes.

    def _failed(self, code: int, ids: tuple[int, ...]) -> KvError:
        """Roll back a step that returned ``code``, and return the error for it."""
        self.emptied = roll_back(self, ids, halfway=code != 1)
        return decode_failure.failure(self, code, ids)

    def _rollback_after_error(self, error: BaseException, ids: Iterable[int]) -> None:
        """Roll back a decode that raised or was interrupted.

        Raises DecodeError for the library's own exceptions; the caller raises the others again.
        """
        if type(error) is NativeError:
            # After a failed assertion of llama.cpp, the context refuses every call.
            with suppress(NativeError):
                self.emptied = roll_back(self, ids, halfway=True)
            raise DecodeError(str(error), code=error.code, log=error.log) from error
        if not isinstance(error, KvError):
            # Ctrl-C, or an exception of another signal handler. Python raises it after C has
            # returned: the decode may have succeeded, but its tokens are not in the ledger.
            with suppress(KvError):
                self.native.cancel(self.handle)  # a worker may still be decoding
            self.emptied = roll_back(self, ids, halfway=True)

    # Generation...

    def _chat(
        self,
        output: GeneratedText,
        tokens: list[int],
        sampler: TokenSampler | SamplerParams | None,
        sequence: Sequence | None,
    ) -> Generator[str]:
        with ExitStack() as stack:
            used = stack.enter_context(self.sequence()) if sequence is None else sequence
            if isinstance(sampler, Sampler):
                sampler.begin(used, new=True)
            if self.guard:
                decode_failure.check_length(self, len(tokens))  # before anything is removed
            with self.lock:
                # The last token is always decoded, for its logits.
                pairs = zip(used.tokens, tokens[:-1], strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens) - 1)
                same = min(same, len(used))
                # Shifted tokens have other positions than those of a prompt.
                if used.positions[:same] != list(range(same)):
                    same = 0
                try:
                    used.trim(same)
                except PartialRemovalRefused:
                    used.remove()
                output.reuse(len(used))
                self.prefill(used, tokens[len(used) :])
            yield from self._generate(output, used, sampler)

    def _generate(
        self,
        output: GeneratedText,
        sequence: Sequence,
        sampler: TokenSampler | SamplerParams | None,
    ) -> Generator[str]:
        picker, mine = self._picker(sampler)
        cancels, yielded = self.cancels, 0
        token = mark = -1  # the sampled token, until it is decoded; the last one when it was
        try:
            if isinstance(picker, Sampler):
                picker.begin(sequence, new=False)
            if output.max_tokens == 0:
                output.end("length")
            elif isinstance(picker, SampledAhead):
                with self.lock:
                    token, mark = picker.take_ahead(sequence)
            while not output.done:
                with self.lock:
                    if token < 0:
                        self._refresh(sequence)
                        token = sample_token(picker, self, sequence.ledger.logits_at)
                        mark = sequence.ledger.marks[-1]
                    sequence.check_end([mark], f"token {token} was sampled after another one")
                    if output.is_end(token):
                        token = -1
                        output.end("end")
                        break
                    if cancels != self.cancels:
                        msg = "the generation was cancelled; yielded tokens are in the sequence"
                        raise Cancelled(msg, text=output.text)
                    self.step(sequence, token)
                    decoded, token = token, -1
                    if output.accept_token(decoded):
                        # Sample the next token before the caller gets this one and possibly decodes
                        # others.
                        token, mark = sample_token(picker, self), sequence.ledger.marks[-1]
                for part in output.parts(yielded):
                    yielded += 1
                    yield part
            yield from output.parts(yielded)
        finally:
            if mine is not None:
                mine.close()
            elif token >= 0 and isinstance(picker, SampledAhead):
                picker.keep_ahead(sequence, mark, token)

    def _picker(
        self, sampler: TokenSampler | SamplerParams | None
    ) -> tuple[TokenSampler, Sampler | None]:
        """Return the sampler to use, and the one to close afterwards if it was created here."""
        if sampler is not None and not isinstance(sampler, SamplerParams):
            return sampler, None
        made = make_sampler(self.model, sampler or SamplerParams())
        return made, made if isinstance(made, Sampler) else None

    def _refresh(self, sequence: Sequence) -> None:
        """Decode the last token again when its logits were overwritten."""
        if sequence.ledger.logits_epoch == self.epoch:
            return
        if not len(sequence):
            msg = "the sequence was emptied before its generation; decode a prompt first"
            raise UsageError(msg)
        last = sequence.ledger.tokens[-1]
        sequence.trim(len(sequence) - 1)
        self.step(sequence, last)


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
