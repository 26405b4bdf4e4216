"""Test that traces are parsed strictly, and truncated ones up to their last complete row."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import pytest
from fakes.simulated import SimulatedNative
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import STORY, record
from variable_kit import read_by_patches

from pyllamakv.errors import KvError, ScenarioFailed, ScriptError, TraceMismatch, WorkerDied
from pyllamakv.scenarios import synthetic_models
from pyllamakv.traces import script, script_player, trace, trace_scenario
from pyllamakv.traces.script_session import ScriptSession
from pyllamakv.verification import discovery


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a trace of a script."""
    return record(tmp_path / "trace.jsonl")


def test_a_recorded_script_has_results_and_cells(recorded: Path) -> None:
    """Its lines have results, times, and the cells that changed."""
    head, lines = trace.read(recorded)
    assert (head.model, head.complete, head.environment) == ("tiny", True, {})
    expected = [line.to_json() for line in script.parse(STORY.splitlines())]
    assert [{**line.to_json(), "result": None} for line in lines] == [
        {**each, "result": None} for each in expected
    ]
    assert all({"at", "us"} <= set(line.result) for line in lines)
    labels = [line.result["picture"]["label"] for line in lines if "picture" in line.result]
    assert labels[:4] == ["context", "decode", "copy", "remove"]
    assert "holes" in labels
    assert lines[4].result["before"]["used"] == 32
    defragged = next(line for line in lines if line.op == "defrag")
    assert defragged.result["moved"]


def test_failed_operation_is_the_last_row(tmp_path: Path) -> None:
    """Check a decode that fails, a restore that is refused, and a worker that ends."""
    text = '{"op": "decode", "feed": {"0": 60}}\n{"op": "save", "seq": 0, "as": "x"}\n'
    full = '{"op": "decode", "feed": {"1": 200}}'
    with pytest.raises(ScenarioFailed, match=r"line 3 \(decode\)"):
        record(tmp_path / "a", text + full)
    assert trace.read(tmp_path / "a")[1][-1].result["status"] == 1

    class Dying(SimulatedNative):
        def defrag(self, context):
            raise WorkerDied("the worker was killed")

    with pytest.raises(WorkerDied):
        record(tmp_path / "b", text + '{"op": "defrag"}', Dying())
    assert trace.read(tmp_path / "b")[1][-1].result["error"] == "WorkerDied"

    class Refusing(SimulatedNative):
        def state_load(self, context, seq, state):
            return 0

    with pytest.raises(ScenarioFailed, match="refused"):
        record(tmp_path / "c", text + '{"op": "restore", "seq": 1, "as": "x"}', Refusing())
    assert trace.read(tmp_path / "c")[1][-1].result["done"] is False


def test_a_trace_without_its_end_is_a_shorter_trace(recorded: Path) -> None:
    """A crash may truncate it between rows, or within one."""
    whole = recorded.read_bytes()
    rows = trace.read(recorded)[1]
    lines = whole.splitlines(keepends=True)
    recorded.write_bytes(b"".join(lines[:5]))
    head, found = trace.read(recorded)
    assert (head.complete, found) == (False, rows[:4])
    recorded.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert trace.read(recorded)[1] == rows[:4]


def test_damaged_and_foreign_files_are_refused(recorded: Path, tmp_path: Path) -> None:
    """The error has the reason and the place."""
    lines = recorded.read_bytes().splitlines(keepends=True)

    def refused(data: bytes, says: str, line: int | None = None) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(data)
        with pytest.raises(ScriptError, match=says) as caught:
            trace.read(path)
        assert line is None or caught.value.line == line

    refused(b"".join(lines[:3] + lines[4:]), "it has")
    refused(b"".join([*lines[:3], b"\xff\xfe\n", *lines[3:]]), "line 4 is not text", 4)
    refused(b"".join([*lines[:3], b"{\n", *lines[3:]]), "line 4: not JSON", 4)
    refused(b"".join([*lines[:3], b'{"op": "step"}\n', *lines[3:]]), "'seq' is missing", 4)
    refused(b"GGUF\x03\x00\x00", "not a trace")
    refused(bytes(range(256)), "not a trace")
    refused(b"", "not a trace")
    refused(b'{"op": "defrag"}\n', "not a trace", 1)
    refused(lines[0], "no rows")
    refused(lines[0][:10], "not a trace", 1)
    refused(b"[" * 100_000 + b"\n", "not a trace", 1)
    refused(b'{"trace": 2, "variant": 7}\n{"op": "defrag"}\n', "must be texts", 1)
    refused(b'{"trace": 2, "kind": "hope"}\n{"op": "defrag"}\n', "kind must be one of", 1)
    refused(lines[0] + b'{"op": "defrag", "result": 3}\n', "result must be an object", 2)
    for result in ('{"status": "ok"}', '{"best": {"0": 3}}', '{"best": {"x": [1, 2, 3]}}'):
        refused(lines[0] + b'{"op": "defrag", "result": %s}\n' % result.encode(), "its", 2)
    with pytest.raises(ScriptError, match="cannot be read"):
        trace.read(tmp_path / "missing.jsonl")
    with pytest.raises(ScriptError, match="cannot be read"):
        trace.read(tmp_path)


@pytest.mark.parametrize(
    "result",
    [
        '"picture": 5',
        '"picture": {"runs": [[0, 4]]}',
        '"picture": {"label": "", "runs": 3}',
        '"picture": {"label": "", "runs": []}',
        '"picture": {"label": "", "runs": [[0, "x"]]}',
        '"picture": {"label": "", "runs": [[0, -4]]}',
        '"picture": {"label": "", "runs": [[-9, 4]]}',
        '"picture": {"label": "", "runs": [[0, 16777217]]}',
        '"picture": {"label": "", "runs": [[0, 16777216], [1, 1]]}',
        '"picture": {"label": "", "runs": [[0, 8]], "streams": [9, 9]}',
        '"moved": 3',
        '"moved": [[1, 2]]',
        '"moved": [[0, -1, 2]]',
        '"moved": [[0, 1, 16777217]]',
        '"cells": "x"',
        '"cells": true',
        '"status": 2147483648',
        '"best": 3',
        '"best": [1, 2, 3]',
        '"best": {"²": [1, 2, 3]}',
        f'"best": {{"{"9" * 5000}": [1, 2, 3]}}',
        f'"best": {{"0": [1, {10**400}, 3]}}',
        '"polls": "z"',
    ],
)
@pytest.mark.regression(
    "invalid results in a trace were accepted, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_malformed_results_are_refused(result: str) -> None:
    """They are refused in a script and in a trace, before anything is played or drawn."""
    with pytest.raises(ScriptError, match=r"line 1 \(clear\): its"):
        list(script.parse([f'{{"op": "clear", "result": {{{result}}}}}']))


@pytest.mark.parametrize(
    "words",
    [
        '"environment": {"LD_PRELOAD": "/tmp/x.so"}',
        '"environment": {"LLAMA_X": "1"}',
        '"environment": {"LLAMA_SET_ROWS=1": "1"}',
        '"environment": {"LLAMA_SET_ROWS": "1\\u0000"}',
        '"environment": {"LLAMA_SET_ROWS": "\\ud800"}',
        '"environment": {"LLAMA_KV_BACKING": "/tmp/x.bin"}',
        '"environment": {"LLAMA_KV_BACKING": "x"}',
        '"variant": "/tmp/elsewhere"',
        '"variant": "path:/tmp/elsewhere"',
        '"spec": "/tmp/elsewhere"',
    ],
)
@pytest.mark.regression(
    "a trace could set any `LLAMA_` variable, one of which overwrites a file with a cache",
    by="hostile input",
    of="Python",
)
def test_trace_head_with_paths_or_unknown_variables_is_refused(words: str, tmp_path: Path) -> None:
    """A foreign trace may contain ids of builds, and only known values of variables.

    The patch mmap-kv would create and truncate a file named by one of the variables.
    """
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"trace": 2, {words}}}\n{{"op": "clear"}}\n')
    with pytest.raises(ScriptError, match="the head's"):
        trace.read(path)


def test_another_version_or_model_is_a_mismatch(recorded: Path, tmp_path: Path) -> None:
    """Both sides are named, and no substitute is used."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"trace": 1, "variant": "x", "model": "tiny"}\n{"op": "defrag"}\n')
    with pytest.raises(TraceMismatch, match="schema 1, this package reads 2") as caught:
        trace.read(path)
    assert (caught.value.expected, caught.value.found) == ("2", "1")
    head, _ = trace.read(recorded)
    assert trace.model_file(head) == synthetic_models.model("tiny")
    with pytest.raises(TraceMismatch, match="another model") as caught:
        trace.model_file(head, "grouped")
    assert caught.value.expected == head.identity
    assert caught.value.found != head.identity
    # Traces of earlier versions have no digest.
    assert trace.model_file(dataclasses.replace(head, identity="0" * 32)).is_file()


def test_trace_head_survives_a_file(tmp_path: Path) -> None:
    """Default values are omitted."""
    head = trace.Head(
        "v", "tiny", "0.3.9+stock", "abc", {"LLAMA_SET_ROWS": "1"}, kind="guard", claim="so"
    )
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(head.to_json()) + '\n{"op": "defrag"}\n{"end": 1}\n')
    assert trace.read(path)[0] == head
    assert "start" not in head.to_json()


def test_a_trace_with_the_older_kind_can_be_read(tmp_path: Path) -> None:
    """Traces of earlier versions have another word for a fix scenario."""
    path = tmp_path / "x.jsonl"
    head = trace.Head("v", "tiny", "0.3.9+stock", "abc", {}).to_json() | {"kind": "cure"}
    path.write_text(json.dumps(head) + '\n{"op": "defrag"}\n{"end": 1}\n')
    assert trace.read(path)[0].kind == "fix"


def test_the_environment_of_a_recording_is_in_its_head(monkeypatch) -> None:
    """Only variables that change the behaviour of a library are recorded."""
    monkeypatch.setenv("LLAMA_SET_ROWS", "1")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/x")
    monkeypatch.setenv("SECRET", "x")
    more = {"LLAMA_KV_BACKING": "mmap", "LLAMA_KV_DEFRAG_PLAN": "ordered"}
    environment = trace.current_head("simulated", synthetic_models.model("tiny"), more).environment
    assert environment == {"LLAMA_SET_ROWS": "1", **more}
    assert not trace.recorded({"LLAMA_KV_BACKING": "/a/folder"}).keys() & {trace.BACKING}
    assert not trace.wrong(environment)


def test_trace_records_every_variable_of_patches_and_scenarios() -> None:
    """A replay must set each variable that a patch or a scenario reads."""
    read = read_by_patches()
    scenarios = discovery.discover().values()
    settings = [each for one in scenarios for each in (one, *one.settings)]
    named = {name for each in settings for name, _ in each.environment}
    assert read
    assert read | named <= set(trace.KNOWN)


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_a_trace_or_a_typed_error(
    tmp_path_factory, junk: bytes, headed: bool
) -> None:
    """Any file is a trace or raises a typed error."""
    path = tmp_path_factory.getbasetemp() / "junk.jsonl"
    path.write_bytes((b'{"trace": 2}\n{"op": "defrag"}\n' if headed else b"") + junk)
    try:
        head, lines = trace.read(path)
    except KvError:
        return
    assert headed
    assert lines[0].op == "defrag"
    assert isinstance(head, trace.Head)


def test_decode_that_failed_when_recorded_is_undone_on_replay(tmp_path: Path) -> None:
    """Later rows find the recorded cells, and the same batch may be decoded again."""
    text = f"""
{{"op": "context", "n_ctx": 64, "n_batch": 64, "n_seq_max": 4}}
{{"op": "decode", "feed": {{"0": 24, "1": 24}}, "interleave": true}}
{{"op": "remove", "seq": 1}}
{{"op": "batch", "tokens": {[7] * 18}, "seq": 2, "expect": "any"}}
{{"op": "expect", "used": 24}}
"""
    path = record(tmp_path / "x.jsonl", text, SimulatedNative())
    _, lines = trace.read(path)
    assert lines[3].result["status"] == 1
    session = ScriptSession(SimulatedNative(heals=True))
    script_player.play(lines, session)
    assert session.player is not None
    assert session.player.ledger.used == 24


@pytest.mark.parametrize(
    ("first", "is_one"),
    [
        (b'{"trace": 2, "variant": "x", "model": "tiny"}', True),
        (b'{"variant": "x", "trace": 2}', True),
        (b'{"trace": 99}', True),
        (b'{"trace": 2, "vari', True),
        (b'{"op": "snapshot", "label": "trace"}', False),
        (b'{"op": "note", "text": "trace", "trace": 1}', False),
        (b'["trace"]', False),
        (b'# "trace"', False),
        (b"\x00\xff\xfe" + b'"trace"', False),
        (b"[" * 60_000 + b'"trace"', False),
        (b"", False),
    ],
)
def test_trace_is_recognized_by_its_head(tmp_path: Path, first: bytes, is_one: bool) -> None:
    """The kind does not depend on other words in the file."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(first + b"\n")
    assert trace.is_trace(path) is is_one


def test_pipes_and_devices_are_refused_as_traces(tmp_path: Path) -> None:
    """Reading a pipe would block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "none", Path("/dev/null"), Path("a\0b")):
        assert not trace.is_trace(path)
    text = '{"op": "clear"}\n'
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert [line.op for line in trace_scenario.load(pipe)[1]] == ["clear"]
    writer.join()
