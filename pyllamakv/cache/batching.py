"""Continue several prompts at once: a small loop of continuous batching over a cache manager.

A step decodes one batch: a token of each sequence that is being continued, and as much of the
prompts that wait as there is room for beside them. Who was fed longest ago comes first, so that
nobody waits for a long prompt, and no prompt waits forever. There are no threads here: whoever
iterates over a generation, or calls `Batcher.step`, does the work.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.cache import feeding, request
from pyllamakv.cache.generation import Generation
from pyllamakv.errors import (
    Cancelled,
    Closed,
    DecodeError,
    KVCacheFull,
    KvError,
    NoKVSlot,
    NoSlotAvailable,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pyllamakv.cache.feeding import Portion
    from pyllamakv.cache.generation import Reason
    from pyllamakv.cache.lease import Manager
    from pyllamakv.runtime.sampler import Picker


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """Count what a batcher did: batches and their tokens, generations by how they ended."""

    waiting: int
    active: int
    decodes: int
    decoded_tokens: int
    chosen_tokens: int
    finished: int
    cancelled: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return asdict(self)


class Batcher:
    """Continue the prompts that are submitted, over the sequences that a cache manager hands out.

    ``n_batch`` tokens at most per decode (None: as many as the context takes). A prompt that finds
    no room waits until another has ended.
    """

    def __init__(self, manager: Manager, *, n_batch: int | None = None) -> None:
        self.manager = manager
        self.context = context = manager.context
        largest = context.info.n_batch
        self.n_batch = largest if n_batch is None else n_batch
        if not 1 <= self.n_batch <= largest:
            msg = f"n_batch must be from 1 to {largest} (the context's), not {n_batch}"
            raise UsageError(msg)
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        self._greedy = request.make_sampler(context.model, SamplerParams())
        #: Nobody gets in until fewer than so many are active.
        self._crowded: int | None = None
        self._feeding: list[Portion] = []
        self._lock = threading.Lock()
        #: Of the context's cancels those that were ours, and those of others that were seen.
        self._interrupts, self._cancels = 0, context.cancels
        self._steps = self._decodes = self._tokens = self._chosen = 0
        self._ended: dict[Reason, int] = dict.fromkeys(
            ("end", "stop", "length", "cancelled", "failed"), 0
        )

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
        if not self._active and not self._waiting:
            self._cancels = self.context.cancels - self._interrupts
        self._waiting.append(made)
        return made

    def step(self) -> bool:
        """Decode one batch; False when there is nothing left to continue.

        What fails, fails alone. Raises what ends everything: the context, or its worker, is gone.
        """
        try:
            self._sweep()
            if self._waiting:
                self._admit()
            if not self._active:
                return False
            portions = feeding.plan(self._active, self.n_batch, self._steps)
            self._steps += 1
            if portions := [each for each in portions if self._room(*each)]:
                self._feed(portions)
        except (Closed, WorkerDied) as error:
            self._end_all("failed", error)
            raise
        return bool(self._active or self._waiting)

    def run(self) -> None:
        """Go on until every generation has ended."""
        while self.step():
            pass

    def stats(self) -> BatcherStats:
        """Count what was done so far."""
        ended = self._ended
        return BatcherStats(
            len(self._waiting), len(self._active), self._decodes, self._tokens, self._chosen,
            sum(ended.values()), ended["cancelled"], ended["failed"],
        )  # fmt: skip

    def interrupt(self, generation: Generation) -> None:
        """End the decode that runs, if it is one of this generation's; from any thread."""
        with self._lock:
            if any(each is generation for each, _ in self._feeding):
                self._interrupts += 1
                with suppress(Closed):
                    self.context.cancel()

    def close(self) -> None:
        """Cancel what has not ended; the manager stays as it is."""
        self._end_all("cancelled")
        if isinstance(self._greedy, Sampler):
            self._greedy.close()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    # Who is in...

    def _admit(self) -> None:
        while self._waiting:
            if self._active and self._crowded is not None and len(self._active) >= self._crowded:
                return
            self._crowded = None
            first = self._waiting[0]
            try:
                lease = self.manager.acquire(first.prompt, groups=first.groups)
            except (NoSlotAvailable, KVCacheFull) as error:
                if self._active:
                    self._crowded = len(self._active)
                    return
                self._end(first, "failed", error)
            except (Closed, WorkerDied):
                raise
            except KvError as error:
                self._end(first, "failed", error)
            else:
                self._waiting.popleft()
                first.begin(lease, self._steps)
                self._active.append(first)

    def _sweep(self) -> bool:
        """End what was cancelled; True when anything was."""
        others = self.context.cancels - self._interrupts
        if others > self._cancels:
            self._cancels = others
            self._end_all("cancelled")
            return True
        gone = [each for each in (*self._active, *self._waiting) if each.cancelled]
        for each in gone:
            self._end(each, "cancelled")
        return bool(gone)

    def _end(self, one: Generation, reason: Reason, error: Exception | None = None) -> None:
        one.end(reason, error)
        self._left(one)

    def _left(self, one: Generation) -> None:
        """Strike out a generation that has ended."""
        for those in (self._active, self._waiting):
            if one in those:
                those.remove(one)
        if one.reason is not None:
            self._ended[one.reason] += 1

    def _end_all(self, reason: Reason, error: Exception | None = None) -> None:
        for each in (*self._active, *self._waiting):
            self._end(each, reason, error)

    # What is decoded...

    def _room(self, one: Generation, n: int) -> bool:
        """Make room for ``n`` tokens; False when they cannot be decoded in this step."""
        try:
            return feeding.make_room(one, n)
        except NoKVSlot as error:
            self._no_room(one, error)
            return False

    def _no_room(self, one: Generation, error: NoKVSlot) -> None:
        """Let a prompt wait until another has ended; what has text already fails."""
        if one.tokens or len(self._active) == 1:
            self._end(one, "failed", error)
            return
        self._crowded = len(self._active)
        self._active.remove(one)
        one.give_back()
        self._waiting.appendleft(one)

    def _feed(self, portions: list[Portion], *, healed: bool = False) -> None:
        """Decode, and choose the next tokens; what fails is tried one by one."""
        self._feeding = portions
        try:
            feeding.decode(self.context, portions)
        except Cancelled:
            self._feeding = []
            if not self._sweep():
                self._end_all("cancelled")
            return
        except DecodeError as error:
            if isinstance(error, NoKVSlot) and not healed and self._defrag(error):
                self._feed(portions, healed=True)
            elif len(portions) > 1:
                for each in portions:
                    # Together they may need more than was made room for, one by one.
                    if each[0].lease is not None and self._room(*each):
                        self._feed([each])
            elif isinstance(error, NoKVSlot):
                self._no_room(portions[0][0], feeding.full(error, defragged=healed))
            else:
                self._end(portions[0][0], "failed", error)
            return
        finally:
            self._feeding = []
        self._decodes += 1
        self._tokens += sum(n for _, n in portions)
        self._choose([one for one, _ in portions])

    def _defrag(self, error: NoKVSlot) -> bool:
        """Defragment where that may help; True when it was done."""
        if error.cause != "fragmented":
            return False
        with suppress(Unsupported):
            self.context.kv.defrag()
            return True
        return False

    # What follows...

    def _choose(self, fed: list[Generation]) -> None:
        context, greedy, ready = self.context, self._greedy, []
        for one in fed:
            one.served = self._steps
            if len(one.stream) == len(one.ledger.tokens):
                if one.max_tokens == 0:
                    self._end(one, "length")
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
            # All of them, before text goes to anybody who may decode something.
            for one, chosen in [(one, self._pick(one)) for one in ready]:
                if chosen is not None:
                    one.take(chosen)
        for one in ready:
            if one.reason is not None:
                self._left(one)

    def _pick(self, one: Generation) -> int | None:
        try:
            return one.sampler.pick(self.context, one.ledger.logits_at)
        except Exception as error:
            one.end("failed", error)
            return None
