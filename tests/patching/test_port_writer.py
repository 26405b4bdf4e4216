"""Proposed markers match the base that they were made from, and no other base."""

from __future__ import annotations

import tomllib

from patching_kit import MemoryTree, diff

from pyllamakv.patching import hunks, port_writer

OLD = {
    "a.cpp": b'    first_of_all("x\\t");\n    common_to_everyone_alike();\n    only_here(1);;;;\n'
}
NEW = {"a.cpp": OLD["a.cpp"] + b"    more();\n", "b.h": b"// new\n"}
OTHER = MemoryTree({"a.cpp": b"    common_to_everyone_alike();\n"})


def test_propose() -> None:
    """A line that the other bases lack is taken before a longer one that they have."""
    patch = hunks.parse(diff(OLD, NEW))
    found = port_writer.propose_markers(patch, MemoryTree(OLD), [OTHER])
    assert [str(marker) for marker in found] == [
        'a.cpp has `first_of_all("x\\t");`',
        "b.h does not exist",
    ]
    assert all(marker.holds(MemoryTree(OLD)) for marker in found)
    assert not all(marker.holds(OTHER) for marker in found)


def test_table() -> None:
    """The table is TOML that says the same, quotes and backslashes included."""
    patch = hunks.parse(diff(OLD, NEW))
    found = port_writer.propose_markers(patch, MemoryTree(OLD))
    (text,) = tomllib.loads(port_writer.port_table("0.3.9", "unified", ["one"], found))["port"]
    assert (text["base"], text["era"], text["requires"]) == ("0.3.9", "unified", ["one"])
    assert text["markers"][1] == {"file": "b.h", "exists": False}
    assert text["markers"][0]["has"].encode() in OLD["a.cpp"]


def test_nothing_to_say() -> None:
    """A file without a telling line is asked to exist."""
    patch = hunks.parse(diff({"a.cpp": b"}\n"}, {"a.cpp": b"}\n}\n"}))
    (marker,) = port_writer.propose_markers(patch, MemoryTree({"a.cpp": b"}\n"}))
    assert str(marker) == "a.cpp exists"
