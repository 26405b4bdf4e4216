"""Test the package index: all sdists on HTML pages, in directories and of find-links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from source_kit import index_page, json_index, pack, serving, sha256

from pyllamakv.errors import FetchError
from pyllamakv.source import tree_limits
from pyllamakv.source.index import PackageIndex
from pyllamakv.source.pipconfig import PipSettings

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("home")


def sdists(folder: Path, *versions: str) -> list[Path]:
    return [pack(folder / f"llama_cpp_python-{v}.tar.gz", {"x": v.encode()}) for v in versions]


def test_versions_sort_as_versions(tmp_path: Path) -> None:
    """Versions of an index are sorted, and have the hashes of the index."""
    files = sdists(tmp_path / "f", "0.3.10", "0.3.9", "0.2.90")
    with serving({}) as server:
        url = index_page(server, *files)
        with PackageIndex(PipSettings(index_urls=(url,))) as index:
            found = index.sdists()
    assert [file.version for file in found] == ["0.2.90", "0.3.9", "0.3.10"]
    assert found[1].sha256 == sha256(files[1])
    assert found[1].url.endswith(files[1].name)


def test_wheels_and_other_projects_are_left_out(tmp_path: Path) -> None:
    """Only sdists of the project are listed."""
    folder = tmp_path / "links"
    sdists(folder, "0.3.9")
    names = ("llama_cpp_python-0.3.9-py3-none-any.whl", "other-1.0.tar.gz")
    for name in (*names, "llama_cpp_python-0.3.9.zip"):
        (folder / name).write_bytes(b"")
    with PackageIndex(PipSettings(index_urls=(), find_links=(str(folder),))) as index:
        assert [file.name for file in index.sdists()] == ["llama_cpp_python-0.3.9.tar.gz"]


def test_index_in_a_directory_is_read(tmp_path: Path) -> None:
    """An index in a directory works through file://, with hashes in the links."""
    (file,) = sdists(tmp_path / "files", "0.3.9")
    page = tmp_path / "simple" / "llama-cpp-python" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{file.name}#sha256={sha256(file)}">{file.name}</a>')
    with PackageIndex(PipSettings(index_urls=((tmp_path / "simple").as_uri(),))) as index:
        (found,) = index.sdists()
    assert found.sha256 == sha256(file)


def test_one_dead_source_does_not_hide_the_others(tmp_path: Path) -> None:
    """A source that does not respond is recorded, and the versions of the others are returned."""
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
    """If no source responds, the error names all sources and the settings to check."""
    with serving({}) as dead:
        gone = dead.url + "/simple"
    settings = PipSettings(index_urls=(gone,))
    with (
        PackageIndex(settings) as index,
        pytest.raises(FetchError, match="pip config list") as caught,
    ):
        index.sdists()
    assert gone in str(caught.value)


def test_index_that_answers_503_raises_fetch_error() -> None:
    """An index that answers 503 is unreachable, not empty."""
    with serving({}) as server:
        server.fail = [503, 503, 503]
        with (
            PackageIndex(PipSettings(index_urls=(server.url + "/simple",))) as index,
            pytest.raises(FetchError, match="503"),
        ):
            index.sdists()


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_index_that_refuses_raises_fetch_error(tmp_path: Path, status: int) -> None:
    """Only a response of 404 means that the index lacks the project."""
    (file,) = sdists(tmp_path / "f", "0.3.9")
    with serving({}) as refusing, serving({}) as server:
        refusing.fail = [status] * 9
        urls = (refusing.url + "/simple", index_page(server, file))
        with PackageIndex(PipSettings(index_urls=urls)) as index:
            assert [each.version for each in index.sdists()] == ["0.3.9"]
            assert [urls[0] in text for text in index.unreachable] == [True] * (status != 404)


def test_page_with_another_content_type_is_unreachable(tmp_path: Path) -> None:
    """An index with another content type is unreachable; an archive as find-links is not."""
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
    "an endless page of an index took all memory",
    by="hostile input",
    of="Python",
)
def test_endless_index_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is limited as it is unpacked, from a server or a directory; others still respond."""
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
    """An unreadable certificate file is named in the error."""
    (tmp_path / "ca.pem").write_text("no certificate")
    settings = PipSettings(
        index_urls=("https://127.0.0.1:1/simple",), cert=str(tmp_path / "ca.pem")
    )
    with PackageIndex(settings) as index, pytest.raises(FetchError, match=r"ca\.pem"):
        index.sdists()


def test_files_of_other_projects_are_ignored(tmp_path: Path) -> None:
    """Files of other projects on the page of a project are ignored."""
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
    """A truncated page is an unreachable source, and other sources still respond."""
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
def test_malformed_json_page_raises_fetch_error(tmp_path: Path, text: str) -> None:
    """JSON of another structure is an unreachable source."""
    with serving({"/simple/llama-cpp-python/": text.encode()}) as server:
        server.types["/simple/llama-cpp-python/"] = "application/vnd.pypi.simple.v1+json"
        settings = PipSettings(index_urls=(server.url + "/simple",))
        with PackageIndex(settings) as index, pytest.raises(FetchError):
            index.sdists()


def test_files_with_invalid_versions_are_ignored(tmp_path: Path) -> None:
    """Files with invalid versions are ignored, and the others are listed."""
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
