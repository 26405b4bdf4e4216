"""Interrupt random operations by a signal, and check that nothing is lost, wrong or locked.

A signal arrives after a random time, also before and after the operation. Its handler raises an
exception that no code knows. Then every ledger must equal the cells, and a further token of each
sequence must have the logits of a fresh evaluation. Each entry is a kind of memory of a release.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

import pyllamakv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import KvError, PartialRemovalRefused, StateError, Unsupported, Untestable
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.releases import TEST_RELEASE
from qa.entry import Entry, StressOptions, Tick, skipped_entry

#: Releases and kinds of memory, as models of `synthetic_models`.
RELEASES: Final = (TEST_RELEASE, "0.3.16", "b4980", "b11549")
MODELS: Final = ("bytes", "sliding", "recurrent", "hybrid")
#: Number of interrupts of an entry without a time limit.
INTERRUPTS: Final = 125
OPERATIONS: Final = (
    *("decode", "prefill", "step_all", "advance", "batcher"),
    *("fork", "trim", "shift", "restore"),
)
#: Maximum difference of a logit from a fresh evaluation, whose batches are different.
TOLERANCE: Final = 1e-2
N_CTX, N_BATCH, SEQUENCES = 1024, 256, 3


class Interrupted(BaseException):
    """The exception of the handler."""


def names() -> tuple[str, ...]:
    """Return the names of all entries."""
    return tuple(f"{release} {model}" for release in RELEASES for model in MODELS)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run each kind of memory for a share of the time."""
    chosen = [name for name in names() if effort.wants(name)]
    part = effort.shared(len(chosen))
    return [entry(name, part, tick) for name in chosen]


def entry(name: str, effort: StressOptions, tick: Tick) -> Entry:
    """Interrupt operations on one kind of memory."""
    release, model = name.split()
    try:
        with (
            pyllamakv.open(f"{release}+patched") as library,
            library.load_model(synthetic_models.model(model)) as loaded,
        ):
            found = Interrupts(loaded, effort.seed)
            end = time.monotonic() + effort.seconds
            while time.monotonic() < end and (effort.operations or found.total < INTERRUPTS):
                found.one()
                tick(f"{name}: {found.total} interrupts")
            found.close()
    except (KvError, Untestable) as error:
        return skipped_entry("interrupts", name, f"not run: {error}")
    return Entry(
        "interrupts",
        name,
        {
            "interrupts": f"{found.total:,}",
            "in an operation": f"{sum(found.struck.values()):,}",
            "checked logits": f"{found.checked:,}",
        },
        tuple(found.defects),
        effort.seed,
        {"struck": dict(found.struck), "seconds": round(sum(found.latencies), 3)},
    )


@contextmanager
def signalled(delay: float) -> Iterator[list[float]]:
    """Send SIGUSR1 to this thread after ``delay`` CPU seconds; its handler raises `Interrupted`.

    Yields a list that then has the CPU time of this thread at the signal. The exception may be
    raised anywhere in the block, and not after it.
    """
    sent: list[float] = []
    wanted = True

    def send() -> None:
        while (rest := due - time.clock_gettime(clock)) > 0:
            if left.wait(rest):
                return
        sent.append(time.clock_gettime(clock))
        signal.pthread_kill(target, signal.SIGUSR1)

    def handler(*_: object) -> None:
        if wanted:
            raise Interrupted

    target, left = threading.get_ident(), threading.Event()
    clock = time.pthread_getcpuclockid(target)
    due = time.clock_gettime(clock) + delay
    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        wanted = False
        left.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


class Interrupts:
    """Random operations on a context of a model, each with a signal at a random time."""

    def __init__(self, model: pyllamakv.Model, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.context = model.context(n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=SEQUENCES, n_threads=1)
        self.batches = model.context(n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=SEQUENCES, n_threads=1)
        self.fresh = model.context(n_ctx=N_CTX, n_batch=N_BATCH, n_threads=1)
        #: Whether a token takes one cell of one cache.
        self.counts = self.context.info.memory is MemoryType.ATTENTION
        self.prompts = [self._tokens(n) for n in (40, 300, 90)]
        self.expected: list[Any] = []
        self._finish: Callable[[], None] | None = None
        self.sampler = model.sampler(temperature=0.0)
        self.sequences = [self.context.sequence() for _ in range(SEQUENCES)]
        self.total, self.checked = 0, 0
        #: Number of interrupted operations, by name.
        self.struck: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.defects: list[str] = []
        #: Usual seconds of an operation.
        self._usual: dict[str, float] = {}
        self._batcher()()
        self._check("batcher")

    def close(self) -> None:
        """Close the contexts."""
        self.sampler.close()
        for each in (self.context, self.batches, self.fresh):
            each.close()  # raises Busy if an operation still has one

    def one(self) -> None:
        """Run one operation with a signal, and check the cells and the logits."""
        name = self.random.choice(OPERATIONS)
        call = getattr(self, f"_{name}")()
        delay = self.random.uniform(0, 1.2 * self._usual.get(name, 0.01))
        begin, ended = time.thread_time(), 0.0
        self.total += 1
        with suppress(Interrupted), signalled(delay) as sent:
            try:
                call()
            except Interrupted:
                ended = time.thread_time()
                raise
            except (Unsupported, PartialRemovalRefused, StateError):
                pass  # a limit of the release, or of a cache with holes
            except KvError as error:
                self.defects.append(f"{name}: {type(error).__name__}: {error}")
            self._usual[name] = time.thread_time() - begin
        if ended and sent:
            self.struck[name] += 1
            self.latencies.append(ended - sent[0])
        self._check(name)

    # The operations...

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(3, 30) for _ in range(n)]

    def _sequence(self, room: int) -> pyllamakv.Sequence:
        one = self.random.choice(self.sequences)
        if len(one) + room > N_CTX // SEQUENCES - 16:
            one.remove()
        return one

    def _decode(self) -> Callable[[], object]:
        one, tokens = self._sequence(N_BATCH), self._tokens(self.random.randrange(2, N_BATCH))
        return lambda: self.context.decode([one.feed(tokens)])

    def _prefill(self) -> Callable[[], object]:
        one, tokens = self._sequence(300), self._tokens(self.random.randrange(100, 300))
        return lambda: one.prefill(tokens)

    def _step_all(self) -> Callable[[], object]:
        for each in self.sequences:
            if len(each) > N_CTX // SEQUENCES - 40:
                each.remove()

        def steps() -> None:
            for _ in range(20):
                self.context.step_all(self.sequences, self._tokens(SEQUENCES))

        return steps

    def _advance(self) -> Callable[[], object]:
        those = self.sequences[: self.random.randrange(1, SEQUENCES + 1)]
        for each in those:
            if len(each) > N_CTX // SEQUENCES - 80:
                each.remove()
        tokens = self._tokens(len(those))
        return lambda: self.context.advance(those, tokens, 60, self.sampler)

    def _fork(self) -> Callable[[], object]:
        one, two = self.random.sample(self.sequences, 2)

        def replace() -> None:
            for _ in range(20):
                two.remove()
                if len(one):
                    one.copy_to(two)

        return replace if self.context.shares else self._decode()

    def _trim(self) -> Callable[[], object]:
        one = self.random.choice(self.sequences)

        def trim() -> None:
            for _ in range(min(20, len(one))):
                one.trim(len(one) - 1)

        return trim

    def _shift(self) -> Callable[[], object]:
        one = self.random.choice(self.sequences)

        def shift() -> None:
            for delta in (3, -3) * 10:
                one.shift(None, None, delta, allow_shared=True)

        return shift

    def _restore(self) -> Callable[[], object]:
        one, two = self.random.sample(self.sequences, 2)

        def restore() -> None:
            for _ in range(5):
                two.restore(one.save(portable=False))

        return restore

    def _batcher(self) -> Callable[[], object]:
        cache = pyllamakv.PrefixCache(self.batches)
        batcher = pyllamakv.Batcher(cache)
        generations = [batcher.submit(each, max_tokens=12) for each in self.prompts]

        def finish() -> None:
            batcher.run()
            found = [(each.finish_reason, list(each.tokens)) for each in generations]
            self.expected = self.expected or found
            if found != self.expected:
                self.defects.append(f"batcher: {found} instead of {self.expected}")
            batcher.close()
            cache.close()
            if len(self.batches.vacant) != SEQUENCES:
                self.defects.append(f"batcher: only sequences {self.batches.vacant} are empty")

        self._finish = finish
        return batcher.run

    # The checks...

    def _check(self, operation: str) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        for context in (self.context, self.batches):
            self._check_cells(operation, context)
        self._compare(operation)

    def _check_cells(self, operation: str, context: pyllamakv.Context) -> None:
        for number, ledger in enumerate(context.ledgers):
            if not len(ledger.tokens) == len(ledger.positions) == len(ledger.marks):
                self.defects.append(f"{operation}: the ledger of sequence {number} is uneven")
            last = context.native.seq_pos_max(context.handle, number)
            if last != ledger.next - 1:
                self.defects.append(
                    f"{operation}: the cells of sequence {number} end at {last}, its ledger at "
                    f"{ledger.next - 1}"
                )
        used = {mark for ledger in context.ledgers for mark in ledger.marks}
        if self.counts and context.kv.stats.used != len(used):
            self.defects.append(f"{operation}: {context.kv.stats.used} cells for {len(used)} marks")

    def _compare(self, operation: str) -> None:
        """Compare the next token of each sequence with a fresh evaluation."""
        for each in self.sequences:
            if each.ledger.moved:
                each.remove()  # has rotated keys, unlike a fresh evaluation
            if not len(each) or len(each) >= N_CTX // SEQUENCES:
                continue
            tokens = [*each.tokens, 5]
            each.step(5)
            got = self.context.logits().copy()
            with self.fresh.sequence() as other:
                other.prefill(tokens)
                distance = float(np.abs(self.fresh.logits().copy() - got).max())
            self.checked += 1
            if distance > TOLERANCE:
                self.defects.append(f"{operation}: logits are off by {distance:.3g}")
