"""Test `pyllamakv patch`: results on stdout, and documented exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, fill, numbered

from pyllamakv.cli import main
from pyllamakv.source import fetch, git_command, lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y")}
TWO = ONE | {"src/a.cpp": numbered(60, l10="x\nz", l40="y")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a data directory with two releases, and a series of two patches."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_release("0.3.2", OLD | {"src/a.cpp": numbered(60, l40="upstream")}, "2025-02-02")
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def call(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], *words: str, shipped: bool = False
) -> tuple[int, str, str]:
    patches = [] if shipped else ["--patches", str(bench.folder)]
    with pytest.raises(SystemExit) as left:
        main.main(["patch", words[0], *words[1:], *patches])
    out, err = capsys.readouterr()
    code = left.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.mark.slow
def test_patch_status_exits_with_3_on_a_conflict(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name, fetched releases are shown; a conflict requires manual work: exit 3."""
    code, out, _ = call(bench, capsys, "status", "--json")
    assert code == 3
    states = {(row["release"], row["patch"]): row["state"] for row in json.loads(out)}
    assert states == {
        ("0.3.1", "one"): "applies",
        ("0.3.1", "two"): "applies",
        ("0.3.2", "one"): "manual",
        ("0.3.2", "two"): "blocked",
    }
    code, out, _ = call(bench, capsys, "status", "0.3.1")
    assert code == 0
    assert "applies" in out
    code, out, _ = call(bench, capsys, "status")
    assert out.splitlines()[1].split() == ["0.3.1", "applies", "one,", "two"]
    assert "hunk" in out and "src/a.cpp#2" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "src/a.cpp#2" in call(bench, capsys, "status", "-v")[1]
    code, out, _ = call(bench, capsys, "status", "0.3.2", "--github")
    assert code == 3
    assert out.count("::error file=") == 2


@pytest.mark.slow
def test_server_patches_are_omitted_unless_requested(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` omits them by default, `show` lists them, `apply` applies them by name."""
    served = TWO | {"src/b.cpp": numbered(20, l9="served")}
    bench.add_patch("serve", {"0.3.1": (TWO, served)}, target="server")
    words = ("status", "0.3.1", "--json")
    rows = [[row["patch"] for row in json.loads(call(bench, capsys, *words, *more)[1])]
            for more in ((), ("--server",))]  # fmt: skip
    assert rows == [["one", "two"], ["one", "two", "serve"]]
    facts = json.loads(call(bench, capsys, "show", "--json")[1])
    assert [(fact["id"], fact["target"]) for fact in facts][1:] == [
        ("two", "library"),
        ("serve", "server"),
    ]
    assert "changes: server" in call(bench, capsys, "show", "serve")[1]
    found = json.loads(call(bench, capsys, "apply", "0.3.1", "serve", "--json")[1])
    assert found["patches"] == ["serve@0.3.1"]
    found = json.loads(call(bench, capsys, "apply", "0.3.1", "--json")[1])
    assert found["patches"] == ["one@0.3.1", "two@0.3.1"]
    assert call(bench, capsys, "export", "--check")[1].count("serve 0.3.1: same") == 1


@pytest.mark.slow
def test_patch_apply_prints_the_commit_and_writes_the_tree(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The commit is printed, and the tree is written to the given directory."""
    target = tmp_path / "tree"
    code, out, _ = call(bench, capsys, "apply", "0.3.1", "--json", "--to", str(target))
    facts = json.loads(out)
    assert code == 0
    assert facts["patches"] == ["one@0.3.1", "two@0.3.1"]
    assert (target / "src" / "a.cpp").read_bytes() == TWO["src/a.cpp"]
    assert facts["tree"] == bench.store.tree_of(facts["commit"])
    (target / "src" / "a.cpp").write_text("edited")
    code, _, err = call(bench, capsys, "apply", "0.3.1", "--to", str(target))
    assert (code, "has changes (changed src/a.cpp)" in err) == (2, True)
    assert (target / "src" / "a.cpp").read_text() == "edited"
    code, out, err = call(bench, capsys, "apply", "0.3.2", "one")
    assert (code, out) == (3, "")
    assert "cannot be carried from 0.3.1: src/a.cpp:40" in err
    assert "src/a.cpp, hunk 2" in err
    assert call(bench, capsys, "apply", "0.3.7")[0] == 2


@pytest.mark.slow
def test_patch_export_check_reports_an_edit_and_export_repairs_it(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An unchanged export passes, an edit is found, and writing repairs it."""
    assert call(bench, capsys, "export", "--check")[0] == 0
    file = bench.file("one", "0.3.1")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"@@ -7,7 +7,7 @@", b"@@ -6,7 +6,7 @@"))
    code, out, _ = call(bench, capsys, "export", "--check", "--json")
    assert code == 1
    assert [row["kind"] for row in json.loads(out)] == ["positions", "same"]
    assert call(bench, capsys, "export", "one")[0] == 0
    assert file.read_bytes() == data
    fill(tmp_path / "tree", TWO | {"src/b.cpp": b"other\n"})
    words = ("export", "two", "--base", "0.3.1", "--from", str(tmp_path / "tree"))
    assert call(bench, capsys, *words)[0] == 0
    assert b"+other" in bench.file("two", "0.3.1").read_bytes()
    assert call(bench, capsys, "export", "--from", str(tmp_path / "tree"))[0] == 2


@pytest.mark.slow
def test_export_check_adds_no_release(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that is in no lock is fetched once and not added to a lock."""
    release = bench.releases["0.3.1"]
    fetched: list[str] = []

    def download(_source: object, version: str, *_facts: object, **_options: object) -> Release:
        fetched.append(version)
        bench.store.update_ref(f"refs/upstream/{version}", release.commit)
        return release

    del bench.releases["0.3.1"]
    bench.store.delete_ref("refs/upstream/0.3.1")
    monkeypatch.setattr(fetch, "_add_version", download)
    for _ in range(2):
        assert call(bench, capsys, "export", "--check")[0] == 0
    assert fetched == ["0.3.1"]
    assert not lockfile.load(lockfile.added())


@pytest.mark.slow
def test_patches_apply_to_a_tree_with_a_committed_stamp(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stamp that was committed by accident does not prevent a patch from applying."""
    first, second = tmp_path / "first", tmp_path / "second"
    bench.store.export(bench.releases["0.3.1"], first)
    assert (first / ".pyllamakv-tree").is_file()
    (first / "llama.h").write_text("x")
    git_command.git(first, "init", "-q")
    git_command.git(first, "add", "-A")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    git_command.git(first, *author, "commit", "-qm", "x")
    code, _, err = call(bench, capsys, "apply", f"path:{first}", "--to", str(second))
    assert code == 0, err
    assert (second / "src" / "a.cpp").read_bytes() == TWO["src/a.cpp"]


def test_patch_lint_prints_a_line_per_fault(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is a line per fault on stdout; exit 1."""
    (bench.folder / "stray").mkdir()
    (bench.folder / "stray" / "x.patch").write_text("")
    code, out, err = call(bench, capsys, "lint")
    assert code == 1
    assert "stray: series:" in out
    assert "scenario: there is no scenario 'some-scenario'" in out
    assert "fault(s)" in err


def test_patch_show_prints_series_and_patches(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """The series, a patch and a port can be shown."""
    code, out, _ = call(bench, capsys, "show", "--json")
    assert code == 0
    assert [patch["id"] for patch in json.loads(out)] == ["one", "two"]
    assert "Because two is needed." in call(bench, capsys, "show", "two")[1]
    assert call(bench, capsys, "show")[0] == 0
    assert call(bench, capsys, "show", "three")[0] == 2


@pytest.mark.slow
@pytest.mark.regression(
    "file names and texts of patches could send control sequences to the terminal",
    by="hostile input",
    of="Python",
)
def test_control_characters_of_patches_are_escaped(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """Titles, reasons and file names of foreign patches may contain any characters."""
    about = bench.folder / "two" / "patch.toml"
    evil = about.read_text().replace("Because", "\\u001b[2J\\u009bBecause")
    about.write_text(evil.replace('title = "', 'title = "\\u001b]0;x\\u0007[bold]'))
    (bench.folder / "str\x1bay").mkdir()
    (bench.folder / "str\x1bay" / "x.patch").write_text("")
    for words in (["show"], ["show", "two"], ["lint"], ["status", "0.3.1"], ["drift", "0.3.2"]):
        _, out, err = call(bench, capsys, *words)
        assert all(sign.isprintable() or sign == "\n" for sign in out + err)
    out = call(bench, capsys, "show", "two")[1]
    assert "\\x1b]0;x\\x07[bold]" in out and "\\x1b[2J\\x9bBecause" in out


@pytest.mark.parametrize("verb", ["apply", "export-series"])
@pytest.mark.parametrize("releases", ["", "==0.3.1"])
def test_conflicting_patch_fails_the_series_unless_excluded(
    bench: SeriesSandbox,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    verb: str,
    releases: str,
) -> None:
    """A conflict is an error unless the patch's `releases` exclude the release."""
    changed = OLD | {"src/b.cpp": numbered(20, l5="five")}
    bench.add_patch("three", {"0.3.1": (OLD, changed)})
    for name in ("one", "two"):
        file = bench.folder / name / "patch.toml"
        text = file.read_text("utf-8").replace('releases = ""', f'releases = "{releases}"')
        file.write_text(text, "utf-8")
    target = tmp_path / "target"
    code, out, err = call(bench, capsys, verb, "0.3.2", "--to", str(target), "--json")
    if releases:
        assert (code, target.exists()) == (0, True)
        assert "skipped one: is meant for ==0.3.1, not for 0.3.2" in err
    else:
        assert (code, target.exists()) == (3, False)
        assert "1 patches of the series do not apply to 0.3.2, nothing was written" in out + err
        assert "cannot be carried from 0.3.1: src/a.cpp:40" in out + err
