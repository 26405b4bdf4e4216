"""Test that recordings are complete and do not change a run."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_kit
from fakes.simulated import ALL, SimulatedNative
from rich.console import Console

import pyllamakv as kv
from pyllamakv.binding.codes import Code
from pyllamakv.binding.protocol import Capability
from pyllamakv.binding.signal_check import keep_run
from pyllamakv.errors import NativeError, NoKVSlot, NoTokenAllowed, Unsupported, UsageError
from pyllamakv.runtime.batch import Feed
from pyllamakv.traces import recording_native, trace
from pyllamakv.traces.recording_native import RecordingNative
from pyllamakv.traces.replay import replay
from pyllamakv.traces.script_session import ScriptSession


def rows(path: Path) -> list[dict]:
    """Return the rows of a trace, the header first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def operations(path: Path) -> list[str]:
    return [row["op"] for row in rows(path) if "op" in row]


def everything(context) -> None:
    """Run all operations on a context."""
    with context.model.sampler() as sampler:
        a, b = context.sequence(), context.sequence()
        context.decode([a.feed([5, 6, 7]), b.feed([8, 9])])
        context.decode(a.feed([4]))
        a.prefill(list(range(5, 15)))
        b.step(10)
        context.step_all([a, b], [11, 12])
        context.advance([a, b], [13, 14], 3, sampler)
        list(a.generate(max_tokens=2, stop_at_end=False))
        batch = kv.Batch.of([5], [b.next_pos], b.id)
        context.decode(batch)
        fork = a.fork(4)
        fork.remove(1, 2)
        saved = b.save()
        b.trim(2)
        b.restore(saved)
        b.shift(2, None, 3)
        b.divide(0, 1, 2)
        context.kv.update()
        context.kv.defrag()
        context.set_threads(2)
        fork.close()
        context.clear()


ALL_OPERATIONS = {
    "context", "batch", "step", "advance", "copy", "remove", "save", "restore", "shift", "divide",
    "update", "defrag", "threads", "clear",
}  # fmt: skip


def test_recording_has_a_row_per_operation(tmp_path: Path) -> None:
    """All operations of a context are recorded, and the trace replays exactly."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context:
        native = context.native
        with kv.record(context, path) as recording:
            assert isinstance(context.native, RecordingNative)
            everything(context)
            context.native.seq_keep(context.handle, 0)
            context.native.cancel_after(context.handle, 3)
            recording.note("so far")
        assert context.native is native
        count = recording.rows
    assert set(operations(path)) == {*ALL_OPERATIONS, "keep", "cancel", "note"}
    head, lines = trace.read(path)
    assert (len(lines), head.complete, head.variant) == (count, True, "simulated")
    assert all(line.result["at"] >= 0 for line in lines)
    session = ScriptSession(SimulatedNative(), file=tmp_path / "tiny.gguf")
    assert replay(head, lines, session) == (count, [])


def test_embeddings_as_input_are_refused(tmp_path: Path) -> None:
    """A trace has no cells of embeddings, so that a replay would differ."""
    with runtime_kit.context(tmp_path) as context:
        with kv.record(context, tmp_path / "run.jsonl"):
            embd, pos, seq = np.zeros((1, 8), np.float32), np.zeros((1, 1), np.int32), np.zeros(1)
            with pytest.raises(Unsupported, match="embeddings"):
                context.native.decode(context.handle, embd, pos, None, seq, None)
        assert context.native.calls == []


def test_a_loop_without_an_allowed_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps were decoded, so the row has status 0, and the trace replays exactly."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, context.model.sampler() as sampler:
        run = context.native.run

        def exclude(*arguments: Any) -> tuple[int, list[list[int]]]:
            return int(Code.ENOTOKEN), [*run(*arguments)[1][:-1], [int(Code.ENOTOKEN)]]

        monkeypatch.setattr(context.native, "run", exclude)
        with kv.record(context, path):
            a = context.sequence()
            with pytest.raises(NoTokenAllowed, match="sample after 3 steps"):
                context.advance([a], [13], 3, sampler)
            a.step(10)
    row = next(row for row in rows(path) if row.get("op") == "advance")
    assert [len(row["steps"]), row["result"]["status"]] == [3, 0]
    assert row["result"]["used"] == 3
    head, lines = trace.read(path)
    session = ScriptSession(SimulatedNative(), file=tmp_path / "tiny.gguf")
    assert replay(head, lines, session) == (len(lines), [])


def test_an_interrupted_loop_is_recorded_with_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completed steps of an interrupted loop are in the trace, which replays exactly."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, context.model.sampler() as sampler:
        run = context.native.run

        def interrupt(*arguments: Any) -> None:
            error = KeyboardInterrupt()
            keep_run(error, *run(*arguments[:5], 3, True))
            raise error

        monkeypatch.setattr(context.native, "run", interrupt)
        with kv.record(context, path):
            a = context.sequence()
            with pytest.raises(KeyboardInterrupt) as caught:
                context.advance([a], [13], 5, sampler)
            assert caught.value.__notes__[0].startswith("3 of 5 steps are complete; the next")
            assert len(a) == 3
            a.step(10)
    row = next(row for row in rows(path) if row.get("op") == "advance")
    assert [len(row["steps"]), row["result"]["status"]] == [3, 0]
    head, lines = trace.read(path)
    session = ScriptSession(SimulatedNative(), file=tmp_path / "tiny.gguf")
    assert replay(head, lines, session) == (len(lines), [])


def test_recorded_rows_have_cells_before_and_after(tmp_path: Path) -> None:
    """Rows that change cells have the cells before and after, the moves, and a snapshot."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, kv.record(context, path):
        a, b = context.sequence(), context.sequence()
        for token in range(8):
            context.step_all([a, b], [token, token])
        b.remove()
        context.kv.defrag()
    removed, defragged = rows(path)[-3]["result"], rows(path)[-2]["result"]
    assert removed["before"] == {"used": 16, "holes": 1, "largest_hole": 48}
    assert (removed["used"], removed["holes"], removed["done"]) == (8, 8, True)
    assert removed["picture"]["runs"][:4] == [[0, 1], [-1, 1], [0, 1], [-1, 1]]
    assert (defragged["used"], defragged["holes"], defragged["cells"]) == (8, 1, 4)
    assert sum(length for _, _, length in defragged["moved"]) == 4
    assert [row["result"]["used"] for row in rows(path)[2:10]] == list(range(2, 18, 2))


def test_recorded_decode_that_moves_cells_has_moves(tmp_path: Path) -> None:
    """A defragmentation inside a decode is detected from the number of free cells."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path, {"heals": True}) as context, kv.record(context, path):
        a, b = context.sequence(), context.sequence()
        for token in range(32):
            context.step_all([a, b], [token, token])
        b.remove()
        context.decode(b.feed(list(range(20))))
    last = rows(path)[-2]
    assert last["op"] == "batch"
    assert last["result"]["moved"]
    assert last["result"]["before"]["holes"] == 32


def test_recording_has_rows_of_failed_operations(tmp_path: Path) -> None:
    """Check a decode without a slot, an aborted one, and one that raised an exception."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, kv.record(context, path):
        a, b = context.sequence(), context.sequence()
        for token in range(32):
            context.step_all([a, b], [token, token])
        b.remove()
        with pytest.raises(NoKVSlot):
            context.decode(b.feed([1, 2, 3]))
        context.native.fail_next.append(2)
        assert context.try_decode(a.feed([1])) == 2
        context.native.fail_next.append(NativeError("threw", code=-3))
        with pytest.raises(kv.DecodeError):
            context.decode(b.feed([1, 2]))
    results = [row["result"] for row in rows(path) if row.get("op") in ("batch", "step")][-3:]
    assert [each.get("status") for each in results] == [1, 2, None]
    assert "polls" in results[1]
    assert results[2]["error"] == "NativeError"


def test_recording_samples_the_best_tokens(tmp_path: Path) -> None:
    """Logits are sampled at the first decode, after cells changed, and periodically."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path, n_ctx=256) as context, kv.record(context, path):
        a = context.sequence()
        for token in range(5, 105):
            a.step(token)
        # A batch without logits has no samples.
        a.prefill([5] * 20, logits=False)
    steps = [row for row in rows(path) if row.get("op") == "step"]
    noted = [place for place, row in enumerate(steps) if "best" in row["result"]]
    assert noted == [
        0,
        recording_native.BEST_EVERY,
        2 * recording_native.BEST_EVERY,
        3 * recording_native.BEST_EVERY,
    ]
    token, logit, margin = steps[0]["result"]["best"]["0"]
    assert 0 <= token < 259
    assert logit == 5.0
    assert margin > 0


def test_arrays_may_be_changed_in_place(tmp_path: Path) -> None:
    """A row has the decoded tokens, not the later contents of the arrays."""
    path = tmp_path / "run.jsonl"
    tokens, positions = np.array([5, 6], np.int32), np.array([0, 1], np.int32)
    with runtime_kit.context(tmp_path) as context, kv.record(context, path):
        batch = kv.Batch.of(tokens, positions, 0)
        context.decode(batch)
        tokens += 2
        positions += 2
        context.decode(batch)
    assert [row["tokens"] for row in rows(path)[2:4]] == [[5, 6], [7, 8]]


def test_a_batch_of_one_token_from_arrays_is_a_batch(tmp_path: Path) -> None:
    """Numbers of numpy are converted for JSON; a refused batch is recorded as well."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, kv.record(context, path):
        a = context.sequence()
        context.decode(Feed(a, [5], "all"))
        context.native.fail_next.append(2)
        assert context.try_decode(kv.Batch().add(6, 1)) == 2
    assert operations(path)[-2:] == ["batch", "batch"]
    assert a.tokens == [5]


def test_a_context_with_tokens_begins_with_them(tmp_path: Path) -> None:
    """Tokens are decoded again, and shared cells are shared; the header records it."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context:
        a = context.sequence()
        a.prefill(list(range(5, 45)))
        fork = a.fork(10)
        a.remove(20, 30)
        with kv.record(context, path):
            fork.step(5)
        with kv.record(context, path):
            context.clear()
        context.native.seq_cp(context.handle, 0, 1, 0, 5)
        context.native.decode(context.handle, [5], [0], None, (3,), None)
        with pytest.raises(UsageError, match="clear it"), kv.record(context, path):
            pass
    head, lines = trace.read(path)
    assert head.start == "rebuilt"
    assert [line.op for line in lines] == ["context", "batch", "clear"]
    assert len(lines[1].arguments["tokens"]) == 31
    assert lines[1].arguments["seq"][:11] == [*[[0, 1]] * 10, 0]
    session = ScriptSession(SimulatedNative(), file=tmp_path / "tiny.gguf")
    assert replay(head, lines, session)[1] == []


def test_recording_decodes_the_tokens_of_each_stream(tmp_path: Path) -> None:
    """The tokens of a stream are decoded only for its sequence, also after a fork."""
    path = tmp_path / "run.jsonl"
    able = {"capabilities": ALL | Capability.STREAMS | Capability.KV_UNIFIED}
    with runtime_kit.context(tmp_path, able, n_seq_max=2, kv_unified=False) as context:
        a = context.sequence()
        a.prefill([5, 6, 7, 8])
        a.fork(3)
        with kv.record(context, path):
            a.step(9)
    batch = trace.read(path)[1][1].arguments
    found = list(zip(batch["seq"], batch["tokens"], strict=True))
    assert sorted(found) == [(0, 5), (0, 6), (0, 7), (0, 8), (1, 5), (1, 6), (1, 7)]


def test_recording_contains_states_saved_before_it(tmp_path: Path) -> None:
    """A save is referred to by its restore; a state from elsewhere is included in the trace."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context:
        a, b = context.sequence(), context.sequence()
        a.prefill(list(range(5, 15)))
        before = a.save()
        context.clear()
        with kv.record(context, path):
            a.restore(before)
            now = a.save()
            b.restore(now)
    states = [row for row in rows(path) if row.get("op") in ("save", "restore")]
    assert [("state" in row) for row in states] == [True, False, False]
    assert states[1]["as"] == states[2]["as"]


@pytest.mark.parametrize("capability", [Capability.CELLS])
def test_recording_without_cells_has_no_counts(tmp_path: Path, capability) -> None:
    """Rows have no counts and snapshots, and everything else."""
    path = tmp_path / "run.jsonl"
    native = {"capabilities": ALL & ~capability}
    with runtime_kit.context(tmp_path, native) as context, kv.record(context, path):
        a = context.sequence()
        a.prefill(list(range(5, 45)))
        a.step(5)
        a.trim(3)
    assert operations(path) == ["context", "batch", "batch", "step", "remove"]
    assert not any("used" in row["result"] for row in rows(path) if "op" in row)


def test_recording_head_has_the_variables_of_the_worker(tmp_path: Path, monkeypatch) -> None:
    """Variables of the open call precede those of this process; others are not recorded."""
    monkeypatch.setenv("LLAMA_SET_ROWS", "1")
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context:
        context.native.environment = {"LLAMA_SET_ROWS": "0", "SECRET": "x"}
        with kv.record(context, path):
            context.sequence().step(5)
    assert trace.read(path)[0].environment == {"LLAMA_SET_ROWS": "0"}


def test_pictures_can_be_left_out(tmp_path: Path) -> None:
    """The counts remain."""
    path = tmp_path / "run.jsonl"
    with runtime_kit.context(tmp_path) as context, kv.record(context, path, pictures=False):
        a = context.sequence()
        a.prefill([5, 6, 7])
        a.trim(1)
    assert '"picture"' not in "".join(path.read_text().splitlines()[2:])
    assert rows(path)[-2]["result"]["used"] == 1


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    """A second one on the same context is refused; another context is not recorded."""
    with runtime_kit.context(tmp_path) as context, kv.record(context, tmp_path / "a"):
        with pytest.raises(UsageError, match="already"), kv.record(context, tmp_path / "b"):
            pass
        other = context.model.context(n_ctx=64)
        context.native.decode(other.handle, [5], [0], None, (0,), None)
        context.native.seq_rm(other.handle, 0, -1, -1)
        context.native.state_load(other.handle, 0, context.native.state_save(other.handle, 0))
    assert operations(tmp_path / "a") == ["context"]


@pytest.mark.parametrize("order", ["watch, record", "record, watch", "watch, record, watch"])
def test_context_is_watched_and_recorded_in_any_order(tmp_path: Path, order: str) -> None:
    """In both orders, both see all operations, and the context is restored afterwards."""
    path, screen = tmp_path / "run.jsonl", io.StringIO()
    console = Console(file=screen, width=200, force_terminal=False, _environ={})
    with runtime_kit.context(tmp_path) as context:
        native = context.native
        with ExitStack() as stack:
            for what in order.split(", "):
                opened = (
                    kv.record(context, path)
                    if what == "record"
                    else kv.watch(context, console=console)
                )
                stack.enter_context(opened)
            everything(context)
            with pytest.raises(UsageError, match="already"), kv.record(context, path):
                pass
        assert context.native is native
    assert set(operations(path)) == ALL_OPERATIONS
    assert "defrag" in screen.getvalue()


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("flash", [False, True])
def test_random_schedules_replay_exactly(variant, tmp_path: Path, flash: bool) -> None:
    """Hundreds of operations with failures and aborts: the same cells, moves and logits."""
    from pyllamakv.scenarios import synthetic_models
    from qa.random_operations import operation_cases
    from qa.random_operations.operations import Operations

    path, stock = tmp_path / "run.jsonl", variant.manifest.stock
    options = {"flash_attn": flash} | ({"type_k": "q8_0", "type_v": "q8_0"} if flash else {})
    for seed in (1, 2):
        with (
            kv.open(variant.folder) as lib,
            lib.load_model(synthetic_models.model("grouped")) as model,
        ):
            one, other = (model.context(256, 96, 32, 5, **options) for _ in range(2))
            with kv.record(one, path):
                work = Operations(one, other, heals=not stock)
                for operation in operation_cases.generate_operations(seed, 30):
                    work.do(operation.name, operation.number)
                work.proof.close()
        head, lines = trace.read(path)
        assert head.variant == variant.id
        with kv.open(variant.folder, isolated=True) as lib:
            session = ScriptSession(lib.native, file=trace.model_file(head))
            assert replay(head, lines, session) == (len(lines), [])
            session.close()


@pytest.mark.native
@pytest.mark.parametrize("manager", ["slots", "prefixes"])
def test_operations_of_a_cache_manager_are_recorded(patched, tmp_path: Path, manager: str) -> None:
    """All its operations on the context are recorded: the trace replays without it."""
    from pyllamakv.cache.batcher import Batcher
    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.slot_cache import SlotCache
    from pyllamakv.scenarios import synthetic_models

    path = tmp_path / "run.jsonl"
    with (
        kv.open(patched.folder) as lib,
        lib.load_model(synthetic_models.model("bytes")) as model,
        model.context(n_ctx=256, n_batch=64, n_ubatch=32, n_seq_max=4) as context,
        kv.record(context, path),
    ):
        made = SlotCache(context) if manager == "slots" else PrefixCache(context)
        with Batcher(made) as batcher:
            prompts = [[1, *range(40, 90)], [1, *range(40, 70), 7], [1, 5, 6], [1, *range(9, 50)]]
            requests = [batcher.submit(prompt, max_tokens=12) for prompt in prompts]
            for each in requests:
                assert isinstance("".join(each), str)
    head, lines = trace.read(path)
    assert len(lines) > 10
    with kv.open(patched.folder, isolated=True) as lib:
        session = ScriptSession(lib.native, file=trace.model_file(head))
        assert replay(head, lines, session) == (len(lines), [])
        session.close()


@pytest.mark.native
def test_a_trace_does_not_name_the_file_of_a_cache(patched, tmp_path: Path) -> None:
    """A context with a cache file is recorded and replayed like any other."""
    from pyllamakv.scenarios import synthetic_models

    path = tmp_path / "run.jsonl"
    with (
        kv.open(patched.folder) as lib,
        lib.load_model(synthetic_models.model("bytes")) as model,
        model.context(n_ctx=256, n_seq_max=2, kv_backing=tmp_path / "kept.kv") as context,
        kv.record(context, path),
    ):
        context.decode(context.sequence().feed([5, 6, 7]))
    assert "kept.kv" not in path.read_text(encoding="utf-8")
    head, lines = trace.read(path)
    assert lines[0].arguments["n_ctx"] == 256
    assert head.model == "bytes"
