"""Continue several prompts at once: a small loop of continuous batching over a cache manager.

A step decodes one batch: a token of each active sequence, then as much of the waiting prompts as
fits (`schedule_batch`). The sequence that has waited longest comes first, so a long prompt does not
delay the others. `GenerationQueue` decides which generation is admitted next. `DecodeOnlyBatch` is
the fast path for steps in which every generation needs one token. There are no threads:
`Batcher.step`, or iterating over a generation, does the work.
"""

from __future__ import annotations

import threading
from bisect import insort
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import MemoryType, SamplerParams
from pyllamakv.cache import defrag_retry
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.generation import (
    Generation,
    changed_elsewhere,
    checked_request,
    drop_last_token,
    follow_ledger,
    make_room,
    record_step,
)
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    Busy,
    Cancelled,
    Closed,
    DecodeError,
    KVCacheFull,
    KvError,
    NoKVSlot,
    NoSlotAvailable,
    ReprocessNeeded,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.batch import Feed
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.decoder import StepGroup
from pyllamakv.runtime.sampler import Sampler, make_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyllamakv.cache.interface import CacheManager
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.generated_text import Reason
    from pyllamakv.runtime.sampler import NumpySampler, Sampler, TokenSampler


P = ParamSpec("P")
R = TypeVar("R")

#: Number of steps after which a waiting generation takes the place of one that has run as long.
MAX_WAIT = 1024

#: Number of steps for which a generation waits at most while another one evaluates a prefix of its
#: prompt, and after which it is not overtaken by one with a longer cached prefix.
MAX_DEFER = 64

#: Number of steps of waiting that count as much as one level of priority.
AGING_STEPS = 256


def _busy() -> Busy:
    return Busy(
        "the batcher is in a call that this one interrupted or that called it, or that another "
        "thread makes: use it after that call"
    )


def _exclusive(
    method: Callable[Concatenate[Batcher, P], R],
) -> Callable[Concatenate[Batcher, P], R]:
    """Run one call at a time; others get Busy: of threads, signal handlers and samplers."""

    @wraps(method)
    def run(self: Batcher, /, *given: P.args, **options: P.kwargs) -> R:
        if self._running:
            raise _busy()
        try:
            self._running = True
            return method(self, *given, **options)
        finally:
            self._running = False

    return run


class Batcher(ClosedOnExit):
    """Generate for several prompts at once, with the sequences of a cache manager.

    A decode has at most ``n_batch`` tokens (None: the context's n_batch). A prompt that does not
    fit waits until another generation has ended. If cells run short, the generation that was
    submitted last is parked until another one has ended. One that has waited for ``max_wait`` steps
    takes the place of one that has run as long (None: it waits). A prompt waits for at most
    ``max_defer`` steps while another one evaluates tokens that both begin with, so that it reuses
    them (0: it does not wait). ``on_text`` is called between the decodes of a step that has
    several, when generations may have more text.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        n_batch: int | None = None,
        max_wait: int | None = MAX_WAIT,
        max_defer: int = MAX_DEFER,
        on_text: Callable[[], None] | None = None,
    ) -> None:
        context = getattr(manager, "context", None)
        if not isinstance(context, Context) or not callable(getattr(manager, "acquire", None)):
            expected = "a cache manager (PrefixCache, SlotCache, or another CacheManager)"
            raise arguments.wrong_type("manager", manager, expected)
        if context.embeds:
            raise UsageError("a context with embeddings has no logits, so it cannot generate")
        n_batch = arguments.whole_or_none("n_batch", n_batch)
        #: The manager whose sequences are used.
        self.manager = manager
        #: The context of the manager.
        self.context = context
        largest = context.info.n_batch
        self.n_batch = largest if n_batch is None else n_batch
        if not 1 <= self.n_batch <= largest:
            msg = (
                f"n_batch must be from 1 to {largest} (the context's), not "
                f"{arguments.shown(n_batch)}"
            )
            raise UsageError(msg)
        #: Text of tokens by id, a cache for all generations: see `Generation`.
        self.known: dict[int, str] = {}
        max_wait = arguments.whole_or_none("max_wait", max_wait, 1, arguments.INT32)
        max_defer = arguments.integer("max_defer", max_defer, 0, arguments.INT32)
        if on_text is not None and not callable(on_text):
            raise arguments.wrong_type("on_text", on_text, "a function, or None")
        self._queue = GenerationQueue(manager, max_wait, max_defer)
        self._greedy = make_sampler(context.model, SamplerParams())
        self._on_text = on_text
        self._feeding: list[Portion] = []
        self._running = False
        #: The fast path for the active generations, until one is added, ends or is cancelled.
        self._decode_only: DecodeOnlyBatch | None = None
        # Reentrant, because a signal handler may cancel a generation.
        self._lock = threading.RLock()
        #: Number of cancels of the context by this batcher, and of all that it has handled.
        self._interrupts, self._cancels = 0, context.cancels
        self._steps = self._decodes = self._tokens = self._generated = self._slot_failures = 0

    @_exclusive
    def submit(
        self,
        prompt: str | Iterable[int] | None = None,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        sampler: TokenSampler | SamplerParams | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
        groups: Iterable[tuple[int, int]] = (),
        checkpoints: Iterable[int] = (),
        salt: str | None = None,
        priority: int = 0,
        stop_at_end: bool = True,
    ) -> Generation:
        """Queue a prompt, text or tokens, and return its generation. Decodes nothing.

        ``messages`` of a chat, with ``tools``, replace the prompt: see `Model.tokenize_chat`.

        The generation ends after ``max_tokens`` (None: no limit; 0: after the prompt), before a
        stop string, or at an end-of-generation token unless ``stop_at_end`` is False. Without
        ``sampler``, it is greedy. Each of ``groups`` of tokens is decoded in one batch.
        ``checkpoints`` are lengths of the prompt after which the manager keeps a state, if the
        memory cannot return there. Only prompts with the same ``salt`` share prefixes. Generations
        of a higher ``priority``, from -100 to 100, are admitted first and parked last;
        256 steps of waiting count as much as 1.

        Raises PromptTooLong for a prompt that is longer than a sequence of the manager,
        BudgetTooSmall for one that exceeds its budget, and UsageError for other invalid arguments
        and for a sampler with the history of another generation. If the manager refuses the prompt
        later, only this generation fails.
        """
        asked = checked_request(
            self.manager, self._greedy, self.n_batch, prompt, messages=messages, tools=tools,
            max_tokens=max_tokens, stop=stop, sampler=sampler, groups=groups,
            checkpoints=checkpoints, salt=salt, priority=priority, stop_at_end=stop_at_end,
        )  # fmt: skip
        made = Generation(self, asked)
        self._begin(made)
        self._leave_decode_only()
        if not self._queue:
            self._cancels = self.context.cancels - self._interrupts
        self._queue.submit(made, self._steps)
        return made

    def step(self) -> bool:
        """Decode one batch. Returns False if no generation is left.

        A failing generation does not affect the others. Raises an error only if all end with it:
        the context was closed, or its worker died. Meanwhile, other threads, signal handlers and
        samplers get Busy from the batcher.
        """
        # What `_exclusive` does, without another call between two decodes.
        if self._running:
            raise _busy()
        try:
            self._running = True
            decode_only = self._decode_only
            if decode_only is not None:
                try:
                    outcome = decode_only.step()
                except (DecodeError, Unsupported) as error:
                    self._leave_decode_only()
                    self._failed(error, decode_only.portions)
                    return bool(self._queue)
                if outcome is GOING:
                    return True
                self._leave_decode_only()
                if outcome is ENDED:
                    self._remove_ended(decode_only.generations)
                    return bool(self._queue)
            self._step()
            return bool(self._queue)
        except (Closed, WorkerDied) as error:
            self._decode_only = None
            self._queue.end_all("failed", error)
            raise
        finally:
            self._running = False

    def run(self) -> None:
        """Decode until every generation has ended."""
        while self.step():
            pass

    def stats(self) -> BatcherStats:
        """Return the totals so far."""
        queue, more = self._queue, self._decode_only.steps if self._decode_only is not None else 0
        each = more * len(queue.active)
        return BatcherStats(
            len(queue.waiting), len(queue.active), self._decodes + more, self._tokens + each,
            self._generated + each,
            self._slot_failures, sum(queue.ended[reason] for reason in ("end", "stop", "length")),
            queue.ended["cancelled"], queue.ended["failed"],
            sum(one.parked is not None for one in queue.waiting),
            queue.parks, queue.resumes,
        )  # fmt: skip

    def __repr__(self) -> str:
        queue = self._queue
        return (
            f"<Batcher of {self.manager!r}, {len(queue.active)} active, {len(queue.waiting)} wait>"
        )

    def interrupt(self, generation: Generation) -> None:
        """Cancel the running decode if it includes this generation. Thread-safe.

        If an interruption would empty the states of others, the decode continues.
        """
        arguments.instance("generation", generation, Generation, "a Generation")
        with self._lock:
            decode_only = self._decode_only
            if decode_only is not None:
                decode_only.cancels = -1
                running = decode_only.decoding and generation in decode_only.generations
            else:
                running = any(each is generation for each, _ in self._feeding)
            # Of all sequences, also those that are not in the decode.
            empties = self.context.info.memory.keeps_states
            if empties and not all(each.cancelled for each in tuple(self._queue.active)):
                return
            if running:
                self._interrupts += 1
                with suppress(Closed):
                    self.context.cancel()

    @_exclusive
    def close(self) -> None:
        """Cancel all generations. The manager stays open. Raises Busy during a step."""
        self._leave_decode_only()
        try:
            self._queue.end_all("cancelled")
        finally:
            if isinstance(self._greedy, Sampler):
                self._greedy.close()

    def _begin(self, made: Generation) -> None:
        """Raise UsageError if the sampler has the history of another text."""
        sampler = made.sampler
        if isinstance(sampler, Sampler):
            going = (one for one in self._queue if one.sampler is sampler and not one.done)
            if sampler.keeps_history and any(going):
                msg = (
                    "this sampler has the history of another generation, which has not ended: "
                    "create a sampler for each, or pass SamplerParams"
                )
                raise UsageError(msg)
            sampler.begin(made, new=True)

    # The fast path: the set of active generations stays the same.

    def _enter_decode_only(self) -> None:
        """Enter the mode in which each generation needs one token, if possible."""
        queue = self._queue
        if not queue.active or len(queue.active) > self.n_batch:
            return
        if queue.waiting and not queue.full:
            return
        # A prompt's only token may be unable to start, and one without text ends after its last.
        if not all(
            0 < len(one.ledger.tokens) == len(one.all_tokens) - 1 and one.max_tokens != 0
            for one in queue.active
        ):
            return
        cancels = self._interrupts + self._cancels
        most = queue.patience(self._steps)
        self._decode_only = DecodeOnlyBatch(self.context, self._greedy, queue.active, cancels, most)
        if any(one.cancelled for one in queue):
            # This order is required, because `Generation.cancel` sets its flag before it
            # interrupts.
            self._leave_decode_only()

    def _leave_decode_only(self) -> None:
        decode_only, self._decode_only = self._decode_only, None
        if decode_only is not None:
            self._steps += decode_only.steps
            self._decodes += decode_only.steps
            self._tokens += decode_only.steps * len(decode_only.portions)
            self._generated += decode_only.steps * len(decode_only.portions)
            record_step(decode_only.generations, self._steps)

    def _remove_ended(self, those: Iterable[Generation]) -> None:
        for one in those:
            if one.finish_reason is not None:
                self._queue.left(one)

    # The general path: generations start or end.

    def _step(self) -> None:
        # After an exception such as Ctrl-C, tokens may be sampled and not accepted, and generations
        # that ended are still in the queue.
        for one in tuple(self._queue.active):
            one.accept_sample()
        self._remove_ended(tuple(self._queue))
        self._sweep()
        for one in tuple(self._queue.active):
            drop_last_token(one)
            if (error := changed_elsewhere(one)) is not None:
                self._queue.end(one, "failed", error)
        self._queue.rotate(self._steps)
        self._queue.admit(self._steps)
        # In place: of generations with the same last step, another one is first next time.
        self._queue.active.sort(key=lambda one: one.last_step)
        portions = schedule_batch(self._queue.active, self.n_batch, self._steps)
        self._steps += 1
        portions = [each for each in portions if self._room(*each)]
        # Room for a later one may have required to park an earlier one.
        portions = [each for each in portions if each[0].lease is not None]
        starts = {one: len(one.ledger.tokens) for one, _ in portions}
        for number, group in enumerate(batches(self.context, portions)):
            if number and self._on_text is not None:
                self._on_text()
            fed = []
            for one, n in group:
                # An earlier batch may have parked a generation, or not decoded its tokens: those
                # of this one would then end inside a group.
                if one.lease is not None and len(one.ledger.tokens) == starts[one]:
                    fed.append((one, n))
                starts[one] += n
            self._feed(fed)
        self._enter_decode_only()

    def _sweep(self) -> bool:
        """End cancelled generations; return whether there were any."""
        others = self.context.cancels - self._interrupts
        if others > self._cancels:
            self._cancels = others
            self._queue.end_all("cancelled")
            return True
        gone = [each for each in self._queue if each.cancelled]
        for each in gone:
            self._queue.end(each, "cancelled")
        return bool(gone)

    def _room(self, one: Generation, n: int) -> bool:
        """Free cells for ``n`` tokens; return False if they cannot be decoded in this step."""
        while one.lease is not None:
            try:
                return make_room(one, n)
            except NoKVSlot as error:
                self._no_room(one, error)
            except (Closed, WorkerDied):
                raise
            except KvError as error:
                self._queue.end(one, "failed", error)
        return False

    def _no_room(self, one: Generation, error: NoKVSlot) -> None:
        """Park the generation that was submitted last; ``one`` fails if it is the only one."""
        if len(self._queue.active) == 1:
            self._queue.end(one, "failed", error)
        else:
            self._queue.park(max(self._queue.active, key=lambda each: each.turn), self._steps)

    def _feed(self, portions: list[Portion], *, defragged: bool = False) -> None:
        """Decode those that are not cancelled, and choose the next tokens."""
        self._feeding = portions
        try:
            # After `_feeding` is set, because `Generation.cancel` sets its flag before it
            # interrupts.
            portions = [each for each in portions if not each[0].cancelled]
            if not portions:
                return
            # The logits are those of this decode until all tokens are sampled.
            with self.context.lock:
                decode(self.context, portions)
                self._decodes += 1
                self._tokens += sum(n for _, n in portions)
                ready = [one for one, _ in portions if one.is_decoded and one.max_tokens != 0]
                record_step([one for one, _ in portions], self._steps)
                choose(self.context, self._greedy, ready)
        except (DecodeError, Unsupported) as error:
            self._failed(error, portions, defragged=defragged)
            return
        finally:
            self._feeding = []
        self._accept([one for one, _ in portions], ready)

    def _failed(
        self, error: DecodeError | Unsupported, portions: list[Portion], *, defragged: bool = False
    ) -> None:
        """Find the failing generation: if a batch fails, its generations are decoded one by one.

        A release may also refuse a batch of several sequences, and decode each of them.
        """
        self._slot_failures += isinstance(error, NoKVSlot)
        if isinstance(error, Cancelled):
            if not self._sweep():
                self._queue.end_all("cancelled")
        elif (
            isinstance(error, NoKVSlot)
            and not defragged
            and defrag_retry.defragment(self.context, error)
        ):
            self._feed(portions, defragged=True)
        elif len(portions) > 1:
            for each in portions:
                # Together, they may need more cells than were reserved for each one.
                if each[0].lease is not None and self._room(*each):
                    self._feed([each])
        elif isinstance(error, NoKVSlot):
            one, n = portions[0]
            counts = {one.sequence.id: n}
            if not self.manager.relieve():
                full = defrag_retry.cache_full_error(
                    self.context, error, counts, defragged=defragged
                )
                self._no_room(one, full)
        elif (
            not isinstance(error, Unsupported)
            or len(portions[0][0].ledger)
            # If a sequence was removed after this one had been opened, some releases start none in
            # its place.
            or not self._queue.postpone(portions[0][0], self._steps)
        ):
            self._queue.end(portions[0][0], "failed", error)

    def _accept(self, fed: list[Generation], ready: list[Generation]) -> None:
        """Continue the generations that have a sampled token, and prepare the others."""
        for one in fed:
            if one.is_decoded:
                if one.max_tokens == 0:
                    self._queue.end(one, "length")
            elif one.lease is not None:
                one.lease.checkpoint()
        self._generated += len(ready)
        for one in ready:
            one.accept_sample()
        self._remove_ended(ready)


def choose(context: Context, greedy: Sampler | NumpySampler, ready: Sequence[Generation]) -> None:
    """Sample a token for each generation from the logits of the last decode."""
    if len(ready) > 1 and all(one.sampler is greedy for one in ready):
        for one, token in zip(ready, greedy.sample_all(context), strict=True):
            one.keep_sample(token)
    else:
        for one in ready:
            one.sample(context)


#: Number of steps after which a waiting generation gets priority over those being decoded.
STARVATION_STEPS = 8

Portion = tuple["Generation", int]


def schedule_batch(active: Sequence[Generation], n_batch: int, steps: int) -> list[Portion]:
    """Schedule a batch: generations left out too long, those that need one token, prompts.

    Within each kind, the one that has waited longest comes first. Groups of a prompt are not split.
    """
    if len(active) <= n_batch and all(
        len(each.all_tokens) - len(each.ledger.tokens) == 1 for each in active
    ):
        return [(each, 1) for each in active]
    late, single, others = [], [], []
    for each in sorted(active, key=lambda one: one.last_step):
        if steps - each.last_step > STARVATION_STEPS:
            late.append(each)
        elif len(each.all_tokens) - len(each.ledger.tokens) == 1:
            single.append(each)
        else:
            others.append(each)
    found: list[Portion] = []
    for each in (*late, *single, *others):
        have = len(each.ledger.tokens)
        n = min(len(each.all_tokens) - have, n_batch)
        if each.lease is not None:
            n = each.lease.limit_batch(n)
        if each.groups and have + n < len(each.prompt):
            n = grouping.floor(each.groups, have + n) - have
        if n > 0:
            found.append((each, n))
            n_batch -= n
    return found


def batches(context: Context, portions: list[Portion]) -> list[list[Portion]]:
    """Divide what a step decodes into micro-batches, as llama.cpp does.

    After a cancellation, those before the cancelled one remain. A recurrent sequence starts in a
    batch of its own: through 0.3.9, llama.cpp computes other states for sequences that start beside
    others.
    """
    if context.info.memory is not MemoryType.RECURRENT:
        return micro_batches(portions, context.info.n_ubatch)
    others = [each for each in portions if len(each[0].ledger)]
    apart = ([each] for each in portions if not len(each[0].ledger))
    return [
        part for each in (others, *apart) for part in micro_batches(each, context.info.n_ubatch)
    ]


def micro_batches(portions: list[Portion], size: int) -> list[list[Portion]]:
    """Divide portions into batches of at most ``size`` tokens, if no group is longer.

    Those that complete their prompts come first, the shortest of them before the others: of a burst
    of prompts, most have their first tokens before the last batch is decoded.
    """
    if sum(n for _, n in portions) <= size or all(n == 1 for _, n in portions):
        return [portions]
    portions = sorted(portions, key=lambda each: (not _completes(*each), each[1]))
    found: list[list[Portion]] = [[]]
    room = size
    for one, n in portions:
        at = len(one.ledger.tokens)
        end = at + n
        while at < end:
            upto = grouping.floor(one.groups, min(at + room, end))
            if upto <= at:
                if room < size:
                    found.append([])
                    room = size
                    continue
                upto = min(grouping.ceil(one.groups, at + 1), end)
            found[-1].append((one, upto - at))
            room -= upto - at
            at = upto
    return found


def _completes(one: Generation, n: int) -> bool:
    """Return whether a generation has logits after ``n`` tokens."""
    return len(one.ledger.tokens) + n == len(one.all_tokens)


def decode(context: Context, portions: Sequence[Portion]) -> None:
    """Decode one batch. A generation whose tokens are all decoded has logits."""
    if all(
        n == 1 == len(one.all_tokens) - len(one.ledger.tokens) and one.max_tokens != 0
        for one, n in portions
    ):
        if len(portions) == 1:
            one = portions[0][0]
            one.sequence.step(one.all_tokens[-1])
        else:
            context.step_all(
                [one.sequence for one, _ in portions], [one.all_tokens[-1] for one, _ in portions]
            )
        return
    feeds = []
    for one, n in portions:
        have = len(one.ledger.tokens)
        piece = np.array(one.all_tokens[have : have + n], dtype=np.int32)
        wants = _completes(one, n) and one.max_tokens != 0
        feeds.append(Feed(one.sequence, piece, "last" if wants else "none"))
    context.decode(feeds)


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """The totals of a batcher: batches and their tokens, generations by how they ended.

    ``finished`` generations are complete, without the ``cancelled`` and ``failed`` ones.
    ``waiting`` and ``active`` generations have not ended; ``parked`` of the waiting ones gave up
    their sequence. Generations were parked ``parks`` times and resumed ``resumes`` times.
    ``slot_failures`` counts decodes that found no cells; a retry serves most of them.
    """

    waiting: int
    active: int
    decodes: int
    decoded_tokens: int
    generated_tokens: int
    slot_failures: int
    finished: int
    cancelled: int
    failed: int
    parked: int
    parks: int
    resumes: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class GenerationQueue:
    """The generations of a batcher that have not ended, and the totals of the others.

    Those that wait are in the order of their turns: that of submission, moved by the priority, so
    that each overtakes only those of a bounded number of steps. Two exceptions reuse more tokens,
    each for a bounded number of steps: a generation is deferred while an active one evaluates a
    prefix of its prompt, as SGLang defers requests of a batch, and of equal priorities the one with
    the longest cached prefix comes first, SGLang's policy "lpm".
    """

    #: Number of tokens for which a generation is deferred at least: the threshold of SGLang.
    MIN_SHARED = 32
    #: Number of waiting generations whose cached prefixes are compared.
    MAX_COMPARED = 32

    def __init__(self, manager: CacheManager, max_wait: int | None, max_defer: int = 0) -> None:
        self.manager = manager
        self.max_wait = max_wait
        self.max_defer = max_defer
        #: Those without a lease, in the order of their turns.
        self.waiting: list[Generation] = []
        self.active: list[Generation] = []
        self.ended: dict[Reason, int] = dict.fromkeys(
            ("end", "stop", "length", "cancelled", "failed"), 0
        )
        #: No generation is admitted until fewer than this number are active.
        self._crowded: int | None = None
        #: Whether only one generation is admitted while none is active.
        self._singly = False
        self._turns = count()
        #: `PrefixCache.cached_length`; not every manager has it.
        self._cached_length = getattr(manager, "cached_length", None)
        #: `SlotCache.shares_leased`: otherwise, deferred prompts would find no common tokens.
        self._shares_leased: bool = getattr(manager, "shares_leased", True)
        #: The cached lengths of prompts in this step.
        self._known: dict[Generation, int] = {}
        #: Totals: generations that were parked, and that were resumed.
        self.parks = self.resumes = 0

    def __bool__(self) -> bool:
        return bool(self.active or self.waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter((*self.active, *self.waiting))

    @property
    def full(self) -> bool:
        """Return whether waiting generations must wait until an active one ends."""
        return bool(self.active and self._crowded is not None and len(self.active) >= self._crowded)

    def admit(self, steps: int) -> None:
        """Admit waiting generations while the manager has leases; ``steps`` is the present step.

        A generation fails if the manager refuses it permanently, or if it finds no cells and no
        active generation could free any.
        """
        self._singly = self._singly and not self.active
        deferred: set[Generation] = set()
        while self.waiting and not self.full and not (self._singly and self.active):
            first = self._next(steps, deferred)
            if first is None:
                break
            self._crowded = None
            resumes = first.parked is not None
            try:
                first.begin(self.manager, steps)
            except (NoSlotAvailable, KVCacheFull) as error:
                if self.active:
                    self._crowded = len(self.active)
                else:
                    self.end(first, "failed", error)
            except (Closed, WorkerDied):
                raise
            except KvError as error:
                self.end(first, "failed", error)
            else:
                self.waiting.remove(first)
                self.active.append(first)
                self.resumes += resumes
        self._known.clear()

    def _next(self, steps: int, deferred: set[Generation]) -> Generation | None:
        """Return the generation to admit next; None if all are deferred, and add these."""
        candidates: list[Generation] = []
        for one in self.waiting:
            if candidates and (one.priority != candidates[0].priority or one.parked is not None):
                continue
            if one not in deferred and self._defers(one):
                deferred.add(one)
                one.defer()
            if one in deferred:
                continue
            candidates.append(one)
            late = steps - one.since >= self.max_defer or one.parked is not None
            if self._cached_length is None or len(candidates) == self.MAX_COMPARED:
                break
            if late and len(candidates) == 1:
                break
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return max(candidates, key=self._cached)  # the first one of equal ones

    def _cached(self, one: Generation) -> int:
        """Return how many tokens of a prompt are cached, as far as the manager says that.

        It is asked once per step: an admission changes only what is evicted for it.
        """
        if self._cached_length is None:
            return 0
        if one not in self._known:
            tokens = np.frombuffer(one.key, np.int32)
            self._known[one] = int(self._cached_length(tokens, groups=one.groups, salt=one.salt))
        return self._known[one]

    def _defers(self, one: Generation) -> bool:
        """Return whether a generation waits, because an active one evaluates a prefix of it."""
        if one.parked is not None or one.all_tokens or one.deferred >= self.max_defer:
            return False
        if not self._shares_leased:
            return False
        if one.awaits is not None and _evaluates(*one.awaits):
            return True
        awaits, length = None, 0
        for other in self.active:
            have, shared = len(other.ledger.tokens), one.common_with(other)
            if shared - have >= self.MIN_SHARED and shared > length and _evaluates(other, shared):
                awaits, length = other, shared
        if awaits is None or self._cached(one) > length - self.MIN_SHARED:
            return False
        one.wait_for(awaits, length)
        return True

    def submit(self, one: Generation, steps: int) -> None:
        """Add a generation."""
        one.queue(self._turn(one, steps), steps)
        insort(self.waiting, one, key=lambda each: each.turn)

    def _turn(self, one: Generation, steps: int) -> tuple[int, int]:
        """Return the turn of a generation that begins to wait.

        If each step of waiting raised the priority, the order of two generations would not change:
        it is that of these constants.
        """
        return steps - one.priority * AGING_STEPS, next(self._turns)

    def park(self, one: Generation, steps: int) -> None:
        """Let a generation wait for its turn, until another one ends."""
        self.active.remove(one)
        insort(self.waiting, one, key=lambda each: each.turn)
        self._crowded = len(self.active)
        self.parks += 1
        one.park(steps)

    def postpone(self, one: Generation, steps: int) -> bool:
        """Park a generation that cannot start until others have ended.

        If it is the last one, the next step admits the first of all without the others, so that the
        manager can clear the context. Returns False if this one was admitted so.
        """
        last = len(self.active) == 1
        if last and self._singly:
            return False
        self._singly = last
        self.park(one, steps)
        return True

    def rotate(self, steps: int) -> None:
        """Park a generation for one that has waited for ``max_wait`` steps.

        None is parked for one that is deferred: it is not admitted yet. Those that have run as
        long, and have sampled a token, get a new turn, after all others of their priority. The
        first one that waits is therefore admitted after the runs of those before it, whatever is
        submitted later with its priority.
        """
        if self.max_wait is None or not self.waiting or not self.active:
            return
        first = self.waiting[0]
        if steps - first.since < self.max_wait:
            return
        for one in self.active:
            # Without a new token, a run that decodes lost tokens again would be repeated for ever.
            if one.turn < first.turn and steps - one.since >= self.max_wait and one.progressed:
                one.yield_turn(self._turn(one, steps))
        last = max(self.active, key=lambda one: one.turn)
        if last.turn > first.turn and not self._defers(first):
            self.park(last, steps)
        self._crowded = None

    def patience(self, steps: int) -> int | None:
        """Return after how many steps `rotate` is due; None: never."""
        if self.max_wait is None or not self.waiting:
            return None
        return max(1, self.waiting[0].since + self.max_wait - steps)

    def end(self, one: Generation, reason: Reason, error: Exception | None = None) -> None:
        """End one generation and remove it. Raises the error of releasing its lease, if any."""
        try:
            one.end(reason, error)
        finally:
            self.left(one)

    def end_all(self, reason: Reason, error: Exception | None = None) -> None:
        """End all generations; an error of releasing a lease is raised after all have ended."""
        with ExitStack() as stack:
            # The stack closes all of them in order of admission, also if one raises.
            for each in reversed((*self.active, *self.waiting)):
                stack.callback(self.end, each, reason, error)

    def left(self, one: Generation) -> None:
        """Remove a generation that has ended."""
        for those in (self.active, self.waiting):
            if one in those:
                those.remove(one)
        if one.finish_reason is not None:
            self.ended[one.finish_reason] += 1


def _evaluates(one: Generation, length: int) -> bool:
    """Return whether a generation is going to evaluate its prompt up to this length."""
    return one.lease is not None and len(one.ledger.tokens) < length <= len(one.prompt)


class StepOutcome(Enum):
    """Record the result of a step: all continue, one ended, or nothing was decoded."""

    GOING = 0
    ENDED = 1
    NOTHING = 2


GOING, ENDED, NOTHING = StepOutcome


class DecodeOnlyBatch:
    """Generations that need one token each.

    ``steps`` counts decodes, at most ``limit`` (None: no limit). ``decoding``: a decode is running.
    If ``cancels`` differs from the context's, the next step does not start.
    """

    __slots__ = (
        "_alike", "_context", "_epoch", "_greedy", "_group", "_outputs", "_rooms", "cancels",
        "decoding", "generations", "limit", "portions", "steps",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        greedy: Sampler | NumpySampler,
        generations: Sequence[Generation],
        cancels: int,
        limit: int | None = None,
    ) -> None:
        self.limit = limit
        self.generations = tuple(generations)
        self.portions = [(one, 1) for one in generations]
        self.steps = 0
        self.cancels = cancels
        self.decoding = False
        self._context = context
        self._outputs = context.outputs
        self._epoch = context.epoch
        self._greedy = greedy
        #: Whether all generations use the greedy sampler, which samples for all in one call.
        self._alike = all(one.sampler is greedy for one in generations)
        self._group = StepGroup(
            tuple(one.sequence.id for one in generations), [one.ledger for one in generations]
        )
        self._rooms = [
            (one, one.sequence, one.ledger, one.lease.make_room) for one in generations if one.lease
        ]

    def step(self) -> StepOutcome:
        """Reserve cells, decode a token of each generation, and sample the next ones.

        NOTHING when that has to be done in the general way. Raises DecodeError.
        """
        context, alike = self._context, self._alike
        if context.cancels != self.cancels or self.steps == self.limit:
            return NOTHING
        if self._outputs.epoch != self._epoch:  # another decode, which may have changed a sequence
            return NOTHING
        # Held once for all: to take a lock again costs a tenth of a step of a small model.
        with context.lock as handle:
            tokens = []
            for one, sequence, ledger, reserve in self._rooms:
                have, end = len(ledger.tokens), ledger.marks[-1:]
                if len(one.all_tokens) != have + 1 or not sequence.open:
                    return NOTHING
                try:
                    reserve(1)
                except ReprocessNeeded as needed:
                    follow_ledger(one, have, needed.tokens)
                    return NOTHING
                except KvError:
                    return NOTHING
                tokens.append(one.all_tokens[-1])
                if len(ledger.tokens) != have:
                    if ledger.marks[-1:] != end:
                        return NOTHING  # others removed tokens
                    follow_ledger(one, have)
            self.decoding = True
            context.decoder.step(handle, self._group, tokens)
            self.decoding = False
            self.steps += 1
            self._epoch = self._outputs.epoch
            if alike:
                chosen = self._greedy.sample_locked(context, handle)
                for one, token in zip(self.generations, chosen, strict=True):
                    one.keep_sample(token)
            else:
                for one in self.generations:
                    one.sample(context)
        outcome = GOING
        for one in self.generations:
            if not one.accept_sample():
                outcome = ENDED
        return outcome
