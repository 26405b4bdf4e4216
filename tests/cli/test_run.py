"""Test the verb run, and trace view and replay, with a simulated library."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from cli_kit import EXAMPLE, Opened, cli
from fakes.simulated import SimulatedNative

import pyllamakv

#: Environment variables of scripts.
JUDGED = {"LLAMA_SET_ROWS": "0"}


@pytest.fixture
def opened(monkeypatch, tmp_path) -> list[tuple[str, dict]]:
    """Replace libraries: ``stock`` fails, and every other one defragments."""
    asked: list[tuple[str, dict]] = []

    def open_(spec, **options):
        asked.append((str(spec), options))
        return Opened(SimulatedNative(heals=not str(spec).endswith("stock")))

    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(pyllamakv, "open", open_, raising=False)
    monkeypatch.setattr("pyllamakv.open_variant.find_recorded", lambda *_: tmp_path)
    return asked


def test_run_plays_a_script_and_draws(opened, capsys) -> None:
    """Each line has its result, and each snapshot its cells; a worker is used."""
    code, out, _ = cli(capsys, "run", EXAMPLE)
    assert code == 0
    assert "used=128 holes=128 largest_hole=1" in out
    assert "after: 144 of 256 cells used" in out
    assert opened == [("None", {"isolated": True, "env": JUDGED})]


def test_run_reports_a_failed_expectation_of_stock(opened, capsys) -> None:
    """An expectation that fails is exit 1, with its line."""
    code, _, err = cli(capsys, "run", EXAMPLE, "--variant", "0.3.9+stock")
    assert code == 1
    assert "line 7 (decode)" in err


def test_run_prints_json_lines(opened, capsys) -> None:
    """There is one object per line, each with its result."""
    code, out, _ = cli(capsys, "run", EXAMPLE, "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [each["op"] for each in results][:2] == ["context", "decode"]
    assert all("result" in each for each in results)


def test_recorded_trace_is_drawn_and_replayed(opened, capsys, tmp_path: Path) -> None:
    """A recording is drawn, and replays equally; on another build, differences are named."""
    trace = tmp_path / "trace.jsonl"
    assert cli(capsys, "trace", "record", EXAMPLE, "-o", trace)[0] == 0

    code, out, _ = cli(capsys, "trace", "view", trace)
    assert code == 0
    assert "after: 144 of 256 cells used" in out
    code, out, _ = cli(capsys, "trace", "view", trace, "--json", "--line", 4)
    assert json.loads(out)[0]["holes"] == 128
    assert cli(capsys, "trace", "view", trace, "--line", 999)[0] == 2
    code, out, _ = cli(capsys, "trace", "view", trace, "--svg", tmp_path / "pictures")
    assert code == 0
    assert all(Path(name).read_text().startswith("<svg") for name in out.split())

    code, out, _ = cli(capsys, "trace", "replay", trace)
    assert code == 0
    assert "nowhere" in out
    code, out, _ = cli(capsys, "trace", "replay", trace, "--variant", "other-stock", "--json")
    # Both report "simulated" as their build: the recorded build itself diverged.
    assert code == 1
    divergence = json.loads(out)["replays"][0]["divergences"][0]
    assert (divergence["row"], divergence["what"]) == (7, "status")
    assert (divergence["recorded"], divergence["found"]) == (0, 1)
    assert divergence["before"] == {"used": 128, "holes": 128, "largest_hole": 1}
    # A trace is a script.
    assert cli(capsys, "run", trace)[0] == 0


def test_every_verb_refuses_a_script_without_its_variable(
    opened, capsys, tmp_path, monkeypatch
) -> None:
    """Every verb refuses the script and its trace with the reason, unless the variable is set."""
    trace = tmp_path / "trace.jsonl"
    assert cli(capsys, "trace", "record", EXAMPLE, "-o", trace)[0] == 0
    for verb in ("view", "stats"):
        assert cli(capsys, "trace", verb, EXAMPLE)[0] == 0
    monkeypatch.setenv("LLAMA_SET_ROWS", "1")
    code, out, _ = cli(capsys, "trace", "replay", trace)
    assert code == 0
    assert "under LLAMA_SET_ROWS=0\n" in out
    assert [options["env"] for _, options in opened] == [JUDGED] * 4
    assert cli(capsys, "run", EXAMPLE)[0] == 0
    assert opened[-1][1]["env"] == {"LLAMA_SET_ROWS": "1"}


@pytest.mark.parametrize("words", [("run",), ("trace", "view"), ("trace", "stats")])
def test_model_option_overrides_the_model_of_the_script(opened, capsys, monkeypatch, words) -> None:
    """The command line overrides the script; a missing model is refused."""
    loaded = []
    load = SimulatedNative.model_load

    def loading(self, path, params):
        loaded.append(Path(path).name)
        return load(self, path, params)

    monkeypatch.setattr(SimulatedNative, "model_load", loading)
    assert cli(capsys, *words, EXAMPLE, "--model", "bytes")[0] == 0
    assert loaded[0].startswith("bytes-")
    opened.clear()
    code, _, err = cli(capsys, *words, EXAMPLE, "--model", "/nowhere/x.gguf")
    assert code == 2 and "x.gguf" in err
    assert not opened


def test_replay_names_variables_missing_in_the_recording(
    opened, capsys, tmp_path, monkeypatch
) -> None:
    """It names variables of this process that the recording did not have."""
    trace = tmp_path / "trace.jsonl"
    assert cli(capsys, "trace", "record", EXAMPLE, "-o", trace)[0] == 0
    monkeypatch.setenv("LLAMA_KV_DEFRAG_PLAN", "ordered")
    _, out, _ = cli(capsys, "trace", "replay", trace)
    assert "under LLAMA_KV_DEFRAG_PLAN=ordered LLAMA_SET_ROWS=0\n" in out
    assert "not set in the recording: LLAMA_KV_DEFRAG_PLAN\n" in out
    _, out, _ = cli(capsys, "trace", "replay", trace, "--json")
    assert json.loads(out)["environment"]["LLAMA_SET_ROWS"] == "0"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("x.jsonl", "--prompt", "hi"),
        ("--prompt", "hi"),
        (EXAMPLE, "--max-tokens", 8),
        (EXAMPLE, "--seed", 0),
        (EXAMPLE, "--flash-attn", "--threads", 2),
    ],
)
def test_contradictory_run_options_are_refused(opened, capsys, words) -> None:
    """They are a usage error, before anything is opened."""
    assert cli(capsys, "run", *words)[0] == 2
    assert not opened


@pytest.mark.native
def test_run_continues_prompts_side_by_side(patched, capsys) -> None:
    """Two prompts in one cache get the same texts as each one alone."""
    from pyllamakv.scenarios import synthetic_models

    options = ["--variant", patched.folder, "--model", synthetic_models.model("bytes"), "--json"]
    options += ["--max-tokens", 12]
    one, other = ["--prompt", "the cat"], ["--prompt", "a dog ran"]
    code, out, _ = cli(capsys, "run", *options, *one, *other)
    assert code == 0
    both = json.loads(out)
    assert both["cache"]["used"] > 20
    for prompt, completion in zip((one, other), both["completions"], strict=True):
        alone = json.loads(cli(capsys, "run", *options, *prompt)[1])["completions"][0]
        assert alone["text"] == completion["text"]


@pytest.mark.native
def test_the_example_fails_on_stock_and_passes_on_patched(stock, patched, capsys) -> None:
    """The documented example has the documented results."""
    assert cli(capsys, "run", EXAMPLE, "--variant", stock.folder)[0] == 1
    assert cli(capsys, "run", EXAMPLE, "--variant", patched.folder)[0] == 0


@pytest.mark.parametrize("verb", ["view", "minimize", "stats"])
def test_help_paragraphs_fill_the_terminal_width(verb, capsys, monkeypatch) -> None:
    """A line ends where the next word would not fit."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli(capsys, "trace", verb, "--help")
    assert code == 0
    prose = out[: out.index("Arguments")].splitlines()[2:-1]
    for line, following in pairwise(prose):
        word = following.split(maxsplit=1)[0] if following.strip() else ""
        if word and line.strip():
            assert len(line.rstrip()) + 1 + len(word) > 78, line
