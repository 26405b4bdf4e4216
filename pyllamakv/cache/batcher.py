"""Continue several prompts at once: a small loop of continuous batching over a cache manager.

A step decodes one batch: a token of each active sequence, then as much of the waiting prompts as
fits (`plan`). The sequence that was fed longest ago comes first, so a long prompt delays nothing
else and every prompt is reached. `Roster` admits generations in the order of submission. `Steady`
is the fast path for steps in which every generation needs one token. There are no threads:
`Batcher.step`, or iterating over a generation, does the work.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.cache import groups as grouping
from pyllamakv.cache import room
from pyllamakv.cache.generation import (
    Generation,
    checked_request,
    follow_ledger,
    make_room,
    make_sampler,
    mark_served,
    restore_logits,
)
from pyllamakv.errors import (
    Cancelled,
    Closed,
    DecodeError,
    KVCacheFull,
    KvError,
    NoKVSlot,
    NoSlotAvailable,
    ReprocessNeeded,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.batch import Feed
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from pyllamakv.cache.generation import Reason
    from pyllamakv.cache.interface import Manager
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sampler import NumpySampler, Picker, Sampler


class Batcher:
    """Continue the prompts that are submitted, over the sequences that a cache manager hands out.

    ``n_batch`` tokens at most per decode (None: as many as the context takes). A prompt that finds
    no room waits until another has ended.
    """

    def __init__(self, manager: Manager, *, n_batch: int | None = None) -> None:
        context = getattr(manager, "context", None)
        if not isinstance(context, Context) or not callable(getattr(manager, "acquire", None)):
            expected = "a cache manager (PrefixCache, SlotCache, or another Manager)"
            raise arguments.wrong_type("manager", manager, expected)
        n_batch = arguments.whole_or_none("n_batch", n_batch)
        self.manager = manager
        self.context = context
        largest = context.info.n_batch
        self.n_batch = largest if n_batch is None else n_batch
        if not 1 <= self.n_batch <= largest:
            msg = (
                f"n_batch must be from 1 to {largest} (the context's), not "
                f"{arguments.shown(n_batch)}"
            )
            raise UsageError(msg)
        #: The text of tokens that were chosen before: see `Generation`.
        self.known: dict[int, str] = {}
        self._roster = Roster(manager)
        self._greedy = make_sampler(context.model, SamplerParams())
        self._feeding: list[Portion] = []
        #: Those who are continued, while nobody comes, goes or is cancelled.
        self._steady: Steady | None = None
        self._lock = threading.Lock()
        #: Of the context's cancels those that were ours, and those of others that were seen.
        self._interrupts, self._cancels = 0, context.cancels
        self._steps = self._decodes = self._tokens = self._chosen = self._slot_failures = 0

    def submit(
        self,
        prompt: str | Iterable[int],
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        sampler: Picker | SamplerParams | None = None,
        *,
        groups: Iterable[tuple[int, int]] = (),
        stop_at_end: bool = True,
    ) -> Generation:
        """Take a prompt, text or tokens, and return what will continue it; nothing is decoded yet.

        Ends after ``max_tokens`` (None: without limit; 0: with the prompt), before a stop string,
        or at an end of generation unless ``stop_at_end`` is False. ``sampler`` None is greedy.
        ``groups`` of tokens are decoded in one batch. Raises UsageError for what cannot be right;
        a prompt that the manager refuses fails alone, when its turn comes.
        """
        asked = checked_request(
            self.context, self._greedy, self.n_batch, prompt, max_tokens=max_tokens, stop=stop,
            sampler=sampler, groups=groups, stop_at_end=stop_at_end,
        )  # fmt: skip
        made = Generation(self, asked)
        self._unsettle()
        if not self._roster:
            self._cancels = self.context.cancels - self._interrupts
        self._roster.waiting.append(made)
        return made

    def step(self) -> bool:
        """Decode one batch; False when there is nothing left to continue.

        What fails, fails alone. Raises what ends everything: the context, or its worker, is gone.
        """
        try:
            steady = self._steady
            if steady is not None:
                try:
                    outcome = steady.step()
                except DecodeError as error:
                    self._unsettle()
                    self._failed(error, steady.portions)
                    return bool(self._roster)
                if outcome is GOING:
                    return True
                self._unsettle()
                if outcome is ENDED:
                    self._strike_out(steady.generations)
                    return bool(self._roster)
            self._step()
        except (Closed, WorkerDied) as error:
            self._steady = None
            self._roster.end_all("failed", error)
            raise
        return bool(self._roster)

    def run(self) -> None:
        """Go on until every generation has ended."""
        while self.step():
            pass

    def stats(self) -> BatcherStats:
        """Count what was done so far."""
        roster, more = self._roster, self._steady.steps if self._steady is not None else 0
        each = more * len(roster.active)
        return BatcherStats(
            len(roster.waiting), len(roster.active), self._decodes + more, self._tokens + each,
            self._chosen + each,
            self._slot_failures, sum(roster.ended.values()), roster.ended["cancelled"],
            roster.ended["failed"],
        )  # fmt: skip

    def interrupt(self, generation: Generation) -> None:
        """End the decode that runs, if it is one of this generation's; from any thread."""
        arguments.instance("generation", generation, Generation, "a Generation")
        with self._lock:
            steady = self._steady
            if steady is not None:
                steady.cancels = -1
                running = steady.decoding and generation in steady.generations
            else:
                running = any(each is generation for each, _ in self._feeding)
            if running:
                self._interrupts += 1
                with suppress(Closed):
                    self.context.cancel()

    def close(self) -> None:
        """Cancel what has not ended; the manager stays as it is."""
        self._unsettle()
        try:
            self._roster.end_all("cancelled")
        finally:
            if isinstance(self._greedy, Sampler):
                self._greedy.close()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    # While nothing changes...

    def _settle(self) -> None:
        """Take note that everybody just needs one token, if so."""
        roster = self._roster
        if not roster.active or len(roster.active) > self.n_batch:
            return
        if roster.waiting and not roster.full:
            return
        if any(len(one.stream) - len(one.ledger.tokens) != 1 for one in roster.active):
            return
        cancels = self._interrupts + self._cancels
        self._steady = Steady(self.context, self._greedy, roster.active, cancels)
        if any(one.cancelled for one in roster):
            # In this order: `Generation.cancel` says so first, and interrupts then.
            self._unsettle()

    def _unsettle(self) -> None:
        steady, self._steady = self._steady, None
        if steady is not None:
            self._steps += steady.steps
            self._decodes += steady.steps
            self._tokens += steady.steps * len(steady.portions)
            self._chosen += steady.steps * len(steady.portions)
            mark_served(steady.generations, self._steps)

    def _strike_out(self, those: Iterable[Generation]) -> None:
        for one in those:
            if one.reason is not None:
                self._roster.left(one)

    # When something does...

    def _step(self) -> None:
        # Who ended when an exception came between, Ctrl-C for one, is still on the list.
        self._strike_out(tuple(self._roster))
        self._sweep()
        for one in self._roster.active:
            restore_logits(one)
        self._roster.admit(self._steps)
        # In place: of those who were fed together another one comes first the next time.
        self._roster.active.sort(key=lambda one: one.served)
        portions = plan(self._roster.active, self.n_batch, self._steps)
        self._steps += 1
        portions = [each for each in portions if self._room(*each)]
        if portions:
            self._feed(portions)
        self._settle()

    def _sweep(self) -> bool:
        """End what was cancelled; True when anything was."""
        others = self.context.cancels - self._interrupts
        if others > self._cancels:
            self._cancels = others
            self._roster.end_all("cancelled")
            return True
        gone = [each for each in self._roster if each.cancelled]
        for each in gone:
            self._roster.end(each, "cancelled")
        return bool(gone)

    def _room(self, one: Generation, n: int) -> bool:
        """Make room for ``n`` tokens; False when they cannot be decoded in this step."""
        try:
            return make_room(one, n)
        except NoKVSlot as error:
            self._no_room(one, error)
            return False

    def _no_room(self, one: Generation, error: NoKVSlot) -> None:
        """Let a prompt wait until another has ended; what has text already fails."""
        if one.tokens or len(self._roster.active) == 1:
            self._roster.end(one, "failed", error)
        else:
            self._roster.set_back(one)

    def _feed(self, portions: list[Portion], *, healed: bool = False) -> None:
        """Decode, and choose the next tokens."""
        self._feeding = portions
        try:
            decode(self.context, portions)
        except DecodeError as error:
            self._failed(error, portions, healed=healed)
            return
        finally:
            self._feeding = []
        self._decodes += 1
        self._tokens += sum(n for _, n in portions)
        self._choose([one for one, _ in portions])

    def _failed(self, error: DecodeError, portions: list[Portion], *, healed: bool = False) -> None:
        """Find out who failed: what fails together is tried one by one."""
        self._slot_failures += isinstance(error, NoKVSlot)
        if isinstance(error, Cancelled):
            if not self._sweep():
                self._roster.end_all("cancelled")
        elif isinstance(error, NoKVSlot) and not healed and room.defragment(self.context, error):
            self._feed(portions, healed=True)
        elif len(portions) > 1:
            for each in portions:
                # Together they may need more than was made room for, one by one.
                if each[0].lease is not None and self._room(*each):
                    self._feed([each])
        elif isinstance(error, NoKVSlot):
            one, n = portions[0]
            counts = {one.sequence.id: n}
            self._no_room(one, room.full(self.context, error, counts, defragged=healed))
        else:
            self._roster.end(portions[0][0], "failed", error)

    def _choose(self, fed: list[Generation]) -> None:
        context, greedy, ready = self.context, self._greedy, []
        mark_served(fed, self._steps)
        for one in fed:
            if len(one.stream) == len(one.ledger.tokens):
                if one.max_tokens == 0:
                    self._roster.end(one, "length")
                else:
                    ready.append(one)
        if not ready:
            return
        self._chosen += len(ready)
        if all(one.sampler is greedy for one in ready):
            tokens = [greedy.pick(context)] if len(ready) == 1 else greedy.pick_all(context)
            for one, token in zip(ready, tokens, strict=True):
                one.take(token)
        else:
            for one in ready:
                one.choose(context)
        self._strike_out(ready)


#: Steps after which whoever was left out goes before those that are being continued.
PATIENCE = 8

Portion = tuple["Generation", int]


def plan(active: Sequence[Generation], n_batch: int, steps: int) -> list[Portion]:
    """Share a batch out: who was left out too long, then who needs one token, then the prompts.

    Of each kind the one first that was fed longest ago. Groups of a prompt are not split.
    """
    if len(active) <= n_batch and all(
        len(each.stream) - len(each.ledger.tokens) == 1 for each in active
    ):
        return [(each, 1) for each in active]
    late, single, others = [], [], []
    for each in sorted(active, key=lambda one: one.served):
        if steps - each.served > PATIENCE:
            late.append(each)
        elif len(each.stream) - len(each.ledger.tokens) == 1:
            single.append(each)
        else:
            others.append(each)
    found: list[Portion] = []
    for each in (*late, *single, *others):
        have = len(each.ledger.tokens)
        n = min(len(each.stream) - have, n_batch)
        if each.groups and have + n < len(each.prompt):
            n = grouping.floor(each.groups, have + n) - have
        if n > 0:
            found.append((each, n))
            n_batch -= n
    return found


def decode(context: Context, portions: Sequence[Portion]) -> None:
    """Decode one batch, with logits where all of a stream is decoded then."""
    if all(n == 1 == len(one.stream) - len(one.ledger.tokens) for one, n in portions):
        if len(portions) == 1:
            one = portions[0][0]
            context.step(one.sequence, one.stream[-1])
        else:
            context.step_all(
                [one.sequence for one, _ in portions], [one.stream[-1] for one, _ in portions]
            )
        return
    feeds = []
    for one, n in portions:
        have = len(one.ledger.tokens)
        piece = np.array(one.stream[have : have + n], dtype=np.int32)
        wants = have + n == len(one.stream) and one.max_tokens != 0
        feeds.append(Feed(one.sequence, piece, "last" if wants else "none"))
    context.decode(feeds)


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """Count what a batcher did: batches and their tokens, generations by how they ended.

    ``slot_failures`` are decodes that found no cells; most of them are cured, and fail nobody.
    """

    waiting: int
    active: int
    decodes: int
    decoded_tokens: int
    chosen_tokens: int
    slot_failures: int
    finished: int
    cancelled: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class Roster:
    """Hold the generations of a batcher that have not ended, and count how the others did."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.waiting: deque[Generation] = deque()
        self.active: list[Generation] = []
        self.ended: dict[Reason, int] = dict.fromkeys(
            ("end", "stop", "length", "cancelled", "failed"), 0
        )
        #: Nobody gets in until fewer than so many are active.
        self._crowded: int | None = None

    def __bool__(self) -> bool:
        return bool(self.active or self.waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter((*self.active, *self.waiting))

    @property
    def full(self) -> bool:
        """Tell whether those who wait have to until somebody ends."""
        return bool(self.active and self._crowded is not None and len(self.active) >= self._crowded)

    def admit(self, steps: int) -> None:
        """Let in who waits, as far as the manager has leases; ``steps`` is when.

        Who is refused for good fails; so does who finds no room although nobody can make any.
        """
        while self.waiting and not self.full:
            self._crowded = None
            first = self.waiting[0]
            try:
                lease = self.manager.acquire(first.prompt, groups=first.groups)
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
                self.waiting.popleft()
                first.begin(lease, steps)
                self.active.append(first)

    def set_back(self, one: Generation) -> None:
        """Let one wait again, as the first, until another has ended."""
        self.active.remove(one)
        self.waiting.appendleft(one)
        self._crowded = len(self.active)
        one.give_back()

    def end(self, one: Generation, reason: Reason, error: Exception | None = None) -> None:
        """End one; raises what giving its lease back does, with it struck out."""
        try:
            one.end(reason, error)
        finally:
            self.left(one)

    def end_all(self, reason: Reason, error: Exception | None = None) -> None:
        """End all of them; what giving a lease back raises is raised when all have ended."""
        with ExitStack() as stack:
            # Last in, first out; a stack goes on where one of them raises.
            for each in reversed((*self.active, *self.waiting)):
                stack.callback(self.end, each, reason, error)

    def left(self, one: Generation) -> None:
        """Strike out one that has ended."""
        for those in (self.active, self.waiting):
            if one in those:
                those.remove(one)
        if one.reason is not None:
            self.ended[one.reason] += 1


class StepOutcome(Enum):
    """Say what became of a step: all go on, somebody ended, or nothing was decoded."""

    GOING = 0
    ENDED = 1
    NOTHING = 2


GOING, ENDED, NOTHING = StepOutcome


class Steady:
    """Hold generations that need one token each.

    ``steps`` counts what was decoded, ``decoding`` says that it is being done, and another number
    than the context's in ``cancels`` ends it before the next step.
    """

    __slots__ = (
        "_alike", "_context", "_greedy", "_rooms", "_sequences", "cancels",
        "decoding", "generations", "portions", "steps",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        greedy: Sampler | NumpySampler,
        generations: Sequence[Generation],
        cancels: int,
    ) -> None:
        self.generations = tuple(generations)
        self.portions = [(one, 1) for one in generations]
        self.steps = 0
        self.cancels = cancels
        self.decoding = False
        self._context = context
        self._greedy = greedy
        #: Whether all of them have the greedy sampler, which chooses for all in one call.
        self._alike = all(one.sampler is greedy for one in generations)
        self._sequences = [one.sequence for one in generations]
        self._rooms = [(one, one.ledger, one.lease.make_room) for one in generations if one.lease]

    def step(self) -> StepOutcome:
        """Make room, decode a token of each, and let each take its next one.

        NOTHING when that has to be done in the general way. Raises DecodeError.
        """
        context = self._context
        if context.cancels != self.cancels:
            return NOTHING
        tokens = []
        for one, ledger, reserve in self._rooms:
            have = len(ledger.tokens)
            if len(one.stream) != have + 1:
                return NOTHING
            try:
                reserve(1)
            except ReprocessNeeded as needed:
                follow_ledger(one, have, needed.tokens)
                return NOTHING
            except NoKVSlot:
                return NOTHING
            token = one.stream[-1]
            if len(ledger.tokens) != have:
                follow_ledger(one, have)
            tokens.append(token)
        self.decoding = True
        if len(tokens) == 1:
            context.step(self._sequences[0], token)
        else:
            context.step_all(self._sequences, tokens)
        self.decoding = False
        self.steps += 1
        outcome = GOING
        if self._alike:
            if len(tokens) == 1:
                return GOING if one.take(self._greedy.pick(context)) else ENDED
            chosen = self._greedy.pick_all(context)
            for one, token in zip(self.generations, chosen, strict=True):
                if not one.take(token):
                    outcome = ENDED
        else:
            for one in self.generations:
                if not one.choose(context):
                    outcome = ENDED
        return outcome
