"""Test `pyllamakv upstream`: results on stdout, JSON on request, typed errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from source_kit import Server, index_page, json_index, pack, pinned
from typer.main import get_command

from pyllamakv.cli import upstream
from pyllamakv.errors import FetchError, HashMismatch, UnknownRelease, UsageError
from pyllamakv.source import lockfile, npm
from pyllamakv.source.releases import Release
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("home")


def run(*words: str) -> None:
    get_command(upstream.app).main(args=list(words), standalone_mode=False)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    run(*words, "--json")
    return json.loads(capsys.readouterr().out)


def test_added_release_is_listed_fetched_and_verified(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new version is added, listed, fetched again without a download, and verified."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    assert answer(capsys, "add", "1.0")["commit"] == release.commit
    (row,) = answer(capsys, "list")
    assert (row["name"], row["era"], row["fetched"]) == ("1.0", "monolith", True)
    assert answer(capsys, "fetch", "--all")[0]["tree"] == release.tree
    assert answer(capsys, "verify") == {"1.0": []}
    assert [one["name"] for one in answer(capsys, "log")] == ["1.0"]
    assert answer(capsys, "log", "no such text") == []


def test_plain_output_has_one_uncut_line_per_release(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --json, stdout has one complete line per release, and no progress."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    run("add", "1.0")
    run("list")
    run("fetch", "1.0")
    run("verify", "1.0")
    out = capsys.readouterr().out
    assert out.count(release.commit) == 2
    assert "llama-cpp-python==1.0" in out
    assert "1.0: good" in out
    assert "download" not in out


@pytest.fixture
def offers(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer three versions of llama-cpp-python, one of xllamacpp and two on npm; pin two."""
    release, file = pinned(tmp_path / "up", "1.0")
    made = Release("b1", "npm", "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z")
    older = replace(release, date="2026-02-01T00:00:00Z")
    lockfile.save(lockfile.shipped(), [older, replace(made, package="node-llama-cpp@3.2.0")])
    others = [pack(tmp_path / f"llama_cpp_python-{v}.tar.gz", {}) for v in ("0.9", "1.1")]
    x = pack(tmp_path / "xllamacpp-2026.10.11549.tar.gz", {})
    dates = {x.name: "2026-10-10T12:00:00Z", others[0].name: "2025-01-01T00:00:00Z"}
    json_index(server, file, *others, x, dates=dates)
    listed = {"3.1.0": "2025-06-01T00:00:00Z", "3.2.0": "", "3.3.0": "2026-10-11T00:00:00Z"}
    monkeypatch.setattr(npm, "versions", lambda: listed)


@pytest.mark.usefixtures("offers")
def test_list_new_shows_unpinned_versions_by_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Unlocked versions are listed by upload time, as `upstream add` takes them."""
    run("list", "--new")
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["node-llama-cpp@3.3.0", "2026-10-11", "node-llama-cpp"],
        ["xllamacpp==2026.10.11549", "2026-10-10", "xllamacpp"],
        ["1.1", "-", "llama-cpp-python"],
    ]
    assert "2 older versions" in err
    assert "--all" in err
    assert "warning" not in err
    found = answer(capsys, "list", "--new")
    assert set(found) == {"new", "lost", "unreachable", "moved"}
    assert found["new"][0] == {
        "source": "node-llama-cpp",
        "version": "3.3.0",
        "spec": "node-llama-cpp@3.3.0",
        "date": "2026-10-11T00:00:00Z",
        "sha256": None,
    }


@pytest.mark.usefixtures("offers")
def test_old_versions_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """With --all, older versions are listed among the others."""
    run("list", "--new", "--all")
    lines = capsys.readouterr().out.splitlines()
    specs = [line.split()[0] for line in lines]
    assert specs[2:] == ["node-llama-cpp@3.1.0", "0.9", "1.1"]
    found = answer(capsys, "list", "--new", "--all")
    assert [each["spec"] for each in found["unpinned"]] == ["node-llama-cpp@3.1.0", "0.9"]
    with pytest.raises(UsageError):
        run("list", "--all")


@pytest.mark.usefixtures("offers")
def test_unreachable_index_is_a_warning_while_another_answers(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a warning if another one responds; otherwise the command fails."""
    del server.files["/simple/xllamacpp/"]
    run("list", "--new")
    out, err = capsys.readouterr()
    assert "xllamacpp" not in out
    assert "1.1" in out
    assert "warning: a source did not answer: xllamacpp: no sdist" in err
    assert "xllamacpp: no sdist" in answer(capsys, "list", "--new")["unreachable"][0]

    def fail() -> dict[str, str]:
        raise FetchError("npm does not answer")

    monkeypatch.setattr(npm, "versions", fail)
    server.files.clear()
    with pytest.raises(FetchError, match="npm does not answer"):
        run("list", "--new")


@pytest.mark.usefixtures("offers")
def test_list_new_reports_that_nothing_is_new(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is on stderr."""
    made = Release("b11549", "xllamacpp", "1" * 40, "2" * 40, "rows", "2026-10-10T00:00:00Z")
    pins = [replace(made, package="xllamacpp==2026.10.11549"), replace(made, name="1.1")]
    pins[1] = replace(pins[1], kind="sdist", package="llama-cpp-python==1.1")
    lockfile.save(lockfile.added(), pins)
    monkeypatch.setattr(npm, "versions", lambda: {"3.2.0": ""})
    run("list", "--new")
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no new version" in err


@pytest.mark.slow
def test_fetch_continues_after_a_failed_release(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """All releases that can be fetched are, then the first failure is raised."""
    good, file = pinned(tmp_path / "a", "2.0")
    bad, _ = pinned(tmp_path / "b", "1.0")
    lockfile.save(lockfile.shipped(), [good, bad])
    index_page(server, file)
    with pytest.raises(FetchError):
        run("fetch", "1.0", "2.0")
    assert "1.0: FetchError" in capsys.readouterr().out
    assert open_store().has(good)


def test_verify_of_a_moved_ref_raises_hash_mismatch(tmp_path: Path, server: Server) -> None:
    """A release whose ref was moved is named with HashMismatch."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    run("add", "1.0")
    store = open_store()
    other, _ = store.commit(release.commit, {"x": b""}, "m")
    store.update_ref("refs/upstream/1.0", other)
    with pytest.raises(HashMismatch, match=r"1\.0"):
        run("verify", "1.0")


def test_upstream_verbs_refuse_invalid_arguments() -> None:
    """Invalid arguments are refused before anything is done."""
    for words in (["fetch"], ["fetch", "1.0", "--all"], ["verify"]):
        with pytest.raises((UsageError, UnknownRelease)):
            run(*words)
    with pytest.raises(UnknownRelease):
        run("fetch", "7.7")
