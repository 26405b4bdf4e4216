"""Test the patched commit: the same on every machine, complete or absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, numbered

from pyllamakv.errors import NoPortApplies
from pyllamakv.patching import apply, series
from pyllamakv.patching.definition import Port
from pyllamakv.source import git_command, lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20), "run.sh": b"#!/bin/sh\n"}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y"), "src/new.h": b"// new\n"}
TWO = ONE | {"src/a.cpp": numbered(60, l10="x\nz", l40="y")}


def make(folder: Path) -> SeriesSandbox:
    bench = SeriesSandbox(open_store(folder / "store.git"), folder / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",))
    return bench


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return a release with two patches."""
    return make(tmp_path / "a")


def run(bench: SeriesSandbox, names: list[str | Port] | None = None) -> apply.PatchedRelease:
    return apply.apply(
        bench.releases["0.3.1"], names, series=series.load(bench.folder), store=bench.store
    )


def tree(bench: SeriesSandbox, commit: str) -> dict[str, bytes | None]:
    return dict(bench.store.read_many(commit, bench.store.ls(commit)))


@pytest.mark.slow
def test_commit_holds_the_patched_tree(bench: SeriesSandbox) -> None:
    """It has the release's tree with the changes, one commit per patch, on the release's commit."""
    patched = run(bench)
    assert patched.patches == ("one", "two")
    assert tree(bench, patched.commit) == TWO
    log = git_command.git(bench.store.path, "log", "--format=%s", patched.commit)
    assert log.splitlines() == ["Do what two does", "Do what one does", "release 0.3.1"]
    assert bench.store.tree_of(patched.commit) == patched.tree


@pytest.mark.slow
def test_patched_commit_is_independent_of_user_and_time_zone(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another store, user and time zone, commit, tree and digest are equal."""
    first = run(bench)
    for name, value in {
        "GIT_AUTHOR_NAME": "someone", "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z",
        "GIT_DIR": "/nowhere", "TZ": "Asia/Tokyo", "LC_ALL": "de_DE.UTF-8", "HOME": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    (tmp_path / ".gitconfig").write_text("[core]\nautocrlf = true\n[user]\nname = x\n")
    second = run(make(tmp_path / "b"))
    assert (first.commit, first.tree, first.digest) == (second.commit, second.tree, second.digest)
    assert run(bench).commit == first.commit


def test_apply_without_patches_is_the_release(bench: SeriesSandbox) -> None:
    """Without patches, commit and tree are those of the release."""
    stock = run(bench, [])
    release = bench.releases["0.3.1"]
    assert (stock.commit, stock.tree, stock.patches) == (release.commit, release.tree, ())
    assert stock.digest == apply.digest(())


def test_failed_patch_leaves_no_commit_and_no_ref(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conflict in the second patch leaves no commit and no ref."""
    # Otherwise a merge is tried only if the locks have a release of that name.
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    bench.add_patch("bad", {"0.3.1": (TWO | {"src/b.cpp": numbered(20, l9="no")}, TWO)})
    before = git_command.git(bench.store.path, "for-each-ref")
    with pytest.raises(NoPortApplies) as caught:
        run(bench, ["two", "bad"])
    (conflict,) = caught.value.conflicts
    assert (conflict.patch, conflict.file) == ("bad (0.3.1)", "src/b.cpp")
    assert git_command.git(bench.store.path, "for-each-ref") == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_dropping_each_hunk_changes_the_tree(bench: SeriesSandbox, number: int) -> None:
    """A port without one hunk has another tree, and exactly that change is missing."""
    text = bench.text("one", "0.3.1")
    crippled = run(bench, [text.without("src/a.cpp", number)])
    assert crippled.patches == ("one",)
    left = numbered(60, l40="y") if number == 1 else numbered(60, l10="x")
    assert tree(bench, crippled.commit)["src/a.cpp"] == left
    assert crippled.digest != run(bench, [text]).digest


def test_author_and_message_are_kept(bench: SeriesSandbox) -> None:
    """A foreign patch keeps its author, date and message; the committer is fixed."""
    data = bench.mail("one", "0.3.1")
    mail = data[: data.index(b"diff --git")]
    own = (
        b"From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001\n"
        b"From: =?UTF-8?q?J=C3=B6rg?= <j@example.org>\nDate: Tue, 1 Apr 2025 10:00:00 +0200\n"
        b"Subject: [PATCH 1/2] A long\n subject\n\nWhy.\n---\n notes\n\n"
    )
    file = bench.folder / "foreign.patch"
    file.write_bytes(data.replace(mail, own))
    commit = run(bench, [str(file)]).commit
    form = "--format=%an|%ae|%aI|%cn|%s|%b"
    shown = git_command.git(bench.store.path, "log", "-1", form, commit)
    assert shown.strip() == (
        f"Jörg|j@example.org|2025-04-01T10:00:00+02:00|{git_command.NAME}|A long subject|Why."
    )


@pytest.mark.slow
def test_file_modes_are_kept_and_changed_by_patches(bench: SeriesSandbox) -> None:
    """Executable files stay executable, and a patch can make one."""
    file = bench.folder / "mode.patch"
    file.write_bytes(b"diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n")
    commit = run(bench, [str(file)]).commit
    modes = {entry.path: entry.mode for entry in bench.store.entries(commit)}
    assert modes["run.sh"] == "100755"
    assert modes["src/a.cpp"] == "100644"
