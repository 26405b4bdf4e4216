"""Continue several prompts at once: a small loop of continuous batching over a cache manager.

A step decodes one batch: a token of each sequence that is being continued, and as much of the
prompts that wait as there is room for beside them. Who was fed longest ago comes first, so that
nobody waits for a long prompt, and no prompt waits forever. There are no threads here: whoever
iterates over a generation, or calls `Batcher.step`, does the work.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.cache import feeding, request, room
from pyllamakv.cache.generation import Generation
from pyllamakv.cache.roster import BatcherStats, Roster
from pyllamakv.cache.steady import ENDED, GOING, Steady
from pyllamakv.errors import (
    Cancelled,
    Closed,
    DecodeError,
    NoKVSlot,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pyllamakv.cache.feeding import Portion
    from pyllamakv.cache.lease import Manager
    from pyllamakv.runtime.sampler import Picker


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
        self._greedy = request.make_sampler(context.model, SamplerParams())
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
        asked = request.checked(
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
            for one in steady.generations:
                one.served = self._steps

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
            feeding.restore_logits(one)
        self._roster.admit(self._steps)
        # In place: of those who were fed together another one comes first the next time.
        self._roster.active.sort(key=lambda one: one.served)
        portions = feeding.plan(self._roster.active, self.n_batch, self._steps)
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
            return feeding.make_room(one, n)
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
            feeding.decode(self.context, portions)
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
        for one in fed:
            one.served = self._steps
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
