"""Test the shared file that writes the metrics of the server, without llama.cpp."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from cpp_kit import ROOT, SHARED, STRICT, compiled, run

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = ROOT / "tests" / "native" / "server_kv_metrics.cpp"
STUBS = f"-I{ROOT / 'tests' / 'native' / 'stubs'}"


def program(folder: Path, right: str = "", wrong: str = "") -> Path:
    """Build the tests of the header, with a fault if one is given."""
    shutil.copytree(SHARED, folder / "shared")
    header = folder / "shared" / "tools" / "server" / "server-kv-metrics.h"
    text = header.read_text("utf-8")
    assert right in text
    header.write_text(text.replace(right, wrong, 1), "utf-8")
    result = compiled(SOURCE, folder, *STRICT, STUBS, f"-I{header.parent}")
    assert result.returncode == 0, result.stderr
    return folder / SOURCE.stem


@pytest.mark.slow
def test_header(tmp_path: Path) -> None:
    """The text has every counter, in Prometheus' units, and none that the build does not count."""
    made = program(tmp_path)
    for group in ("absent", "values"):
        result = run(made, group)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_lists_every_metric() -> None:
    """The table of docs/server.md has the names of the header, in their order."""
    text = (SHARED / "tools" / "server" / "server-kv-metrics.h").read_text("utf-8")
    page = (ROOT / "docs" / "server.md").read_text("utf-8")
    names = re.findall(r'\{ "(\w+)", +"(?:counter|gauge)"', text)
    assert len(names) == 11
    assert re.findall(r"^\| `llamacpp:kv_(\w+)` \|", page, re.MULTILINE) == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "right", "wrong"),
    [
        ("absent", "if (value < 0) {", "if (false) {"),
        ("values", "std::setw(9) << ", ""),
        ("values", "last().counters = counters;", ""),
    ],
)
def test_faults_are_noticed(tmp_path: Path, group: str, right: str, wrong: str) -> None:
    """Each group fails when what it is about is wrong."""
    assert run(program(tmp_path, right, wrong), group).returncode != 0
