"""Test fetching from the index into the store: checked, and complete or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, Server, index_page, objects, pinned, refs, sdist, serving

from pyllamakv.errors import (
    ArchiveError,
    DiskFull,
    FetchError,
    GitError,
    HashMismatch,
    NotFetched,
    UnknownRelease,
    UsageError,
)
from pyllamakv.source import architectures, fetch, lockfile
from pyllamakv.source.quarantine import Quarantine
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("home")


def test_a_release_is_fetched_once(tmp_path: Path, server: Server, home: Path) -> None:
    """A release is fetched from the index into the store once; the second call sends no request."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    reports: list[str] = []
    assert fetch.fetch(release, progress=lambda what, *_: reports.append(what)) == release
    store = open_store()
    assert store.has(release)
    assert {p: store.read(release, p) for p in store.ls(release)} == TREE
    assert list((home / "downloads").iterdir()) == []
    assert reports
    before = len(server.asked)
    fetch.fetch(release)
    assert len(server.asked) == before


def test_the_archive_may_be_kept(tmp_path: Path, server: Server, home: Path) -> None:
    """A kept archive serves a later fetch without the network."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    fetch.fetch(release, keep=True)
    assert (home / "downloads" / file.name).read_bytes() == file.read_bytes()
    open_store().delete_ref("refs/upstream/1.0")
    server.files.clear()
    fetch.fetch(release, keep=True)
    assert open_store().has(release)


def test_concurrent_fetches_download_once(tmp_path: Path, server: Server) -> None:
    """Concurrent fetches of a release download it once."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: fetch.fetch(release), range(4))) == [release] * 4
    assert sum(path.endswith(".tar.gz") for path, _ in server.asked) == 1


def test_archive_with_another_hash_is_refused(tmp_path: Path, server: Server) -> None:
    """A file with another hash is refused, whether the index states its hash or not."""
    release, file = pinned(tmp_path / "up", "1.0")
    open_store()
    before = objects(open_store())
    wrong = replace(release, sha256="0" * 64)
    for stated in (True, False):
        index_page(server, file, stated=stated)
        with pytest.raises(HashMismatch) as caught:
            fetch.fetch(wrong)
        assert caught.value.expected == "0" * 64
    assert objects(open_store()) == before
    assert not refs(open_store())


def test_archive_with_another_commit_is_refused(tmp_path: Path, server: Server, home: Path) -> None:
    """An archive that holds another commit than pinned is refused, whatever its hash."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    with pytest.raises(HashMismatch, match="commit"):
        fetch.fetch(replace(release, commit="1" * 40))
    with pytest.raises(HashMismatch, match="tree"):
        fetch.fetch(replace(release, tree="1" * 40))
    assert not refs(open_store())


def test_truncated_archive_is_refused(tmp_path: Path, server: Server) -> None:
    """A truncated archive without a known hash is detected while it is read."""
    file = sdist(tmp_path / "up", "1.0")
    file.write_bytes(file.read_bytes()[:-50])
    index_page(server, file, stated=False)
    with pytest.raises(ArchiveError, match="truncated"):
        fetch.add("1.0")
    assert not refs(open_store())
    assert lockfile.known() == {}


@pytest.mark.slow
@pytest.mark.parametrize("project", ["llama-cpp-python", "xllamacpp"])
@pytest.mark.parametrize(
    "body",
    [b"<html><h1>Log in</h1></html>", b"", b"\x1f\x8bgarbage"],
    ids=["page", "empty", "garbage"],
)
def test_page_instead_of_an_archive_leaves_nothing(
    tmp_path: Path, server: Server, home: Path, project: str, body: bytes
) -> None:
    """If an index serves another file, the store is unchanged; then the version is added."""
    file = tmp_path / f"{project.replace('-', '_')}-2026.10.11549.tar.gz"
    file.write_bytes(body)
    index_page(server, file, stated=False)
    store = open_store()
    before = objects(store)
    with pytest.raises(FetchError):
        fetch.add(f"{project}==2026.10.11549")
    assert objects(store) == before
    assert not refs(store)
    assert lockfile.known() == {}
    if project == "llama-cpp-python":
        index_page(server, sdist(tmp_path / "up", "2026.10.11549"), stated=False)
        assert fetch.add(f"{project}==2026.10.11549").name == "2026.10.11549"


@pytest.mark.slow
@pytest.mark.parametrize("errors", [[503] * 3, [500] * 3, [429] * 3], ids=["503", "500", "429"])
def test_failing_index_raises_fetch_error(
    tmp_path: Path, server: Server, errors: list[int]
) -> None:
    """A version is not unknown if its index fails; later it is added."""
    index_page(server, sdist(tmp_path / "up", "1.0"))
    server.fail = list(errors)
    with pytest.raises(FetchError, match=str(errors[0])):
        fetch.add("1.0")
    assert not refs(open_store())
    assert lockfile.known() == {}
    server.fail = []
    assert fetch.add("1.0").name == "1.0"


def test_full_disk_does_not_change_the_store(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If git finds no space, DiskFull is raised; later the fetch succeeds."""
    release, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)

    def full(self: Quarantine, pack: Path) -> None:
        raise GitError(["git", "index-pack"], 128, "fatal: sha1 file: No space left on device")

    true_add = Quarantine.add_pack
    monkeypatch.setattr(Quarantine, "add_pack", full)
    with pytest.raises(DiskFull, match="PYLLAMAKV_HOME"):
        fetch.fetch(release)
    assert not refs(open_store())
    monkeypatch.setattr(Quarantine, "add_pack", true_add)
    fetch.fetch(release)
    assert open_store().has(release)


def test_pinned_version_missing_on_the_index_names_the_newest(
    tmp_path: Path, server: Server
) -> None:
    """A pinned version that the index lacks is a failed fetch whose error names the newest one."""
    release, _ = pinned(tmp_path / "up", "1.0")
    index_page(server, sdist(tmp_path / "other", "2.0"))
    with pytest.raises(FetchError, match=r"newest there is 2\.0"):
        fetch.fetch(release)


@pytest.mark.slow
@pytest.mark.regression(
    "two processes that added the same version removed each other's archive",
    by="faults",
    of="Python",
)
def test_concurrent_additions_of_a_version_succeed(
    tmp_path: Path, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process to finish does not remove the archive of the other."""
    file = sdist(tmp_path / "up", "9.0.1")
    index_page(server, file)
    begun, ended, plain = Event(), Event(), fetch._add_file

    def slowly(*words: object) -> object:
        if not begun.is_set():
            begun.set()
            ended.wait(1.0)
        return plain(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "_add_file", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetch.add, "9.0.1")
        assert begun.wait(60)
        second = fetch.add("9.0.1")
        ended.set()
        assert first.result() == second
    assert list((home / "downloads").iterdir()) == []


def test_fetch_without_network_keeps_stored_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, a fetch fails with the reason, and stored releases stay usable."""
    with serving({}) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
        first, file = pinned(tmp_path / "up", "1.0")
        index_page(server, file)
        fetch.fetch(first)
    second, _ = pinned(tmp_path / "up2", "2.0")
    with pytest.raises(FetchError, match="network"):
        fetch.fetch(second)
    assert fetch.fetch(first) == first


def test_a_new_version_is_added(tmp_path: Path, server: Server) -> None:
    """A version that no lock has is added with all its data, and is found later."""
    expected, file = pinned(tmp_path / "up", "1.0")
    index_page(server, file)
    assert fetch.ensure("1.0") == expected
    assert resolve("1.0") == expected
    assert lockfile.load(lockfile.added()) == [expected]
    before = len(server.asked)
    assert fetch.add("1.0") == expected
    assert len(server.asked) == before


def test_a_new_version_may_be_pinned(tmp_path: Path, server: Server) -> None:
    """A version can be written to the shipped lock, together with its architectures."""
    names = b'LLM_ARCH_NAMES = {\n    { LLM_ARCH_LLAMA, "llama" },\n};\n'
    expected, file = pinned(tmp_path / "up", "1.0", TREE | {"src/llama-arch.cpp": names})
    index_page(server, file)
    fetch.add("1.0", pin=lockfile.shipped())
    assert lockfile.load(lockfile.shipped()) == [expected]
    assert lockfile.load(lockfile.added()) == []
    table = lockfile.shipped().with_name("architectures.toml")
    assert architectures.load(table) == {"llama": "1.0"}


def test_unknown_version_names_the_newest(tmp_path: Path, server: Server) -> None:
    """A version that the index lacks is refused with the versions that it has."""
    index_page(server, sdist(tmp_path / "up", "1.0"))
    with pytest.raises(UnknownRelease, match=r"newest there is 1\.0"):
        fetch.ensure("1.7")
    with pytest.raises(UnknownRelease):
        fetch.ensure("nonsense")


def test_local_archive_is_added_without_network(tmp_path: Path) -> None:
    """A local archive is added without a network and is not moved."""
    expected, file = pinned(tmp_path / "up", "1.0")
    assert fetch.add(str(file)) == expected
    assert open_store().has(expected)
    assert file.is_file()


def test_an_archive_of_a_pinned_release_must_match(tmp_path: Path) -> None:
    """An archive of a locked release is checked against the lock."""
    release, file = pinned(tmp_path / "up", "1.0")
    lockfile.save(lockfile.shipped(), [release])
    assert fetch.add(str(file)) == release
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(HashMismatch, match="the lock file expects"):
        fetch.add(str(file))


def test_invalid_additions_are_refused(tmp_path: Path) -> None:
    """An invalid file name and an unknown word are refused with the choices."""
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(UsageError, match="neither llama_cpp_python"):
        fetch.add(str(tmp_path / "x.zip"))
    with pytest.raises(UsageError, match="neither a file nor a version"):
        fetch.add("what")


def test_release_without_an_archive_is_not_fetched() -> None:
    """A lock entry without an archive cannot be fetched, and the error has the reason."""
    release = lockfile.Release("9.9", "sdist", "1" * 40, "2" * 40, "rows", "2025")
    with pytest.raises(NotFetched, match="no archive"):
        fetch.fetch(release)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_reference_release_is_fetched_from_the_real_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference release of the configured index matches the lock."""
    monkeypatch.undo()
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    release = resolve("0.3.9")
    try:
        fetch.fetch(release)
    except HashMismatch:
        raise
    except (FetchError, UnknownRelease) as error:
        pytest.skip(f"the index cannot be reached: {error}")
    store = open_store()
    assert store.tree_of(release) == release.tree
    store.export(release, tmp_path / "tree")
    assert not store.compare(release, tmp_path / "tree")
    assert (tmp_path / "tree" / "include" / "llama.h").stat().st_size > 0
