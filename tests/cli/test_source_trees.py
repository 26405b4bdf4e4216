"""Test `pyllamakv upstream sync`, `status` and `clean`: export, changed files, and removal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from source_kit import TREE, imported, isolate
from typer.main import get_command

from pyllamakv.cli import source_trees as cli
from pyllamakv.errors import TreeDirty, UnknownPatch, UnknownRelease, UsageError
from pyllamakv.source import lockfile, vendor, verified
from pyllamakv.source.store import open_store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a data directory with one release."""
    place = isolate(tmp_path, monkeypatch)
    accepted = tmp_path / "expected.toml"
    accepted.write_text("schema = 1\n[[cell]]\nrelease = '0.3.9'\nverdict = 'needed'\n", "utf-8")
    monkeypatch.setattr(verified, "shipped", lambda: accepted)
    lockfile.save(
        lockfile.shipped(), [imported(open_store(), "0.3.9", TREE, "2025-01-01T00:00:00Z")]
    )
    return place


def run(*words: str) -> None:
    get_command(cli.app).main(args=list(words), standalone_mode=False)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    run(*words, "--json")
    return json.loads(capsys.readouterr().out)


def test_trees_are_written_compared_and_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest verified release is exported, verified, and removed."""
    (row,) = answer(capsys, "sync")
    assert row["written"] == len(TREE)
    assert row["folder"] == str(home / "trees" / "0.3.9")
    assert answer(capsys, "sync", "0.3.9")[0]["written"] == 0
    assert answer(capsys, "status") == {"0.3.9": []}
    assert answer(capsys, "clean", "0.3.9") == [str(home / "trees" / "0.3.9")]
    assert not (home / "trees" / "0.3.9").exists()


def test_status_names_changed_missing_and_stray_files(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed, missing and stray files are listed; the file that CMake writes is not."""
    run("sync")
    folder = home / "trees" / "0.3.9"
    (folder / "common").mkdir()
    (folder / "common" / "build-info.cpp").write_text("x")
    run("status")
    (folder / "stray").write_text("x")
    (folder / "include/llama.h").write_text("other")
    (folder / "src/llama.cpp").unlink()
    capsys.readouterr()
    with pytest.raises(TreeDirty) as caught:
        run("status")
    out = capsys.readouterr().out.splitlines()
    lines = ["changed include/llama.h", "missing src/llama.cpp", "stray stray"]
    assert out == ["0.3.9: 3 differ", *(f"  {line}" for line in lines)]
    assert list(caught.value.files) == [f"0.3.9: {line}" for line in lines]
    assert "`pyllamakv upstream sync 0.3.9` restores" in str(caught.value)
    run("sync")
    run("status")


@pytest.mark.regression(
    "file names and texts of patches could send control sequences to the terminal",
    by="hostile input",
    of="Python",
)
def test_control_characters_of_file_names_are_escaped(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """File names of a tree are untrusted."""
    run("sync")
    (home / "trees" / "0.3.9" / "\x1b]0;x\x07").write_text("x")
    capsys.readouterr()
    with pytest.raises(TreeDirty):
        run("status")
    out = capsys.readouterr().out
    assert "\\x1b]0;x\\x07" in out and "\x1b" not in out


def test_tree_of_a_repinned_release_is_outdated(home: Path) -> None:
    """If the lock has another tree, the directory is reported as stale."""
    run("sync")
    store = open_store()
    lockfile.save(
        lockfile.shipped(), [imported(store, "0.3.9", {**TREE, "new": b""}, "2025-01-01")]
    )
    with pytest.raises(TreeDirty, match="outdated"):
        run("status", "0.3.9")
    run("sync")
    run("status")


def test_sync_to_refuses_a_foreign_directory(tmp_path: Path, home: Path) -> None:
    """A tree may be exported elsewhere, but never over foreign files."""
    run("sync", "0.3.9", "--to", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "include" / "llama.h").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="letter"):
        run("sync", "0.3.9", "--to", str(tmp_path / "other"))
    with pytest.raises(UsageError):
        run("sync", "0.3.9", "0.3.9+stock", "--to", str(tmp_path / "x"))
    assert vendor.listed() == []


def test_stock_spec_is_the_tree_of_the_release(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.3.9+stock is the same tree in the same directory as 0.3.9."""
    plain, stock = answer(capsys, "sync", "0.3.9", "0.3.9+stock")
    assert plain["folder"] == stock["folder"]
    assert plain["tree"] == stock["tree"]


def test_misspelt_series_gets_a_suggestion(home: Path) -> None:
    """The names of all patches and of none are suggested like names of patches."""
    with pytest.raises(UnknownPatch, match=r"did you mean stock\?"):
        run("sync", "0.3.9+stok")
    assert vendor.listed() == []


@pytest.mark.slow
def test_status_and_clean_accept_all_spellings_of_a_release(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each verb accepts the spellings of `sync`; an exact name comes first."""
    run("sync", "0.3.9")
    spellings = ("v0.3.9", "v0.3.9+stock", "0.3.9+stock", "llama-cpp-python==0.3.9")
    for spec in spellings:
        assert answer(capsys, "status", spec) == {"0.3.9": []}
    for spec in spellings:
        assert answer(capsys, "clean", spec) == [str(home / "trees" / "0.3.9")]
        run("sync", spec)
        assert answer(capsys, "status", "0.3.9") == {spec: []}
    tag = imported(open_store(), "v0.3.9", {**TREE, "tag": b""}, "2025-01-02T00:00:00Z")
    lockfile.save(lockfile.shipped(), [tag])
    for verb in ("status", "clean"):
        for spec in ("v0.3.9", "v0.3.9+stock"):
            with pytest.raises(UnknownRelease, match=r"'v0\.3\.9.* is not vendored"):
                run(verb, spec)
    run("sync", "v0.3.9")
    assert answer(capsys, "clean", "v0.3.9") == [str(home / "trees" / "v0.3.9")]


def test_directory_of_sources_is_synced_under_a_safe_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory of sources can be vendored under a safe name."""
    for path, data in TREE.items():
        (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / path).write_bytes(data)
    (row,) = answer(capsys, "sync", f"path:{tmp_path / 'src'}")
    assert Path(row["folder"]).name.startswith("path-")
    run("status")


def test_source_tree_verbs_refuse_invalid_arguments() -> None:
    """Missing and invalid arguments are refused."""
    for words in (["status"], ["clean"], ["clean", "x", "--all"]):
        with pytest.raises(UsageError):
            run(*words)
    for words in (["clean", "0.3.9"], ["sync", "7"]):
        with pytest.raises(UnknownRelease):
            run(*words)
