"""Test that decode scripts are parsed strictly, played exactly, recorded and replayed."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.simulated import SimulatedNative
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import ScenarioFailed, ScriptError
from pyllamakv.scenarios.player import Player
from pyllamakv.traces import script, script_player, trace
from pyllamakv.traces.script_session import ScriptSession

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

STORY = """
# two sequences, one leaves
{"op": "context", "n_ctx": 64, "n_ubatch": 16, "n_seq_max": 4}
{"op": "decode", "feed": {"0": 16, "1": 16}, "interleave": true}
{"op": "copy", "seq": 0, "into": 2, "to": 4}
{"op": "save", "seq": 1, "as": "kept"}
{"op": "remove", "seq": 1}
{"op": "shift", "seq": 0, "from": 8, "by": 2}
{"op": "snapshot", "label": "holes"}
{"op": "defrag"}
{"op": "decode", "feed": {"0": [5, 6], "2": "hi", "3+1": 4}}
{"op": "expect", "used": 24}
{"op": "decode", "feed": {"0": 60}, "expect": "no-slot"}
{"op": "note", "text": "still there"}
"""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def lines(text: str) -> list[script.Line]:
    return list(script.parse(text.splitlines()))


def play(text: str, native=None) -> list[tuple[str, dict]]:
    session = ScriptSession(native or SimulatedNative())
    results: list[tuple[str, dict]] = []
    try:
        script_player.play(
            lines(text), session, lambda line, result: results.append((line.op, result))
        )
    finally:
        session.close()
    return results


def test_script_operations_report_their_results() -> None:
    """Each operation reports its result."""
    results = dict(play(STORY))
    assert results["remove"]["used"] == 16
    assert results["defrag"]["moves"] >= 1
    assert results["expect"]["used"] == 24
    assert results["decode"]["status"] == 1


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_examples_are_scripts(path: Path) -> None:
    """Every example of the documentation can be parsed."""
    assert script.read(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "expected an object"),
        ('{"op": "defrg"}', "did you mean 'defrag'"),
        ('{"op": "remove"}', "'seq' is missing"),
        ('{"op": "remove", "seq": "0"}', "seq must be a number"),
        ('{"op": "remove", "seq": 0, "until": 3}', "unknown argument 'until'"),
        ('{"op": "shift", "seq": 0, "by": 1, "from": "a"}', "from must be a number or null"),
        ('{"op": "decode", "feed": {}}', "feed must be like"),
        ('{"op": "decode", "feed": {"0": 0}}', "cannot feed 0"),
        ('{"op": "decode", "feed": {"0": true}}', "cannot feed True"),
        ('{"op": "decode", "feed": {"0": "\\ud800"}}', "cannot feed"),
        ('{"op": "context", "model": "\\ud800"}', "model must be a text"),
        ('{"op": "decode", "feed": {"0": 1}, "expect": "fine"}', "expect must be one of"),
        ('{"op": "save", "seq": 0, "as": []}', "as must be a text"),
        ('{"op": "context", "n_ctx": "many"}', "n_ctx must be a number"),
        ('{"op": "context", "n_ctx": -5}', "n_ctx must be 1 or more, found -5"),
        ('{"op": "context", "n_threads": 0}', "n_threads must be 1 or more"),
        ('{"op": "context", "swa_full": 1}', "swa_full must be true or false"),
        ('{"op": "context", "type_k": []}', "type_k must be the name"),
        ('{"op": "context", "defrag_thold": "x"}', "defrag_thold must be a number"),
        ('{"op": "step", "seq": 0, "token": 99999999999}', "token must be a number of 32 bits"),
        ('{"op": "batch", "tokens": [], "seq": 0}', "tokens must be a list"),
        ('{"op": "advance", "steps": 3, "seq": [0]}', "steps must be a list"),
        ('{"op": "advance", "steps": [[1]], "seq": 0}', "seq must be a list"),
        ('{"op": "advance", "steps": [[1, 2]], "seq": [0]}', "seq must be a sequence"),
    ],
)
@pytest.mark.regression(
    "names in a script with a lone surrogate, or too long for a file, raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_a_wrong_line_is_named(text: str, says: str) -> None:
    """The message has the line and the expected value."""
    with pytest.raises(ScriptError) as caught:
        lines(text)
    assert says in str(caught.value)
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"op": "decode", "feed": {"a": 1}}', "not a sequence"),
        ('{"op": "restore", "seq": 0, "as": "x"}', "no sequence was saved"),
        ('{"op": "restore", "seq": 0, "as": "x", "state": "é"}', "state cannot be read"),
        ('{"op": "defrag"}\n{"op": "context"}', "first operation"),
        ('{"op": "context", "type_k": "f13"}', "f13"),
    ],
)
@pytest.mark.regression(
    "names in a script with a lone surrogate, or too long for a file, raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_a_line_that_cannot_be_played_is_named(text: str, says: str) -> None:
    """An error that occurs only during the run has its line as well."""
    with pytest.raises(ScriptError, match=says):
        play(text)


def test_an_expectation_that_is_not_met_is_named() -> None:
    """The error has the line and both numbers."""
    with pytest.raises(ScenarioFailed, match=r"line 2 \(expect\): used is 3, expected 4"):
        play('{"op": "decode", "feed": {"0": 3}}\n{"op": "expect", "used": 4}')


def test_verify_finds_lost_cells() -> None:
    """A cell that the library lost is reported."""

    class Losing(SimulatedNative):
        def seq_cp(self, context, src, dst, p0, p1):
            return

    text = '{"op": "decode", "feed": {"0": 3}}\n{"op": "copy", "seq": 0, "into": 1}'
    with pytest.raises(ScenarioFailed, match="lost"):
        play(text + '\n{"op": "verify"}', Losing())
    play(text + '\n{"op": "verify"}')


def test_verify_checks_the_window_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a memory with a window, the second cache must have the cells that the next token uses."""
    asked: list[int] = []
    info = SimulatedNative.context_info
    monkeypatch.setattr(SimulatedNative, "context_info", lambda *of: replace(info(*of), n_swa=8))
    monkeypatch.setattr(Player, "check_windows", lambda _, window: asked.append(window))
    play('{"op": "decode", "feed": {"0": 3}}\n{"op": "verify"}')
    assert asked == [8]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.mark.slow
@given(
    st.sampled_from(list(script.OPERATIONS)),
    st.dictionaries(st.sampled_from(["seq", "feed", "by", "from", "as", "used", "polls"]), JSON),
)
def test_any_object_is_read_or_refused_with_its_line(op: str, words: dict) -> None:
    """Any line gives an operation or a ScriptError."""
    try:
        found = lines(json.dumps({**words, "op": op}))
    except ScriptError as error:
        assert error.line == 1
    else:
        assert found[0].op == op


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_script_without_operations_is_refused(text: str, tmp_path: Path) -> None:
    """An empty run would pass."""
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ScriptError, match="no operations"):
        script.read(path)


def test_a_count_beyond_any_batch_is_refused() -> None:
    """Generating its tokens would take hours."""
    with pytest.raises(ScriptError, match="cannot feed 10000000000"):
        list(script.parse(['{"op": "decode", "feed": {"0": 10000000000}}']))


@pytest.mark.parametrize("before", ['{"op": "clear"}', '{"op": "context"}'])
def test_context_operation_must_be_first(tmp_path: Path, before: str) -> None:
    """It is refused before anything is played, with the line that is too late."""
    path = tmp_path / "late.jsonl"
    path.write_text(f'# a remark\n\n{before}\n{{"op": "context", "n_ctx": 64}}\n')
    with pytest.raises(ScriptError, match="must be the first") as caught:
        script.read(path)
    assert caught.value.line == 4


def test_position_beyond_int32_is_an_error_with_its_line() -> None:
    """Positions that follow from the line before are checked as well."""
    far = '{"op": "step", "seq": 0, "token": 5, "pos": 2147483647}\n'
    with pytest.raises(ScriptError, match=r"line 2 \(step\): .* out of range"):
        play(far + '{"op": "step", "seq": 0, "token": 5}')


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="no endless device here")
@pytest.mark.regression(
    "an endless script or trace, such as a device, was read until memory was exhausted",
    by="hostile input",
    of="Python",
)
def test_a_script_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless device takes no more memory than the largest script."""
    monkeypatch.setattr(script, "LARGEST", 1 << 20)
    with pytest.raises(ScriptError, match="expected at most 1,048,576 bytes"):
        script.read(Path("/dev/zero"))
    with pytest.raises(ScriptError, match="expected at most 1,048,576 bytes"):
        trace.read(Path("/dev/zero"))


@pytest.mark.regression(
    "reading a small script or trace allocated memory for the largest one",
    by="fuzzing",
    of="Python",
)
def test_a_small_script_takes_little_memory(tmp_path: Path) -> None:
    """Memory is allocated for the bytes that were read, not for the limit."""
    path = tmp_path / "small.jsonl"
    path.write_text('{"op": "clear"}\n')
    tracemalloc.start()
    try:
        script.read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 25


def test_the_page_on_scripts_lists_every_operation_and_argument() -> None:
    """The table names all operations, all their arguments, and no others."""
    page = (EXAMPLES.parent / "docs" / "scripts.md").read_text(encoding="utf-8")
    table = page.partition("| op |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|(.*?)\|.*\|$", table, re.MULTILINE)
    assert {op for names, _ in rows for op in re.findall(r"\w+", names)} == set(script.OPERATIONS)
    for names, arguments in rows:
        known = {name for op in re.findall(r"\w+", names) for name in script.OPERATIONS[op]}
        listed = set(re.findall(r"`(\w+\??)`", arguments))
        assert listed - {"ok", "any"} == known, names
