"""Test watching the index: new, skipped and removed versions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from source_kit import Server, index_page, json_index, pack, serving, sha256

from pyllamakv.errors import FetchError, ToolMissing
from pyllamakv.source import lockfile, npm, spec_resolver, watch
from pyllamakv.source.releases import Release

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.source.releases import Kind


pytestmark = pytest.mark.usefixtures("home")


def offered(folder: Path, version: str) -> Path:
    return pack(folder / f"llama_cpp_python-{version}.tar.gz", {"x": version.encode()})


def release(file: Path, version: str) -> Release:
    found = Release(version, "sdist", "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z")
    return replace(found, archive=file.name, sha256=sha256(file))


def test_watch_lists_new_unpinned_and_lost_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions above the lock are new, others are unpinned; changed or removed ones are lost."""
    files = {v: offered(tmp_path, v) for v in ("0.3.2", "0.3.9", "0.3.10", "0.3.11", "0.10.0")}
    known = [release(files["0.3.10"], "0.3.10"), release(files["0.3.2"], "0.3.9")]
    lockfile.save(lockfile.shipped(), [*known, release(files["0.3.2"], "0.3.4")])
    with serving({}) as server:
        monkeypatch.setenv("PIP_INDEX_URL", index_page(server, *files.values()))
        news = watch.new_versions()
    assert [each.spec for each in news.new] == ["0.10.0", "0.3.11"]
    assert [each.spec for each in news.unpinned] == ["0.3.2"]
    assert news.lost == ("llama-cpp-python==0.3.4", "llama-cpp-python==0.3.9")


def test_every_version_is_new_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock every version is new; the settings are pip's."""
    offered(tmp_path / "links", "0.3.9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert [each.spec for each in watch.new_versions().new] == ["0.3.9"]


def test_watch_without_network_raises_fetch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable index is an error, not "nothing new"."""
    with serving({}) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    with pytest.raises(FetchError):
        watch.new_versions()


def sources(folder: Path) -> list[Path]:
    """Write archives of two projects, two versions each."""
    names = ("llama_cpp_python-0.3.36", "llama_cpp_python-0.3.37")
    names += ("xllamacpp-2026.9.10809", "xllamacpp-2026.10.11549")
    return [pack(folder / f"{name}.tar.gz", {"x": name.encode()}) for name in names]


DATES = {
    "llama_cpp_python-0.3.37.tar.gz": "2026-11-01T00:00:00Z",
    "xllamacpp-2026.10.11549.tar.gz": "2026-10-10T15:54:57.042696Z",
    "xllamacpp-2026.9.10809.tar.gz": "2026-09-06T05:39:43Z",
}
NPM = {"3.7.0": "2025-03-28T01:00:00Z", "3.22.1": "2026-10-20T00:00:00Z", "2.8.0": "", "3.1.0": ""}


def pin(name: str, kind: Kind, package: str) -> None:
    made = Release(name, kind, "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z", package=package)
    lockfile.save(lockfile.shipped(), [made])


@pytest.fixture(autouse=True)
def without_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace npm's list of versions, which is empty unless a test sets it."""

    def absent() -> dict[str, str]:
        raise ToolMissing("npm is not installed", tool="npm", hint="install Node.js")

    monkeypatch.setattr(npm, "versions", absent)


@pytest.fixture
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve an index with two projects, and versions of npm; one of each is pinned."""
    pin("0.3.36", "sdist", "llama-cpp-python==0.3.36")
    pin("b4980", "npm", "node-llama-cpp@3.7.0")
    monkeypatch.setattr(npm, "versions", lambda: NPM)
    with serving({}) as server:
        url = json_index(server, *sources(tmp_path), dates=DATES)
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield server


def test_new_versions_of_all_sources_are_listed_by_upload(tmp_path: Path, indexes: Server) -> None:
    """Unlocked versions are listed by upload time, each as `fetch.add` takes it, per index."""
    found = watch.new_versions()
    x = "xllamacpp"
    file = sha256(tmp_path / "xllamacpp-2026.10.11549.tar.gz")
    assert [each.spec for each in found.new] == [
        "0.3.37",
        "node-llama-cpp@3.22.1",
        "xllamacpp==2026.10.11549",
        "xllamacpp==2026.9.10809",
    ]
    assert found.new[2] == watch.NewVersion(
        x, "2026.10.11549", "xllamacpp==2026.10.11549", "2026-10-10T15:54:57Z", file
    )
    # 2.8.0 has no bundle of llama.cpp.
    assert [each.spec for each in found.unpinned] == ["node-llama-cpp@3.1.0"]
    assert (found.lost, found.unreachable) == ((), ())
    pin("b11549", "xllamacpp", "xllamacpp==2026.10.11549")
    found = watch.new_versions()
    assert [each.spec for each in found.new] == ["0.3.37", "node-llama-cpp@3.22.1"]
    assert "xllamacpp==2026.9.10809" in [each.spec for each in found.unpinned]


def test_an_addition_does_not_hide_an_older_version(indexes: Server) -> None:
    """A version whose fetch failed stays new after a newer one was added."""
    date = "2026-12-01T00:00:00Z"
    newer = Release("b11549", "xllamacpp", "3" * 40, "4" * 40, "rows", date)
    newer = replace(newer, package="xllamacpp==2026.10.11549")
    last = replace(newer, name="0.3.38", kind="sdist", package="llama-cpp-python==0.3.38")
    lockfile.save(lockfile.added(), [newer, last])
    specs = [each.spec for each in watch.new_versions().new]
    assert specs == ["0.3.37", "node-llama-cpp@3.22.1", "xllamacpp==2026.9.10809"]


def test_build_pinned_from_another_source_is_not_new(indexes: Server) -> None:
    """A version of xllamacpp is not new if its build is pinned from npm."""
    pin("b11549", "npm", "node-llama-cpp@3.22.1")
    specs = [each.spec for each in watch.new_versions().new]
    assert specs == ["0.3.37", "xllamacpp==2026.9.10809"]


def test_pinned_packages_missing_on_the_index_are_lost(indexes: Server) -> None:
    """Pinned packages that are no longer on their index are listed as packages."""
    pin("b1", "npm", "node-llama-cpp@3.99.0")
    pin("b2", "xllamacpp", "xllamacpp==2026.1.2")
    assert watch.new_versions().lost == ("node-llama-cpp@3.99.0", "xllamacpp==2026.1.2")


def test_moved_git_references_are_named(indexes: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned branch with another commit is listed, without its user; a dead URL is a problem."""
    for ref in ("same", "moved", "dead"):
        pin(f"git:https://me@h/x@{ref}", "git", "")

    def remote(release: Release) -> str:
        if release.name.endswith("dead"):
            raise FetchError("cannot list dead")
        return ("3" if release.name.endswith("moved") else "1") * 40

    monkeypatch.setattr(spec_resolver, "remote_commit", remote)
    found = watch.new_versions()
    assert found.moved == ("git:https://***@h/x@moved",)
    assert found.unreachable == ("cannot list dead",)


@pytest.mark.parametrize("status", [403, 429, 503])
def test_packages_of_an_unreachable_index_are_not_lost(
    indexes: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """While one index of a project fails, its pinned packages are not lost."""
    pin("b2", "xllamacpp", "xllamacpp==2026.1.2")
    with serving({}) as refusing:
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", refusing.url + "/simple")
        refusing.fail = [status] * 9
        found = watch.new_versions()
        assert found.lost == ()
        assert [str(status) in text for text in found.unreachable] == [True, True]
        refusing.fail = []
        assert watch.new_versions().lost == ("xllamacpp==2026.1.2",)


def test_one_index_does_not_hide_the_others(
    indexes: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each index that fails is listed with its error; it is an error only if all fail."""

    def fail() -> dict[str, str]:
        raise ToolMissing("npm is not installed", tool="npm", hint="")

    monkeypatch.setattr(npm, "versions", fail)
    del indexes.files["/simple/llama-cpp-python/"]
    found = watch.new_versions()
    assert {each.source for each in found.new} == {"xllamacpp"}
    problems = found.unreachable
    assert [text.partition(":")[0] for text in problems] == ["llama-cpp-python", "node-llama-cpp"]
    del indexes.files["/simple/xllamacpp/"]
    with pytest.raises(FetchError, match="node-llama-cpp: npm is not installed"):
        watch.new_versions()


@pytest.mark.parametrize("page", [b"<html><h1>Log in</h1></html>", b"", b"\xff\xfe", b"{}"])
def test_page_without_files_is_an_unreachable_index(indexes: Server, page: bytes) -> None:
    """A page without files is an unreachable index: pinned versions are not lost."""
    indexes.files["/simple/llama-cpp-python/"] = page
    indexes.types["/simple/llama-cpp-python/"] = "text/html"
    found = watch.new_versions()
    assert not found.lost
    assert "llama-cpp-python" in found.unreachable[0]


def test_versions_that_cannot_be_added_are_not_offered(indexes: Server) -> None:
    """A version that `fetch.add` would refuse is not listed."""
    page = b'{"files": [{"filename": "llama_cpp_python-%s.tar.gz", "url": "/f/x"}]}'
    indexes.files["/simple/llama-cpp-python/"] = page % b"7"
    assert "llama-cpp-python" not in {each.source for each in watch.new_versions().new}
