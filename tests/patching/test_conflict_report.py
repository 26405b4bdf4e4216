"""Test reports of conflicts: hunk, both sides, and the releases that changed the lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, code

from pyllamakv.patching import conflict_report, series
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

STOCK = {"src/a.cpp": code("first") + code("second", "keep(b);")}
FIXED = {"src/a.cpp": code("first", "fix(a);") + code("second", "keep(c);")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a patch of two hunks, and releases of which the third changes lines of the second."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    moved = {"src/a.cpp": b"// one\n" + STOCK["src/a.cpp"]}
    bench.add_release("0.3.1", STOCK, "2025-01-01")
    bench.add_release("0.3.2", moved, "2025-01-02")
    other = {"src/a.cpp": moved["src/a.cpp"].replace(b"keep(b);", b"drop(b);")}
    bench.add_release("0.3.3", other, "2025-01-03")
    bench.add_release("0.3.4", {"src/b.cpp": b"int x;\n"}, "2025-01-04")
    bench.add_patch("fix", {"0.3.1": (STOCK, FIXED)}, marker=("src/a.cpp", "first"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def report(bench: SeriesSandbox, release: str) -> tuple[conflict_report.UncarriedPatch, ...]:
    """Return the patches that require manual work on a release."""
    found = conflict_report.of_release(
        bench.releases[release], series=series.load(bench.folder), store=bench.store
    )
    json.dumps([one.as_json() for one in found])
    return found


@pytest.mark.slow
def test_conflict_report_has_place_sides_and_releases(bench: SeriesSandbox) -> None:
    """The second hunk of the port conflicts; upstream changed its lines after 0.3.2."""
    (patch,) = report(bench, "0.3.3")
    assert (patch.id, patch.state, patch.port) == ("fix", "manual", "0.3.1")
    (conflict,) = patch.conflicts
    line = bench.files["0.3.3"]["src/a.cpp"].split(b"\n").index(b"    drop(b);") + 1
    assert (conflict.file, conflict.hunk, conflict.line) == ("src/a.cpp", 2, line)
    assert conflict.function == "static int second"
    assert conflict.upstream == ("    drop(b);",)
    assert conflict.base == ("    keep(b);",)
    assert conflict.patch == ("    keep(c);",)
    assert (conflict.changed_after, conflict.changed_in) == ("0.3.2", "0.3.3")
    place = f"src/a.cpp, hunk 2 in second, line {line}: changed between 0.3.2 and 0.3.3"
    assert (
        conflict.decision == "rewrite the hunk: it uses `keep`, which upstream's lines do not have"
    )
    assert str(conflict) == f"{place}; likely: {conflict.decision}"


def test_applicable_patches_are_not_reported(bench: SeriesSandbox) -> None:
    """A patch that applies or is carried is not reported."""
    assert report(bench, "0.3.1") == report(bench, "0.3.2") == ()


@pytest.mark.slow
def test_conflict_in_a_missing_file_has_no_line(bench: SeriesSandbox) -> None:
    """Without the file, the conflict has no line, and names its first hunk."""
    place = bench.folder / "fix" / "patch.toml"
    carry = 'carry = [{ file = "src/b.cpp", exists = true }]\n\n[[port]]'
    place.write_text(place.read_text("utf-8").replace("[[port]]", carry), "utf-8")
    (patch,) = report(bench, "0.3.4")
    (conflict,) = patch.conflicts
    assert (conflict.file, conflict.hunk, conflict.line) == ("src/a.cpp", 1, 0)
    assert (conflict.changed_after, conflict.changed_in) == ("0.3.3", "0.3.4")


@pytest.mark.slow
def test_blocked_patch_has_a_reason_and_no_conflict(bench: SeriesSandbox) -> None:
    """A blocked patch has the reason and no conflict of its own."""
    more = FIXED | {"src/c.h": b"long;\n"}
    bench.add_patch(
        "next", {"0.3.1": (FIXED, more)}, requires=("fix",), marker=("src/a.cpp", "first")
    )
    _, blocked = report(bench, "0.3.3")
    assert (blocked.id, blocked.state, blocked.conflicts) == ("next", "blocked", ())
    assert "requires fix" in blocked.reason


@pytest.mark.slow
def test_uncarried_patch_has_expected_and_found_lines(bench: SeriesSandbox) -> None:
    """Without a merge, the hunk that does not apply has the expected and the found line."""
    place = bench.folder / "fix" / "patch.toml"
    carry = 'carry = [{ file = "src/b.cpp", exists = true }]\n\n[[port]]'
    place.write_text(place.read_text("utf-8").replace("[[port]]", carry), "utf-8")
    (patch,) = report(bench, "0.3.3")
    (conflict,) = patch.conflicts
    assert (patch.state, conflict.hunk, conflict.patch) == ("fails", 2, ())
    assert (conflict.base, conflict.upstream) == (("    keep(b);",), ("    drop(b);",))
    assert (conflict.changed_after, conflict.changed_in) == ("0.3.2", "0.3.3")
