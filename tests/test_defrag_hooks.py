"""What carries out a plan on tensors, over a ggml that checks every rule and computes late."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_kit import ROOT, Header, run

HEADER = Header(
    "llama-kv-defrag-ggml.h",
    "full-defrag",
    ROOT / "tests" / "native" / "kv_defrag_ggml.cpp",
    places=True,
    needs=("llama-kv-defrag.h",),
)
GROUPS = (
    "cells",
    "failures",
    "graphs",
    "middle",
    "moves",
    "picks",
    "scratch",
    "slices",
    "worth",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header."""
    return HEADER.program(tmp_path_factory.mktemp("kv_defrag_ggml"))


def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_hooks(program: Path, group: str, tmp_path: Path) -> None:
    """A group agrees with what the moves say, and breaks no rule of memory or of ggml."""
    result = HEADER.run(program, group, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


def test_faults_are_noticed(tmp_path: Path) -> None:
    """Each group fails when what it is about is wrong."""
    HEADER.check_faults(
        tmp_path,
        {
            "cells": ("+ stream*size", ""),
            "failures": ("return RESULT_FAILED;", "return RESULT_HOST;"),
            "graphs": ("moves_per_graph(g->max_nodes, device.size())", "n_batch / n_batch"),
            "middle": ("started = true;", ""),
            "moves": ("ggml_backend_sched_synchronize(g->sched);", ""),
            "picks": ("(bytes != 2 && bytes != 4)", "bytes != 2"),
            "scratch": ("buf.size() + move_data", "move_data"),
            "slices": ("v0*ct.where.stride", "0*ct.where.stride"),
            "worth": ("? worth/8 : worth", "? worth : worth"),
        },
    )
