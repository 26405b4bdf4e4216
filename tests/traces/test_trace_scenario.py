"""Test that a trace is a scenario: found, played in a lab, and compared with its claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trace_kit
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

from pyllamakv.errors import NativeError, ScriptError, UsageError, WorkerDied
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.traces import trace, trace_scenario
from pyllamakv.verification import discovery

FRAGMENTED = """
{"op": "context", "n_ctx": 256, "n_ubatch": 64, "n_seq_max": 4}
{"op": "decode", "feed": {"0": 128, "1": 128}, "interleave": true}
{"op": "remove", "seq": 1}
{"op": "batch", "tokens": [1, 2, 3, 4, 5, 6, 7, 8], "seq": 2, "expect": "any"}
{"op": "step", "seq": 0, "token": 5}
"""


@pytest.fixture(autouse=True)
def _home(request, tmp_path, monkeypatch) -> None:
    if request.node.get_closest_marker("native"):
        return  # builds lie in the real one
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(discovery.VARIABLE, raising=False)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a trace of a library that fails because it does not defragment."""
    return trace_kit.record(tmp_path / "Stock_fails.jsonl", FRAGMENTED, SimulatedNative())


def run(path: Path, make=SimulatedNative):
    """Play the scenario of a file on a library and return its result."""
    one = discovery.read(path)
    with ScenarioRunner(Opener(make)) as bench:
        return bench.run(Path("lib"), one, one.settings[0]).outcome


def healing() -> SimulatedNative:
    return SimulatedNative(heals=True)


def edit(path: Path, **words: str) -> Path:
    """Change keys of a trace's head."""
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), **words}) + "\n" + rest)
    return path


def test_trace_of_a_failure_is_a_fix_scenario(recorded: Path) -> None:
    """A library without the fix fails again; one with it passes and continues as recorded."""
    outcome = run(recorded)
    assert (outcome.status, outcome.failure) == ("fail", "claim")
    assert "row 5 (batch)" in outcome.message
    assert "8 tokens with 128 free cells ended with no-slot, expected ok" in outcome.message
    assert run(recorded, healing).status == "pass"


def test_trace_head_defines_id_kind_and_claim(recorded: Path) -> None:
    """It has the name, the kind, and whether decodes must end as recorded."""
    plain = discovery.read(recorded)
    assert (plain.id, plain.kind, plain.claim) == ("stock-fails", "fix", trace_scenario.CLAIM)
    assert plain.model == "tiny"
    assert plain.environment == ()
    edit(recorded, claim="It holds.", kind="guard", issue="a/b#1", expect="recorded")
    one = discovery.read(recorded)
    assert (one.claim, one.kind, one.issue) == ("It holds.", "guard", "a/b#1")
    assert run(recorded).status == "pass"
    outcome = run(recorded, healing)
    assert outcome.failure == "claim"
    assert "ended with ok, expected no-slot" in outcome.message


def test_decode_beyond_the_free_cells_may_fail(tmp_path: Path) -> None:
    """A full cache is not a failure."""
    text = (
        '{"op": "decode", "feed": {"0": 250}}\n{"op": "decode", "feed": {"0": 9}, "expect": "any"}'
    )
    assert run(trace_kit.record(tmp_path / "full.jsonl", text, SimulatedNative())).status == "pass"


def test_trace_scenario_classifies_lost_cells_and_logits(recorded: Path, tmp_path: Path) -> None:
    """Lost cells, other logits, a refusal and a crash have their own classes."""

    class Losing(SimulatedNative):
        def decode(self, context, token, pos, seq_count, seq_id, logits):
            status = super().decode(context, token, pos, seq_count, seq_id, logits)
            if len(token) == 8:
                self._get(context).cache.remove(0, 3, 4)
            return status

    class Wrong(SimulatedNative):
        def _row(self, cache, seq, pos):
            row = super()._row(cache, seq, pos)
            return row * 2 if cache.size == 256 and pos == 128 else row

    class Refusing(SimulatedNative):
        def seq_rm(self, context, seq, p0, p1):
            return False

    class Dying(SimulatedNative):
        def seq_rm(self, context, seq, p0, p1):
            raise WorkerDied("the worker was killed")

    for kind, failure in (
        (lambda: Losing(heals=True), "lost"),
        (lambda: Wrong(heals=True), "data"),
        (lambda: Refusing(heals=True), "claim"),
        (lambda: Dying(heals=True), "crash"),
    ):
        assert run(recorded, kind).failure == failure, failure


def test_trace_scenario_accepts_recorded_errors_only(tmp_path: Path) -> None:
    """A recorded error may be absent; an unrecorded one is a failure."""

    class Throwing(SimulatedNative):
        def update(self, context):
            raise NativeError("threw", code=-3)

    text = '{"op": "decode", "feed": {"0": 3}}\n{"op": "update"}'
    with pytest.raises(NativeError):
        trace_kit.record(tmp_path / "a.jsonl", text, Throwing())
    for make in (SimulatedNative, Throwing):
        assert run(tmp_path / "a.jsonl", make).status == "pass"
    trace_kit.record(tmp_path / "b.jsonl", text)
    assert run(tmp_path / "b.jsonl", Throwing).failure == "claim"


def test_script_is_a_scenario(tmp_path: Path) -> None:
    """Its expectations are the claim."""
    path = tmp_path / "mine.jsonl"
    path.write_text(FRAGMENTED.replace('"expect": "any"', '"expect": "ok"'))
    assert run(path).failure == "claim"
    assert run(path, healing).status == "pass"
    path.write_text("# nothing\n")
    with pytest.raises(ScriptError, match="no operations"):
        discovery.read(path)


def test_traces_are_found_beside_scenarios(recorded: Path, monkeypatch) -> None:
    """They are found in a directory, by the environment, or by the name of the file."""
    assert "stock-fails" in discovery.discover([recorded.parent])
    monkeypatch.setenv(discovery.VARIABLE, str(recorded.parent))
    known = discovery.discover()
    assert known["stock-fails"].source == recorded
    monkeypatch.delenv(discovery.VARIABLE)
    (chosen,) = discovery.select(discovery.discover(), [str(recorded)])
    assert (chosen.id, chosen.source) == ("stock-fails", recorded)
    before = chosen.digest
    edit(recorded, claim="Other.")
    assert discovery.read(recorded).digest != before
    with pytest.raises(UsageError, match="no scenario file"):
        discovery.select(discovery.discover(), ["nowhere.jsonl"])
    recorded.write_text('{"trace": 2}\n{"op": "nothing"}\n')
    with pytest.raises(ScriptError, match=r"Stock_fails\.jsonl: line 2"):
        discovery.discover([recorded.parent])


def test_trace_with_a_missing_model_is_untestable(recorded: Path) -> None:
    """An invalid trace does not disable the other scenarios."""
    edit(recorded, model="/no/such/model.gguf")
    outcome = run(recorded)
    assert outcome.status == "skip"
    assert "was not found" in outcome.message
    edit(recorded, model="grouped")
    assert "another model" in run(recorded).message


def test_long_traces_keep_few_logits(tmp_path: Path, monkeypatch) -> None:
    """Of later decodes only some are kept; the result is the same."""
    monkeypatch.setattr(trace_scenario, "KEPT", 4)
    lines = ['{"op": "step", "seq": 0, "token": 5}'] * 60
    path = trace_kit.record(tmp_path / "long.jsonl", "\n".join(lines), SimulatedNative())
    assert run(path).status == "pass"
    monkeypatch.setattr(trace_scenario, "LIMIT", 100)
    assert run(path).status == "pass"


def test_token_count_of_each_operation_is_known() -> None:
    """The count of a text is unknown without the model."""
    from pyllamakv.traces.script import Line

    def size(op: str, **words: object) -> int:
        return Line(1, op, words).tokens

    assert size("step", token=1) == 1
    assert size("batch", tokens=[1, 2]) == 2
    assert size("advance", seq=[0, 1, 2]) == 3
    assert size("decode", feed={"0": 3, "1": [1, 2]}) == 5
    assert size("decode", feed={"0": "text"}) == 0
    assert size("defrag") == 0


@pytest.mark.slow
@pytest.mark.native
def test_a_trace_recorded_on_stock_is_needed(stock, patched, tmp_path) -> None:
    """What failed on stock passes on patched, with the right K, V and logits."""
    import pyllamakv as kv

    path = tmp_path / "real.jsonl"
    with (
        kv.open(stock.folder) as lib,
        lib.load_model(synthetic_models.model("grouped")) as model,
        model.context(n_ctx=256, n_batch=256, n_seq_max=3) as ctx,
        kv.record(ctx, path),
    ):
        a, b, c = ctx.sequence(), ctx.sequence(), ctx.sequence()
        for token in range(128):
            ctx.decode([a.feed([token % 32]), b.feed([token % 32])])
        b.remove()
        feed = c.feed(list(range(16)))
        assert ctx.try_decode(feed) == 1
        ctx.kv.defrag()
        ctx.decode(feed)
        saved = a.save()
        a.remove(3, 50)
        a.shift(50, None, -47)
        a.restore(saved)
    head, _ = trace.read(path)
    assert head.spec == "0.3.9+stock"
    one = discovery.read(path)
    with ScenarioRunner() as bench:
        assert bench.run(stock.folder, one, one.settings[0]).outcome.failure == "claim"
        assert bench.run(patched.folder, one, one.settings[0]).outcome.status == "pass"
