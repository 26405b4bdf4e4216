"""Test patched libraries in C++ programs: environment variables, buffers, exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from linked_program_kit import linked, run
from native_kit import built

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plain program with the patched libraries."""
    return linked("0.3.36+patched", "sparse", tmp_path_factory.mktemp("patched"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "arguments", "printed"),
    [
        ({}, (), "0 cells moved\n"),
        ({"LLAMA_KV_DEFRAG_THOLD": "0.5"}, (), "50 cells moved\n"),
        ({"LLAMA_KV_DEFRAG_THOLD": "0.99"}, (), "0 cells moved\n"),
        (
            {"LLAMA_KV_DEFRAG_THOLD": "0.5", "LLAMA_KV_DEFRAG_MIN_CELLS": "4096"},
            (),
            "0 cells moved\n",
        ),
        # The program's value overrides the variable, in both directions.
        ({"LLAMA_KV_DEFRAG_THOLD": "0.5"}, ("0",), "0 cells moved\n"),
        ({"LLAMA_KV_DEFRAG_THOLD": "0"}, ("0.5",), "50 cells moved\n"),
        ({}, ("0.5",), "50 cells moved\n"),
        (
            {"LLAMA_KV_DEFRAG_THOLD": "half", "LLAMA_KV_DEFRAG_PLAN": "ordered"},
            (),
            "LLAMA_KV_DEFRAG_THOLD is 'half', which is ignored; expected a number from 0 to 1\n"
            "0 cells moved\n",
        ),
    ],
)  # fmt: skip
def test_compaction_variable_applies_unless_the_program_decides(
    patched: Path, variables: dict[str, str], arguments: tuple[str, ...], printed: str
) -> None:
    """The variable is the default of the program's value; an invalid one is logged once."""
    model = str(synthetic_models.model("tiny"))
    assert run(patched, model, *arguments, **variables) == printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "given", "effect", "moved"),
    [("patched", -1.0, 0.5, 50), ("patched", 0.0, 0.0, 0), ("stock", 0.25, -1.0, None)],
)
def test_a_context_reports_its_threshold(
    side: str, given: float, effect: float, moved: int | None
) -> None:
    """The context reports the threshold of the variable, of the argument, or none."""
    env = {"LLAMA_KV_DEFRAG_THOLD": "0.5"}
    with (
        kv.open(built(f"0.3.36+{side}").folder, isolated=True, env=env) as library,
        library.load_model(synthetic_models.model("tiny")) as model,
        model.context(4096, 256, 256, 2, defrag_thold=given) as ctx,
    ):
        assert ctx.info.defrag_thold == effect
        gone, live = ctx.sequence(), ctx.sequence()
        gone.prefill([1] * 3000)
        live.prefill([2] * 50)
        gone.close()
        live.step(3)
        if moved is not None:
            assert ctx.counters.cells_moved == moved


@pytest.mark.slow
def test_stock_ignores_the_variables(tmp_path: Path) -> None:
    """Upstream's libraries read no variable, and do not log an invalid one."""
    program = linked("0.3.36+stock", "sparse", tmp_path)
    model = str(synthetic_models.model("tiny"))
    variables = {"LLAMA_KV_DEFRAG_THOLD": "half", "LLAMA_KV_DEFRAG_PLAN": "best"}
    assert run(program, model, "0.5", **variables) == "no counters\n"


@pytest.fixture(scope="module", params=["0.3.9", "b11549"])
def release(request: pytest.FixtureRequest) -> str:
    """Return a release with mapped caches: the test release and the newest one."""
    return f"{request.param}+patched"


@pytest.fixture(scope="module")
def buffers(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that writes to every byte of a cache's buffers."""
    return linked(release, "buffers", tmp_path_factory.mktemp("buffers"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backing", "where"),
    [
        (None, "info: upstream's memory"),
        ("heap", "warning: upstream's memory"),
        ("mmap", "warning: anonymous mapped memory"),
        ("DIRECTORY", "warning: a temporary file in DIRECTORY"),
        ("DIRECTORY/cache", "warning: the file DIRECTORY/cache"),
        ("mmpa", "warning: upstream's memory"),
    ],
)
def test_every_byte_of_a_buffer_can_be_written(
    buffers: Path,
    backing: str | None,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer of ggml is written, cleared and used again; its memory is logged."""
    monkeypatch.chdir(tmp_path)
    variables = {}
    if backing is not None:
        variables["LLAMA_KV_BACKING"] = backing.replace("DIRECTORY", str(tmp_path))
    level, memory = where.replace("DIRECTORY", str(tmp_path)).split(": ")
    expected = [f"{level} log_backing: KV cache (CPU) is in {memory}", "2 tensors in 1 buffers"]
    if backing == "mmpa":
        wrong = "LLAMA_KV_BACKING is 'mmpa', which is ignored; expected heap, mmap, a directory, or"
        expected.insert(0, f"warning {wrong} a file whose path contains a '/'")
    printed = run(buffers, str(synthetic_models.model("tiny")), **variables)
    assert printed.splitlines() == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_exception_in_a_shift_keeps_the_abort_callback(release: str, tmp_path: Path) -> None:
    """A decode after a shift that threw is aborted by the callback of the context."""
    program = linked(release, "throwing_shift", tmp_path)
    assert run(program, str(synthetic_models.model("tiny"))) == "the callback was kept\n"
