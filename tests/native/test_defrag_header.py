"""Test the shared files of full-defrag without llama.cpp: one compiler, sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_kit import ROOT, STRICT, Header, run

HEADER = Header("llama-kv-defrag.h", "full-defrag", ROOT / "tests" / "native" / "kv_defrag.cpp")
GROUPS = (
    "cells",
    "data-rows",
    "data-transposed",
    "data-wide",
    "faults",
    "graphs",
    "options",
    "plan-exhaustive",
    "plan-linear",
    "plan-random",
    "ranges",
    "stopwatch",
    "threads",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header."""
    return HEADER.program(tmp_path_factory.mktemp("kv_defrag"))


@pytest.mark.slow
def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_defrag_header_agrees_with_a_cell_by_cell_check(program: Path, group: str) -> None:
    """A group of the header agrees with what is found cell by cell, and breaks no memory rule."""
    result = run(program, group)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_header_compiles_as_the_oldest_release_does(tmp_path: Path) -> None:
    """The header is clean C++11, as 0.2.90 is compiled, without a warning."""
    result = HEADER.compile(tmp_path, "-O0", *STRICT)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_tests_can_fail(tmp_path: Path) -> None:
    """Faults put into the header are found: the tests are not empty."""
    faults = {
        "plan-exhaustive": ("while (!used[src])", "while (false)"),
        "plan-random": ("std::min(gap, m.len - k)", "gap"),
        "data-rows": ("moves[i].len*l.cell", "l.cell"),
        "data-transposed": ("row0 + l.stride", "row0"),
        "cells": ("src = cell_t();", ""),
        "faults": ("catch (const std::exception &)", "catch (int)"),
        "ranges": ("add(c, range.c1);", ""),
        "graphs": ("/(3*n_tensors)", "/(2*n_tensors)"),
        "options": ("enum order order = ORDER_DEFAULT", "enum order order = ORDER_KEPT"),
    }
    HEADER.check_faults(tmp_path, faults)
