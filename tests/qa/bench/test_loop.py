"""Test the benchmark of the decode loop: work, arithmetic and errors, but no times."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building_kit import manifest

from pyllamakv.building.variant import Variant
from pyllamakv.errors import CommandFailed, HarnessError, NotBuilt, ToolMissing, Untestable
from qa.bench import decode_loops, loop, peer_loops
from qa.bench.measure import Pairs
from qa.bench.workload import Round, Workload, require_same_result

if TYPE_CHECKING:
    from collections.abc import Callable

EIGHT = Workload("eight", "greedy", 8, 4, ("llama_decode",))
PROMPT = Workload("prompt", "prompt", 1, 300, ("eval",))


@pytest.fixture
def dropin(tmp_path: Path) -> Variant:
    """Return a variant whose ordinary library is not one."""
    folder = tmp_path / "variant"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libllama.so").touch()
    manifest(release="0.3.9").save(folder)
    return Variant(folder)


def test_workloads_fit_their_contexts() -> None:
    """Check cells, batches and tokens of each workload, and that bursts are complete."""
    for work in loop.WORKLOADS:
        assert work.n_ctx >= work.steps * work.sequences
        assert all(0 < token < 256 for token in work.tokens)
        assert work.burst == 0 or work.steps % work.burst == 0
        assert set(work.peers) <= set(loop.NAMES)
    assert (EIGHT.n_batch, len(EIGHT.tokens)) == (8, 8)
    assert (PROMPT.n_batch, len(PROMPT.tokens)) == (128, 300)
    assert len({work.name for work in loop.WORKLOADS}) == len(loop.WORKLOADS)


def test_speed_ratio_to_c_divides_c_time_by_python_time() -> None:
    """Check the ratio, the target, and that the whole interval must meet it."""
    good = loop.beside_c(EIGHT, Path("m.gguf"), Pairs([1.0] * 30, [1.0] * 30))
    assert (good.value, good.met) == ("1.00 [1.00, 1.00] of the speed of plain C", True)
    assert good.limit.startswith("250000 us in plain C")
    bad = loop.beside_c(EIGHT, Path("m.gguf"), Pairs([0.9] * 30, [1.0] * 30))
    assert bad.met is False
    assert loop.beside_c(PROMPT, Path("m.gguf"), Pairs([0.9] * 30, [1.0] * 30)).met is None


def test_speed_ratio_to_llama_cpp_python_divides_its_time() -> None:
    """Check factor and target."""
    ahead = loop.beside_peer(EIGHT, "llama_decode", Pairs([3.0] * 30, [2.0] * 30))
    assert (ahead.value, ahead.met) == ("takes 1.50 [1.50, 1.50] times as long", True)
    tie = loop.beside_peer(EIGHT, "llama_decode", Pairs([2.0] * 30, [2.0] * 30))
    assert tie.met is False
    missing = loop.not_measured(EIGHT, "llama_decode", "pip install it")
    assert (missing.value, missing.met, missing.how) == ("not measured", None, "pip install it")


def test_loops_with_different_results_are_refused() -> None:
    """Check equal, nearly equal and different results."""
    require_same_result("x", Round(1, [1.0, 2.0]), Round(2, [1.0, 2.00001]))
    for other in ([1.0, 3.0], [1.0], []):
        with pytest.raises(HarnessError, match="different work"):
            require_same_result("x", Round(1, [1.0, 2.0]), Round(1, other))


def test_loop_figures_are_ordered_and_name_missing_ones(monkeypatch, tmp_path: Path) -> None:
    """Check the plan of a whole run with fake loops."""

    class Pretended:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __enter__(self) -> Callable[[], Round]:
            return lambda: Round(self.seconds, [1.0])

        def __exit__(self, *_: object) -> None:
            pass

    def absent(variant: object, model: object, work: Workload, api: str) -> Pretended:
        if api == "eval":
            raise Untestable("pip install llama-cpp-python")
        return Pretended(3.0)

    monkeypatch.setattr(loop.variants, "find", lambda spec: spec)
    monkeypatch.setattr(loop, "model_file", lambda: tmp_path / "m.gguf")
    monkeypatch.setattr(loop, "ours", lambda *_: Pretended(2.0))
    monkeypatch.setattr(loop, "plain", lambda *_: Pretended(2.0))
    monkeypatch.setattr(loop, "peer", absent)
    ticks: list[None] = []
    found = loop.figures(lambda: ticks.append(None), pairs=2)
    assert len(found) == sum(1 + len(work.peers) for work in loop.WORKLOADS)
    assert found[0].name == loop.WORKLOADS[0].name
    assert {figure.met for figure in found if "eval" in figure.name} == {None}
    assert all(figure.met for figure in found if "llama_decode" in figure.name)
    assert ticks
    monkeypatch.setattr(loop.variants, "find", lambda spec: None)
    with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.9"):
        loop.figures(lambda: None)


def test_uncompilable_c_loop_reports_the_compiler_error(monkeypatch, dropin: Variant) -> None:
    """Check the first compiler error, and a machine without a compiler."""
    monkeypatch.setattr(decode_loops, "_headers", lambda variant, folder: None)
    source = dropin.folder / "wrong.c"
    source.write_text("int prepare(void) { return nothing; }\n", encoding="utf-8")
    try:
        with pytest.raises(CommandFailed, match="nothing") as caught:
            decode_loops.compiled(dropin, dropin.folder, source)
    except ToolMissing:
        pytest.skip("no C compiler on this machine")
    assert caught.value.code != 0
    monkeypatch.setattr(decode_loops.shutil, "which", lambda name: None)
    with pytest.raises(ToolMissing, match="gcc or clang"):
        decode_loops.compiled(dropin, dropin.folder, source)


def test_a_loop_in_c_that_fails_is_a_typed_error() -> None:
    """Check the exit code in the message."""
    decode_loops._answer(0, "decode")
    with pytest.raises(HarnessError, match="could not decode: it gave -3"):
        decode_loops._answer(-3, "decode")


def python_that(folder: Path, code: str) -> str:
    """Return the path of a program that runs this code in place of the child's."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return os.fspath(program)


ANSWERS = """
import json, sys
print(json.dumps({"version": VERSION}), flush=True)
sys.stdin.readline()
for line in sys.stdin:
    print(json.dumps({"seconds": 0.5, "result": [7.0], "wall": 0.75}), flush=True)
"""


def test_peer_process_returns_one_result_per_round(monkeypatch, dropin: Variant) -> None:
    """Check rounds of a fake child, and another version."""
    good = python_that(dropin.folder, ANSWERS.replace("VERSION", "'0.3.9'"))
    monkeypatch.setenv(peer_loops.VARIABLE, good)
    with peer_loops.peer(dropin, Path("m.gguf"), EIGHT, "llama_decode") as run:
        assert [run() for _ in range(3)] == [Round(0.5, [7.0], 0.75)] * 3
    other = python_that(dropin.folder, ANSWERS.replace("VERSION", "'0.3.2'"))
    monkeypatch.setenv(peer_loops.VARIABLE, other)
    with (
        pytest.raises(Untestable, match=r"0\.3\.2.*dropin setup 0\.3\.9"),
        peer_loops.peer(dropin, Path("m.gguf"), EIGHT, "llama_decode"),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('No module named llama_cpp')", "dropin setup 0.3.9"),
        ("raise SystemExit('it crashed')", "it crashed"),
        ("", "ended with 0"),
    ],
)
def test_peer_process_that_fails_is_untestable(
    monkeypatch, dropin: Variant, code: str, message: str
) -> None:
    """Check the reason and the remedy."""
    monkeypatch.setenv(peer_loops.VARIABLE, python_that(dropin.folder, code))
    with (
        pytest.raises(Untestable, match=message),
        peer_loops.peer(dropin, Path("m.gguf"), EIGHT, "eval"),
    ):
        pass
    monkeypatch.setenv(peer_loops.VARIABLE, str(dropin.folder / "nowhere"))
    with (
        pytest.raises(Untestable, match="does not run"),
        peer_loops.peer(dropin, Path("m.gguf"), EIGHT, "eval"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.native
def test_python_and_c_loops_have_the_same_result(patched: Variant) -> None:
    """Check every workload, shortened, on the generated model."""
    from pyllamakv.home import home
    from pyllamakv.scenarios import synthetic_models

    model = synthetic_models.generate(loop.SHAPE, home() / "models")
    for work in loop.WORKLOADS:
        steps = 2 * (work.burst or 4) if work.kind != "prompt" else 200
        short = Workload(work.name, work.kind, work.sequences, steps, (), work.burst)
        with (
            decode_loops.ours(patched, model, short) as mine,
            decode_loops.plain(patched, model, short) as c,
        ):
            require_same_result(work.name, mine(), c())
            require_same_result(work.name, mine(), c())
