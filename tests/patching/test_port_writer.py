"""Test that proposed markers match the base of their port, and no other base."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING

import patching_kit
import pytest
from patching_kit import MemoryTree, SeriesSandbox, diff

from pyllamakv.errors import FetchError, SourceError
from pyllamakv.patching import hunks, port_writer, series, trees
from pyllamakv.source import fetch, lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release

OLD = {
    "a.cpp": b'    first_of_all("x\\t");\n    common_to_everyone_alike();\n    only_here(1);;;;\n'
}
NEW = {"a.cpp": OLD["a.cpp"] + b"    more();\n", "b.h": b"// new\n"}
OTHER = MemoryTree({"a.cpp": b"    common_to_everyone_alike();\n"})


def test_proposed_marker_distinguishes_other_bases() -> None:
    """A line that other bases lack is preferred to a longer one that they have."""
    patch = hunks.parse(diff(OLD, NEW))
    found = port_writer.propose_markers(patch, MemoryTree(OLD), [OTHER])
    assert [str(marker) for marker in found] == [
        'a.cpp has `first_of_all("x\\t");`',
        "b.h does not exist",
    ]
    assert all(marker.holds(MemoryTree(OLD)) for marker in found)
    assert not all(marker.holds(OTHER) for marker in found)


def test_port_table_is_valid_toml() -> None:
    """The values are unchanged, including quotes and backslashes."""
    patch = hunks.parse(diff(OLD, NEW))
    found = port_writer.propose_markers(patch, MemoryTree(OLD))
    (text,) = tomllib.loads(port_writer.port_table("0.3.9", "unified", ["one"], found))["port"]
    assert (text["base"], text["era"], text["requires"]) == ("0.3.9", "unified", ["one"])
    assert text["markers"][1] == {"file": "b.h", "exists": False}
    assert text["markers"][0]["has"].encode() in OLD["a.cpp"]


def test_file_without_a_unique_line_requires_its_existence() -> None:
    """Without a unique line, the marker is the existence of the file."""
    patch = hunks.parse(diff({"a.cpp": b"}\n"}, {"a.cpp": b"}\n}\n"}))
    (marker,) = port_writer.propose_markers(patch, MemoryTree({"a.cpp": b"}\n"}))
    assert str(marker) == "a.cpp exists"


@pytest.mark.parametrize(
    ("problem", "marker"),
    [
        ("", 'first_of_all("x\\t");'),
        ("no network", "common_to_everyone_alike();"),
        ("it is in no lock file", "common_to_everyone_alike();"),
    ],
)
def test_bases_of_other_ports_are_fetched_for_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str, marker: str
) -> None:
    """They are fetched; those that cannot be compared are in the notes, with the reason."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    target = bench.add_release("0.3.3", OLD)
    other = dict(OTHER.files)
    known = patching_kit.release(open_store(tmp_path / "index.git"), "0.3.2", other)
    bench.add_patch("fix", {"0.3.2": (other, {"a.cpp": b"    more();\n"})})
    names = [] if "lock" in problem else [known]
    monkeypatch.setattr(lockfile, "known", lambda: {each.name: each for each in names})

    def bring(release: Release, **_: object) -> Release:
        if problem:
            raise FetchError(problem)
        return patching_kit.release(bench.store, release.name, other)

    monkeypatch.setattr(fetch, "fetch", bring)
    with pytest.raises(SourceError):
        bench.store.tree_of(known)
    definition = series.load(bench.folder).definition("fix")
    port = replace(definition.port("0.3.2"), base="0.3.3", patch=hunks.parse(diff(OLD, NEW)))
    stock = trees.StoreTree(bench.store, target.tree)
    _, notes = port_writer.write_port(definition, port, "unified", stock, bench.store)
    written = tomllib.loads((bench.folder / "fix" / "patch.toml").read_text("utf-8"))
    assert written["port"][1]["markers"][0]["has"] == marker
    wanted = [f"the proposed markers were not compared with 0.3.2: {problem}"] if problem else []
    assert list(notes[1:]) == wanted
