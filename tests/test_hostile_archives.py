"""Archives that want more than to be read: out of the tree, without end, or run."""

from __future__ import annotations

import hashlib
import random
import struct
import tarfile
import zlib
from typing import TYPE_CHECKING

import pytest
from archive_kit import PLAIN, UNPACKED, refused, sdist
from source_kit import (
    TREE,
    fill,
    isolate,
    link,
    objects,
    pack,
    refs,
    repository,
    sdist_members,
    serving,
)

from pyllamakv.errors import ArchiveError, FetchError, SourceError
from pyllamakv.source import bounds, download, fetch, gitting, limits, npm
from pyllamakv.source.archive import import_sdist
from pyllamakv.source.index import Index
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

BUNDLE = "package/llama/gitRelease.bundle"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a home of its own."""
    return isolate(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_only_files_and_links_of_a_plain_tree_are_taken(tmp_path: Path, kind: bytes) -> None:
    """A hard link, a device or a pipe in an unpacked tree is refused."""
    members = PLAIN | {"x": link(f"{UNPACKED}/src/x", "/etc/passwd", kind)}
    refused(open_store(), sdist(tmp_path, members), "no plain file")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "llama_cpp_python-1.0/../../x"])
def test_members_outside_the_tree_are_passed_over(tmp_path: Path, name: str) -> None:
    """A member that is no part of llama.cpp is never written, wherever it wants to lie."""
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, PLAIN | {name: b"out"}))
    assert set(store.ls(commit)) == set(TREE)
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", ["/etc/x", "/", "a//b"])
def test_an_absolute_path_below_the_tree_is_refused(tmp_path: Path, name: str) -> None:
    """A path that would begin at the root, were it joined, is hostile."""
    refused(open_store(), sdist(tmp_path, PLAIN | {f"{UNPACKED}/{name}": b"x"}), "leads outside")


@pytest.mark.parametrize(
    "links",
    [
        {"a/out": "/etc"},
        {"a/out": "../../etc"},
        {"a/b/up": "../..", "a/b/out": "up/../etc"},
        {"a/b/up": "../..", "out": "a/b/up/../etc"},
    ],
)
@pytest.mark.defect(
    "a link out of a tree by way of another link was exported",
    by="hostile input",
    of="Python",
)
def test_a_link_out_of_the_tree_is_not_exported(tmp_path: Path, links: dict[str, str]) -> None:
    """A link that leads out by itself, or by way of another link, never reaches a folder."""
    members = PLAIN | {at: link(f"{UNPACKED}/{at}", to) for at, to in links.items()}
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, members))
    with pytest.raises(SourceError, match="leads outside"):
        store.export(commit, tmp_path / "tree")


@pytest.mark.defect(
    "a tree could bring the file that says what a folder holds, and so pass for whole",
    by="hostile input",
    of="Python",
)
def test_a_tree_with_a_stamp_of_its_own_is_not_exported(tmp_path: Path) -> None:
    """The file that says what a folder holds is ours alone."""
    store = open_store()
    for name in (".pyllamakv-tree", ".pyllamakv-tree/x"):
        commit, _ = store.commit(None, TREE | {name: b'{"complete": true}'}, "x")
        with pytest.raises(SourceError, match="unsafe path"):
            store.export(commit, tmp_path / "tree")


# --- without end ------------------------------------------------------------------------------


@pytest.mark.defect(
    "an archive could unpack without end in members that are not taken",
    by="hostile input",
    of="Python",
)
def test_an_archive_that_unpacks_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out is counted, wherever in the archive it lies."""
    monkeypatch.setattr(bounds, "BYTES", 1 << 20)
    bomb = bytes(2 << 20)
    where = [f"{UNPACKED}/big", "llama_cpp_python-1.0/README"]
    for name in where:
        refused(open_store(), sdist(tmp_path, PLAIN | {name: bomb}), "unpacks to more than")
    many = {f"{UNPACKED}/{n}": bytes(300 << 10) for n in range(5)}
    refused(open_store(), sdist(tmp_path, PLAIN | many), "unpacks to more than")
    tarball = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: bomb})
    with pytest.raises(ArchiveError, match="unpacks to more than"):
        npm.import_package(open_store(), tarball)


@pytest.mark.defect(
    "references of a clone in an archive had a bound each, and none together",
    by="hostile input",
    of="Python",
)
def test_references_without_end(tmp_path: Path) -> None:
    """The texts of a clone are counted together."""
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp"
    members = {f"{at}/refs/heads/{number}": bytes(300 << 10) for number in range(4)}
    refused(open_store(), sdist(tmp_path, members), "reasonable size")


def test_a_loose_object_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that unpacks past all bounds is refused before it fills the memory."""
    monkeypatch.setattr(limits, "OBJECT", 1 << 20)
    members = sdist_members(tmp_path / "making", "1.0")
    content = b"blob 4194304\0" + bytes(4 << 20)
    name = hashlib.sha1(content).hexdigest()
    place = f"llama_cpp_python-1.0/.git/modules/vendor/llama.cpp/objects/{name[:2]}/{name[2:]}"
    refused(open_store(), sdist(tmp_path, members | {place: zlib.compress(content)}), name)


def packed(*entries: tuple[int, bytes]) -> bytes:
    """Return a pack of objects, each a number for its kind and a content."""
    out = bytearray(b"PACK" + struct.pack(">II", 2, len(entries)))
    for kind, data in entries:
        first, size = kind << 4 | len(data) & 15, len(data) >> 4
        while size:
            out.append(first | 0x80)
            first, size = size & 0x7F, size >> 7
        out.append(first)
        out += zlib.compress(data)
    return bytes(out + hashlib.sha1(out).digest())


@pytest.mark.parametrize(("name", "limit"), [("OBJECT", 1 << 20), ("MEMORY", 256 << 20)])
@pytest.mark.defect(
    "a pack that claimed an object of any size made git take as much memory",
    by="hostile input",
    of="Python",
)
def test_a_packed_object_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """A tree that claims more than there may be is no allocation: not in an sdist, nor a bundle."""
    monkeypatch.setattr(limits, "OBJECT", 1 << 40)
    monkeypatch.setattr(limits, name, limit)
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
    if name == "OBJECT":
        (tmp_path / "bundle").write_bytes(bundle)
        not_fetched(f"git:{tmp_path / 'bundle'}@HEAD", "bytes for an object")


@pytest.mark.defect("a small pack could keep git at work for days", by="hostile input", of="Python")
def test_objects_that_take_git_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object of a small pack may be large, and there may be many: time has a limit as well."""
    monkeypatch.setattr(limits, "CPU_SECONDS", 1)
    number, large = 30, packed((3, bytes(100 << 20)))[12:-20]
    head = b"PACK" + struct.pack(">II", 2, number)
    whole = head + large * number
    bomb = whole + hashlib.sha1(whole).digest()
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp"
    members = {f"{at}/HEAD": b"1" * 40, f"{at}/objects/pack/pack-{'1' * 40}.pack": bomb}
    refused(open_store(), sdist(tmp_path, members), "processor time")
    (tmp_path / "bundle").write_bytes(b"# v2 git bundle\n" + b"1" * 40 + b" HEAD\n\n" + bomb)
    not_fetched(f"git:{tmp_path / 'bundle'}@HEAD", "processor time")


@pytest.mark.defect(
    "small loose objects of an archive could unpack without end together",
    by="hostile input",
    of="Python",
)
def test_loose_objects_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a few kilobytes each are counted as they unpack."""
    monkeypatch.setattr(bounds, "BYTES", 5 << 20)
    at = "llama_cpp_python-1.0/.git/modules/vendor/llama.cpp/objects"
    members = {}
    for number in range(6):
        content = b"blob 1048577\0" + bytes(1 << 20) + bytes([number])
        name = hashlib.sha1(content).hexdigest()
        members[f"{at}/{name[:2]}/{name[2:]}"] = zlib.compress(content)
    refused(open_store(), sdist(tmp_path, members), "not packed")


def not_fetched(spec: str, words: str) -> None:
    """Check that a source is refused, and that the store is as it was."""
    store = open_store()
    before = objects(store)
    with pytest.raises(ArchiveError, match=words):
        fetch.add(spec)
    assert objects(store) == before
    assert not refs(store)
    assert not (store.path / "shallow").exists()
    assert not list(store.path.glob("tmp-*"))


@pytest.mark.defect(
    "a git URL was fetched into the store itself, in any size, and left there what was then "
    "refused",
    by="hostile input",
    of="Python",
)
def test_a_repository_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack past the limit is given up while it comes; one of too much is not kept."""
    big = {f"src/{n}": random.Random(n).randbytes(700 << 10) for n in range(3)}
    repository(tmp_path / "up", TREE | big)
    gitting.git(tmp_path / "up", "bundle", "create", "-q", "../bundle", "main")
    specs = (f"git:file://{tmp_path / 'up'}@main", f"git:{tmp_path / 'bundle'}@main")
    for spec in specs:
        with monkeypatch.context() as patch:
            patch.setattr(limits, "FILE", 1 << 20)
            not_fetched(spec, "in a file to unpack")
        with monkeypatch.context() as patch:
            patch.setattr(bounds, "BYTES", 1 << 20)
            not_fetched(spec, "no release comes near")
        with monkeypatch.context() as patch:
            patch.setattr(limits, "OBJECT", 500 << 10)
            not_fetched(spec, "no release comes near")
        with monkeypatch.context() as patch:
            patch.setattr(bounds, "NAMES", 100)
            not_fetched(spec, "no release comes near")
    for spec in specs:
        fetch.add(spec)


@pytest.mark.defect(
    "a folder as a source was read in any size before it was looked at",
    by="hostile input",
    of="Python",
)
def test_a_folder_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is counted before anything of it is written, a work tree as well."""
    plain = fill(tmp_path / "plain", TREE)
    repository(tmp_path / "up")
    for folder in (plain, tmp_path / "up"):
        with (folder / "sparse").open("wb") as file:
            file.truncate(limits.OBJECT + 1)
        not_fetched(f"path:{folder}", "bytes in one file")
        (folder / "sparse").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(bounds, "FILES", 3)
            not_fetched(f"path:{folder}", "more than 3 files")
        with monkeypatch.context() as patch:
            patch.setattr(bounds, "BYTES", 20)
            not_fetched(f"path:{folder}", "20 bytes")


def nested(store: Store, depth: int) -> str:
    """Return a tree of trees, each ten times in the next: ten to the power of ``depth`` files."""
    blob = gitting.git(store.path, "hash-object", "-w", "--stdin", input=b"x")
    line = f"100644 blob {blob}\t"
    for _ in range(depth):
        listed = "".join(f"{line}{n}\n" for n in range(10))
        tree = gitting.git(store.path, "mktree", input=listed)
        line = f"040000 tree {tree}\t"
    return tree


@pytest.mark.defect(
    "trees that hold each other, a kilobyte in git, were taken and would have been billions of "
    "files",
    by="hostile input",
    of="Python",
)
def test_trees_that_hold_each_other(tmp_path: Path) -> None:
    """A tree of a billion files, a kilobyte as git keeps it, is refused in an instant."""
    made = open_store(tmp_path / "made.git")
    commit = made.commit_tree(nested(made, 9), [], "bomb")
    gitting.git(made.path, "update-ref", "refs/heads/main", commit)
    gitting.git(made.path, "bundle", "create", "-q", str(tmp_path / "bundle"), "main")
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: (tmp_path / "bundle").read_bytes()})
    store = open_store()
    before = objects(store)
    with pytest.raises(ArchiveError, match="no release comes near"):
        npm.import_package(store, file)
    assert objects(store) == before
    not_fetched(f"git:{tmp_path / 'bundle'}@main", "no release comes near")


@pytest.mark.defect(
    "folders within each other that git cannot walk ended it, and the error did not name the "
    "archive as the cause",
    by="hostile input",
    of="Python",
)
def test_folders_within_each_other(tmp_path: Path) -> None:
    """Git walks folders by recursion, and ends where its stack does."""
    path = f"{UNPACKED}/{'d/' * 30_000}f"
    refused(open_store(), sdist(tmp_path, PLAIN | {path: b"x"}), "git can walk|lacks objects")


@pytest.mark.defect(
    "trees that hold each other, a kilobyte in git, were taken and would have been billions of "
    "files",
    by="hostile input",
    of="Python",
)
def test_files_that_are_small_in_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a tree are counted as they would be written out."""
    monkeypatch.setattr(bounds, "BYTES", 1 << 20)
    members = sdist_members(tmp_path / "making", "1.0", TREE | {"zeros": bytes(2 << 20)})
    small = {name: data for name, data in members.items() if len(data) < 1 << 20}
    assert len(small) < len(members)
    refused(open_store(), sdist(tmp_path, small), "no release comes near")


@pytest.mark.defect(
    "a server that never ended a download filled the disk",
    by="hostile input",
    of="Python",
)
def test_a_download_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never stops is left, and what it sent is thrown away."""
    monkeypatch.setattr(bounds, "BYTES", 1 << 16)
    endless = serving({"/f": bytes(1 << 20)})
    with endless as server, Index() as index, pytest.raises(FetchError, match="longer than"):
        download.download(index.session, f"{server.url}/f", tmp_path / "f", sha256=None)
    assert not list(tmp_path.glob("f*"))


# --- what commits say ---------------------------------------------------------------------------

MAKER = b"author a <a@b> 1 +0000\n"
MADE = b"committer a <a@b> 1 +0000\n"
ODD = {
    "no committer": MAKER,
    "no number": MAKER + b"committer a <a@b> z +0000\n",
    "no field": MAKER + b"committer x\n",
    "far away": MAKER + b"committer a <a@b> 99999999999999 +0000\n",
    "crowd": b"",
}


def loose(kind: str, data: bytes) -> tuple[str, bytes]:
    """Return the name of a git object, and the bytes of its file."""
    whole = f"{kind} {len(data)}\0".encode() + data
    return hashlib.sha1(whole).hexdigest(), zlib.compress(whole)


@pytest.mark.parametrize("said", ODD)
@pytest.mark.defect(
    "commits without a date, with one far away, or with parents without number were taken, or a "
    "bare error",
    by="hostile input",
    of="Python",
)
def test_commits_that_say_what_none_does(tmp_path: Path, said: str) -> None:
    """A commit without a date, or with parents without number, is refused before it is taken."""
    up = tmp_path / "up"
    tree = f"tree {gitting.git(up, 'rev-parse', repository(up) + '^{tree}')}\n".encode()
    parents = [loose("commit", tree + MAKER + MADE + b"\n%d\n" % n) for n in range(65)]
    named = b"".join(f"parent {name}\n".encode() for name, _ in parents)
    text = tree + (ODD[said] or named + MAKER + MADE) + b"\nx\n"
    head, data = loose("commit", text)
    for name, content in (*parents, (head, data)):
        fill(up / ".git" / "objects", {f"{name[:2]}/{name[2:]}": content})
    gitting.git(up, "update-ref", "refs/heads/main", head)
    gitting.git(up, "bundle", "create", "-q", str(tmp_path / "bundle"), "HEAD")
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: (tmp_path / "bundle").read_bytes()})
    words = "65 parents" if said == "crowd" else "nothing of when"
    for spec in (str(file), f"git:file://{up}@main", f"git:{tmp_path / 'bundle'}@HEAD"):
        not_fetched(spec, words)
    if said != "crowd":
        assert fetch.add(f"path:{up}").date


# --- run --------------------------------------------------------------------------------------


def test_nothing_of_an_sdist_is_run(tmp_path: Path) -> None:
    """Whatever Python, CMake, make, npm or git would run of a folder leaves no trace here."""
    trace = tmp_path / "ran"
    python = f"open({str(trace)!r}, 'w')\n".encode()
    shell = f"#!/bin/sh\ntouch {trace}\n".encode()
    top = "llama_cpp_python-1.0"
    members = sdist_members(tmp_path / "making", "1.0")
    members |= {
        f"{top}/setup.py": python,
        f"{top}/conftest.py": python,
        f"{top}/sitecustomize.py": python,
        f"{top}/llama_cpp/__init__.py": python,
        f"{top}/CMakeLists.txt": f"execute_process(COMMAND touch {trace})\n".encode(),
        f"{top}/Makefile": f"all:\n\ttouch {trace}\n".encode(),
        f"{top}/pyproject.toml": b'[build-system]\nrequires = ["evil"]\nbuild-backend = "setup"\n',
        f"{top}/.git/config": f"[core]\n\tfsmonitor = touch {trace}\n".encode(),
        f"{top}/.git/hooks/post-checkout.sh": shell,
        f"{top}/.git/modules/vendor/llama.cpp/hooks/reference-transaction.sh": shell,
        f"{top}/.git/modules/vendor/llama.cpp/config": (
            f"[core]\n\tfsmonitor = touch {trace}\n\tsshCommand = touch {trace}\n"
            f'[filter "x"]\n\tsmudge = touch {trace}\n\trequired = true\n'
        ).encode(),
    }
    release = fetch.add(str(sdist(tmp_path, members)))
    open_store().export(release, tmp_path / "tree")
    assert (tmp_path / "tree" / "include" / "llama.h").is_file()
    assert not trace.exists()


@pytest.mark.defect(
    "files of a tree with a newline or a carriage return in their name could not be read, or "
    "were taken for another",
    by="hostile input",
    of="Python",
)
def test_file_names_are_never_options(tmp_path: Path) -> None:
    """Leading dashes, blanks, quotes and newlines in names of files come through unchanged."""
    names = ["-rf", "--upload-pack=x", "a b", "a\nb", 'a"b', "a\tb", "$(x)", "`x`", ";x", "'"]
    files = TREE | {f"src/{name}": b"x" for name in names} | {"-x/--y": b"z"}
    plain = {f"{UNPACKED}/{name}": data for name, data in files.items()}
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, plain))
    assert set(store.ls(commit)) == set(files)
    store.export(commit, tmp_path / "tree")
    assert all((tmp_path / "tree" / name).read_bytes() == data for name, data in files.items())
    fill(tmp_path / "folder", files)
    release = fetch.add(f"path:{tmp_path / 'folder'}")
    assert set(store.ls(release.commit)) == set(files)
