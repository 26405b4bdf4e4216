"""Patch descriptions: markers, releases, identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import MemoryTree, SeriesSandbox, diff, numbered

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import definition
from pyllamakv.patching.definition import Definition, Marker, Port
from pyllamakv.patching.hunks import Patch
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60)}
NEW = {"src/a.cpp": numbered(60, l10="x", l40="y")}


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        (Marker("a", has=("one", "two")), True),
        (Marker("a", has=("one", "three")), False),
        (Marker("a", lacks=("three",)), True),
        (Marker("a", lacks=("three", "two")), False),
        (Marker("a", exists=True), True),
        (Marker("b", exists=False), True),
        (Marker("a", exists=False), False),
        (Marker("b", has=("one",)), False),
        (Marker("b", lacks=("one",)), True),
        (Marker("b", lacks=("one",), exists=True), False),
    ],
)
def test_marker_holds_if_every_part_matches(marker: Marker, holds: bool) -> None:
    """Every part of a marker must match; a missing file contains nothing."""
    assert marker.holds(MemoryTree({"a": b"one two"})) is holds
    assert str(marker).startswith(marker.file)


@pytest.mark.parametrize(
    ("spec", "name", "wanted"),
    [
        ("", "0.3.9", True),
        ("<=0.3.9", "0.3.10", False),
        ("<=0.3.9", "0.3.9", True),
        (">=0.3.6,<0.3.10", "0.2.90", False),
        ("<=0.3.8", "b4980", True),
        ("==0.3.9", "0.3.9.dev1", False),
        ("<1", "0.4.0rc1", True),
        ("<=0.3.8", "git:https://example.org/x@main", True),
    ],
)
def test_release_bounds_are_compared_as_versions(spec: str, name: str, wanted: bool) -> None:
    """Versions are compared as versions; other releases are left to the markers."""
    assert Definition("p", "P", releases=spec).covers_release(name) is wanted


@pytest.mark.parametrize("spec", [">0.3.5,<0.3.6", "==0.3.*", "~=0.3.5,!=0.3.5", ">=9", "<0.1"])
def test_a_bound_may_be_any_version(tmp_path: Path, spec: str) -> None:
    """A range is refused only if no version can be in it."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_patch("one", {"0.3.1": (OLD, NEW)}, releases=spec)
    assert definition.load(bench.folder / "one").releases == spec


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"since": "0.3.99"}, "p: since is '0.3.99', which is no known release"),
        ({"until": "b1"}, "p: until is 'b1', which is no known release.*upstream add"),
        ({"since": "0.3.9", "until": "0.3.5"}, "p: since is 0.3.9, which is newer than until"),
    ],
)
def test_wrong_bounds_are_refused(bounds: dict[str, str], says: str) -> None:
    """A patch is neither used nor left out because of a bound that nobody can compare."""
    with pytest.raises(PatchFormatError, match=says):
        Definition("p", "P", **bounds).covers_release("0.3.8")
    based = Port("p", Patch(b"", ()), "b99999")
    assert Definition("p", "P", since="b99999", ports=(based,)).covers_release("0.3.8")


def test_loaded_definition_has_all_fields_and_ports(tmp_path: Path) -> None:
    """All fields are loaded, and the ports, composed of hooks and shared files."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    with_shared = NEW | {"src/x.h": b"// x\n"}
    bench.add_patch("one", {"0.3.1": (OLD, with_shared)}, releases="<1", shared=("src/x.h",))
    found = definition.load(bench.folder / "one")
    assert (found.title, found.releases, found.shared) == ("Do what one does", "<1", ("src/x.h",))
    assert found.port("0.3.1").patch.paths == ("src/a.cpp", "src/x.h")
    assert found.port("0.3.1").markers == (Marker("src/a.cpp", has=("line 1",)),)
    with pytest.raises(PatchFormatError, match=r"0\.3\.1"):
        found.port("0.3.2")


def test_hooks_that_change_a_shared_file_are_refused(tmp_path: Path) -> None:
    """The error names the shared file to change instead."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_patch("one", {"0.3.1": (OLD, NEW | {"src/x.h": b"// x\n"})}, shared=("src/x.h",))
    file = bench.file("one", "0.3.1")
    file.write_bytes(file.read_bytes() + diff({"src/x.h": b"// x\n"}, {"src/x.h": b"// y\n"}))
    with pytest.raises(PatchFormatError, match=r"change shared/src/x\.h instead") as caught:
        definition.load(bench.folder / "one")
    assert caught.value.path == str(file)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (', has = "line 1"', "", "at least one of"),
        ('has = "line 1"', "has = 1", "list of texts"),
        ('has = "line 1"', 'had = "line 1"', "unknown key 'had'"),
        ('title = "Do', 'title = "" # "Do', "must be a text"),
        ('scenarios = ["some-scenario"]', "scenarios = []", "must not be empty"),
        ("[[port]]", "[port]", "list of tables"),
        ('releases = ""', 'releases = ">=0.3.9,<0.3"', "no version can match"),
        ("schema = 1", "schema = ", "patch.toml"),
        pytest.param("schema = 1", "schema = " + "9" * 5000, "patch.toml", id="digits"),
        pytest.param("schema = 1", "a" + ".a" * 101 + " = 1", "more than 100 dots", id="dots"),
    ],
)
@pytest.mark.regression(
    "a key of 100,000 parts in a series took all memory, and a number of too many digits raised "
    "ValueError",
    by="hostile input",
    of="Python",
)
def test_invalid_definition_error_names_file_and_fault(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    """The error names the file and the expected content."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_patch("one", {"0.3.1": (OLD, NEW)})
    toml = bench.folder / "one" / "patch.toml"
    text = toml.read_text("utf-8")
    assert old in text
    toml.write_text(text.replace(old, new), "utf-8")
    with pytest.raises(PatchFormatError, match=says) as caught:
        definition.load(bench.folder / "one")
    assert str(toml) in str(caught.value)


def test_port_digest_ignores_the_mail_header(tmp_path: Path) -> None:
    """Other words in the header keep the digest; another hunk changes it."""
    file = tmp_path / "p.patch"
    file.write_bytes(b"Words.\n\n" + diff(OLD, NEW))
    text = Port.from_file(file)
    file.write_bytes(b"Other words.\n\n" + diff(OLD, NEW))
    assert Port.from_file(file).digest == text.digest
    assert text.without("src/a.cpp", 1).digest != text.digest
    assert text.name == "p"
