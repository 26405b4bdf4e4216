"""Watching the index: what is new, what was skipped, what went away."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from source_kit import index_page, isolate, pack, serving, sha256

from pyllamakv.errors import FetchError
from pyllamakv.source import lockfile, watch
from pyllamakv.source.index import PackageIndex
from pyllamakv.source.pipconfig import PipSettings
from pyllamakv.source.releases import Release

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a home of its own."""
    return isolate(tmp_path, monkeypatch)


def offered(folder: Path, version: str) -> Path:
    return pack(folder / f"llama_cpp_python-{version}.tar.gz", {"x": version.encode()})


def release(file: Path, version: str) -> Release:
    found = Release(version, "sdist", "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z")
    return replace(found, archive=file.name, sha256=sha256(file))


def test_news(tmp_path: Path) -> None:
    """Versions above the lock are new, others are unpinned; a changed or absent one is lost."""
    files = {v: offered(tmp_path, v) for v in ("0.3.2", "0.3.9", "0.3.10", "0.3.11", "0.10.0")}
    known = [release(files["0.3.10"], "0.3.10"), release(files["0.3.2"], "0.3.9")]
    lockfile.save(lockfile.shipped(), [*known, release(files["0.3.2"], "0.3.4")])
    with serving({}) as server:
        url = index_page(server, *files.values())
        with PackageIndex(PipSettings(index_urls=(url,))) as index:
            news = watch.compare_with_index(index)
    assert news.new == ("0.3.11", "0.10.0")
    assert news.unpinned == ("0.3.2",)
    assert news.lost == ("0.3.4", "0.3.9")


def test_everything_is_new_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock every version is new; the settings are pip's."""
    offered(tmp_path / "links", "0.3.9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert watch.compare_with_index().new == ("0.3.9",)


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent index is an error, not "nothing new"."""
    with serving({}) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    with pytest.raises(FetchError):
        watch.compare_with_index()
