"""The package index: every sdist it offers, from HTML pages, folders and find-links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from source_kit import index_page, isolate, json_index, pack, serving, sha256

from pyllamakv.errors import FetchError
from pyllamakv.source import tree_limits
from pyllamakv.source.index import PackageIndex
from pyllamakv.source.pipconfig import PipSettings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test pip settings of its own."""
    return isolate(tmp_path, monkeypatch)


def sdists(folder: Path, *versions: str) -> list[Path]:
    return [pack(folder / f"llama_cpp_python-{v}.tar.gz", {"x": v.encode()}) for v in versions]


def test_versions_sort_as_versions(tmp_path: Path) -> None:
    """What an index offers is ordered by version, with the hash that it states."""
    files = sdists(tmp_path / "f", "0.3.10", "0.3.9", "0.2.90")
    with serving({}) as server:
        url = index_page(server, *files)
        with PackageIndex(PipSettings(index_urls=(url,))) as index:
            found = index.sdists()
    assert [file.version for file in found] == ["0.2.90", "0.3.9", "0.3.10"]
    assert found[1].sha256 == sha256(files[1])
    assert found[1].url.endswith(files[1].name)


def test_wheels_and_other_projects_are_left_out(tmp_path: Path) -> None:
    """Only sdists of the project count, whatever else the page lists."""
    folder = tmp_path / "links"
    sdists(folder, "0.3.9")
    names = ("llama_cpp_python-0.3.9-py3-none-any.whl", "other-1.0.tar.gz")
    for name in (*names, "llama_cpp_python-0.3.9.zip"):
        (folder / name).write_bytes(b"")
    with PackageIndex(PipSettings(index_urls=(), find_links=(str(folder),))) as index:
        assert [file.name for file in index.sdists()] == ["llama_cpp_python-0.3.9.tar.gz"]


def test_a_local_index(tmp_path: Path) -> None:
    """An index in a folder works through file://, hashes behind the links."""
    (file,) = sdists(tmp_path / "files", "0.3.9")
    page = tmp_path / "simple" / "llama-cpp-python" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{file.name}#sha256={sha256(file)}">{file.name}</a>')
    with PackageIndex(PipSettings(index_urls=((tmp_path / "simple").as_uri(),))) as index:
        (found,) = index.sdists()
    assert found.sha256 == sha256(file)


def test_one_dead_source_does_not_hide_the_others(tmp_path: Path) -> None:
    """A source that does not answer is noted, and what others offer is returned."""
    files = sdists(tmp_path / "f", "0.3.9")
    with serving({}) as dead:
        gone = dead.url + "/simple"
    with serving({}) as server:
        url = index_page(server, *files)
        settings = PipSettings(
            index_urls=(gone, url, server.url + "/empty"), find_links=(str(tmp_path / "none"),)
        )
        with PackageIndex(settings) as index:
            assert [file.version for file in index.sdists()] == ["0.3.9"]
            assert any(gone in problem for problem in index.unreachable)


def test_no_network_names_the_sources() -> None:
    """When nothing answers, the error names every source and where to look."""
    with serving({}) as dead:
        gone = dead.url + "/simple"
    settings = PipSettings(index_urls=(gone,))
    with (
        PackageIndex(settings) as index,
        pytest.raises(FetchError, match="pip config list") as caught,
    ):
        index.sdists()
    assert gone in str(caught.value)


def test_a_server_fault_is_no_empty_index() -> None:
    """An index that answers 503 is unreachable, not empty."""
    with serving({}) as server:
        server.fail = [503, 503, 503]
        with (
            PackageIndex(PipSettings(index_urls=(server.url + "/simple",))) as index,
            pytest.raises(FetchError, match="503"),
        ):
            index.sdists()


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_a_refusal_is_no_empty_index(tmp_path: Path, status: int) -> None:
    """Of the errors, only 404 means that the index lacks the project."""
    (file,) = sdists(tmp_path / "f", "0.3.9")
    with serving({}) as refusing, serving({}) as server:
        refusing.fail = [status] * 9
        urls = (refusing.url + "/simple", index_page(server, file))
        with PackageIndex(PipSettings(index_urls=urls)) as index:
            assert [each.version for each in index.sdists()] == ["0.3.9"]
            assert [urls[0] in text for text in index.unreachable] == [True] * (status != 404)


def test_pages_that_are_none(tmp_path: Path) -> None:
    """An index with another content type does not answer; an archive as find-links does."""
    (file,) = sdists(tmp_path / "f", "0.3.9")
    with serving({}) as server:
        url = index_page(server, file)
        archive = f"{server.url}/files/{file.name}"
        with PackageIndex(PipSettings(index_urls=(), find_links=(archive,))) as index:
            assert [each.version for each in index.sdists()] == ["0.3.9"]
            assert index.unreachable == []
        server.files["/other/llama-cpp-python/"] = b"{}"
        server.types["/other/llama-cpp-python/"] = "application/json"
        with PackageIndex(PipSettings(index_urls=(url, server.url + "/other"))) as index:
            assert index.sdists()
            assert "Content-Type unsupported" in index.unreachable[0]


@pytest.mark.regression(
    "a page of an index that does not end took all memory",
    by="hostile input",
    of="Python",
)
def test_a_page_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is counted as it unpacks, from a server or a folder; other sources still answer."""
    files = sdists(tmp_path / "f", "0.3.9")
    monkeypatch.setattr(tree_limits, "MAX_INDEX_PAGE_BYTES", 1 << 16)
    page = tmp_path / "local" / "llama-cpp-python" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_bytes(bytes(1 << 17))
    with serving({"/long/llama-cpp-python/": bytes(1 << 20)}) as server:
        url = index_page(server, *files)
        long = (server.url + "/long", page.parent.parent.as_uri())
        for gone in long:
            settings = PipSettings(index_urls=(gone,))
            with PackageIndex(settings) as index, pytest.raises(FetchError, match="longer than"):
                index.sdists()
        with PackageIndex(PipSettings(index_urls=(*long, url))) as index:
            assert [file.version for file in index.sdists()] == ["0.3.9"]


def test_bad_certificates_are_named(tmp_path: Path) -> None:
    """A certificate file that cannot be read is named."""
    (tmp_path / "ca.pem").write_text("no certificate")
    settings = PipSettings(
        index_urls=("https://127.0.0.1:1/simple",), cert=str(tmp_path / "ca.pem")
    )
    with PackageIndex(settings) as index, pytest.raises(FetchError, match=r"ca\.pem"):
        index.sdists()


def test_other_projects(tmp_path: Path) -> None:
    """An index is asked for one project, and files of others on its page do not count."""
    files = [pack(tmp_path / f"xllamacpp-{v}.tar.gz", {}) for v in ("2026.9.1", "2026.10.2")]
    with serving({}) as server:
        dates = {files[0].name: "2026-09-06T05:39:43.160187Z"}
        url = json_index(server, *files, *sdists(tmp_path, "0.3.9"), dates=dates)
        server.files["/simple/other/"] = server.files["/simple/xllamacpp/"]
        settings = PipSettings(index_urls=(url,))
        with PackageIndex(settings, project="xllamacpp") as index:
            found = index.sdists()
        with PackageIndex(settings, project="other") as index:
            assert index.sdists() == []
    assert [(file.version, file.uploaded) for file in found] == [
        ("2026.9.1", "2026-09-06T05:39:43Z"),
        ("2026.10.2", ""),
    ]
    assert found[0].sha256 == sha256(files[0])


def test_a_json_page_that_is_cut_off(tmp_path: Path) -> None:
    """Half of a page is a source that does not answer, and others still do."""
    (file,) = sdists(tmp_path, "0.3.9")
    with serving({}) as server:
        url = json_index(server, file, dates={})
        server.files["/bad/llama-cpp-python/"] = server.files["/simple/llama-cpp-python/"][:-9]
        server.types["/bad/llama-cpp-python/"] = server.types["/simple/llama-cpp-python/"]
        bad = server.url + "/bad"
        with PackageIndex(PipSettings(index_urls=(bad,))) as index, pytest.raises(FetchError):
            index.sdists()
        with PackageIndex(PipSettings(index_urls=(bad, url))) as index:
            assert [each.version for each in index.sdists()] == ["0.3.9"]
            assert any(bad in problem for problem in index.unreachable)


@pytest.mark.parametrize("text", ["[]", "7", '{"files": 7}'])
def test_json_of_something_else(tmp_path: Path, text: str) -> None:
    """JSON that is no page of an index is a source that does not answer."""
    with serving({"/simple/llama-cpp-python/": text.encode()}) as server:
        server.types["/simple/llama-cpp-python/"] = "application/vnd.pypi.simple.v1+json"
        settings = PipSettings(index_urls=(server.url + "/simple",))
        with PackageIndex(settings) as index, pytest.raises(FetchError):
            index.sdists()


def test_versions_that_are_none(tmp_path: Path) -> None:
    """Files whose versions are no versions are left out, and hide no others."""
    strange = ["1..2", "0.3.9-extra", "1.0.", "0x10"]
    (file,) = sdists(tmp_path, "0.3.9")
    anchors = [
        f'<a href="/f/{n}">{n}</a>' for n in (f"llama_cpp_python-{v}.tar.gz" for v in strange)
    ]
    with serving({}) as server:
        url = index_page(server, file)
        server.files["/simple/llama-cpp-python/"] += "".join(anchors).encode()
        with PackageIndex(PipSettings(index_urls=(url,))) as index:
            assert [each.version for each in index.sdists()] == ["0.3.9"]
