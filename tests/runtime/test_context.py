"""Test decoding: recorded tokens, state after a failure, and concurrent calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit

from pyllamakv.binding.protocol import Capability, DecodeStatus, SamplerParams
from pyllamakv.errors import (
    Busy,
    Cancelled,
    Closed,
    DecodeError,
    NativeError,
    NoKVSlot,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime.batch import Batch
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from pathlib import Path


def test_tokens_are_recorded_after_success(tmp_path: Path) -> None:
    """Check the ledgers after a batch of two sequences and a step."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed([5, 6, 7]), b.feed([8])])
    b.step(np.int32(9))
    assert (a.tokens, b.tokens) == ([5, 6, 7], [8, 9])
    assert (a.pos_min, a.pos_max, b.pos_max) == (0, 2, 1)
    assert ctx.kv.stats.used == 5


def test_tokens_of_a_text_are_decoded_and_read_back(tmp_path: Path) -> None:
    """Check the tokens and the text of two feeds, of which the first begins with the BOS token."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed(ctx.model.tokenize("ab")))
    ctx.decode(a.feed(ctx.model.tokenize("c", add_special=False)))
    assert a.tokens == [1, 100, 101, 102]
    assert a.text == "abc"


@pytest.mark.parametrize("failure", [1, 2, -3])
def test_a_failed_decode_keeps_every_token(tmp_path: Path, failure: int) -> None:
    """Check ledgers and cells after each kind of failure, and that the same feeds work again."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode([a.feed([5, 6]), b.feed([7])])
    before = ctx.kv.snapshot()
    feeds = [a.feed([1, 2, 3]), b.feed([4])]
    ctx.native.fail_next.append(failure)
    kind = {1: NoKVSlot, 2: Cancelled, -3: DecodeError}[failure]
    with pytest.raises(kind) as caught:
        ctx.decode(feeds)
    assert caught.value.code == failure
    assert (a.tokens, b.tokens) == ([5, 6], [7])
    assert not len(before.moves_to(ctx.kv.snapshot()))
    ctx.decode(feeds)
    assert (a.tokens, b.tokens) == ([5, 6, 1, 2, 3], [7, 4])


def test_an_exception_of_the_library_becomes_a_decode_error(tmp_path: Path) -> None:
    """Check both ways to decode, and that a dead worker raises its own error."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    for work in (lambda: a.step(5), lambda: ctx.decode(a.feed([5, 6]))):
        ctx.native.fail_next.append(NativeError("llama.cpp threw: out of ideas", code=-1003))
        with pytest.raises(DecodeError, match="out of ideas"):
            work()
        ctx.native.fail_next.append(WorkerDied("the worker ended"))
        with pytest.raises(WorkerDied):
            work()
    assert a.tokens == []


@pytest.mark.regression(
    "a decode whose signal handler raised an error of this package was not rolled back",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Busy, Closed])
@pytest.mark.parametrize("way", ["decode", "step", "step_all", "run"])
def test_interrupted_decode_is_rolled_back(
    tmp_path: Path, way: str, kind: type[BaseException]
) -> None:
    """A handler raises after the C call: its tokens are rolled back, and may be decoded again."""
    ctx = kit.context(tmp_path)
    a, b, sampler = ctx.sequence(), ctx.sequence(), Sampler(ctx.model, SamplerParams())
    ctx.decode([a.feed([5, 6]), b.feed([7])])
    operation = "run" if way == "run" else "decode"
    real = getattr(ctx.native, operation)
    work = {
        "decode": lambda: ctx.decode([a.feed([1, 2, 3]), b.feed([4])]),
        "step": lambda: a.step(1),
        "step_all": lambda: ctx.step_all([a, b], [1, 2]),
        "run": lambda: ctx.advance([a, b], [1, 2], 3, sampler),
    }[way]

    def interrupted(*args: Any) -> int:
        setattr(ctx.native, operation, real)
        real(*args)
        raise kind

    setattr(ctx.native, operation, interrupted)
    with pytest.raises(kind):
        work()
    assert (a.tokens, b.tokens) == ([5, 6], [7])
    assert (a.pos_max, b.pos_max, ctx.kv.stats.used) == (1, 0, 3)
    work()
    assert ctx.kv.stats.used == len(a) + len(b)


def test_try_decode_returns_each_status(tmp_path: Path) -> None:
    """Check `try_decode` for each status, and that errors still raise."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    assert ctx.try_decode(a.feed([1])) is DecodeStatus.OK
    ctx.native.fail_next += [1, 2, -1]
    assert ctx.try_decode(a.feed([1])) is DecodeStatus.NO_SLOT
    assert ctx.try_decode(a.feed([1])) is DecodeStatus.ABORTED
    with pytest.raises(DecodeError):
        ctx.try_decode(a.feed([1]))
    assert a.tokens == [1]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([259], "token 259"),
        ([-1], "token -1"),
        ([1] * 33, "n_batch is 32"),
    ],
)
def test_batches_that_cannot_be_right_never_reach_c(
    tmp_path: Path, tokens: list[int], message: str
) -> None:
    """Check empty, too large and out of the vocabulary."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    with pytest.raises(UsageError, match=message):
        ctx.decode([a.feed(tokens)])
    with pytest.raises(UsageError, match="token 259"):
        a.step(259)
    with pytest.raises(TypeError):
        a.step(1.5)
    assert ctx.native.calls == []


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ([(5, 3, 0)], "continues at position 2"),
        ([(5, 2, 0), (5, 4, 0)], "continues at position 3"),
        ([(5, 1, 0)], "continues at position 2"),
        ([(5, -1, 1)], "continues at position 0"),
        ([(5, 0, 4)], "sequence 4 is out of range"),
        ([(5, 0, -1)], "sequence -1 is out of range"),
        ([(5, 2, [0, 1])], "sequence 1 continues"),
        ([(5, 0, [1, 1])], "twice"),
    ],
)
def test_batch_with_gaps_or_repeats_is_refused(tmp_path: Path, placed: list, message: str) -> None:
    """Check gaps, repeats and foreign sequences in a `Batch`."""
    ctx = kit.context(tmp_path)
    ctx.decode(ctx.sequence().feed([8, 9]))
    batch = Batch()
    for token, pos, sequences in placed:
        batch.add(token, pos, sequences)
    with pytest.raises(UsageError, match=message):
        ctx.decode(batch)


def test_a_batch_writes_the_ledger_of_each_sequence(tmp_path: Path) -> None:
    """Check a token that two sequences share: one cell, in both ledgers."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    ctx.decode(Batch().add(5, 0, [0, 1]).add(6, 1, [0, 1]).add(7, 2, 1, logits=True))
    assert (a.tokens, b.tokens) == ([5, 6], [5, 6, 7])
    assert ctx.kv.stats.used == 3
    assert ctx.kv.stats.shared == 2
    assert b.logits().argmax() == ctx.logits(2).argmax()


def test_long_prompts_are_split(tmp_path: Path) -> None:
    """Check pieces of n_batch, and logits of the last token alone."""
    ctx = kit.context(tmp_path, n_ctx=128)
    a = ctx.sequence()
    a.prefill(list(range(3, 80)))
    assert ctx.native.calls == ["decode 32", "decode 32", "decode 13"]
    assert a.tokens == list(range(3, 80))
    assert ctx.logits(12).argmax() == a.logits().argmax()
    with pytest.raises(UsageError, match="no tokens"):
        a.prefill([])


def test_a_failing_piece_keeps_those_before(tmp_path: Path) -> None:
    """Check that the ledger has the decoded part of a prompt."""
    ctx = kit.context(tmp_path)
    a, other = ctx.sequence(), ctx.sequence()
    other.prefill([5])
    with pytest.raises(NoKVSlot) as caught:
        a.prefill([5] * 64)
    assert caught.value.cause == "full"
    assert len(a) == 32


def test_a_second_thread_is_refused(tmp_path: Path) -> None:
    """Check Busy for all calls of a second thread, and that cancel works."""
    ctx = kit.context(tmp_path)
    a, native = ctx.sequence(), ctx.native
    native.gate.clear()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ctx.decode(a.feed([5, 6]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert native.entered.wait(120)
        for attempt in (
            lambda: a.step(5),
            lambda: ctx.decode(a.feed([5, 6])),
            lambda: a.remove(),
            ctx.clear,
            ctx.close,
            ctx.model.close,
        ):
            with pytest.raises(Busy):
                attempt()
        assert not ctx.closed
        ctx.cancel()
    finally:
        native.gate.set()
        thread.join(120)
    assert [type(error) for error in errors] == [Cancelled]
    ctx.decode(a.feed([5, 6]))
    assert a.tokens == [5, 6]


def test_statistics_can_be_read_while_a_decode_runs(tmp_path: Path) -> None:
    """A second thread waits for the decode, and sees its tokens."""
    ctx = kit.context(tmp_path)
    a, native = ctx.sequence(), ctx.native
    native.gate.clear()
    read: list[int] = []
    decode = threading.Thread(target=lambda: ctx.decode(a.feed([5, 6])))
    decode.start()
    assert native.entered.wait(120)
    monitor = threading.Thread(target=lambda: read.append(ctx.kv.stats.used))
    monitor.start()
    monitor.join(0.1)
    assert read == []
    native.gate.set()
    monitor.join(120)
    decode.join(120)
    assert read == [2]


def test_prefill_ends_between_pieces_when_cancelled(tmp_path: Path) -> None:
    """Check that a cancel between two pieces is not lost."""
    ctx = kit.context(tmp_path, n_ctx=128)
    a, decode = ctx.sequence(), ctx.native.decode

    def cancelling(*args):
        code = decode(*args)
        ctx.cancel()
        return code

    ctx.native.decode = cancelling
    with pytest.raises(Cancelled):
        a.prefill([5] * 100)
    assert len(a) == 32


def test_sequences_are_handed_out_and_taken_back(tmp_path: Path) -> None:
    """Check the lowest free id, a requested id, and both refusals."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence(2)
    assert (a.id, b.id, ctx.sequence().id, ctx.sequence().id) == (0, 2, 1, 3)
    with pytest.raises(UsageError, match="all 4 sequences"):
        ctx.sequence()
    with pytest.raises(UsageError, match="in use"):
        ctx.sequence(2)
    with pytest.raises(UsageError, match="out of range"):
        ctx.sequence(4)
    b.close()
    assert ctx.sequence().id == 2


def test_a_sequence_that_a_batch_filled_is_not_handed_out_as_empty(tmp_path: Path) -> None:
    """Check the lowest empty one, and that the filled one is returned by its number."""
    ctx = kit.context(tmp_path)
    ctx.decode(Batch().add(5, 0, 0).add(6, 0, 1, logits=True))
    assert ctx.sequence().id == 2
    assert ctx.sequence(1).tokens == [6]
    assert ctx.sequence().id == 3
    with pytest.raises(UsageError, match="all 4"):
        ctx.sequence()


def test_threads_can_be_changed(tmp_path: Path) -> None:
    """Check the values that reach the library, and invalid ones."""
    ctx = kit.context(tmp_path)
    seen: list[tuple[int, int]] = []
    ctx.native.threads = lambda handle, one, many: seen.append((one, many))
    ctx.set_threads(2)
    ctx.set_threads(2, 4)
    assert seen == [(2, 2), (2, 4)]
    with pytest.raises(UsageError):
        ctx.set_threads(0)


def test_clear_empties_everything(tmp_path: Path) -> None:
    """Check cells and ledgers."""
    ctx = kit.context(tmp_path)
    a = ctx.sequence()
    ctx.decode(a.feed([5, 6]))
    ctx.clear()
    assert (a.tokens, ctx.kv.stats.used) == ([], 0)
    ctx.decode(a.feed([5]))
    assert a.pos_max == 0


def test_counters_need_their_patch(tmp_path: Path) -> None:
    """Check both builds."""
    ctx = kit.context(tmp_path)
    ctx.sequence().step(5)
    assert ctx.counters.slot_searches == 1
    poor = kit.context(tmp_path, {"capabilities": Capability.CELLS})
    with pytest.raises(Unsupported, match="COUNTERS"):
        _ = poor.counters


@pytest.mark.parametrize("which", ["context", "model", "library"])
def test_use_after_close_is_refused_in_any_order(tmp_path: Path, which: str) -> None:
    """Check every method after closing the library, the model or the context."""
    opened = kit.library()
    model = opened.load_model(kit.write_gguf(tmp_path / "tiny.gguf"))
    ctx = model.context(n_ctx=32, n_seq_max=2)
    a = ctx.sequence()
    ctx.decode(a.feed([5, 6]))
    {"context": ctx, "model": model, "library": opened}[which].close()
    for attempt in (
        lambda: a.step(5),
        lambda: ctx.decode(a.feed([5])),
        lambda: ctx.decode(Batch().add(5, 2, 0)),
        ctx.sequence,
        ctx.clear,
        ctx.logits,
        ctx.cancel,
        ctx.kv.snapshot,
        ctx.kv.defrag,
        a.fork,
        a.save,
        lambda: a.remove(),
        lambda: a.trim(0),
        lambda: a.shift(0, None, 1),
        lambda: a.pos_max,
        lambda: next(a.generate()),
        ctx.__enter__,
    ):
        with pytest.raises(Closed):
            attempt()
    a.close()
    ctx.close()
    model.close()
    opened.close()
    assert opened.native.freed == ["context", "model", "library"]


def test_dropped_objects_are_freed_contexts_first(tmp_path: Path) -> None:
    """Check that dropped objects free their handles, contexts first."""
    import gc

    opened = kit.library()
    native = opened.native
    model = opened.load_model(kit.write_gguf(tmp_path / "tiny.gguf"))
    contexts = [model.context(n_ctx=16) for _ in range(2)]
    del model, opened
    assert native.freed == []
    del contexts
    gc.collect()
    assert native.freed == ["context", "context", "model", "library"]


def test_guard_off_passes_batches_unchecked(tmp_path: Path) -> None:
    """Check that a wrong batch reaches the library, in a worker only."""
    model = kit.library(isolated=True).load_model(kit.write_gguf(tmp_path / "tiny.gguf"))
    ctx = model.context(n_ctx=32, n_batch=8, n_ubatch=8, n_seq_max=2, guard="off")
    a = ctx.sequence()
    with pytest.raises(DecodeError, match="invalid token"):
        ctx.decode(a.feed([300]))
    ctx.decode(Batch().add(5, 7, 0).add(6, 3, 0))
    assert (a.tokens, a.positions) == ([6, 5], [3, 7])
    ctx.decode(a.feed([1] * 8))
    fork = a.fork()
    fork.shift(None, None, 3)
    assert a.positions == fork.positions == [6, 10, *range(11, 19)]


def test_dir_of_a_context_and_its_objects_lists_public_names(tmp_path: Path) -> None:
    """The list has no handles, locks or ledgers."""
    ctx = kit.context(tmp_path)
    public = {
        ctx: (
            *("adapters", "advance", "cancel", "chat", "clear", "close", "closed", "counters"),
            *("decode", "embed", "embedding", "emptied", "info", "kv", "logits", "logits_all"),
            *("model", "params", "sequence", "set_adapters", "set_threads", "step_all"),
            *("stream_per_sequence", "try_decode", "vacant"),
        ),
        ctx.sequence(): (
            *("close", "context", "copy_to", "divide", "embedding", "feed", "fork", "generate"),
            *("id", "logits", "next_pos", "pos_max", "pos_min", "positions", "prefill"),
            *("remove", "restore", "save", "share", "shift", "step", "text", "tokens", "trim"),
        ),
        ctx.kv: (
            *("defrag", "flush", "memory", "rows", "snapshot", "state", "stats", "trim", "update"),
        ),
        ctx.model: (
            *("apply_chat_template", "chat_template", "close", "closed", "context"),
            *("detokenize", "digest", "file", "info", "is_eog", "isolated", "load_adapter"),
            *("meta", "path", "piece", "sampler", "tokenize", "tokenize_chat"),
        ),
        ctx.model.sampler(): (
            *("accept", "close", "keeps_history", "logprobs", "params", "processors", "reset"),
            *("sample", "sample_all"),
        ),
    }
    for each, names in public.items():
        assert {name for name in dir(each) if not name.startswith("_")} == set(names)
