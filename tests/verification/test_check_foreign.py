"""Test that foreign patches get the same verdicts as shipped ones, with the users' command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import foreign_kit
import pytest

import pyllamakv as kv
from pyllamakv.cli import main
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from qa.random_operations import operation_cases

RELEASE = foreign_kit.RELEASE
pytestmark = pytest.mark.native

#: Checks patches, and returns the exit status and the JSON output.
Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(stock, capsys: pytest.CaptureFixture[str]) -> Iterator[Check]:
    """Yield the command; remove the variants that it builds afterwards."""
    made = []

    def ask(*words: str) -> tuple[int, dict[str, Any]]:
        with pytest.raises(SystemExit) as left:
            main.main(["check", RELEASE, "--quick", "--json", *words])
        answer = json.loads(capsys.readouterr().out)
        if "patched" in answer["variants"]:
            made.append(home() / "built" / answer["variants"]["patched"])
        assert answer["variants"]["stock"] == stock.id
        return int(left.value.code or 0), answer

    yield ask
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def failing(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that failed on patched."""
    return [run for run in answer["results"]["patched"] if run["outcome"]["status"] == "fail"]


@pytest.mark.slow
def test_a_lost_retry_hunk_is_ineffective(check: Check, tmp_path: Path) -> None:
    """It applies and builds without harm, and its claim still fails."""
    file = foreign_kit.retry_lost(tmp_path)
    claims = b"Scenario: fragmented\nScenario: retry-between-ubatches\n"
    file.write_bytes(b"Subject: [PATCH] retry\n\n" + claims + b"---\n" + file.read_bytes())
    code, answer = check("--patches", str(file))
    assert (code, answer["verdict"]) == (1, "ineffective")
    assert "fragmented [" in answer["reason"]
    assert "free cells ended with no-slot" in answer["reason"]
    scenarios = answer["scenarios"]
    assert scenarios["fragmented"] == scenarios["retry-between-ubatches"] == "ineffective"
    assert scenarios["restore-fragmented"] == "needed"
    assert "harmful" not in scenarios.values()
    assert {run["outcome"]["failure"] for run in failing(answer)} == {"claim"}


@pytest.mark.slow
def test_a_corrupted_v_under_flash_attention_is_harmful(check: Check, tmp_path: Path) -> None:
    """It applies and builds, decodes find slots, and the values are wrong afterwards."""
    code, answer = check("--patches", str(foreign_kit.values_by_column(tmp_path)))
    assert (code, answer["verdict"]) == (1, "harmful")
    assert answer["patches"] == ["defrag", "cleanup"]
    assert answer["scenarios"]["fragmented"] == "harmful"
    assert "introduces wrong data: " in answer["reason"]
    assert "[flash attention, " in answer["reason"]
    # A story generated from a damaged cache differs, which is its claim.
    wrong = [run for run in failing(answer) if run["scenario"] != "story"]
    assert {run["outcome"]["failure"] for run in wrong} == {"data"}
    assert {run["setting"].split()[0] for run in wrong} == {"flash"}
    assert any("V rows of layer 0" in run["outcome"]["message"] for run in wrong)
    assert not any("K rows" in run["outcome"]["message"] for run in wrong)
    with kv.open(home() / "built" / answer["variants"]["patched"]) as library:
        model = library.load_model(synthetic_models.model("grouped"))
        for flash, found in ((True, {"data"}), (False, set())):
            opener = partial(model.context, 256, 96, 32, 5, flash_attn=flash)
            failed = [
                operation_cases.CaseRunner(opener).play(
                    operation_cases.generate_operations(seed, 25)
                )
                for seed in range(4)
            ]
            assert {each.failure for each in failed if each is not None} == found


@pytest.mark.slow
def test_patch_that_does_not_apply_names_the_hunk(check: Check, tmp_path: Path) -> None:
    """The reason has the place, the expected and the actual lines; nothing is built."""
    text = foreign_kit.change(foreign_kit.shipped())
    old = b"        // find KV slot\n"
    assert text.count(old) == 1
    file = tmp_path / "old.diff"
    file.write_bytes(text.replace(old, b"        // find a slot\n"))
    code, answer = check("--patches", str(file), "--scenario", "fragmented")
    assert (code, answer["verdict"]) == (1, "broken-apply")
    assert "old does not apply: src/llama-context.cpp, hunk 2 in " in answer["reason"]
    assert "expected `// find a slot`, found `// find KV slot`" in answer["reason"]
    assert "stock fails fragmented" in answer["reason"]
    assert "patched" not in answer["variants"]


@pytest.mark.slow
def test_patch_that_does_not_build_keeps_the_first_error(check: Check, tmp_path: Path) -> None:
    """The first compiler error is the reason."""
    text = foreign_kit.change(foreign_kit.shipped())
    old = b"+        bool found = kv_self->find_slot(ubatch);\n"
    assert text.count(old) == 1
    file = tmp_path / "typo.diff"
    file.write_bytes(text.replace(old, old.replace(b"kv_self", b"kv_selves")))
    code, answer = check("--patches", str(file), "--scenario", "fragmented")
    assert (code, answer["verdict"]) == (1, "broken-build")
    assert "llama-context.cpp" in answer["reason"]
    assert "kv_selves" in answer["reason"]
