"""Test the shared file that reads the environment variables, without llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_kit import ROOT, STRICT, Header, run

HEADER = Header(
    "llama-kv-settings.h",
    "compaction",
    ROOT / "tests" / "native" / "kv_settings.cpp",
    needs=("llama-kv-defrag.h",),
)
GROUPS = ("numbers", "once", "precedence", "words")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header."""
    return HEADER.program(tmp_path_factory.mktemp("kv_settings"))


@pytest.mark.slow
def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_settings_header_reads_and_refuses_values(program: Path, group: str) -> None:
    """Values are read, refused with one line, and ranked as documented."""
    result = run(program, group)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_header_compiles_as_the_oldest_release_does(tmp_path: Path) -> None:
    """The header is clean C++11, as 0.2.90 is compiled, without a warning."""
    result = HEADER.compile(tmp_path, "-O0", *STRICT)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_faults_are_noticed(tmp_path: Path) -> None:
    """Each group fails when what it is about is wrong."""
    faults = {
        "numbers": ("found <= highest", "true"),
        "once": (
            "static const settings res = read();",
            "const settings & res = *new settings(read());",
        ),
        "precedence": ("given.order     != ORDER_DEFAULT ?", "false ?"),
        "words": ("std::strcmp(value, each.text) == 0", "value[0] == each.text[0]"),
    }
    HEADER.check_faults(tmp_path, faults)
