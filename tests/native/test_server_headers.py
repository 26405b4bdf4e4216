"""Test the shared files of the server's patches, without llama.cpp."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from cpp_kit import ROOT, SHARED, STRICT, compiled, run

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = SHARED / "tools" / "server"
STUBS = f"-I{ROOT / 'tests' / 'native' / 'stubs'}"

#: The groups of the program that tests a header.
GROUPS = {
    "server-kv-metrics.h": ("absent", "values"),
    "server-park.h": ("victims", "turns", "seats", "entries", "limits", "metrics"),
}


def program(folder: Path, name: str, right: str = "", wrong: str = "") -> Path:
    """Build the tests of a header, with a fault if one is given."""
    source = ROOT / "tests" / "native" / f"{name[:-2].replace('-', '_')}.cpp"
    shutil.copytree(SHARED, folder / "shared")
    header = folder / "shared" / "tools" / "server" / name
    text = header.read_text("utf-8")
    assert right in text
    header.write_text(text.replace(right, wrong, 1), "utf-8")
    result = compiled(source, folder, *STRICT, STUBS, f"-I{header.parent}")
    assert result.returncode == 0, result.stderr
    return folder / source.stem


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_server_header_groups_pass(tmp_path: Path, name: str) -> None:
    """Every group of a header's tests passes."""
    made = program(tmp_path, name)
    for group in GROUPS[name]:
        result = run(made, group)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_lists_every_metric() -> None:
    """The tables of docs/server.md have the names of the headers, in their order."""
    page = (ROOT / "docs" / "server.md").read_text("utf-8")
    names = [
        re.findall(r'\{ "(\w+)", +"(?:counter|gauge)"', (FOLDER / name).read_text("utf-8"))
        for name in GROUPS
    ]
    assert [len(each) for each in names] == [11, 5]
    assert re.findall(r"^\| `llamacpp:kv_(\w+)` \|", page, re.MULTILINE) == names[0]
    assert re.findall(r"^\| `llamacpp:(park\w+|resumes_total)` \|", page, re.MULTILINE) == names[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group", "right", "wrong"),
    [
        ("server-kv-metrics.h", "absent", "if (value < 0) {", "if (false) {"),
        ("server-kv-metrics.h", "values", "std::setw(9) << ", ""),
        ("server-kv-metrics.h", "values", "last().counters = counters;", ""),
        ("server-park.h", "victims", "return n_active > 1 ? res : -1;", "return res;"),
        ("server-park.h", "victims", "g.guarded < groups[res].guarded || ", ""),
        ("server-park.h", "turns", "std::max<int64_t>(64, n_tokens)", "n_tokens"),
        ("server-park.h", "turns", "g.cells + std::max(g.extra, g.next)", "g.cells + g.next"),
        ("server-park.h", "turns", "!groups[i].guarded && ", ""),
        (
            "server-park.h",
            "turns",
            "g.since < groups[first].since",
            "g.since > groups[first].since",
        ),
        ("server-park.h", "seats", "evaluated + turn(n_tokens)", "turn(n_tokens)"),
        ("server-park.h", "seats", "std::max<int64_t>(0, n_sharing - 1)", "(n_sharing - 1)"),
        ("server-park.h", "entries", "slot.i_batch >= off && ", "slot.i_batch >= 0 && "),
        ("server-park.h", "entries", "slot.i_batch = moved[slot.i_batch];", ""),
        ("server-park.h", "limits", "word.size() > 12", "false"),
    ],
)
def test_faults_are_noticed(tmp_path: Path, name: str, group: str, right: str, wrong: str) -> None:
    """Each group fails when what it is about is wrong."""
    assert run(program(tmp_path, name, right, wrong), group).returncode != 0
