"""Test the import of llama.cpp from an sdist: only objects, checked by git; no code is run."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from archive_kit import refused
from source_kit import (
    MODULE,
    TREE,
    link,
    objects,
    pack,
    pinned,
    refs,
    repository,
    sdist_members,
)

from pyllamakv.errors import ArchiveError, HashMismatch
from pyllamakv.source import git_command
from pyllamakv.source.sdist_import import import_sdist
from pyllamakv.source.store import Store, open_store

TOP = f"llama_cpp_python-1.0/{MODULE}"
UNPACKED = "llama_cpp_python-1.0/vendor/llama.cpp"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store."""
    return open_store(tmp_path / "home" / "store.git")


@pytest.fixture
def members(tmp_path: Path) -> dict[str, Any]:
    """Return the members of a valid sdist."""
    return sdist_members(tmp_path / "making", "1.0")


def packed(tmp_path: Path, members: dict[str, Any]) -> Path:
    return pack(tmp_path / "llama_cpp_python-1.0.tar.gz", members)


def untouched(store: Store, before: set[str]) -> bool:
    """Return whether a store is unchanged and contains no partial files."""
    left = [p for p in Path(store.path).iterdir() if p.name.startswith("tmp-")]
    return objects(store) == before and not refs(store) and not left


def test_embedded_clone_is_imported_with_its_commit(store: Store, tmp_path: Path) -> None:
    """The commit of the embedded clone is imported completely, and equals the unpacked tree."""
    release, file = pinned(tmp_path, "1.0")
    commit, tree = import_sdist(store, file, commit=release.commit, tree=release.tree)
    assert (commit, tree) == (release.commit, release.tree)
    assert {path: store.read(commit, path) for path in store.ls(commit)} == TREE
    store.update_ref("refs/upstream/1.0", commit)
    git_command.git(store.path, "fsck", "--full", "--strict")


def test_config_and_hooks_of_an_sdist_are_not_imported(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """Only objects are imported: no config, hook or ref, and nothing of setup.py."""
    before = (Path(store.path) / "config").read_text()
    members[f"{TOP}/config"] = b'[http]\n\textraheader = "secret"\n[core]\n\tpager = false\n'
    import_sdist(store, packed(tmp_path, members))
    assert (Path(store.path) / "config").read_text() == before
    names = {p.name for p in Path(store.path).rglob("*")}
    assert "post-checkout" not in names
    assert not refs(store)
    assert not any("secret" in p.read_text("latin-1") for p in store.path.rglob("*") if p.is_file())


def test_loose_objects_of_a_clone_are_imported(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """A clone with loose objects is imported like a packed one."""
    clone = tmp_path / "making" / "clone-1.0"
    packs = list((clone / "objects" / "pack").glob("*.pack"))
    loose = tmp_path / "loose.git"
    git_command.git(tmp_path, "init", "-q", "--bare", str(loose))
    git_command.git(loose, "unpack-objects", "-q", input=packs[0])
    members = {k: v for k, v in members.items() if "/objects/" not in k}
    for file in (loose / "objects").glob("??/*"):
        members[f"{TOP}/objects/{file.parent.name}/{file.name}"] = file.read_bytes()
    commit, _ = import_sdist(store, packed(tmp_path, members))
    assert set(store.ls(commit)) == set(TREE)


def test_head_of_a_loose_or_packed_branch_is_resolved(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """HEAD may name a branch, loose or packed."""
    commit = members[f"{TOP}/HEAD"].decode().strip()
    members = {k: v for k, v in members.items() if "/refs/" not in k and "packed-refs" not in k}
    members[f"{TOP}/HEAD"] = b"ref: refs/heads/master\n"
    members[f"{TOP}/packed-refs"] = f"# pack-refs\n{commit} refs/heads/master\n".encode()
    assert import_sdist(store, packed(tmp_path, members))[0] == commit
    del members[f"{TOP}/packed-refs"]
    members[f"{TOP}/refs/heads/master"] = f"{commit}\n".encode()
    assert import_sdist(store, packed(tmp_path, members))[0] == commit


def test_an_sdist_without_a_clone_is_read_as_a_tree(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """Without the clone the unpacked tree is imported, with the same tree and fixed ids."""
    plain = {k: v for k, v in members.items() if "/.git/" not in k}
    release, _ = pinned(tmp_path / "other", "1.0")
    commit, tree = import_sdist(store, packed(tmp_path, plain))
    assert tree == release.tree
    assert set(store.ls(commit)) == set(TREE)
    assert not refs(store)
    second = open_store(tmp_path / "second.git")
    assert import_sdist(second, tmp_path / "llama_cpp_python-1.0.tar.gz") == (commit, tree)


def test_links_in_a_plain_tree_stay_links(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """Links of an unpacked tree become links of the commit; nothing is written to the disk."""
    plain = {k: v for k, v in members.items() if "/.git/" not in k}
    plain["x"] = link(f"{UNPACKED}/l.h", "include/llama.h")
    commit, _ = import_sdist(store, packed(tmp_path, plain))
    assert {e.mode for e in store.entries(commit, "l.h")} == {"120000"}


@pytest.mark.parametrize("path", ["../../../escape", "a/../../b", "./x"])
def test_member_path_outside_the_tree_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any], path: str
) -> None:
    """An archive with a member outside of the tree is refused."""
    plain = {k: v for k, v in members.items() if "/.git/" not in k}
    plain[f"{UNPACKED}/{path}"] = b"x"
    with pytest.raises(ArchiveError, match=r"points outside|path outside"):
        import_sdist(store, packed(tmp_path, plain))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_in_place_of_an_object_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any], kind: bytes
) -> None:
    """A link, a hard link or a pipe in place of an object is refused."""
    before = objects(store)
    name = f"{TOP}/objects/pack/pack-{'a' * 40}.pack"
    members["bad"] = link(name, "/etc/passwd", kind)
    with pytest.raises(ArchiveError, match="not a plain file"):
        import_sdist(store, packed(tmp_path, members))
    assert untouched(store, before)


def test_an_object_under_another_name_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """A loose object must match its name and be complete."""
    content = b"blob 1\0x"
    name = hashlib.sha1(content).hexdigest()
    good = zlib.compress(content)
    wrong = {"0" * 40: good, name: good[:-3], "1" * 40: b"no zlib"}
    before = objects(store)
    for sha, data in wrong.items():
        bad = members | {f"{TOP}/objects/{sha[:2]}/{sha[2:]}": data}
        with pytest.raises(ArchiveError, match=sha):
            import_sdist(store, packed(tmp_path, bad))
    assert untouched(store, before)


def test_a_damaged_pack_is_refused(store: Store, tmp_path: Path, members: dict[str, Any]) -> None:
    """Git detects a flipped bit in the pack, and the store is unchanged."""
    before = objects(store)
    name = next(k for k in members if k.endswith(".pack"))
    data = bytearray(members[name])
    data[len(data) // 2] ^= 1
    with pytest.raises(ArchiveError, match="damaged"):
        import_sdist(store, packed(tmp_path, members | {name: bytes(data)}))
    assert untouched(store, before)


def test_a_clone_that_lacks_objects_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """A HEAD whose commit is not in the pack, or that names none, is refused."""
    before = objects(store)
    with pytest.raises(ArchiveError, match="lacks objects"):
        import_sdist(store, packed(tmp_path, members | {f"{TOP}/HEAD": b"1" * 40}))
    with pytest.raises(ArchiveError, match="names no commit"):
        import_sdist(store, packed(tmp_path, members | {f"{TOP}/HEAD": b"gibberish"}))
    assert untouched(store, before)


def test_a_truncated_archive_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """An archive that is truncated anywhere is refused, and so is a file of another format."""
    before = objects(store)
    file = packed(tmp_path, members)
    whole = file.read_bytes()
    for length in (0, 5, len(whole) // 3, len(whole) - 20, len(whole) - 4):
        file.write_bytes(whole[:length])
        with pytest.raises(ArchiveError):
            import_sdist(store, file)
    with pytest.raises(ArchiveError, match="no archive"):
        import_sdist(store, tmp_path / "none.tar.gz")
    assert untouched(store, before)


def test_a_duplicate_member_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """Two members of one name are refused, because readers differ in which one they use."""
    info = tarfile.TarInfo(f"{TOP}/HEAD")
    with pytest.raises(ArchiveError, match="twice"):
        import_sdist(store, packed(tmp_path, members | {"again": info}))


@pytest.mark.regression(
    "two clones in an sdist were mixed into one", by="hostile input", of="Python"
)
def test_two_clones_are_refused(store: Store, tmp_path: Path, members: dict[str, Any]) -> None:
    """Two clones in folders of different names are refused like two members of one name."""
    other = {name.replace("llama_cpp_python", "other"): data for name, data in members.items()}
    for part in ("/HEAD", "/pack/"):
        again = {name: data for name, data in other.items() if part in name}
        with pytest.raises(ArchiveError, match="twice"):
            import_sdist(store, packed(tmp_path, members | again))


@pytest.mark.regression(
    "after the import of an sdist whose HEAD was a tag, every fetch into the store failed",
    by="hostile input",
    of="Python",
)
def test_a_head_that_names_a_tag_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """A tag would stop git from fetching other releases."""
    source = tmp_path / "tagged"
    commit = repository(source)
    git_command.git(source, "tag", "-a", "-m", "x", "x")
    tag = git_command.git(source, "rev-parse", "x")
    members = {k: v for k, v in members.items() if "/objects/" not in k}
    for file in (source / ".git" / "objects").glob("??/*"):
        members[f"{TOP}/objects/{file.parent.name}/{file.name}"] = file.read_bytes()
    before = objects(store)
    with pytest.raises(ArchiveError, match="the tag"):
        import_sdist(store, packed(tmp_path, members | {f"{TOP}/HEAD": tag.encode()}))
    assert untouched(store, before)
    assert import_sdist(store, packed(tmp_path, members | {f"{TOP}/HEAD": commit.encode()}))


def test_an_archive_without_llama_cpp_is_refused(store: Store, tmp_path: Path) -> None:
    """The error names the expected content."""
    with pytest.raises(ArchiveError, match=r"vendor/llama\.cpp"):
        import_sdist(store, packed(tmp_path, {"other-1.0/README": b"x"}))


def test_commit_or_tree_other_than_pinned_is_refused(
    store: Store, tmp_path: Path, members: dict[str, Any]
) -> None:
    """The error has both ids, and the store is unchanged."""
    file = packed(tmp_path, members)
    before = objects(store)
    with pytest.raises(HashMismatch) as caught:
        import_sdist(store, file, commit="1" * 40)
    assert caught.value.expected == "1" * 40
    assert caught.value.found == members[f"{TOP}/HEAD"].decode().strip()
    with pytest.raises(HashMismatch, match="holds tree"):
        import_sdist(store, file, tree="2" * 40)
    assert untouched(store, before)


def test_importing_twice_is_harmless(store: Store, tmp_path: Path, members: dict[str, Any]) -> None:
    """The second import changes nothing."""
    file = packed(tmp_path, members)
    first = import_sdist(store, file)
    before = objects(store)
    assert import_sdist(store, file) == first
    assert objects(store) == before


def test_tree_without_llama_h_is_refused(store: Store, tmp_path: Path) -> None:
    """A plain tree that has no llama.h is not llama.cpp."""
    plain = {f"llama_cpp_python-1.0/vendor/llama.cpp/{n}": b"x" for n in ("README.md", "src/x.cpp")}
    refused(store, packed(tmp_path, plain), "no llama.cpp: neither include/llama.h nor")
