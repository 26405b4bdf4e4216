"""Test rebases by a merge in a work tree of the store, and conflicts that are resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, numbered

from pyllamakv.errors import NoPortApplies, RebaseConflict, UsageError
from pyllamakv.patching import apply, lint, patch_export, rebase, rebase_session, series, worktree
from pyllamakv.source import lockfile, spec_resolver
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y")}
TWO = ONE | {"src/b.cpp": numbered(20, l9="two")}
#: The context of `one` differs, its lines do not: git merges it, strict application refuses.
NEAR = OLD | {"src/a.cpp": numbered(60, l13="upstream", l30="up\nup")}
#: The line that `one` changes differs.
FAR = NEAR | {"src/a.cpp": numbered(60, l13="upstream", l40="upstream too")}
DONE = OLD | {"src/a.cpp": numbered(60, l10="x", l13="upstream", l40="y")}
CODE = b"".join(b"line %d\n" % n for n in (*range(7, 14), *range(37, 44)))
#: `a.cpp` was removed, and too few of its lines are in `c.cpp` for git to detect a rename.
GONE = {"src/b.cpp": numbered(20), "src/c.cpp": b"other\n" * 99 + CODE}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return releases of growing distance and two patches for the first, one on the other."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    trees = {"0.3.1": OLD, "0.3.2": NEAR, "0.3.3": FAR, "0.3.4": DONE, "0.3.5": GONE}
    for number, (name, files) in enumerate(trees.items(), 1):
        bench.add_release(name, files, f"2025-01-0{number}")
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",), marker=("src/b.cpp", "line"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: bench.releases[name])
    return bench


def carry(bench: SeriesSandbox, *ids: str, onto: str, **words: object) -> list[rebase.Rebased]:
    return list(rebase.rebase(ids, onto, patches=bench.folder, **words))  # type: ignore[arg-type]


def stop(bench: SeriesSandbox, *ids: str, onto: str = "0.3.3", **words: object) -> RebaseConflict:
    with pytest.raises(RebaseConflict) as caught:
        carry(bench, *ids, onto=onto, **words)
    assert caught.value.folder is not None
    return caught.value


def left(bench: SeriesSandbox) -> list[Path]:
    folder = bench.store.path.parent / "rebase"
    return [*folder.glob("*"), *(bench.store.path / "worktrees").glob("*")]


@pytest.mark.slow
def test_clean_merge_becomes_a_port(bench: SeriesSandbox) -> None:
    """Git's merge becomes a port that applies, round-trips and is in patch.toml."""
    (done,) = carry(bench, "one", onto="0.3.2")
    assert (done.state, done.anchor, done.base) == ("clean", "0.3.1", "0.3.1")
    assert done.comparison is not None
    assert done.comparison.change == "context"
    assert done.path == bench.file("one", "0.3.2")
    loaded = series.load(bench.folder)
    patched = apply.apply(bench.releases["0.3.2"], ["one"], series=loaded, store=bench.store)
    expected = numbered(60, l10="x", l13="upstream", l30="up\nup", l40="y")
    assert bench.store.read(patched.tree, "src/a.cpp") == expected
    pairs = patch_export.select_ports(loaded, ["one"])
    assert all(one.same for one in patch_export.check(loaded, pairs, store=bench.store))
    assert not [f for f in lint.lint(bench.folder) if "one" in f.path]
    assert not left(bench)
    # the second release has its own port now: nothing is left to do
    (again,) = carry(bench, "one", onto="0.3.2")
    assert (again.state, again.path) == ("applies", None)
    assert carry(bench, "one", onto="0.3.2", force=True)[0].state == "clean"


@pytest.mark.slow
def test_solved_conflict_becomes_a_port(bench: SeriesSandbox) -> None:
    """Conflict markers have the common ancestor; after the resolution, the port is written."""
    error = stop(bench, "one")
    assert error.files == ("src/a.cpp",)
    assert error.exit_code == 3
    assert "src/a.cpp" in str(error)
    assert str(error.folder) in str(error)
    file = error.folder / "src/a.cpp"  # type: ignore[operator]
    marks = [line[:7] for line in file.read_bytes().splitlines() if line[:7] in MARKS]
    assert marks == [b"<<<<<<<", b"|||||||", b">>>>>>>"]
    with pytest.raises(RebaseConflict):  # not resolved yet
        list(rebase.resume("one"))
    with pytest.raises(RebaseConflict):  # one at a time
        carry(bench, "one", onto="0.3.2")
    assert not bench.file("one", "0.3.3").exists()
    file.write_bytes(numbered(60, l10="x", l13="upstream", l30="", l40="y"))
    (file.parent / "a.cpp.orig").write_bytes(b"left by an editor\n")
    (done,) = rebase.resume("one")
    assert done.state == "resolved"
    text = series.load(bench.folder).definition("one").port("0.3.3")
    assert b"-upstream too" in text.patch.data
    assert text.patch.paths == ("src/a.cpp",)
    assert not left(bench)


MARKS = (b"<<<<<<<", b"|||||||", b">>>>>>>")


@pytest.mark.slow
def test_a_dropped_hunk_is_reported(bench: SeriesSandbox) -> None:
    """A hunk that was dropped in the resolution is listed."""
    error = stop(bench, "one")
    file = error.folder / "src/a.cpp"  # type: ignore[operator]
    file.write_bytes(numbered(60, l10="x", l13="upstream", l40="upstream too"))
    (done,) = rebase.resume("one")
    assert done.comparison is not None
    assert [str(loss) for loss in done.comparison.missing if loss.what == "hunk"] == [
        "src/a.cpp, hunk 2 (line 36)"
    ]


@pytest.mark.slow
def test_upstream_line_deleted_by_a_resolution_is_reported(bench: SeriesSandbox) -> None:
    """The previous port keeps it: the resolution lost it, for example a check."""
    check = "if (n_free == 0) { return false; }"
    checked = numbered(60, l13="upstream", l40="upstream too", l44=check, l50="abort_all();")
    there = FAR | {"src/a.cpp": checked}
    bench.add_release("0.3.6", there, "2025-01-06")
    error = stop(bench, "one", onto="0.3.6")
    file = error.folder / "src/a.cpp"  # type: ignore[operator]
    file.write_bytes(numbered(60, l10="x", l13="upstream", l40="y", l44="", l50=""))
    (done,) = rebase.resume("one")
    lost = [note for note in done.notes if "which the port before keeps" in note]
    assert lost[0].startswith("deletes a check or a jump of upstream")
    assert lost[0].endswith(check)
    assert [note.rpartition(": ")[2] for note in lost[1:]] == ["abort_all();"]


@pytest.mark.slow
def test_one_conflict_does_not_end_a_rebase(bench: SeriesSandbox) -> None:
    """The others are rebased, those that require it are blocked, and --continue resumes."""
    bench.add_patch(
        "other", {"0.3.1": (OLD, OLD | {"src/b.cpp": numbered(20, l18="own")})},
        marker=("src/b.cpp", "line 20"),
    )  # fmt: skip
    seen = []
    with pytest.raises(RebaseConflict) as caught:
        for done in rebase.rebase(
            ["one", "two", "other"], "0.3.3", patches=bench.folder, force=True
        ):
            seen.append((done.id, done.state))
    assert seen == [("one", "conflict"), ("two", "blocked"), ("other", "clean")]
    file = caught.value.folder / "src/a.cpp"  # type: ignore[operator]
    file.write_bytes(numbered(60, l10="x", l13="upstream", l40="y"))
    found = [(done.id, done.state) for done in rebase.resume("one")]
    assert found == [("one", "resolved"), ("two", "applies"), ("other", "applies")]


@pytest.mark.slow
def test_skipped_patch_does_not_end_a_rebase(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The patches after it are rebased."""
    bench.add_patch(
        "other", {"0.3.1": (OLD, OLD | {"src/b.cpp": numbered(20, l18="own")})},
        marker=("src/b.cpp", "line 20"),
    )  # fmt: skip
    stop(bench, "one", "other", to=tmp_path / "out")
    found = [(done.id, done.state) for done in rebase.skip("one")]
    assert found == [("one", "skipped"), ("other", "applies")]


@pytest.mark.slow
def test_a_resolution_is_remembered(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The same conflict on the next release is resolved, and the port has to be reviewed."""
    error = stop(bench, "one", to=tmp_path / "first")
    file = error.folder / "src/a.cpp"  # type: ignore[operator]
    file.write_bytes(numbered(60, l10="x", l13="upstream", l30="up\nup", l40="y"))
    list(rebase.resume("one"))
    bench.add_release("0.3.6", FAR | {"src/b.cpp": b"other\n"}, "2025-01-06")
    (again,) = carry(bench, "one", onto="0.3.6", to=tmp_path / "next")
    assert again.state == "resolved"
    assert "review the port" in again.notes[0]


@pytest.mark.parametrize("way", ["abort", "skip"])
def test_aborted_or_skipped_rebase_writes_nothing(bench: SeriesSandbox, way: str) -> None:
    """Abort and skip write nothing and leave no work tree."""
    stop(bench, "one")
    before = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    if way == "abort":
        rebase.abort("one")
    else:
        assert [done.state for done in rebase.skip("one")] == ["skipped"]
    assert {p: p.read_bytes() for p in bench.folder.rglob("*") if p.is_file()} == before
    assert not left(bench)
    assert not bench.store.refs("refs/rebase/")
    with pytest.raises(UsageError, match="No rebase"):
        list(rebase.resume("one"))


@pytest.mark.slow
def test_rebased_patch_can_require_the_one_before(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A patch that requires another one finds its new port."""
    out = tmp_path / "out"
    error = stop(bench, "one", "two", to=out)
    file = error.folder / "src/a.cpp"  # type: ignore[operator]
    file.write_bytes(numbered(60, l10="x", l13="upstream", l30="", l40="y"))
    found = list(rebase.resume("one"))
    assert [(done.id, done.state) for done in found] == [("one", "resolved"), ("two", "clean")]
    assert sorted(path.name for path in out.iterdir()) == ["one.patch", "two.patch"]
    assert b"Requires: one" in (out / "two.patch").read_bytes()
    assert not bench.file("one", "0.3.3").exists()
    with pytest.raises(NoPortApplies, match="rebase that onto"):
        carry(bench, "two", onto="0.3.3")


@pytest.mark.slow
def test_requirement_not_covering_the_target_is_omitted(bench: SeriesSandbox) -> None:
    """A required patch that does not cover the target is omitted, and this is reported."""
    file = bench.folder / "one" / "patch.toml"
    file.write_text(file.read_text().replace('releases = ""', 'releases = "<0.3.4"'))
    with pytest.raises(NoPortApplies, match="rebase that onto"):
        carry(bench, "two", onto="0.3.4")  # the patch itself requires it
    file = bench.folder / "two" / "patch.toml"
    text = file.read_text().replace('requires = ["one"]', "requires = []")
    file.write_text(text + 'requires = ["one"]\n')
    (done,) = carry(bench, "two", onto="0.3.4")
    assert done.state == "clean"
    assert "it no longer requires one, which does not cover 0.3.4" in done.notes
    loaded = series.load(bench.folder)
    text = loaded.definition("two").port("0.3.4")
    assert (text.requires, text.patch.paths) == ((), ("src/b.cpp",))
    patched = apply.apply(bench.releases["0.3.4"], ["two"], series=loaded, store=bench.store)
    assert patched.patches == ("two",)


@pytest.mark.slow
def test_carried_requirement_stays_a_requirement(bench: SeriesSandbox) -> None:
    """A required patch without a port for the target stays a requirement."""
    file = bench.folder / "one" / "patch.toml"
    text = file.read_text().replace('has = "line 1"', 'has = "line 13"')
    carried = 'carry = [{ file = "src/a.cpp", has = "upstream" }]\n\n[[port]]'
    file.write_text(text.replace("[[port]]", carried))
    file = bench.folder / "two" / "patch.toml"
    text = file.read_text().replace('requires = ["one"]', "requires = []")
    file.write_text(text + 'requires = ["one"]\n')
    (same,) = carry(bench, "two", onto="0.3.2")
    assert (same.state, same.base) == ("applies", "0.3.1")
    (done,) = carry(bench, "two", onto="0.3.2", force=True)
    assert not any("no longer requires" in note for note in done.notes)
    loaded = series.load(bench.folder)
    port = loaded.definition("two").port("0.3.2")
    assert (port.requires, port.patch.paths) == (("one",), ("src/b.cpp",))
    patched = apply.apply(bench.releases["0.3.2"], ["two"], series=loaded, store=bench.store)
    assert (patched.patches, patched.carried) == (("one", "two"), {"one": "0.3.1"})
    (later,) = carry(bench, "one", onto="0.3.2")
    assert later.state == "clean", "a carried patch gets a port of its own"


@pytest.mark.slow
def test_patch_that_the_release_contains_needs_no_port(bench: SeriesSandbox) -> None:
    """A release that contains the change needs no port."""
    (done,) = carry(bench, "one", onto="0.3.4")
    assert (done.state, done.path) == ("empty", None)
    assert not left(bench)


@pytest.mark.slow
def test_file_missing_in_the_target_is_a_conflict(bench: SeriesSandbox) -> None:
    """A missing file must be decided on; it is not added as a whole."""
    error = stop(bench, "one", onto="0.3.5")
    assert error.files == ("src/a.cpp",)
    assert "carry its change over to src/c.cpp, then delete it" in str(error)
    with pytest.raises(RebaseConflict, match="has no such file"):
        list(rebase.resume("one"))
    assert error.folder is not None
    (error.folder / "src/a.cpp").unlink()
    (error.folder / "src/c.cpp").write_bytes(b"other\n" * 99 + b"x\ny\n" + CODE)
    (done,) = rebase.resume("one")
    assert done.comparison is not None
    assert series.load(bench.folder).definition("one").port("0.3.5").patch.paths == ("src/c.cpp",)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["make", "cherry_pick"])
def test_killed_rebase_can_be_aborted_or_repeated(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A killed process leaves a state that abort removes and a new start replaces."""

    class KilledError(BaseException):
        pass

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(worktree, moment, die)
        with pytest.raises(KilledError):
            carry(bench, "one", onto="0.3.2")
    assert rebase_session.ids(bench.store) == ("one",)
    with pytest.raises(UsageError, match="interrupted"):
        list(rebase.resume("one"))
    if moment == "make":
        rebase.abort("one")
        assert not left(bench)
    assert carry(bench, "one", onto="0.3.2")[0].state == "clean"
    assert not left(bench)


def test_foreign_patch_is_rebased_into_a_directory(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A foreign patch is rebased to a directory, with its own message."""
    file = tmp_path / "mine.patch"
    file.write_bytes(bench.mail("one", "0.3.1").replace(b"Patch: one", b"Patch: mine"))
    with pytest.raises(UsageError, match="--to"):
        list(rebase.rebase(["mine"], "0.3.2", patches=file))
    (done,) = rebase.rebase(["mine"], "0.3.2", patches=file, to=tmp_path / "out")
    assert done.path is not None
    assert b"Because one is needed." in done.path.read_bytes()


def test_patch_without_an_applicable_base_cannot_be_carried(bench: SeriesSandbox) -> None:
    """A patch that applies to no release cannot be rebased."""
    data = bench.file("one", "0.3.1").read_bytes()
    bench.file("one", "0.3.1").write_bytes(data.replace(b"-line 10", b"-line X"))
    with pytest.raises(NoPortApplies, match="any fetched release"):
        carry(bench, "one", onto="0.3.2")
