"""`pyllamakv upstream`: result on stdout, JSON on request, typed errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from source_kit import Server, index_page, isolate, pinned, sdist, serving
from typer.main import get_command

from pyllamakv.cli import upstream
from pyllamakv.errors import FetchError, HashMismatch, UnknownRelease, UsageError
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a home of its own."""
    return isolate(tmp_path, monkeypatch)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server that pip's settings name as the index."""
    with serving({}) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url + "/simple")
        yield found


def run(*words: str) -> None:
    get_command(upstream.app).main(args=list(words), standalone_mode=False)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    run(*words, "--json")
    return json.loads(capsys.readouterr().out)


def test_add_list_fetch_verify(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new version is added, listed, fetched again for nothing, and verified."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    assert answer(capsys, "add", "1.0")["commit"] == release.commit
    (row,) = answer(capsys, "list")
    assert (row["name"], row["era"], row["fetched"]) == ("1.0", "monolith", True)
    assert answer(capsys, "fetch", "--all")[0]["tree"] == release.tree
    assert answer(capsys, "verify") == {"1.0": []}
    assert [one["name"] for one in answer(capsys, "line")] == ["1.0"]
    assert answer(capsys, "line", "no such text") == []


def test_plain_output(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json stdout holds one line per release, uncut, and nothing of the progress."""
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


def test_news(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The index is asked for versions that no lock has."""
    release, file = pinned(tmp_path / "up", "1.0")
    lockfile.save(lockfile.shipped(), [release])
    index_page(server, file, sdist(tmp_path / "new", "1.1"))
    found = answer(capsys, "list", "--new")
    assert found == {"new": ["1.1"], "unpinned": [], "lost": []}


def test_one_failure_does_not_stop_the_rest(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every release that can be fetched is, then the first failure is raised."""
    good, file = pinned(tmp_path / "a", "2.0")
    bad, _ = pinned(tmp_path / "b", "1.0")
    lockfile.save(lockfile.shipped(), [good, bad])
    index_page(server, file)
    with pytest.raises(FetchError):
        run("fetch", "1.0", "2.0")
    assert "1.0: FetchError" in capsys.readouterr().out
    assert open_store().has(good)


def test_a_store_that_differs(tmp_path: Path, server: Server) -> None:
    """A release whose ref was moved is named with HashMismatch."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    run("add", "1.0")
    store = open_store()
    other, _ = store.commit(release.commit, {"x": b""}, "m")
    store.update_ref("refs/upstream/1.0", other)
    with pytest.raises(HashMismatch, match=r"1\.0"):
        run("verify", "1.0")


def test_usage() -> None:
    """What cannot be meant is refused before anything is done."""
    for words in (["fetch"], ["fetch", "1.0", "--all"], ["verify"]):
        with pytest.raises((UsageError, UnknownRelease)):
            run(*words)
    with pytest.raises(UnknownRelease):
        run("fetch", "7.7")
