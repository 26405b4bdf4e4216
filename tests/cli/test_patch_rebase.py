"""Test the commands that carry patches: results on stdout, and documented exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from patching_kit import SeriesSandbox, diff, numbered

from pyllamakv import home
from pyllamakv.cli import main
from pyllamakv.patching import series
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store
from pyllamakv.verification import result_cache

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y")}
SOLVED = numbered(60, l10="x", l40="y")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a data directory with two releases, and a shipped series of one patch."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_release("0.3.2", OLD | {"src/a.cpp": numbered(60, l40="upstream")}, "2025-02-02")
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    monkeypatch.setattr(home, "data", lambda _name: bench.folder)
    return bench


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main.main(["patch", *words])
    out, err = capsys.readouterr()
    code = left.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.mark.slow
def test_rebase_conflict_exits_with_3_until_continued(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conflict exits with 3 and prints the directory; --continue writes the port."""
    code, out, err = call(capsys, "rebase", "one", "--onto", "0.3.2")
    assert (code, out) == (3, "")
    assert "src/a.cpp" in err
    code, out, _ = call(capsys, "rebase", "--continue", "--json")
    assert code == 3
    waits = json.loads(out)["waiting"]
    assert waits["files"] == ["src/a.cpp"]
    (Path(waits["folder"]) / "src" / "a.cpp").write_bytes(SOLVED)
    code, out, _ = call(capsys, "rebase", "--continue", "one", "--json")
    assert code == 0
    (done,) = json.loads(out)["done"]
    assert (done["state"], done["change"]) == ("resolved", "content")
    assert series.load(bench.folder).definition("one").port("0.3.2")
    code, out, _ = call(capsys, "rebase", "one", "--onto", "0.3.2")
    assert code == 0
    assert out == "one onto 0.3.2: applies\n"


@pytest.mark.slow
def test_rebase_abort_and_skip_require_no_patch_name(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """They need no name while one rebase is active; without a rebase there is an error."""
    for way in ("--abort", "--skip"):
        assert call(capsys, "rebase", "one", "--onto", "0.3.2")[0] == 3
        assert call(capsys, "rebase", way)[0] == 0
        assert call(capsys, "rebase", way)[0] == 2
    assert not bench.file("one", "0.3.2").exists()
    assert call(capsys, "rebase", "one")[0] == 2
    assert call(capsys, "rebase", "--onto", "0.3.2")[0] == 2
    assert call(capsys, "rebase", "../one", "--abort")[0] == 2


@pytest.mark.slow
def test_rebase_continue_requires_the_same_patches_directory(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    """--continue takes the --patches of the rebase, and no other."""
    own = bench.folder.rename(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    words = ("rebase", "--continue", "--patches")
    assert call(capsys, "rebase", "one", "--onto", "0.3.2", "--patches", "own")[0] == 3
    code, _, err = call(capsys, *words, "other")
    assert code == 2 and str(own) in err
    waits = json.loads(call(capsys, *words, "own", "--json")[1])["waiting"]
    (Path(waits["folder"]) / "src" / "a.cpp").write_bytes(SOLVED)
    assert call(capsys, *words, "own")[0] == 0
    assert series.load(own).definition("one").port("0.3.2")


def test_patch_diff_exits_with_1_for_a_lost_hunk(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A lost hunk is exit status 1; ports are given as bases or files."""
    short = tmp_path / "short.patch"
    short.write_bytes(diff(OLD, OLD | {"src/a.cpp": numbered(60, l10="x")}))
    code, out, _ = call(capsys, "diff", "one", "0.3.1", str(short), "--json")
    assert code == 1
    facts = json.loads(out)
    assert facts["change"] == "content"
    assert [loss["name"] for loss in facts["lost"] if loss["what"] == "hunk"] == ["2"]
    code, out, _ = call(capsys, "diff", "one", "0.3.1", str(short))
    assert "src/a.cpp, hunk 2" in out
    assert out.startswith("one: 0.3.1 to short.patch: content")
    assert call(capsys, "diff", "one", "0.3.1", "0.3.1")[0] == 0


@pytest.mark.slow
def test_patch_drift_names_the_release_that_changed_a_hunk(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first release in which the hunk fails is named; exit 3, as for status."""
    code, out, _ = call(capsys, "drift", "0.3.2", "--json")
    assert code == 3
    (facts,) = json.loads(out)
    assert facts["hunks"][1]["changed_in"] == "0.3.2"
    code, out, _ = call(capsys, "drift", "0.3.2")
    assert "changed between 0.3.1 and 0.3.2" in out
    assert call(capsys, "drift", "0.3.1", "one")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["drift", "obsolete"])
def test_patches_of_the_server_are_measured_by_name(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Otherwise they are omitted."""
    served = OLD | {"src/b.cpp": numbered(20, l9="served")}
    bench.add_patch("serve", {"0.3.1": (OLD, served)}, target="server")
    for names, expected in ((("serve",), ["serve"]), ((), ["one"])):
        rows = json.loads(call(capsys, verb, "0.3.1", *names, "--json")[1])
        assert [row["patch"] for row in rows] == expected


def test_patch_obsolete_reports_hints_without_failing(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hints that a patch may be obsolete are not failures."""
    code, out, _ = call(capsys, "obsolete", "0.3.1", "--json")
    assert code == 0
    assert json.loads(out)[0]["obsolete"] is False
    assert "behaviour: unknown" in call(capsys, "obsolete", "0.3.1")[1]


def test_patch_obsolete_uses_cached_results_of_stock(
    bench: SeriesSandbox, capsys, monkeypatch
) -> None:
    """Results of stock are a third hint; scenarios of other patches do not count."""
    seen = {"some-scenario": "pass", "other": "fail"}
    monkeypatch.setattr(result_cache, "stock", lambda _release, _patches: seen)
    assert "behaviour: yes (stock passes some-scenario)" in call(capsys, "obsolete", "0.3.1")[1]
    seen["some-scenario"] = "fail"
    assert "behaviour: no (stock fails some-scenario)" in call(capsys, "obsolete", "0.3.1")[1]


@pytest.mark.slow
def test_patch_import_reports_the_state_on_every_release(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A user's patch is imported, and its state on every release is reported."""
    file = tmp_path / "mine.patch"
    file.write_bytes(diff(OLD, OLD | {"src/a.cpp": numbered(60, l41="mine")}))
    code, out, _ = call(capsys, "import", str(file), "--id", "mine", "--scenario", "s")
    assert code == 0
    assert "0.3.1: applies" in out
    assert "0.3.2: mine does not apply" in out
    assert series.load(bench.folder).order == ("one", "mine")
    words = ("import", str(file), "--id", "two", "--base", "0.3.2", "--scenario", "s")
    assert call(capsys, *words)[0] == 3
    words = ("import", str(file), "--id", "two", "--to", str(tmp_path / "own"), "--json")
    code, out, _ = call(capsys, *words, "--scenario", "s")
    assert json.loads(out)["applies"] == ["0.3.1"]
