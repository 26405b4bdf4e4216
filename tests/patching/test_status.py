"""Test that status shows every patch on every release, hunk by hunk."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from patching_kit import Files, SeriesSandbox, diff, fill, numbered, repository

from pyllamakv.errors import NoPortApplies, PatchConflict
from pyllamakv.patching import foreign_series, port_choice, series, status
from pyllamakv.source import git_command, lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y")}
TWO = ONE | {"src/a.cpp": numbered(60, l10="x\nz", l40="y")}
THREE = OLD | {"src/b.cpp": numbered(20, l9="three")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return three releases, and patches of which the first two fail on the second release.

    Nothing is carried: no lock has their bases.
    """
    monkeypatch.setattr(lockfile, "known", dict)
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_release("0.3.2", OLD | {"src/a.cpp": b"+\n+\n" + numbered(60, l41="upstream")})
    bench.add_release("0.3.3", OLD | {"src/a.cpp": b"+\n+\n" + numbered(60)})
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",))
    bench.add_patch("three", {"0.3.1": (OLD, THREE)}, releases="<0.3.3")
    return bench


def table(bench: SeriesSandbox) -> dict[str, list[status.PatchStatus]]:
    found = status.status(
        bench.releases.values(), series=series.load(bench.folder), store=bench.store
    )
    return {name: [s for s in found if s.release == name] for name in bench.releases}


def test_every_patch_is_shown(bench: SeriesSandbox) -> None:
    """After a failure, a dependent patch is blocked, and the next one is tried."""
    found = {name: [s.state for s in row] for name, row in table(bench).items()}
    assert found == {
        "0.3.1": ["applies", "applies", "applies"],
        "0.3.2": ["fails", "blocked", "applies"],
        "0.3.3": ["offset", "offset", "not-applicable"],
    }


@pytest.mark.slow
def test_hunks_have_a_state_and_an_offset(bench: SeriesSandbox) -> None:
    """Each hunk has its state and offset, also the good ones of a failing patch."""
    one, two, _ = table(bench)["0.3.2"]
    assert one.best is not None
    assert [(p.state, p.offset) for p in one.best.placements] == [("offset", 2), ("conflict", None)]
    assert one.best.failed[0].found == "upstream"
    assert two.reason == "requires one, which is not applied here"
    moved = table(bench)["0.3.3"][0]
    assert moved.port == "0.3.1"
    assert moved.best is not None
    assert [p.offset for p in moved.best.placements] == [2, 2]


@pytest.mark.slow
def test_json_and_annotations(bench: SeriesSandbox) -> None:
    """Both formats name the failing hunk; annotations have one line each."""
    row = table(bench)["0.3.2"]
    data = json.loads(json.dumps([one.as_json() for one in row]))
    assert [one["state"] for one in data] == ["fails", "blocked", "applies"]
    assert data[0]["ports"][0]["hunks"][1]["found"] == "upstream"
    lines = status.github_annotations(row)
    assert len(lines) == 2
    assert lines[0].startswith(
        "::error file=patches/one/0.3.1.patch,title=src/a.cpp hunk 2::one on 0.3.2: "
    )
    assert "\n" not in "".join(lines)
    assert "%0A" in lines[0]


@pytest.mark.slow
def test_nothing_is_written(bench: SeriesSandbox) -> None:
    """The store is unchanged."""
    before = sorted(path.name for path in bench.store.path.rglob("*"))
    table(bench)
    assert sorted(path.name for path in bench.store.path.rglob("*")) == before


def test_requirements_of_a_foreign_patch_are_the_shipped_ones(
    bench: SeriesSandbox, tmp_path: Path
) -> None:
    """`Requires:` in a header works in every command, not only in check."""
    shipped = series.load(bench.folder)
    file = tmp_path / "mine.patch"
    change = diff(TWO, TWO | {"src/b.cpp": numbered(20, l3="mine")})
    file.write_bytes(b"Subject: [PATCH] mine\n\nRequires: two\n---\n" + change)
    foreign = foreign_series.load(file)
    both = port_choice.with_requirements(foreign, shipped)
    assert both.order == ("one", "two", "mine")
    found = status.status([bench.releases["0.3.1"]], series=both, store=bench.store)
    assert [each.state for each in found] == ["applies"] * 3
    assert port_choice.with_requirements(shipped, shipped) is shipped


@pytest.mark.slow
def test_a_tree_with_a_file_of_the_patch_is_partly_patched(bench: SeriesSandbox) -> None:
    """The absence of the file is a marker of the port, which must not be skipped silently."""
    header = {"src/new.h": b"// new\n"}
    bench.add_patch("four", {"0.3.1": (OLD, THREE | header)})
    toml = bench.folder / "four" / "patch.toml"
    marker = '{ file = "src/new.h", exists = false }'
    text = toml.read_text("utf-8").replace("markers = [", f"markers = [{marker}, ")
    toml.write_text(text, encoding="utf-8")
    states = {
        "0.3.4": (OLD | header, "fails", True),
        "0.3.5": (THREE | header, "not-applicable", False),
        "0.3.6": (OLD | {"src/new.h": b"// upstream's\n"}, "not-applicable", False),
    }
    loaded = series.load(bench.folder)
    for name, (files, state, partly) in states.items():
        release = bench.add_release(name, files)
        found = status.status([release], series=loaded, store=bench.store)
        assert [each.state for each in found if each.id == "four"] == [state], name
        with pytest.raises((PatchConflict, NoPortApplies)) as caught:
            port_choice.choose_for_release(release, ["four"], series=loaded, store=bench.store)
        conflicts = getattr(caught.value, "conflicts", [caught.value])
        assert [each.half_applied for each in conflicts] == [True] * partly, name


@pytest.mark.slow
def test_the_commit_of_a_contained_patch(bench: SeriesSandbox, tmp_path: Path) -> None:
    """It is the commit that added the lines of the port that the release contains."""
    blank = OLD | {"src/b.cpp": numbered(20, l2="line 2\n\n")}
    other = OLD | {"src/a.cpp": numbered(60, l9="another text")}
    bench.add_patch("four", {"0.3.1": (OLD, THREE), "0.3.2": (OLD, other)})
    bench.add_patch("five", {"0.3.1": (OLD, blank)})
    upstream = repository(tmp_path / "up", OLD)
    files, commits = dict(OLD), []
    changed = numbered(20, l2="line 2\n\n", l9="three")
    for number, change in enumerate(
        (
            {"src/b.cpp": changed},
            {"src/b.cpp": changed + b"three\n"},
            {"src/a.cpp": OLD["src/a.cpp"] + b"three\nanother text\n"},
        )
    ):
        files |= change
        fill(upstream, files)
        date = f"2026-11-2{number}T00:00:00Z"
        dates = {"GIT_COMMITTER_DATE": date}
        git_command.git(upstream, "commit", "-q", "-a", "-m", f"change {number}", env=dates)
        commits.append(git_command.git(upstream, "rev-parse", "HEAD"))
    loaded = series.load(bench.folder)

    def release(name: str, files: Files) -> Release:
        found = replace(bench.add_release(name, files), kind="path", url=str(upstream))
        bench.store.update_ref(f"refs/upstream/{found.key}", found.commit)
        return found

    there = release("there", files)
    found = {one.id: one for one in status.status([there], series=loaded, store=bench.store)}
    assert found["four"].state == found["five"].state == "contained"
    assert found["four"].reason.endswith(f"it is in {commits[0][:12]} (change 0)")
    assert "it is in" not in found["five"].reason  # its only line is empty
    # The search takes time, and the other verbs do not print the commit.
    rows = status.of_release(there, loaded, bench.store)
    assert not any("it is in" in one.reason for one in rows)
    # Below a local change, the lines of the last commit have other numbers.
    moved = release("changed", files | {"src/b.cpp": b"+\n" + files["src/b.cpp"]})
    found = {one.id: one for one in status.status([moved], series=loaded, store=bench.store)}
    assert found["four"].state == "contained"
    assert "it is in" not in found["four"].reason
