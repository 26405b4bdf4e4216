"""Test that ports are chosen by markers, then by strict application, with requirements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, diff, numbered

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import port_choice, series
from pyllamakv.patching.definition import Port
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
NEW = {
    "src/a.cpp": b"// unified\n" + numbered(60, l30="changed upstream"),
    "src/b.cpp": numbered(20),
}


def patched(files: dict[str, bytes], **changed: bytes) -> dict[str, bytes]:
    return files | {f"src/{name}.cpp": data for name, data in changed.items()}


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return two releases and three patches: `one`, `two` (requires `one`), `three`."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_release("0.3.2", NEW)
    first = (OLD, patched(OLD, a=numbered(60, l10="one")))
    second = (NEW, patched(NEW, a=b"// unified\n" + numbered(60, l30="one, other")))
    bench.add_patch("one", {"0.3.1": first, "0.3.2": second})
    with_one = first[1]
    bench.add_patch(
        "two",
        {"0.3.1": (with_one, patched(with_one, a=numbered(60, l10="one\ntwo")))},
        requires=("one",),
    )
    bench.add_patch("three", {"0.3.1": (OLD, patched(OLD, b=numbered(20, l9="three")))})
    return bench


def plan(
    bench: SeriesSandbox, release: str, names: list[str | Port] | None = None
) -> port_choice.PortChoice:
    return port_choice.choose_for_release(
        bench.releases[release], names, series=series.load(bench.folder), store=bench.store
    )


def test_required_patches_are_chosen_first(bench: SeriesSandbox) -> None:
    """A requested patch includes the required ones, before it."""
    found = plan(bench, "0.3.1", ["two"])
    assert [port.id for port in found.ports] == ["one", "two"]
    entry = found.draft.entry("src/a.cpp")
    assert entry is not None
    assert entry.data == numbered(60, l10="one\ntwo")


def test_plan_without_names_applies_the_series(bench: SeriesSandbox) -> None:
    """Without names the series is applied; patches that do not apply have a reason."""
    assert [text.name for text in plan(bench, "0.3.1").ports] == [
        "one (0.3.1)", "two (0.3.1)", "three (0.3.1)",
    ]  # fmt: skip
    newer = plan(bench, "0.3.2")
    assert [port.name for port in newer.ports] == ["one (0.3.2)", "three (0.3.1)"]
    (skipped,) = newer.skipped
    assert skipped.id == "two"
    assert "does not apply" in skipped.reason


def test_port_of_the_release_is_preferred(bench: SeriesSandbox) -> None:
    """If several ports apply, that of the release is used."""
    both = plan(bench, "0.3.2", ["one"])
    assert both.ports[0].base == "0.3.2"
    definition = series.load(bench.folder).definition("one")
    assert [text.base for text in port_choice.candidates(definition, "0.3.2")] == ["0.3.2", "0.3.1"]


def test_markers_decide_before_the_hunks(bench: SeriesSandbox) -> None:
    """A port whose markers do not match is not tried, and the reason names the marker."""
    bench.add_patch(
        "four", {"0.3.1": (OLD, patched(OLD, b=numbered(20, l3="4")))}, marker=("src/c.cpp", "x")
    )
    with pytest.raises(NoPortApplies, match=r"0\.3\.1: src/c\.cpp does not exist"):
        plan(bench, "0.3.1", ["four"])


def test_patch_for_other_releases_is_left_out(bench: SeriesSandbox) -> None:
    """A named patch for older releases is refused; otherwise it is omitted."""
    bench.add_patch(
        "five", {"0.3.1": (OLD, patched(OLD, b=numbered(20, l15="5")))}, releases="<0.3.2"
    )
    assert "five" in [text.id for text in plan(bench, "0.3.1").ports]
    assert "five" not in [text.id for text in plan(bench, "0.3.2").ports]
    with pytest.raises(NoPortApplies, match=r"meant for <0\.3\.2"):
        plan(bench, "0.3.2", ["five"])


def test_a_named_patch_must_apply(bench: SeriesSandbox) -> None:
    """The conflict of a named patch is raised with its whole state."""
    with pytest.raises(PatchConflict) as caught:
        plan(bench, "0.3.2", ["two"])
    error = caught.value
    assert (error.patch, error.file, error.hunk) == ("two (0.3.1)", "src/a.cpp", 1)
    assert error.expected
    assert error.found
    assert error.exit_code == 3


def test_plan_without_an_applicable_port_has_every_conflict(bench: SeriesSandbox) -> None:
    """A release on which no port applies is reported with every conflict."""
    bench.add_release("0.4", {"src/a.cpp": b"line 1\nnothing else\n"})
    with pytest.raises(NoPortApplies) as caught:
        plan(bench, "0.4")
    assert {error.patch.split()[0] for error in caught.value.conflicts} == {"one", "three"}


def test_unknown_patch_gets_a_suggestion(bench: SeriesSandbox) -> None:
    """An unknown name has the closest names in the error."""
    with pytest.raises(UsageError, match="three"):
        plan(bench, "0.3.1", ["thre"])


def test_patch_file_and_given_port_are_planned(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A file is a valid name; a given port replaces the shipped one of its id."""
    file = tmp_path / "My Fix.patch"
    file.write_bytes(diff(OLD, patched(OLD, b=numbered(20, l2="mine"))))
    found = plan(bench, "0.3.1", ["three", str(file)])
    assert [port.id for port in found.ports] == ["three", "my-fix"]
    whole = tmp_path / "whole.patch"
    whole.write_bytes(bench.mail("two", "0.3.1"))
    crippled = Port.from_file(whole)
    assert (crippled.id, crippled.base, crippled.requires) == ("two", "0.3.1", ("one",))
    assert [text.id for text in plan(bench, "0.3.1", [crippled]).ports] == ["one", "two"]


def test_requirement_of_a_port_holds_for_its_base(bench: SeriesSandbox) -> None:
    """A requirement of one port applies only to that port."""
    toml = bench.folder / "three" / "patch.toml"
    toml.write_text(
        toml.read_text("utf-8").replace('base = "0.3.1"', 'base = "0.3.1"\nrequires = ["one"]'),
        "utf-8",
    )
    assert [text.id for text in plan(bench, "0.3.1", ["three"]).ports] == ["one", "three"]


def test_a_failed_requirement_is_the_reason(bench: SeriesSandbox) -> None:
    """The reason is the requirement, not the patch's own hunks."""
    bench.add_release("0.3.3", {**OLD, "src/a.cpp": numbered(60, l8="other")})
    found = plan(bench, "0.3.3")
    assert [port.id for port in found.ports] == ["three"]
    assert [skip.reason for skip in found.skipped if skip.id == "two"] == [
        "requires one, which is not applied here"
    ]


def test_a_skipped_port_names_its_marker(bench: SeriesSandbox) -> None:
    """The reason has port, marker and file, and lists further ports."""
    release = bench.add_release("0.3.4", {"src/a.cpp": b"int a;\n"})
    loaded = series.load(bench.folder)
    with pytest.raises(NoPortApplies) as caught:
        port_choice.choose_for_release(release, None, series=loaded, store=bench.store)
    assert (
        "one: skipped port 0.3.1: required marker `line 1` not found in src/a.cpp; "
        "the markers of 0.3.2 do not match either"
    ) in str(caught.value)
