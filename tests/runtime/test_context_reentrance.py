"""Call the API from signal handlers and callbacks, during every operation."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache.inspection import check_ledgers
from pyllamakv.errors import Cancelled, Closed, KvError, SequenceChanged
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

PROMPT = [5, 6, 7, 8, 9, 10]
OTHER = [20, 21, 22]
#: Longer than a batch.
LONG = [3 + 7 * i % 50 for i in range(40)]
#: The native calls of a context during which the handler runs.
CALLS = (
    *("decode", "run", "clear", "seq_rm", "seq_cp", "seq_keep", "seq_add"),
    *("seq_div", "seq_pos_min", "seq_pos_max", "defrag", "update", "cells", "state_save"),
    *("state_load", "logits", "logits_all", "sample", "sample_all", "threads"),
)


class Setup:
    """A context with two sequences, and cache managers over two others."""

    def __init__(self, model: kv.Model) -> None:
        self.model = model
        self.ctx = ctx = model.context(256, 16, n_ubatch=8, n_seq_max=8)
        self.a, self.b = ctx.sequence(), ctx.sequence()
        self.a.prefill(PROMPT)
        self.b.prefill(OTHER)
        self.saved = self.b.save()
        self.prefixes = kv.PrefixCache(ctx, entries=2)
        self.slots = kv.SlotCache(ctx, 2, size=64)
        self.batcher = kv.Batcher(self.slots)

    def contents(self) -> list[tuple[list[int], list[int]]]:
        """Return tokens and positions of all sequences."""
        return [(each.tokens, each.positions) for each in self.ctx.ledgers]

    def run_lease(self) -> None:
        """Decode a prompt in both managers."""
        with self.prefixes.acquire(LONG) as lease:
            lease.prefill()
        with self.slots.acquire(LONG) as slot:
            slot.decode()

    def run_batcher(self) -> None:
        """Generate for two prompts."""
        self.batcher.submit(PROMPT, 4)
        self.batcher.submit(OTHER, 4)
        self.batcher.run()

    def check(self) -> None:
        """Check that ledgers and cells agree, and that logits are those of a fresh evaluation."""
        ctx = self.ctx
        if all(len(set(each.positions)) == len(each) for each in ctx.ledgers):  # else divided
            check_ledgers(ctx)
        with self.model.context(256, 64, n_seq_max=1) as fresh:
            for sequence in (self.a, self.b):
                if not sequence.open or sequence.positions != list(range(len(sequence))):
                    continue
                with fresh.sequence() as same:
                    same.prefill([*sequence.tokens, 11])
                    ctx.decode(sequence.feed([11]))
                    left, right = sequence.logits().copy(), same.logits().copy()
                    np.testing.assert_allclose(left, right, rtol=0, atol=1e-4)


def consume(stream: kv.TextStream) -> None:
    """Run a generation."""
    for _ in stream:
        pass


OPERATIONS: dict[str, Callable[[Setup], object]] = {
    "prefill": lambda s: s.a.prefill(LONG),
    "decode": lambda s: s.ctx.decode([s.a.feed([1, 2]), s.b.feed([3])]),
    "step": lambda s: s.a.step(4),
    "step_all": lambda s: s.ctx.step_all([s.a, s.b], [4, 5]),
    "advance": lambda s: s.ctx.advance([s.a], [4], 5, s.model.sampler()),
    "generate": lambda s: consume(s.a.generate(5, stop_at_end=False)),
    "clear": lambda s: s.ctx.clear(),
    "fork": lambda s: s.a.fork(3).close(),
    "copy_to": lambda s: s.a.copy_to(s.b),
    "trim": lambda s: s.a.trim(2),
    "remove": lambda s: s.a.remove(2, 4),
    "shift": lambda s: s.a.shift(3, None, 5),
    "divide": lambda s: s.a.divide(0, None, 2),
    "save": lambda s: s.a.save(),
    "restore": lambda s: s.a.restore(s.saved),
    "close": lambda s: s.a.close(),
    "defrag": lambda s: s.ctx.kv.defrag(),
    "snapshot": lambda s: s.ctx.kv.snapshot(),
    "rows": lambda s: s.ctx.kv.state(s.a),
    "logits": lambda s: s.ctx.logits_all().copy(),
    "set_threads": lambda s: s.ctx.set_threads(2),
    "leases": Setup.run_lease,
    "batcher": Setup.run_batcher,
}

INNER: dict[str, Callable[[Setup], object]] = {
    "clear": lambda s: s.ctx.clear(),
    "sequence": lambda s: s.ctx.sequence(),
    "prefill": lambda s: s.b.prefill(LONG),
    "decode": lambda s: s.ctx.decode(s.b.feed([1, 2])),
    "step": lambda s: s.b.step(4),
    "step_all": lambda s: s.ctx.step_all([s.a, s.b], [4, 5]),
    "advance": lambda s: s.ctx.advance([s.b], [4], 5, s.model.sampler()),
    "generate": lambda s: consume(s.b.generate(2)),
    "trim": lambda s: s.b.trim(1),
    "remove": lambda s: s.b.remove(),
    "shift": lambda s: s.b.shift(0, None, 1),
    "fork": lambda s: s.b.fork(),
    "copy_to": lambda s: s.b.copy_to(s.a),
    "share": lambda s: s.b.share(s.a),
    "save": lambda s: s.b.save(),
    "restore": lambda s: s.b.restore(s.saved),
    "close": lambda s: s.b.close(),
    "defrag": lambda s: s.ctx.kv.defrag(),
    "update": lambda s: s.ctx.kv.update(),
    "snapshot": lambda s: s.ctx.kv.snapshot(),
    "state": lambda s: s.ctx.kv.state(s.b),
    "memory": lambda s: s.ctx.kv.memory,
    "close context": lambda s: s.ctx.close(),
    "close model": lambda s: s.model.close(),
    "set_adapters": lambda s: s.ctx.set_adapters({}),
    "prefix acquire": lambda s: s.prefixes.acquire(OTHER),
    "prefix clear": lambda s: s.prefixes.clear(),
    "prefix close": lambda s: s.prefixes.close(),
    "slot acquire": lambda s: s.slots.acquire(OTHER),
    "slot relieve": lambda s: s.slots.relieve(),
}


@contextmanager
def handler_in_calls(setup: Setup, inner: Callable[[], object]) -> Iterator[Counter[str]]:
    """Raise SIGUSR1 after each native call, and call ``inner`` in its handler; count outcomes."""
    seen: Counter[str] = Counter()

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            inner()
        except KvError as error:
            seen[type(error).__name__] += 1
        else:
            seen["no error"] += 1

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            if not seen["running"]:
                seen["running"] = 1
                signal.raise_signal(signal.SIGUSR1)
                seen["running"] = 0
            return result

        return call

    native, before = setup.ctx.native, signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(native, name, wrap(getattr(native, name)))
            yield seen
    finally:
        signal.signal(signal.SIGUSR1, before)
        del seen["running"]


def check_pair(model: kv.Model, operation: str, inner: str) -> None:
    """Run an operation, with a handler that calls ``inner``, and compare with one without it."""
    plain, setup = Setup(model), Setup(model)
    OPERATIONS[operation](plain)
    with handler_in_calls(setup, lambda: INNER[inner](setup)) as seen:
        OPERATIONS[operation](setup)
    # A check of arguments may come before: the sequence is empty, or closed.
    assert "Busy" in seen, f"{inner} during {operation}: {dict(seen)}"
    if inner == "trim":
        del seen["no error"]  # of an empty sequence
    assert set(seen) <= {"Busy", "UsageError", "Closed"}, (
        f"{inner} during {operation}: {dict(seen)}"
    )
    assert setup.contents() == plain.contents(), f"{inner} during {operation}"
    setup.check()
    for each in (plain, setup):
        each.ctx.close()


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_calls_of_handlers_during_an_operation_are_busy(operation: str, tmp_path: Path) -> None:
    """They change nothing: the operation ends as without them."""
    model = kit.model(tmp_path)
    for inner in INNER:
        check_pair(model, operation, inner)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["in-process", "isolated"])
@pytest.mark.parametrize(
    ("release", "kind"),
    [
        *(("0.3.9", kind) for kind in ("bytes", "sliding", "recurrent")),
        *(("b11549", kind) for kind in ("bytes", "sliding", "recurrent", "hybrid")),
    ],
)
def test_calls_of_handlers_are_busy_in_a_real_library(
    release: str, kind: str, isolated: bool, tmp_path: Path
) -> None:
    """They are for every kind of memory, also in a worker process."""
    shape = replace(synthetic_models.SHAPES[kind], n_vocab=320, vocab="bytes")
    with (
        kv.open(built(f"{release}+patched").folder, isolated=isolated) as library,
        library.load_model(synthetic_models.generate(shape, tmp_path)) as model,
    ):
        operations = ["prefill", "step", "advance", "leases", "batcher"]
        if kind in ("bytes", "sliding"):
            # States have no cells to move, and cannot evaluate their last token again.
            operations += ["generate", "defrag"]
        for operation in operations:
            for inner in ("clear", "trim", "step", "close", "prefix acquire", "slot acquire"):
                check_pair(model, operation, inner)


def test_a_handler_may_cancel(tmp_path: Path) -> None:
    """`cancel` takes no lock that the interrupted code may hold."""
    setup = Setup(kit.model(tmp_path))
    with (
        handler_in_calls(setup, setup.ctx.cancel) as seen,
        pytest.raises(Cancelled, match="tokens left"),
    ):
        setup.a.prefill(LONG)
    assert set(seen) == {"no error"}
    assert setup.a.tokens == PROMPT + LONG[:16]
    setup.check()
    setup.ctx.lock.interrupt(lambda raw: setup.ctx.cancel())


@contextmanager
def called_at_line(number: int, inner: Callable[[], object]) -> Iterator[list[str]]:
    """Call ``inner`` before the package executes the line of this number in the block.

    A signal handler could run there. Yields the names of errors.
    """
    count, errors = itertools.count(), []

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("pyllamakv."):
            return None
        if event == "line" and next(count) == number:
            sys.settrace(None)
            try:
                inner()
            except KvError as error:
                errors.append(type(error).__name__)
            else:
                errors.append("")
        return trace

    sys.settrace(trace)
    try:
        yield errors
    finally:
        sys.settrace(None)


GENERATING: dict[str, Callable[[Setup], list[int]]] = {
    "generate": lambda s: generated(s.a.generate(3, stop_at_end=False)),
    "prefill": lambda s: s.a.prefill(LONG) or [],
    "batcher": lambda s: submitted(s.batcher),
}


def generated(stream: kv.TextStream) -> list[int]:
    """Return the tokens of a stream."""
    consume(stream)
    return stream.tokens


def submitted(batcher: kv.Batcher) -> list[int]:
    """Return the tokens of a generation; raise its error."""
    one = batcher.submit(PROMPT, 3, stop_at_end=False)
    batcher.run()
    if one.error is not None:
        raise one.error
    return one.tokens


@pytest.mark.slow
@pytest.mark.parametrize("operation", GENERATING)
@pytest.mark.parametrize("inner", ["clear", "trim", "step", "decode", "close"])
def test_a_call_between_any_two_lines_leaves_no_wrong_data(
    operation: str, inner: str, tmp_path: Path
) -> None:
    """It is Busy, or complete; the operation then continues correctly, or raises."""
    model = kit.model(tmp_path)
    inners: dict[str, Callable[[Setup], object]] = {
        "clear": lambda s: s.ctx.clear(),
        "trim": lambda s: [each.trim(1) for each in (s.a, *(o.sequence for o in s.slots._slots))],
        "step": lambda s: s.a.step(30),
        "decode": lambda s: s.ctx.decode(s.a.feed([30, 31])),
        "close": lambda s: s.a.close(),
    }
    expected, changed = GENERATING[operation](Setup(model)), []
    with suppress(KvError):
        before = Setup(model)
        inners[inner](before)
        changed = GENERATING[operation](before)
    outcomes: Counter[str] = Counter()
    for number in itertools.count(0, 11):
        setup = Setup(model)
        with called_at_line(number, lambda s=setup: inners[inner](s)) as errors:
            try:
                tokens = GENERATING[operation](setup)
            except (SequenceChanged, Closed, kv.UsageError, kv.StaleLogits) as error:
                tokens, outcome = [], type(error).__name__
            else:
                outcome = "done"
        if not errors:
            break
        outcomes[f"{errors[0]} {outcome}"] += 1
        if errors[0] == "Busy":
            assert (tokens, outcome) == (expected, "done"), number
        elif outcome == "done":
            assert tokens in (expected, changed), number
        setup.check()
        setup.ctx.close()
    assert any(each.startswith("Busy") for each in outcomes), outcomes
