"""Test that drift is reported by hunk: offset, fuzz, new place, and the release."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patching_kit import SHOWN, WITH, SeriesSandbox, code, diff, numbered

from pyllamakv.cli import patch_views
from pyllamakv.patching import drift, foreign_series, hunk_locator, hunks, series, status
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y")}
CODE = [b"int first_function(int cell) {\n", b"    return find_cell_of(cell);\n", b"}\n"]
KEPT = {"src/cache.cpp": numbered(9) + b"".join(CODE) + numbered(9)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return releases that increasingly differ from a port for the second one."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    line = {
        "0.3.1": numbered(60, l41="an older line"),
        "0.3.2": numbered(60),
        "0.3.3": b"+\n+\n" + numbered(60),
        "0.3.4": b"+\n+\n" + numbered(60, l37="other context"),
        "0.3.5": b"+\n+\n" + numbered(60, l37="other context", l40="other"),
    }
    for number, (name, data) in enumerate(line.items(), 1):
        bench.add_release(name, OLD | {"src/a.cpp": data}, f"2025-01-0{number}")
    bench.add_patch("one", {"0.3.2": (OLD, ONE)})
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def on(bench: SeriesSandbox, name: str) -> drift.Drift:
    (found,) = drift.drift(
        bench.releases[name], series=series.load(bench.folder), store=bench.store
    )
    json.dumps(found.as_json())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "state", "offsets", "fuzz", "changed"),
    [
        ("0.3.2", "applies", [0, 0], [0, 0], ["", ""]),
        ("0.3.3", "offset", [2, 2], [0, 0], ["", ""]),
        ("0.3.4", "carried", [2, None], [0, 1], ["", "0.3.4"]),
        ("0.3.5", "manual", [2, None], [0, None], ["", "0.3.4"]),
        ("0.3.1", "carried", [0, None], [0, 3], ["", "0.3.2"]),
    ],
)
def test_drift_has_offset_fuzz_and_changed_release(
    bench: SeriesSandbox,
    release: str,
    state: str,
    offsets: list[int],
    fuzz: list[int],
    changed: list[str],
) -> None:
    """Each hunk has its offset, the required fuzz, and the release that changed its lines."""
    found = on(bench, release)
    assert found.state == state
    assert [hunk.placement.offset for hunk in found.hunks] == offsets
    assert [hunk.fuzz for hunk in found.hunks] == fuzz
    assert [hunk.changed_in for hunk in found.hunks] == changed
    assert found.bad == tuple(hunk for hunk in found.hunks if not hunk.placement.good)


def test_drift_of_a_renamed_file_names_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a deleted file, drift names the file that has its code now."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    other = {"src/other.cpp": b"int other(int cell) {\n}\n"}
    bench.add_release("0.3.1", KEPT | other)
    moved = {"src/unified.cpp": b"// new\n" * 9 + b"".join(CODE)}
    bench.add_release("0.3.2", moved | other, "2025-02-02")
    new = {"src/cache.cpp": KEPT["src/cache.cpp"].replace(b"find_cell_of", b"look_for")}
    bench.add_patch("one", {"0.3.1": (KEPT | other, new | other)}, marker=("src/cache.cpp", "int"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    (hunk,) = on(bench, "0.3.2").hunks
    assert hunk.placement.state == "missing"
    assert [there.path for there in hunk.moved] == ["src/unified.cpp"]
    assert hunk.changed_in == "0.3.2"


@pytest.mark.slow
def test_drift_of_a_foreign_patch_uses_the_nearest_release(
    bench: SeriesSandbox, tmp_path: Path
) -> None:
    """A foreign patch is compared with the nearest release that has its lines."""
    file = tmp_path / "theirs.diff"
    file.write_bytes(diff(OLD, ONE))
    theirs = foreign_series.load(file)
    words = {"series": theirs, "store": bench.store}
    (found,) = drift.drift(bench.releases["0.3.5"], **words)
    assert (found.base, [hunk.changed_in for hunk in found.hunks]) == ("", ["", "0.3.4"])
    (found,) = drift.drift(bench.releases["0.3.1"], **words)
    assert [hunk.changed_in for hunk in found.hunks] == ["", "0.3.2"]


@pytest.mark.slow
def test_no_release_changed_the_lines_of_a_commit(bench: SeriesSandbox) -> None:
    """The date of a commit does not state which releases it contains."""
    release = replace(bench.releases["0.3.5"], kind="git")
    bench.store.update_ref(f"refs/upstream/{release.key}", release.commit)
    (found,) = drift.drift(release, series=series.load(bench.folder), store=bench.store)
    assert [hunk.changed_in for hunk in found.hunks] == ["", ""]
    assert "changed" not in str(found.bad[0])


@pytest.mark.slow
def test_drift_without_a_matching_port_uses_the_nearest(bench: SeriesSandbox) -> None:
    """If markers exclude every port, that of the nearest base shows the changes."""
    new = bench.files["0.3.4"]
    there = new | {"src/a.cpp": new["src/a.cpp"].replace(b"line 10\n", b"x\n")}
    texts = {"0.3.2": (OLD, ONE), "0.3.4": (new, there)}
    bench.add_patch("two", texts, marker=("src/a.cpp", "nowhere"))
    both = series.load(bench.folder)
    _, two = drift.drift(bench.releases["0.3.5"], series=both, store=bench.store)
    assert (two.id, two.state, two.base) == ("two", "not-applicable", "0.3.4")


@pytest.mark.slow
def test_drift_line_names_the_first_lost_hunk(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the patch, the first hunk without a place, and the release."""
    loaded = series.load(bench.folder)
    monkeypatch.setattr(series, "load", lambda: loaded)
    monkeypatch.setattr(drift, "open_store", lambda: bench.store)
    assert drift.why(bench.releases["0.3.3"]) == ""
    assert drift.why(bench.releases["0.3.5"], ["one"]) == (
        "one does not apply: src/a.cpp, hunk 2 in 36 (line 37): the expected lines do not "
        "exist; fuzz is not used; changed between 0.3.3 and 0.3.4; "
        "expected `line 37`, found `other context`"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "state", "shown"),
    [
        ("", "function", "line 12 in `static int second(int a, int b) {`"),
        ("first", "already", "the changed lines at 12, the unchanged ones only at 42"),
    ],
)
def test_drift_reports_a_match_in_another_function(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: str,
    state: str,
    shown: str,
) -> None:
    """A single match in another function is reported as such."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    old, new = ({"src/a.cpp": code("first", *lines)} for lines in (SHOWN, WITH))
    bench.add_release("0.3.1", old)
    second = (code(there, *WITH) if there else b"") + code("second", *SHOWN)
    bench.add_release("0.3.2", {"src/a.cpp": second}, "2025-01-02")
    bench.add_patch("one", {"0.3.1": (old, new)}, marker=("src/a.cpp", "static int"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    loaded = series.load(bench.folder)
    found = on(bench, "0.3.2")
    (hunk,) = found.hunks
    whole = "contained" if there else "manual"
    assert (found.state, hunk.placement.state, hunk.changed_in) == (whole, state, "")
    assert found.as_json()["hunks"][0]["found"] == shown
    (row,) = status.status([bench.releases["0.3.2"]], series=loaded, store=bench.store)
    facts = row.as_json()["ports"][0]["hunks"][0]
    assert (row.state, facts["state"], facts["found"]) == (whole, state, shown)
    assert (shown in row.reason) == (row.state == "manual")
    patch_views.drift([found])
    out = capsys.readouterr().out
    assert f": {state}\n    found {shown}\n" in out
    patch_views.drift([found], verbose=True)
    out = capsys.readouterr().out
    assert f"{state}, expected" in out
    assert shown in out
    assert "fuzz" not in out


@pytest.mark.slow
def test_lines_differing_in_blanks_are_reported_as_such(bench: SeriesSandbox) -> None:
    """The report states that only blanks differ."""
    data = numbered(60, l39="line   39")
    bench.add_release("0.3.6", OLD | {"src/a.cpp": data}, "2025-01-06")
    assert on(bench, "0.3.6").hunks[1].whitespace_only


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_fuzz_is_the_smallest_that_matches(before: int, after: int, head: int, tail: int) -> None:
    """Different lines at the outer ends of the context need fuzz, the longer side first."""
    context = [b"l%d\n" % n for n in range(before)], [b"m%d\n" % n for n in range(after)]
    head, tail = min(head, before), min(tail, after)
    marked = [b" " + line for line in context[0]] + [b"-x\n", b"+y\n"]
    marked += [b" " + line for line in context[1]]
    count = before + after + 1
    hunk = hunks.Hunk(4, count, 4, count, b"", tuple(marked))
    lines = [b"other\n"] * (3 + head) + context[0][head:] + [b"x\n"]
    lines += context[1][: after - tail] + [b"other\n"] * (3 + tail)
    longest = max(before, after)
    # the shorter side is cut only after the longer one has its length
    wanted = max(
        head and head + longest - before,
        tail and tail + longest - after,
    )
    assert drift.fuzz(hunk, hunk_locator.LineIndex(lines)) == wanted
