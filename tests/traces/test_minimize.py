"""Test that failing traces are minimized and still fail in the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trace_kit
from cli_kit import Opened, cli
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

import pyllamakv
from pyllamakv.cli import main
from pyllamakv.errors import UsageError, WorkerDied
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.traces import minimize, trace, trace_scenario, variant_selection

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stock-fails.jsonl"

LONG = "\n".join(
    [
        '{"op": "context", "n_ctx": 256, "n_ubatch": 64, "n_seq_max": 4}',
        '{"op": "decode", "feed": {"2": "hello"}}',
        *['{"op": "batch", "tokens": [5, 6], "seq": [0, 1], "logits": "all"}'] * 100,
        '{"op": "save", "seq": 0, "as": "x"}',
        '{"op": "remove", "seq": 1}',
        '{"op": "note", "text": "now"}',
        '{"op": "copy", "seq": 0, "into": 3}',
        f'{{"op": "batch", "tokens": {[7] * 64}, "seq": 1, "expect": "any"}}',
        *['{"op": "step", "seq": 0, "token": 5}'] * 5,
    ]
)


@pytest.fixture(autouse=True)
def _home(request, tmp_path, monkeypatch) -> None:
    if request.node.get_closest_marker("native"):
        return  # builds lie in the real one
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))


def shrink(path: Path, make=SimulatedNative, **options):
    head, lines = trace_scenario.load(path)
    model = synthetic_models.model("tiny")
    return minimize.minimize(head, lines, Path("lib"), model=model, opener=Opener(make), **options)


def words(found) -> list[dict]:
    return [{k: v for k, v in line.to_json().items() if k != "result"} for line in found.lines]


@pytest.mark.slow
def test_minimized_trace_keeps_only_the_cause(tmp_path: Path) -> None:
    """A fill, a removal and the failing batch remain, with the fewest possible tokens."""
    path = trace_kit.record(tmp_path / "long.jsonl", LONG, SimulatedNative())
    reports: list[tuple[int, int]] = []
    found = shrink(path, progress=lambda left, runs: reports.append((left, runs)))
    assert (found.failure, found.before, found.minimal) == ("claim", 111, True)
    assert "ended with no-slot, expected ok" in found.message
    operations = words(found)
    assert [each["op"] for each in operations] == ["context", "batch", "remove", "batch"]
    assert reports[-1] == (3, reports[-1][1])
    assert reports[-1][1] <= found.runs
    # It fails, and no longer fails with one token less anywhere.
    head, _ = trace_scenario.load(path)
    first, *rest = found.lines
    with ScenarioRunner(Opener(SimulatedNative)) as bench:
        work = minimize.FailureProbe(
            head, first, Path("lib"), synthetic_models.model("tiny"), bench
        )
        items = tuple(json.dumps(line.to_json()) for line in rest)
        wanted = minimize.failure_key(work.outcome(items))
        assert wanted[0] == "claim"
        for place, item in enumerate(items):
            less = [(*items[:place], *items[place + 1 :])]
            n = minimize._size(item)
            if n > 1:
                less.append((*items[:place], minimize._cut(item, n - 1), *items[place + 1 :]))
            for some in less:
                assert minimize.failure_key(work.outcome(some)) != wanted


def test_script_is_minimized_like_a_trace(tmp_path: Path) -> None:
    """A decode that must succeed, in feeds of counts, lists and texts."""
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"op": "context", "n_ctx": 64, "n_batch": 64, "n_seq_max": 4}\n'
        '{"op": "decode", "feed": {"0": 20, "1": [5, 6, 7], "2": "abc"}, "interleave": true}\n'
        '{"op": "decode", "feed": {"0": 18, "1": 18}, "interleave": true}\n'
        '{"op": "snapshot"}\n{"op": "remove", "seq": 1}\n'
        '{"op": "decode", "feed": {"3": 15}}\n'
    )
    found = shrink(path)
    assert {line.op for line in found.lines} == {"context", "decode", "remove"}
    assert found.lines[-1].arguments["feed"].keys() == {"3"}


def test_minimizing_keeps_the_failure_class(tmp_path: Path) -> None:
    """A crash stays a crash, although a shorter trace loses cells."""

    class Bad(SimulatedNative):
        def update(self, context):
            cache = self._get(context).cache
            if len(cache.used) >= 9:
                raise WorkerDied("the worker was killed by signal 11")
            cache.remove(0)

    path = tmp_path / "bad.jsonl"
    path.write_text('{"op": "decode", "feed": {"0": 30}}\n{"op": "clear"}\n' * 2 +
                    '{"op": "decode", "feed": {"0": 30}}\n{"op": "update"}\n')  # fmt: skip
    found = shrink(path, Bad)
    assert found.failure == "crash"
    assert words(found)[1:] == [{"op": "decode", "feed": {"0": 9}}, {"op": "update"}]


def test_minimizing_cuts_steps_within_one_call(tmp_path: Path) -> None:
    """By whole steps."""

    class Lossy(SimulatedNative):
        def decode(self, context, token, pos, *rest):
            status = super().decode(context, token, pos, *rest)
            if int(pos[0]) == 4 and int(token[0]) == 9:
                self._get(context).cache.remove(0, 2, 3)
            return status

    path = tmp_path / "lossy.jsonl"
    path.write_text('{"op": "advance", "steps": [[5], [6], [7], [8], [9], [10], [11]], "seq": [0]}')
    found = shrink(path, Lossy)
    assert found.failure == "lost"
    assert words(found)[1]["steps"] == [[5], [6], [7], [8], [9]]


def test_passing_trace_is_not_minimized(tmp_path: Path) -> None:
    """A trace that passes is reported, and one that cannot be replayed has the reason."""
    path = trace_kit.record(tmp_path / "long.jsonl", LONG, SimulatedNative())
    with pytest.raises(UsageError, match="does not fail on that build"):
        shrink(path, lambda: SimulatedNative(heals=True))


@pytest.mark.slow
def test_interrupted_minimizing_returns_the_shortest_trace(tmp_path: Path) -> None:
    """The shortest trace so far is returned, and reported as not minimal."""
    path = trace_kit.record(tmp_path / "long.jsonl", LONG, SimulatedNative())

    def reports(left: int, _: int) -> None:
        if left < 60:
            raise KeyboardInterrupt

    found = shrink(path, progress=reports)
    assert not found.minimal
    assert 3 < len(found.lines) - 1 < 60


@pytest.mark.slow
@pytest.mark.parametrize(("at", "left"), [(1, None), (2, 111)])
def test_interrupt_of_the_first_run_returns_the_whole_trace(
    tmp_path: Path, at: int, left: int | None
) -> None:
    """Until the failure of the trace is known, the whole trace is returned."""
    path = trace_kit.record(tmp_path / "long.jsonl", LONG, SimulatedNative())
    runs = []

    class Interrupted(SimulatedNative):
        def context_new(self, model, params):
            if params.n_seq_max == 4:
                runs.append(1)
                if len(runs) == at:
                    raise KeyboardInterrupt
            return super().context_new(model, params)

    if left is None:
        with pytest.raises(KeyboardInterrupt):
            shrink(path, Interrupted)
    else:
        found = shrink(path, Interrupted)
        assert (len(found.lines) - 1, found.minimal) == (left, False)


@pytest.mark.slow
def test_minimize_writes_a_trace_with_results(capsys, monkeypatch, tmp_path: Path) -> None:
    """It is written next to the original, with results of the build on which it fails."""
    monkeypatch.setattr(
        pyllamakv, "open", lambda *_, **__: Opened(SimulatedNative()), raising=False
    )
    monkeypatch.setattr(variant_selection, "variant_folder", lambda *_: Path("lib"))
    monkeypatch.setattr(
        minimize, "ScenarioRunner", lambda _: ScenarioRunner(Opener(SimulatedNative))
    )
    path = trace_kit.record(tmp_path / "long.jsonl", LONG, SimulatedNative())
    code, out, _ = cli(capsys, "trace", "minimize", path)
    assert code == 0
    assert "111 operations became 3" in out
    head, lines = trace.read(tmp_path / "long.min.jsonl")
    assert head.complete
    assert lines[-1].result["status"] == 1
    code, out, _ = cli(capsys, "trace", "minimize", path, "--json", "-o", tmp_path / "x.jsonl")
    assert json.loads(out)["operations"] == 3
    assert (tmp_path / "x.jsonl").is_file()
    monkeypatch.setattr(
        minimize,
        "ScenarioRunner",
        lambda _: ScenarioRunner(Opener(lambda: SimulatedNative(heals=True))),
    )
    assert cli(capsys, "trace", "minimize", path)[0] == 2


@pytest.mark.slow
@pytest.mark.native
def test_example_is_minimized_on_stock(stock, patched, capsys, tmp_path: Path) -> None:
    """A fill, a removal and the failing batch remain; patched still decodes it."""
    target = tmp_path / "small.jsonl"
    code, _, _ = cli(capsys, "trace", "minimize", EXAMPLE, "--variant", stock.folder, "-o", target)
    assert code == 0
    _, lines = trace.read(target)
    assert [line.op for line in lines] == ["context", "batch", "remove", "batch"]
    code, out, _ = cli(
        capsys, "trace", "replay", target, "--variant", f"{patched.folder}", "--json"
    )
    assert code == 0
    assert json.loads(out)["replays"][0]["divergences"][0]["what"] == "status"


def test_minimize_refuses_an_unwritable_output_and_two_builds(capsys, tmp_path) -> None:
    """It refuses before it starts to minimize."""
    with pytest.raises(UsageError, match="cannot be written"):
        trace.check(tmp_path / "none" / "x.jsonl")
    trace.check(tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()
    with pytest.raises(SystemExit) as leaving:
        main.main(["trace", "minimize", str(EXAMPLE), "--variant", "stock,patched"])
    assert leaving.value.code == 2
    assert "one build" in capsys.readouterr().err
