"""Test limits of archives, repositories and directories, which are checked while reading."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from typing import TYPE_CHECKING

import pytest
from archive_kit import BUNDLE, PLAIN, UNPACKED, not_fetched, refused, sdist
from source_kit import (
    TREE,
    fill,
    objects,
    pack,
    repository,
    sdist_members,
    serving,
)

from pyllamakv.errors import ArchiveError, FetchError
from pyllamakv.source import download, fetch, git_command, git_limits, npm, tree_limits
from pyllamakv.source.index import PackageIndex
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.regression(
    "an archive could unpack without a limit in members that are not imported",
    by="hostile input",
    of="Python",
)
def test_unpacked_size_of_an_archive_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked bytes are counted in all parts of the archive."""
    monkeypatch.setattr(tree_limits, "MAX_BYTES", 1 << 20)
    bomb = bytes(2 << 20)
    where = [f"{UNPACKED}/big", "llama_cpp_python-1.0/README"]
    for name in where:
        refused(open_store(), sdist(tmp_path, PLAIN | {name: bomb}), "unpacks to more than")
    many = {f"{UNPACKED}/{n}": bytes(300 << 10) for n in range(5)}
    refused(open_store(), sdist(tmp_path, PLAIN | many), "unpacks to more than")
    tarball = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: bomb})
    with pytest.raises(ArchiveError, match="unpacks to more than"):
        npm.import_package(open_store(), tarball)


@pytest.mark.regression(
    "refs of a clone in an archive were limited one by one, but not in total",
    by="hostile input",
    of="Python",
)
def test_size_of_references_is_limited(tmp_path: Path) -> None:
    """The refs of a clone are counted together."""
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp"
    members = {f"{at}/refs/heads/{number}": bytes(300 << 10) for number in range(4)}
    refused(open_store(), sdist(tmp_path, members), "plausible size")


def test_unpacked_size_of_a_loose_object_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that unpacks to too many bytes is refused before it fills the memory."""
    monkeypatch.setattr(git_limits, "MAX_OBJECT_BYTES", 1 << 20)
    members = sdist_members(tmp_path / "making", "1.0")
    content = b"blob 4194304\0" + bytes(4 << 20)
    name = hashlib.sha1(content).hexdigest()
    place = f"llama_cpp_python-1.0/.git/modules/vendor/llama.cpp/objects/{name[:2]}/{name[2:]}"
    refused(open_store(), sdist(tmp_path, members | {place: zlib.compress(content)}), name)


def packed(*entries: tuple[int, bytes]) -> bytes:
    """Return a pack of objects, each given as the number of its kind and its content."""
    out = bytearray(b"PACK" + struct.pack(">II", 2, len(entries)))
    for kind, data in entries:
        first, size = kind << 4 | len(data) & 15, len(data) >> 4
        while size:
            out.append(first | 0x80)
            first, size = size & 0x7F, size >> 7
        out.append(first)
        out += zlib.compress(data)
    return bytes(out + hashlib.sha1(out).digest())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit"), [("MAX_OBJECT_BYTES", 1 << 20), ("MAX_MEMORY_BYTES", 256 << 20)]
)
@pytest.mark.regression(
    "a pack with a huge claimed object size made git allocate as much memory",
    by="hostile input",
    of="Python",
)
def test_claimed_size_of_a_packed_object_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """A tree with a huge claimed size is not allocated, from an sdist or a bundle."""
    monkeypatch.setattr(git_limits, "MAX_OBJECT_BYTES", 1 << 40)
    monkeypatch.setattr(git_limits, name, limit)
    bomb = packed((2, bytes(300 << 20)))
    assert len(bomb) < 1 << 20
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp"
    members = {f"{at}/HEAD": b"1" * 40, f"{at}/objects/pack/pack-{'1' * 40}.pack": bomb}
    refused(open_store(), sdist(tmp_path, members), "bytes for an object")
    bundle = b"# v2 git bundle\n" + b"1" * 40 + b" HEAD\n\n" + bomb
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: bundle})
    with pytest.raises(ArchiveError, match="bytes for an object"):
        npm.import_package(open_store(), file)
    assert not objects(open_store())
    if name == "MAX_OBJECT_BYTES":
        (tmp_path / "bundle").write_bytes(bundle)
        not_fetched(f"git:{tmp_path / 'bundle'}@HEAD", "bytes for an object")


@pytest.mark.slow
@pytest.mark.regression(
    "a small pack could keep git busy for days", by="hostile input", of="Python"
)
def test_processor_time_of_git_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pack may have many large objects, so CPU time is limited as well."""
    monkeypatch.setattr(git_limits, "MAX_CPU_SECONDS", 1)
    number, large = 30, packed((3, bytes(100 << 20)))[12:-20]
    head = b"PACK" + struct.pack(">II", 2, number)
    whole = head + large * number
    bomb = whole + hashlib.sha1(whole).digest()
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp"
    members = {f"{at}/HEAD": b"1" * 40, f"{at}/objects/pack/pack-{'1' * 40}.pack": bomb}
    refused(open_store(), sdist(tmp_path, members), "processor time")
    (tmp_path / "bundle").write_bytes(b"# v2 git bundle\n" + b"1" * 40 + b" HEAD\n\n" + bomb)
    not_fetched(f"git:{tmp_path / 'bundle'}@HEAD", "processor time")


@pytest.mark.regression(
    "small loose objects of an archive could unpack without a total limit",
    by="hostile input",
    of="Python",
)
def test_total_size_of_loose_objects_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects of a few kilobytes each are counted as they are unpacked."""
    monkeypatch.setattr(tree_limits, "MAX_BYTES", 5 << 20)
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp/objects"
    members = {}
    for number in range(6):
        content = b"blob 1048577\0" + bytes(1 << 20) + bytes([number])
        name = hashlib.sha1(content).hexdigest()
        members[f"{at}/{name[:2]}/{name[2:]}"] = zlib.compress(content)
    refused(open_store(), sdist(tmp_path, members), "loose objects")


@pytest.mark.slow
@pytest.mark.regression(
    "a git URL was fetched into the store without a limit, and refused objects stayed in it",
    by="hostile input",
    of="Python",
)
def test_size_of_a_fetched_repository_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack beyond the limit is cancelled during the transfer and not kept."""
    big = {f"src/{n}": random.Random(n).randbytes(700 << 10) for n in range(3)}
    repository(tmp_path / "up", TREE | big)
    git_command.git(tmp_path / "up", "bundle", "create", "-q", "../bundle", "main")
    specs = (f"git:file://{tmp_path / 'up'}@main", f"git:{tmp_path / 'bundle'}@main")
    for spec in specs:
        with monkeypatch.context() as patch:
            patch.setattr(git_limits, "MAX_FILE_BYTES", 1 << 20)
            not_fetched(spec, "in a file to unpack")
        with monkeypatch.context() as patch:
            patch.setattr(tree_limits, "MAX_BYTES", 1 << 20)
            not_fetched(spec, "no release (is that large|needs that much)")
        with monkeypatch.context() as patch:
            patch.setattr(git_limits, "MAX_OBJECT_BYTES", 500 << 10)
            not_fetched(spec, "no release (is that large|needs that much)")
        with monkeypatch.context() as patch:
            patch.setattr(tree_limits, "MAX_NAMES_BYTES", 100)
            not_fetched(spec, "no release (is that large|needs that much)")
    for spec in specs:
        fetch.add(spec)


@pytest.mark.regression(
    "a directory as a source was read completely before its size was checked",
    by="hostile input",
    of="Python",
)
def test_size_of_a_directory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory, or a work tree, is counted before any of it is written."""
    plain = fill(tmp_path / "plain", TREE)
    repository(tmp_path / "up")
    for folder in (plain, tmp_path / "up"):
        with (folder / "sparse").open("wb") as file:
            file.truncate(git_limits.MAX_OBJECT_BYTES + 1)
        not_fetched(f"path:{folder}", "bytes in one file")
        (folder / "sparse").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(tree_limits, "MAX_FILES", 3)
            not_fetched(f"path:{folder}", "more than 3 files")
        with monkeypatch.context() as patch:
            patch.setattr(tree_limits, "MAX_BYTES", 20)
            not_fetched(f"path:{folder}", "20 bytes")


def nested(store: Store, depth: int) -> str:
    """Return nested trees, each ten times in the next: ten to the power of ``depth`` files."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input=b"x")
    line = f"100644 blob {blob}\t"
    for _ in range(depth):
        listed = "".join(f"{line}{n}\n" for n in range(10))
        tree = git_command.git(store.path, "mktree", input=listed)
        line = f"040000 tree {tree}\t"
    return tree


@pytest.mark.slow
@pytest.mark.regression(
    "exponentially nested trees, a kilobyte in git and billions of files, were accepted",
    by="hostile input",
    of="Python",
)
def test_exponentially_nested_trees_are_refused(tmp_path: Path) -> None:
    """A tree of a billion files, stored in a kilobyte, is refused immediately."""
    made = open_store(tmp_path / "made.git")
    commit = made.commit_tree(nested(made, 9), [], "bomb")
    git_command.git(made.path, "update-ref", "refs/heads/main", commit)
    git_command.git(made.path, "bundle", "create", "-q", str(tmp_path / "bundle"), "main")
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: (tmp_path / "bundle").read_bytes()})
    store = open_store()
    before = objects(store)
    with pytest.raises(ArchiveError, match=r"no release (is that large|needs that much)"):
        npm.import_package(store, file)
    assert objects(store) == before
    not_fetched(f"git:{tmp_path / 'bundle'}@main", "no release (is that large|needs that much)")


@pytest.mark.slow
@pytest.mark.regression(
    "deeply nested directories crashed git, and the error did not name the archive as the cause",
    by="hostile input",
    of="Python",
)
def test_deeply_nested_directories_are_refused(tmp_path: Path) -> None:
    """Git walks directories recursively, up to the limit of its stack."""
    path = f"{UNPACKED}/{'d/' * 30_000}f"
    refused(open_store(), sdist(tmp_path, PLAIN | {path: b"x"}), "git can process|lacks objects")


@pytest.mark.regression(
    "exponentially nested trees, a kilobyte in git and billions of files, were accepted",
    by="hostile input",
    of="Python",
)
def test_unpacked_size_of_a_tree_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a tree are counted as if they were written."""
    monkeypatch.setattr(tree_limits, "MAX_BYTES", 1 << 20)
    members = sdist_members(tmp_path / "making", "1.0", TREE | {"zeros": bytes(2 << 20)})
    small = {name: data for name, data in members.items() if len(data) < 1 << 20}
    assert len(small) < len(members)
    refused(open_store(), sdist(tmp_path, small), "no release (is that large|needs that much)")


@pytest.mark.regression(
    "an endless download filled the disk",
    by="hostile input",
    of="Python",
)
def test_size_of_a_download_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless download is cancelled and deleted."""
    monkeypatch.setattr(tree_limits, "MAX_BYTES", 1 << 16)
    endless = serving({"/f": bytes(1 << 20)})
    with endless as server, PackageIndex() as index, pytest.raises(FetchError, match="longer than"):
        download.download(index.session, f"{server.url}/f", tmp_path / "f", sha256=None)
    assert not list(tmp_path.glob("f*"))
