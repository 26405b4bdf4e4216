"""Test the files of a prefix store: search, and each kind of invalid file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv import errors
from pyllamakv.cache import prefix_store
from pyllamakv.cache.prefix_store import PART, SUFFIX, PrefixStore, scan
from pyllamakv.cache.radix_tree import NO_SALT, tokens_to_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.cache.prefix_store import StoredPage, StoredPrefix

IDENTITY = {"model": "m", "build": "1", "type_k": "1"}
A, B = tokens_to_key(range(10)), tokens_to_key([*range(5), *range(50, 60)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the path of a store."""
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[PrefixStore]:
    """Open a new store."""
    made = PrefixStore(folder, IDENTITY)
    yield made
    made.close()


def fill(store: PrefixStore) -> tuple[StoredPage, StoredPage, StoredPage]:
    """Write A in pages of 4 and 6 tokens, and B, which diverges from A after 5."""
    one = store.add("cells", NO_SALT, None, 0, A[:16], b"one" * 10)
    two = store.add("cells", NO_SALT, one, 4, A[16:], b"two" * 10)
    three = store.add("cells", NO_SALT, two, 5, B[20:], b"three" * 10)
    store.sync()
    return one, two, three


def files(folder: Path) -> dict[str, bytes]:
    """Return the names and contents of all files but the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def names(found: StoredPrefix) -> list[str]:
    """Return the names of a prefix's pages."""
    return [page.name for page in found.pages]


def test_pages_are_found_by_tokens(store: PrefixStore) -> None:
    """Search for all, a part, and a branch that starts inside of a page."""
    one, two, three = fill(store)
    found = store.find(A, NO_SALT, 10)
    assert (found.length, names(found)) == (10, [one.name, two.name])
    assert [found.used_range(i) for i in range(2)] == [(0, 4), (4, 10)]
    found = store.find(A, NO_SALT, 9)
    assert (found.length, found.used_range(1)) == (9, (4, 9))
    found = store.find(B, NO_SALT, 15)
    assert (found.length, names(found)) == (15, [one.name, two.name, three.name])
    assert [found.used_range(i) for i in range(3)] == [(0, 4), (4, 5), (5, 15)]
    assert names(store.find(B, NO_SALT, 5)) == [one.name, two.name]
    assert names(store.find(A, NO_SALT, 4)) == [one.name]
    assert store.find(tokens_to_key([9, 9]), NO_SALT, 2).length == 0
    assert store.find(tokens_to_key([*range(7), 99, 99]), NO_SALT, 9).length == 7
    assert [store.read(page) for page in (one, two, three)] == [
        b"one" * 10,
        b"two" * 10,
        b"three" * 10,
    ]


def test_a_page_has_its_name_when_it_is_complete(
    store: PrefixStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it has another name, which the next scan removes."""
    seen: list[set[str]] = []
    fsync = os.fsync

    def look(handle: int) -> None:
        seen.append({path.suffix for path in folder.iterdir()})
        fsync(handle)

    monkeypatch.setattr(os, "fsync", look)
    store.add("cells", NO_SALT, None, 0, A[:16], b"one" * 10)
    assert PART in seen[0]
    assert SUFFIX not in seen[0]
    assert {path.suffix for path in folder.iterdir()} == {"", ".json", SUFFIX}


def test_stored_state_is_used_at_its_end_or_trimmed(store: PrefixStore) -> None:
    """A whole state is used only at its end, or trimmed if the memory can."""
    short = store.add("state", NO_SALT, None, 0, A[:24], b"short")
    long = store.add("state", NO_SALT, None, 0, A, b"long")
    assert names(store.find(A, NO_SALT, 10, exact=True)) == [long.name]
    assert store.find(A, NO_SALT, 9, exact=True) == prefix_store.StoredPrefix(6, (short,))
    assert store.find(A, NO_SALT, 9) == prefix_store.StoredPrefix(9, (long,))
    assert store.find(B, NO_SALT, 15, exact=True).length == 0
    assert store.find(B, NO_SALT, 15).length == 5


def test_reopened_store_has_the_same_pages_and_order(store: PrefixStore, folder: Path) -> None:
    """The pages and the order of use are kept."""
    one, two, three = fill(store)
    store.touch([one, two])
    store.close()
    again = PrefixStore(folder, IDENTITY)
    try:
        assert names(again.find(B, NO_SALT, 15)) == [one.name, two.name, three.name]
        assert (
            again.size
            == store.size
            == sum(len(each) for each in files(folder).values()) - len(files(folder)["store.json"])
        )
        found = [again.pages[page.name].used for page in (one, two, three)]
        assert found == [one.used, two.used, three.used]
        assert found[0] == found[1] > found[2]
        assert again.removed == {}
        assert folder.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    finally:
        again.close()


def test_least_recently_used_pages_are_removed_first(folder: Path) -> None:
    """A page that others follow is not removed before them."""
    store = PrefixStore(folder, IDENTITY)
    one, two, _ = fill(store)
    other = store.add("cells", NO_SALT, None, 0, tokens_to_key([7, 8]), b"x" * 30)
    store.touch([one, two])
    store.set_budget(store.size - 1)
    assert set(store.pages) == {one.name, two.name, other.name}
    store.set_budget(store.size - 1)
    assert set(store.pages) == {one.name, two.name}
    # Too large together with the pages before it: nothing is removed.
    with pytest.raises(errors.BudgetTooSmall) as caught:
        store.add("cells", NO_SALT, two, 10, tokens_to_key([2]), b"z" * store.size)
    assert caught.value.needed > caught.value.budget == store.budget
    assert {one.name, two.name} <= set(store.pages)
    assert set(scan(folder).pages) == set(store.pages)
    store.close()
    PrefixStore(folder, IDENTITY, budget=0).close()
    assert scan(folder).pages == {}


def test_a_longer_page_replaces_a_shorter_one(store: PrefixStore) -> None:
    """The shorter one is removed only if nothing follows it."""
    one, two, three = fill(store)
    longer = store.add("cells", NO_SALT, one, 4, A[16:] + tokens_to_key([77]), b"longer")
    store.replace(two)
    assert two.name in store.pages
    store.discard(three)
    store.replace(two)
    assert set(store.pages) == {one.name, longer.name}
    assert store.find(A, NO_SALT, 10).length == 10
    # After a crash between the two steps both exist, and either one is valid.
    store.add("cells", NO_SALT, one, 4, A[16:], b"two" * 10)
    assert store.find(A + tokens_to_key([77]), NO_SALT, 11).length == 11


def test_second_writer_of_a_store_is_refused(store: PrefixStore, folder: Path) -> None:
    """A second writer is refused, and the store does not change."""
    fill(store)
    before = files(folder)
    with pytest.raises(errors.PrefixStoreBusy, match="in use"):
        PrefixStore(folder, IDENTITY)
    with pytest.raises(errors.PrefixStoreBusy):
        prefix_store.prune(folder)
    assert files(folder) == before
    assert len(scan(folder).pages) == 3  # readers need no lock
    store.close()
    store.close()
    PrefixStore(folder, IDENTITY).close()


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({**IDENTITY, "model": "n"}, ["model"]),
        ({**IDENTITY, "build": "2", "type_k": "8"}, ["build", "type_k"]),
        ({**IDENTITY, "adapter": "x"}, ["adapter"]),
        ({"model": "m", "build": "1"}, ["type_k"]),
    ],
)
def test_another_identity_is_refused(
    store: PrefixStore, folder: Path, other: dict[str, str], differs: list[str]
) -> None:
    """The error names the difference, with both values."""
    fill(store)
    store.close()
    before = files(folder)
    with pytest.raises(errors.PrefixStoreForeign, match="another model") as caught:
        PrefixStore(folder, other)
    assert sorted(caught.value.differences) == differs
    assert files(folder) == before


def test_another_format_is_refused(store: PrefixStore, folder: Path) -> None:
    """A later version, and a foreign directory or file, are not changed."""
    store.close()
    path = folder / "store.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "version": 2}))
    with pytest.raises(errors.PrefixStoreForeign, match="format 2") as caught:
        PrefixStore(folder, IDENTITY)
    assert caught.value.differences == ("version",)
    path.write_text(json.dumps({**about, "format": "other"}))
    with pytest.raises(errors.PrefixStoreForeign, match="not a prefix store"):
        PrefixStore(folder, IDENTITY)
    path.write_text(json.dumps({**about, "identity": [["model", "n"]]}))
    with pytest.raises(errors.PrefixStoreDamaged, match="delete"):
        PrefixStore(folder, IDENTITY)
    for bad in ("", "[]", "{", '{"format": "pyllamakv prefix store", "version": 1}'):
        path.write_text(bad)
        with pytest.raises((errors.PrefixStoreDamaged, errors.PrefixStoreForeign)):
            PrefixStore(folder, IDENTITY)
    home = folder.parent / "home"
    home.mkdir()
    (home / "notes").write_text("mine")
    with pytest.raises(errors.PrefixStoreForeign, match="has files"):
        PrefixStore(home, IDENTITY)
    assert [each.name for each in home.iterdir()] == ["notes"]
    with pytest.raises(errors.PrefixStoreForeign, match="not a directory"):
        PrefixStore(home / "notes", IDENTITY)
    with pytest.raises(errors.PrefixStoreForeign):
        PrefixStore(folder.parent / "nothing", None)
    assert not (folder.parent / "nothing").exists()


@pytest.mark.slow
def test_page_with_any_changed_byte_is_refused(store: PrefixStore, folder: Path) -> None:
    """Each byte of a page is changed, and each length cut: it is never read."""
    page = store.add("cells", NO_SALT, None, 0, A, b"content" * 5)
    store.close()
    path = store.path(page)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        found = scan(folder, contents=True)
        assert (found.pages, list(found.unusable)) == ({}, [path]), at
        with pytest.raises(errors.PrefixStoreDamaged, match=page.name):
            store.read(page)
        path.write_bytes(whole[:at])
        assert scan(folder).pages == {}
    path.write_bytes(whole + b"\0")
    assert scan(folder).pages == {}
    path.write_bytes(whole)
    assert list(scan(folder, contents=True).pages) == [page.name]


def test_unusable_files_are_removed_when_a_store_is_opened(
    store: PrefixStore, folder: Path
) -> None:
    """Incomplete, renamed, truncated and orphaned files are removed."""
    one, two, three = fill(store)
    alone = store.add("state", NO_SALT, None, 0, A, b"state")
    store.close()
    store.path(two).unlink()
    (folder / f"x{PART}").write_bytes(b"half")
    (folder / f"{'0' * 32}{SUFFIX}").write_bytes(store.path(one).read_bytes())
    store.path(alone).write_bytes(store.path(alone).read_bytes()[:-1])
    found = scan(folder)
    assert set(found.pages) == {one.name}
    reasons = {path.name: why for path, why in found.unusable.items()}
    assert "missing" in reasons[three.name + SUFFIX]
    assert "renamed" in reasons[f"{'0' * 32}{SUFFIX}"]
    assert "bytes instead of" in reasons[alone.name + SUFFIX]
    assert "not completed" in reasons[f"x{PART}"]
    again = PrefixStore(folder, IDENTITY)
    assert len(again.removed) == 3
    again.close()
    assert set(files(folder)) == {"store.json", one.name + SUFFIX}


@pytest.mark.regression(
    "`cache verify` reported damage if a writer evicted pages meanwhile",
    by="hostile input",
    of="Python",
)
def test_pages_that_are_evicted_during_a_scan_are_no_damage(
    store: PrefixStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last page is read, and evicted with those before it."""
    one, two, three = fill(store)
    real = prefix_store._read_page

    def read(path: Path, *arguments: Any, **options: Any) -> tuple[StoredPage, bytes]:
        found = real(path, *arguments, **options)
        if path == store.path(three):
            store.discard(one)
        return found

    last_first = [store.path(page) for page in (three, two, one)]
    monkeypatch.setattr(prefix_store, "_read_page", read)
    monkeypatch.setattr(prefix_store, "sorted", lambda found, **_: list(found), raising=False)
    monkeypatch.setattr(prefix_store, "_entries", lambda _: last_first)
    found = scan(folder, contents=True)
    assert (found.pages, found.unusable) == ({}, {})


def test_a_missing_page_is_damage(store: PrefixStore) -> None:
    """A page that cannot be read is discarded, with all that follow it."""
    one, two, _ = fill(store)
    store.path(two).unlink()
    with pytest.raises(errors.PrefixStoreDamaged, match="missing") as caught:
        store.read(two)
    assert caught.value.path == store.path(two)
    store.discard(two)
    assert set(store.pages) == {one.name}
    assert store.size == one.size
    assert store.find(B, NO_SALT, 15).length == 4


def test_pages_of_another_store_are_not_read(store: PrefixStore, folder: Path) -> None:
    """A page copied from a store of another model is unusable."""
    other = PrefixStore(folder.parent / "other", {**IDENTITY, "model": "n"})
    page = other.add("cells", NO_SALT, None, 0, A, b"other")
    other.close()
    (folder / (page.name + SUFFIX)).write_bytes(other.path(page).read_bytes())
    assert "another store" in str(next(iter(scan(folder).unusable.values())))


def test_prune_removes_damaged_pages_and_those_beyond_the_budget(
    store: PrefixStore, folder: Path
) -> None:
    """Only damaged pages and those beyond a budget are removed."""
    _, two, three = fill(store)
    store.close()
    assert prefix_store.prune(folder) == prefix_store.PruneResult(0, 3, store.size)
    data = store.path(three).read_bytes()
    store.path(three).write_bytes(data[:-1] + b"?")
    left = store.size - three.size
    assert prefix_store.prune(folder) == prefix_store.PruneResult(1, 2, left)
    left -= two.size
    assert prefix_store.prune(folder, left) == prefix_store.PruneResult(1, 1, left)
    assert prefix_store.prune(folder, 0) == prefix_store.PruneResult(1, 0, 0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, errors.PrefixStoreFull),
        (errno.EDQUOT, errors.PrefixStoreFull),
        (errno.EIO, errors.PrefixStoreError),
    ],
)
@pytest.mark.parametrize("call", ["open", "fdopen", "fsync", "replace"])
def test_failed_writes_leave_nothing(
    store: PrefixStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    kind: type[Exception],
) -> None:
    """Each step of a write may fail: complete pages remain, and the next write succeeds."""
    one = store.add("cells", NO_SALT, None, 0, A[:16], b"one")
    store.sync()
    before = files(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "replace" else os, call, fail)
        with pytest.raises(kind) as caught:
            store.add("cells", NO_SALT, one, 4, A[16:], b"two")
        assert type(caught.value) is kind
    assert files(folder) == before
    assert list(store.pages) == [one.name]
    store.add("cells", NO_SALT, one, 4, A[16:], b"two")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(kind):
            store.sync()
    store.sync()
    assert store.find(A, NO_SALT, 10).length == 10


def test_store_directory_without_permission_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be written, listed or locked is refused with a remedy."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("mkdir", "iterdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(errors.PrefixStoreError, match=r"Permission denied.*name a dir"):
                PrefixStore(folder, IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr(prefix_store.filelock.FileLock, "acquire", refuse)
        with pytest.raises(errors.PrefixStoreError, match="lock"):
            PrefixStore(folder, IDENTITY)
    PrefixStore(folder, IDENTITY).close()


def refuse_pages(patch: pytest.MonkeyPatch, code: int) -> None:
    """Make the opening of pages fail."""
    real = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(SUFFIX):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **options)

    patch.setattr(os, "open", fail)


@pytest.mark.regression(
    "a prefix store deleted pages that could temporarily not be opened, for example with too many"
    " open files",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EMFILE, "ulimit"), (errno.EACCES, "can be read"), (errno.ESTALE, "can be read")],
)
def test_pages_that_cannot_be_opened_now_are_kept(
    store: PrefixStore, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    """The file may be intact: reading, opening and pruning fail, and nothing is removed."""
    one, *_ = fill(store)
    before = files(folder)
    with monkeypatch.context() as patch:
        refuse_pages(patch, code)
        with pytest.raises(errors.PrefixStoreError, match=remedy) as caught:
            store.read(one)
        assert type(caught.value) is errors.PrefixStoreError
        store.close()
        for act in (lambda: PrefixStore(folder, IDENTITY), lambda: prefix_store.prune(folder)):
            with pytest.raises(errors.PrefixStoreError, match=remedy):
                act()
    assert files(folder) == before
    assert prefix_store.prune(folder).pages == 3
    with monkeypatch.context() as patch:
        refuse_pages(patch, errno.EIO)
        assert len(scan(folder).unusable) == 3


@pytest.mark.regression(
    "a directory with only *.part files was treated as an unfinished store, and they were deleted",
    by="hostile input",
    of="Python",
)
def test_unfinished_files_of_others_are_not_removed(folder: Path) -> None:
    """Only an unfinished `store.json` may be in the directory of a new store."""
    folder.mkdir()
    (folder / f"film{PART}").write_text("mine")
    with pytest.raises(errors.PrefixStoreForeign, match="has files"):
        PrefixStore(folder, IDENTITY)
    assert (folder / f"film{PART}").read_text() == "mine"
    (folder / f"film{PART}").unlink()
    (folder / f"store{PART}").write_text("half")
    PrefixStore(folder, IDENTITY).close()
    assert set(files(folder)) == {"store.json"}


@pytest.mark.regression(
    "a store whose store.json was a dangling link got another identity, and lost its pages",
    by="hostile input",
    of="Python",
)
def test_dangling_identity_link_is_refused(store: PrefixStore, folder: Path) -> None:
    """The file may be on a disk that is not mounted."""
    fill(store)
    store.close()
    (folder / "store.json").rename(folder.parent / "elsewhere")
    with pytest.raises(errors.PrefixStoreForeign, match="has files"):
        PrefixStore(folder, IDENTITY)
    (folder / "store.json").symlink_to(folder.parent / "nothing")
    with pytest.raises(errors.PrefixStoreForeign, match=r"has no store\.json"):
        PrefixStore(folder, {**IDENTITY, "model": "n"})
    (folder.parent / "elsewhere").rename(folder.parent / "nothing")
    again = PrefixStore(folder, IDENTITY)
    assert len(again.pages) == 3
    again.close()


@pytest.mark.parametrize("kind", ["directory", "pipe"])
@pytest.mark.regression(
    "`cache prune` counted pages as removed that could not be removed, and waited for a pipe",
    by="hostile input",
    of="Python",
)
def test_directory_in_place_of_a_page_is_unusable(
    store: PrefixStore, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is unusable, and an error if it cannot be removed."""
    one, *_ = fill(store)
    store.close()
    path = store.path(one)
    path.unlink()
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    assert scan(folder, contents=True).pages == {}
    if kind == "directory":
        again = PrefixStore(folder, IDENTITY)
        assert (list(again.pages), path in again.removed) == ([], False)
        with pytest.raises(errors.PrefixStoreError, match="move it away"):
            again.add("cells", NO_SALT, None, 0, A[:16], b"one")
        again.close()
        with pytest.raises(errors.PrefixStoreError, match="move it away"):
            prefix_store.prune(folder)
    else:
        assert prefix_store.prune(folder).removed == 3

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    path.rmdir() if kind == "directory" else None
    other = PrefixStore(folder, IDENTITY)
    other.add("cells", NO_SALT, None, 0, A[:16], b"one" * 10)
    other.close()
    with pytest.raises(errors.PrefixStoreError, match="Permission denied"):
        prefix_store.prune(folder, 0)


@pytest.mark.regression(
    "a forked process wrote to the store of its parent, without a lock",
    by="hostile input",
    of="Python",
)
def test_forked_process_cannot_write_to_the_store(store: PrefixStore, folder: Path) -> None:
    """It is refused, and the lock of the parent stays when it closes the store."""
    fill(store)
    store.check_owned()
    child = os.fork()
    if not child:
        status = 1
        try:
            store.check_owned()
        except errors.PrefixStoreBusy:
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(errors.PrefixStoreBusy):
        PrefixStore(folder, IDENTITY)


def test_a_reader_uses_pages_that_are_written_again(store: PrefixStore, folder: Path) -> None:
    """Its read found them removed, which is no damage."""
    fill(store)
    reader = PrefixStore(folder, IDENTITY, read_only=True)
    found = reader.find(B, NO_SALT, 15)
    one = found.pages[0]
    store.discard(store.pages[one.name])
    with pytest.raises(errors.PrefixStoreDamaged, match="missing"):
        reader.read(one)
    reader.discard(one)
    fill(store)
    reader.refresh()
    assert names(reader.find(B, NO_SALT, 15)) == names(found)
    reader.close()


def test_a_store_is_read_while_another_one_writes(store: PrefixStore, folder: Path) -> None:
    """New pages are found, removed ones are not used, and no file is changed or locked."""
    one, two, three = fill(store)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    reader = PrefixStore(folder, IDENTITY, read_only=True, budget=1)
    other = PrefixStore(folder, None, read_only=True)
    found = reader.find(B, NO_SALT, 15)
    assert names(found) == [one.name, two.name, three.name]
    assert bytes(reader.read(found.pages[2])) == b"three" * 10
    reader.touch(found.pages)
    with pytest.raises(errors.UsageError, match="read it only"):
        reader.check_owned()
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()
    }
    store.discard(two)
    more = store.add("cells", NO_SALT, one, 4, B[16:], b"more" * 10)
    with pytest.raises(errors.PrefixStoreDamaged, match="missing"):
        reader.read(found.pages[1])
    reader.refresh()
    assert names(reader.find(B, NO_SALT, 15)) == [one.name, more.name]
    assert reader.size == store.size
    # A damaged page is neither used again nor removed.
    path = folder / f"{more.name}{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(errors.PrefixStoreDamaged):
        reader.read(reader.pages[more.name])
    reader.discard(reader.pages[more.name])
    store.add("cells", NO_SALT, None, 0, tokens_to_key([9]), b"new")
    reader.refresh()
    assert more.name not in reader.pages
    assert path.exists()
    assert len(reader.pages) == 2
    reader.close()
    other.close()
    with pytest.raises(errors.PrefixStoreForeign, match="model"):
        PrefixStore(folder, {**IDENTITY, "model": "n"}, read_only=True)
    with pytest.raises(errors.PrefixStoreForeign):
        PrefixStore(folder / "nothing", IDENTITY, read_only=True)
    assert not (folder / "nothing").exists()


READER = """
import sys
from pyllamakv.cache.prefix_store import PrefixStore
from pyllamakv.cache.radix_tree import NO_SALT
from pyllamakv.errors import PrefixStoreDamaged
reader = PrefixStore(sys.argv[1], None, read_only=True)
print("ready", flush=True)
seen = gone = 0
for line in sys.stdin:
    key = bytes.fromhex(line)
    reader.refresh()
    for page in reader.find(key, NO_SALT, len(key) // 4).pages:
        try:
            assert bytes(reader.read(page)) == page.tokens * 10
            seen += 1
        except PrefixStoreDamaged as error:
            assert "missing" in str(error), error
            reader.discard(page)
            gone += 1
    print(seen, gone, flush=True)
"""


@pytest.mark.slow
def test_process_reads_pages_of_a_concurrent_writer(folder: Path) -> None:
    """While pages are added and evicted, each page that it reads is complete."""
    store = PrefixStore(folder, IDENTITY, budget=3000)
    keys = [tokens_to_key([number, 7, 8, 9]) for number in range(60)]
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for key in keys:
            page = store.add("cells", NO_SALT, None, 0, key, key * 10)
            assert page.size < 600
            child.stdin.write(f"{key.hex()}\n")
            child.stdin.flush()
        answers = [child.stdout.readline().split() for _ in keys]
        child.stdin.close()
        assert child.wait() == 0
    seen, gone = map(int, answers[-1])
    assert seen + gone > 0
    assert len(store.pages) < len(keys)
    store.close()
