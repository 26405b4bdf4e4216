"""Test what keeps pages: memory, files, and what is wrong with files."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from fakes.simulated import SimulatedNative
from prefix_kit import SYSTEM, make, serve

from pyllamakv.cache import paging
from pyllamakv.errors import NativeError, PagingError

if TYPE_CHECKING:
    from pathlib import Path

SAVED = bytes(range(256)) * 8


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_pages_return_the_written_bytes(where: str, tmp_path: Path) -> None:
    """Write, read and drop, and count the bytes."""
    pager = paging.pager("memory" if where == "memory" else tmp_path / "new" / "pages")
    assert pager is not None
    a, b = pager.write(SAVED, 3, 9), pager.write(SAVED[:10], 0, 2)
    assert (a.read(), b.read()) == (SAVED, SAVED[:10])
    assert (a.start, a.end, a.refs) == (3, 9, 0)
    assert (pager.count, pager.size) == (2, a.size + b.size)
    assert a.size >= len(SAVED)
    a.drop()
    assert (pager.count, pager.size) == (1, b.size)
    pager.close()
    assert list(tmp_path.rglob("*.kvpage")) == []


def test_the_pages_of_an_unclosed_cache_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last reference, but not by a fork of the process."""
    kept, gone = paging.FilePager(tmp_path), paging.FilePager(tmp_path)
    for each in (kept, gone):
        each.write(SAVED, 0, 2)
    there = kept.folder
    del gone, each
    assert list(tmp_path.iterdir()) == [there]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    kept.close()
    assert list(tmp_path.iterdir()) == [there]


def test_cache_without_a_directory_has_no_pager() -> None:
    """Ask for no pager."""
    assert paging.pager(None) is None


def spoil(content: bytes, how: str) -> bytes:
    """Damage the bytes of a page."""
    if how == "truncated":
        return content[:-7]
    if how == "longer":
        return content + b"x"
    if how == "flipped":
        return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    return {"foreign": b"GGUF" + content[4:], "empty": b"", "head": content[:10]}[how]


@pytest.mark.parametrize("how", ["truncated", "longer", "flipped", "foreign", "empty", "head"])
def test_a_page_that_is_not_whole_is_refused(how: str, tmp_path: Path) -> None:
    """Read files that were cut, changed, or are something else: the error names the file."""
    pager = paging.FilePager(tmp_path)
    page = pager.write(SAVED, 0, 4)
    (path,) = pager.folder.iterdir()
    path.write_bytes(spoil(path.read_bytes(), how))
    with pytest.raises(PagingError, match="cannot be used") as caught:
        page.read()
    assert caught.value.path == path


def test_a_page_of_another_branch_or_cache_is_refused(tmp_path: Path) -> None:
    """Put a sound page where another one belongs, and remove one."""
    pager, other = paging.FilePager(tmp_path), paging.FilePager(tmp_path)
    mine, next_, theirs = pager.write(SAVED, 0, 4), pager.write(SAVED, 4, 8), other.write(b"", 0, 4)
    for foreign in (next_, theirs):
        mine.path.write_bytes(foreign.path.read_bytes())  # type: ignore[attr-defined]
        with pytest.raises(PagingError, match="belongs to another"):
            mine.read()
    mine.path.unlink()  # type: ignore[attr-defined]
    with pytest.raises(PagingError, match="cannot be read"):
        mine.read()
    mine.drop()
    assert pager.count == 1


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail in the middle of a write: no file, no bytes counted, and the next one works."""
    pager = paging.FilePager(tmp_path)
    real = type(tmp_path).open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "open", lambda self, mode: Full(real(self, mode)))
    with pytest.raises(PagingError, match="No space left") as caught:
        pager.write(SAVED, 0, 4)
    assert caught.value.path is not None
    assert (pager.count, pager.size, list(pager.folder.iterdir())) == (0, 0, [])
    monkeypatch.undo()
    assert pager.write(SAVED, 0, 4).read() == SAVED


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    """Name a file as the folder."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PagingError, match="writable directory"):
        paging.pager(tmp_path / "file")


def test_a_page_restores_every_node_in_it(tmp_path: Path) -> None:
    """A page of 20 tokens gives back the first 12 alone, which were pinned since."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)
    cache.pin("system", tokens[:12])
    cache.page_in(tokens[:12])
    cache.check()
    assert cache.stats().cells == 12
    assert serve(cache, [*tokens[:12], 5]) == 12
    assert serve(cache, [*tokens, 5]) == 20
    assert cache.stats().damaged == 0


def test_a_page_that_cannot_be_restored_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sequence is left behind, and the page is used later."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)

    def fail(*_: Any) -> int:
        raise NativeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedNative, "state_load", fail)
        with pytest.raises(PagingError):
            cache.page_in(tokens)
    cache.check()
    assert cache.stats().resident == 0
    assert len(cache.context.vacant) == cache.context.info.n_seq_max
    cache.page_in(tokens)
    assert serve(cache, [*tokens, 5]) == 20


def test_a_page_of_other_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages of one length were exchanged: neither is used under the other's tokens."""
    cache = make(tmp_path, paging="memory")
    prompts = [[number] * 20 for number in (7, 8)]
    for tokens in prompts:
        serve(cache, tokens)
        cache.page_out(tokens)
    pages = [node.page for node in cache.branches.tree.walk()]
    contents = [page.read() for page in pages]
    monkeypatch.setattr(paging.MemoryPage, "read", lambda page: contents[1 - pages.index(page)])
    for tokens in prompts:
        with pytest.raises(PagingError, match="other tokens"):
            cache.page_in(tokens)
        assert serve(cache, [*tokens, 5]) == 0


def test_a_branch_is_restored_from_its_page_and_that_of_its_prefix(tmp_path: Path) -> None:
    """The branch that was paged out first has no tokens of the prefix that another one had then."""
    cache = make(tmp_path, paging="memory")
    first, second = ([*SYSTEM, *[number] * 8] for number in (7, 8))
    for tokens in (first, second):
        serve(cache, tokens)
    for tokens in (first, second):
        cache.page_out(tokens)
    starts = sorted((node.page.start, node.end) for node in cache.branches.tree.walk())
    assert starts == [(0, 20), (0, 28), (20, 28)]
    cache.page_in(first)
    cache.check()
    assert serve(cache, [*first, 5]) == 28
    assert serve(cache, [*second, 5]) == 28
    assert cache.stats().damaged == 0


def test_a_damaged_page_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt that would use it is decoded, and no later prompt reads it again."""
    cache = make(tmp_path, paging="memory")
    tokens = list(range(10, 30))
    serve(cache, tokens)
    cache.page_out(tokens)

    def fail(page: paging.MemoryPage) -> bytes:
        raise PagingError(f"{page} is damaged")

    monkeypatch.setattr(paging.MemoryPage, "read", fail)
    for _ in range(2):
        with cache.acquire([*tokens, 5]) as lease:
            assert lease.cached == 0
            assert (cache.stats().damaged, cache.stats().paged) == (1, 0)
    cache.check()
