"""Interrupt random operations by a signal, and check that nothing is lost, wrong, locked or leaked.

A signal arrives after a random time, also before and after the operation. Its handler raises an
exception that no code knows. Then every ledger must equal the cells, and a further token of each
sequence must have the logits of a fresh evaluation. Memory, file descriptors and threads must not
grow over the run, as in `qa.leaks`. Each entry is a kind of memory of a release.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import pyllamakv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import KvError, PartialRemovalRefused, StateError, Unsupported, Untestable
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.traces import script, script_player
from pyllamakv.traces.script_session import ScriptSession
from qa import leaks
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.leaks import sampling

RELEASES: Final = (TEST_RELEASE, "0.3.16", "b4980", "b11549")
#: Kind of memory -> its model of `synthetic_models`, here with a vocabulary, and its options.
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bytes": ("bytes", {}),
    "streams": ("bytes", {"kv_unified": False}),
    "sliding": ("sliding", {}),
    "full-window": ("sliding", {"swa_full": True}),
    "recurrent": ("recurrent", {}),
    "hybrid": ("hybrid", {}),
}
#: Kinds that a release does not have, or computes wrongly with several sequences.
LACKING: Final = {
    TEST_RELEASE: ("streams", "hybrid"),
    "b4980": ("streams", "recurrent", "hybrid"),
}
#: Number of interrupts in operations of an entry without a time limit.
INTERRUPTS: Final = 300
OPERATIONS: Final = (
    *("decode", "prefill", "step_all", "advance", "generate", "chat", "embed", "batcher"),
    *("fork", "trim", "shift", "save", "restore", "run"),
)
#: Interrupts between two samples of memory and descriptors, and the bytes that each may add: the
#: heap grew by up to 0.9 KB each over 150 of them, and by 0.1 KB over 400.
SAMPLE: Final = 10
LEAK: Final = leaks.LeakWorkload("", 0, 2048)
#: Maximum difference of a logit from a fresh evaluation, whose batches are different: as in the
#: tests of saved states (`NOISE`).
TOLERANCE: Final = 0.02
N_CTX, N_BATCH, SEQUENCES = 1536, 256, 3
#: Maximum tokens of a sequence.
LENGTH: Final = 341
TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: The script of `run`, without its context.
SCRIPT: Final = (
    {"op": "decode", "feed": {"0": 100, "1": 60}},
    {"op": "advance", "seq": [0, 1], "steps": [[7, 8]] * 20},
    {"op": "verify"},
)


class Interrupted(BaseException):
    """The exception of the handler."""


def names() -> tuple[str, ...]:
    """Return the names of all entries."""
    return tuple(
        f"{release} {kind}"
        for release in RELEASES
        for kind in KINDS
        if kind not in LACKING.get(release, ())
    )


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run each kind of memory for a share of the time."""
    chosen = [name for name in names() if effort.wants(name)]
    part = effort.shared(len(chosen))
    return [entry(name, part, tick) for name in chosen]


def entry(name: str, effort: StressOptions, tick: Tick) -> Entry:
    """Interrupt operations on one kind of memory."""
    release, kind = name.split()
    shape, options = KINDS[kind]
    try:
        with (
            pyllamakv.open(f"{release}+patched") as library,
            library.load_model(_with_vocabulary(shape)) as loaded,
        ):
            sampling.opened.append(library)  # whose log is emptied before each sample
            found = Interrupts(loaded, effort.seed, options)
            found.warm()
            end = time.monotonic() + effort.seconds
            while time.monotonic() < end and (effort.operations or found.hits < INTERRUPTS):
                found.one()
                tick(f"{name}: {found.hits} interrupts in operations")
            found.close()
    except (KvError, Untestable) as error:
        return skipped_entry("interrupts", name, f"not run: {error}")
    finally:
        sampling.opened.clear()
    grown = leaks.evaluate(name, LEAK, found.samples, effort.seed)
    row = {"interrupts": f"{found.total:,}", "in an operation": f"{found.hits:,}"}
    row |= {"checked logits": f"{found.checked:,}"}
    row |= {what: text for what, text in grown.row.items() if what != "operations"}
    return Entry(
        "interrupts",
        name,
        row,
        (*found.defects, *grown.defects),
        effort.seed,
        {"struck": dict(found.struck), "seconds": round(sum(found.latencies), 3)},
    )


def _with_vocabulary(name: str) -> Path:
    """Return the path of a model of `synthetic_models`, with a token per byte."""
    shape = replace(synthetic_models.SHAPES[name], name=f"{name}-bytes", n_vocab=320, vocab="bytes")
    return synthetic_models.generate(shape, home() / "models")


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

    def __init__(
        self, model: pyllamakv.Model, seed: int, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.random = model, random.Random(seed)
        new = partial(model.context, n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=1)
        self.options = dict(options or {})
        self.context = new(n_seq_max=SEQUENCES, **self.options)
        self.batches = new(n_seq_max=SEQUENCES, **self.options)
        self.pooled = new(embeddings=True, pooling="mean")
        self.fresh = new()
        #: Whether a token takes one cell of one cache.
        self.counts = self.context.info.memory is MemoryType.ATTENTION
        self.prompts = [self._tokens(n) for n in (40, 300, 90)]
        self.expected: list[Any] = []
        self.vector: Any = None
        self._finish: Callable[[], None] | None = None
        self.sampler = model.sampler(temperature=0.0)
        self.sequences = [self.context.sequence() for _ in range(SEQUENCES)]
        self.total, self.checked = 0, 0
        #: Number of interrupted operations, by name.
        self.struck: Counter[str] = Counter()
        self.latencies: list[float] = []
        #: Memory and descriptors after a number of interrupts in operations.
        self.samples: list[dict[str, int]] = []
        self.defects: list[str] = []
        #: Usual seconds of an operation.
        self._usual: dict[str, float] = {}
        self._batcher()()
        self._check("batcher")

    def close(self) -> None:
        """Close the contexts."""
        self.sampler.close()
        for each in (self.context, self.batches, self.pooled, self.fresh):
            each.close()  # raises Busy if an operation still has one

    @property
    def hits(self) -> int:
        """Return the number of interrupted operations."""
        return sum(self.struck.values())

    def warm(self) -> None:
        """Run every operation without a signal, after which caches grow no more."""
        for name in OPERATIONS * 3:
            call = getattr(self, f"_{name}")()
            begin = time.thread_time()
            with suppress(Unsupported, PartialRemovalRefused, StateError):
                call()
            self._usual[name] = time.thread_time() - begin
            self._check(name)

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
        if not self.samples or self.hits >= self.samples[-1]["count"] + SAMPLE:
            self._sample()

    def _sample(self) -> None:
        """Sample memory and descriptors of empty sequences, beside a process for templates."""
        for each in self.sequences:
            each.remove()
        self.model.apply_chat_template([{"role": "user", "content": "a"}], template=TEMPLATE)
        self.samples.append(sampling.sample(self.hits))

    # The operations...

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(3, 30) for _ in range(n)]

    def _sequence(self, room: int) -> pyllamakv.Sequence:
        one = self.random.choice(self.sequences)
        if len(one) + room > LENGTH - 16:
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
            if len(each) > LENGTH - 40:
                each.remove()

        def steps() -> None:
            for _ in range(20):
                self.context.step_all(self.sequences, self._tokens(SEQUENCES))

        return steps

    def _advance(self) -> Callable[[], object]:
        those = self.sequences[: self.random.randrange(1, SEQUENCES + 1)]
        for each in those:
            if len(each) > LENGTH - 80:
                each.remove()
        tokens = self._tokens(len(those))
        return lambda: self.context.advance(those, tokens, 60, self.sampler)

    def _generate(self) -> Callable[[], object]:
        one, tokens = self._sequence(60), self._tokens(30)

        def generate() -> None:
            one.prefill(tokens)
            for _ in one.generate(24, self.sampler, stop_at_end=False):
                pass

        return generate

    def _chat(self) -> Callable[[], object]:
        one = self._sequence(LENGTH)  # an empty one
        text = "".join(self.random.choices("abcdefgh", k=120))

        def chat() -> None:
            words = [{"role": "user", "content": text}]
            for _ in self.context.chat(words, 24, sequence=one, template=TEMPLATE):
                pass

        return chat

    def _embed(self) -> Callable[[], object]:
        def finish() -> None:
            vector = self.pooled.embed([self.prompts[0]])
            if self.vector is None:
                self.vector = vector
            distance = float(np.abs(vector - self.vector).max())
            if distance > TOLERANCE:
                self.defects.append(f"embed: an embedding is off by {distance:.3g}")

        self._finish = finish
        tokens = [self._tokens(200) for _ in range(2)]
        return lambda: self.pooled.embed(tokens)

    def _run(self) -> Callable[[], object]:
        """Play a script in this process, which `pyllamakv run` does in a worker."""
        native, path = self.model.native, self.model.path
        session = ScriptSession(native, file=path, loaded={str(path): self.model.handle})
        words = {"op": "context", "n_ctx": 512, "n_seq_max": 4, "n_threads": 1}
        lines = list(script.parse(map(json.dumps, (words, *SCRIPT))))
        script_player.play(lines[:1], session)
        self._finish = session.close
        return lambda: script_player.play(lines[1:], session)

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

    def _save(self) -> Callable[[], object]:
        one, two = self.random.sample(self.sequences, 2)

        def save() -> None:
            for _ in range(5):
                two.restore(one.save())

        return save

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
        for context in (self.context, self.batches, self.pooled):
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
        marks = [mark for ledger in context.ledgers for mark in ledger.marks]
        used = len(set(marks) if context.shares else marks)
        if self.counts and context.kv.stats.used != used:
            self.defects.append(f"{operation}: {context.kv.stats.used} cells for {used} marks")

    def _compare(self, operation: str) -> None:
        """Compare the next token of each sequence with a fresh evaluation."""
        for each in self.sequences:
            if each.ledger.moved:
                each.remove()  # has rotated keys, unlike a fresh evaluation
            if not len(each) or len(each) >= LENGTH:
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
