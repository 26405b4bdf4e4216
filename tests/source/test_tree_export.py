"""Test exports: only differences are written, and incomplete exports are detected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from source_kit import TREE, repository

from pyllamakv.errors import DiskFull, SourceError, UsageError
from pyllamakv.source import git_command, tree_export
from pyllamakv.source.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store whose ref `main` is a tiny llama.cpp."""
    made = open_store(tmp_path / "store.git")
    commit = repository(tmp_path / "up")
    git_command.git(made.path, "fetch", "-q", str(tmp_path / "up"), "HEAD", network=True)
    made.update_ref("refs/upstream/main", commit)
    return made


MAIN = "refs/upstream/main"


def found(folder: Path) -> dict[str, bytes]:
    """Return the files of a directory without the stamp."""
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name != tree_export.STAMP)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def test_export_writes_the_tree(store: Store, tmp_path: Path) -> None:
    """A first export writes every file with its mode, independent of the umask."""
    before = os.umask(0o077)
    try:
        done = store.export(MAIN, tmp_path / "out")
    finally:
        os.umask(before)
    assert found(tmp_path / "out") == TREE
    assert done.written == len(TREE)
    assert (tmp_path / "out/scripts/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out/include/llama.h").stat().st_mode & 0o777 == 0o644
    assert tree_export.stamped(tmp_path / "out") == store.tree_of(MAIN) == done.tree


def test_export_rewrites_only_changed_files(store: Store, tmp_path: Path) -> None:
    """Switching between two commits rewrites only the files that differ."""
    out = tmp_path / "out"
    store.export(MAIN, out)
    for path in out.rglob("*"):
        os.utime(path, (1e9, 1e9))
    child, _ = store.commit(MAIN, {"src/llama.cpp": b"patched\n", "src/new.h": b"\n"}, "patch")
    done = store.export(child, out)
    assert (done.written, done.removed) == (2, 0)
    fresh = [p for p in TREE if (out / p).stat().st_mtime != 1e9]
    assert fresh == ["src/llama.cpp"]
    back = store.export(MAIN, out)
    assert (back.written, back.removed) == (1, 1)
    assert found(out) == TREE
    assert store.export(MAIN, out).written == 0


def test_export_removes_stray_files_except_kept_ones(store: Store, tmp_path: Path) -> None:
    """Foreign files and empty directories are removed; files on the keep list are not."""
    out = tmp_path / "out"
    store.export(MAIN, out)
    for name in ("stray", "deep/er/stray", "build/obj.o", "common/build-info.cpp"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("x")
    store.export(MAIN, out, keep=("build", "common/build-info.cpp"))
    assert set(found(out)) == set(TREE) | {"build/obj.o", "common/build-info.cpp"}
    assert not (out / "deep").exists()
    store.export(MAIN, out)
    assert set(found(out)) == set(TREE) | {"common/build-info.cpp"}


def test_damage_is_named_and_repaired(store: Store, tmp_path: Path) -> None:
    """Changed, missing and stray files and modes are listed, and the next export repairs them."""
    out = tmp_path / "out"
    store.export(MAIN, out)
    assert not store.compare(MAIN, out)
    (out / "src/llama.cpp").write_text("other")
    (out / "scripts/run.sh").chmod(0o644)
    (out / "include/llama.h").unlink()
    (out / "new").write_text("x")
    (out / "common").mkdir()
    (out / "common/build-info.cpp").write_text("x")
    expected = ["changed scripts/run.sh", "changed src/llama.cpp", "missing include/llama.h"]
    assert store.compare(MAIN, out).lines() == [*expected, "stray new"]
    store.export(MAIN, out)
    assert not store.compare(MAIN, out)


def test_incomplete_export_is_detected(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk fills up during an export, the directory is incomplete."""
    out = tmp_path / "out"
    store.export(MAIN, out)
    child, tree = store.commit(MAIN, {"a": b"1", "b": b"2"}, "m")
    true_put = tree_export._put

    def full(folder: Path, entry: object, data: bytes) -> None:
        if data == b"2":
            raise OSError(28, "No space left on device")
        true_put(folder, entry, data)  # type: ignore[arg-type]

    monkeypatch.setattr(tree_export, "_put", full)
    with pytest.raises(DiskFull):
        store.export(child, out)
    assert tree_export.stamped(out) is None
    (out / tree_export.STAMP).write_text("[" * 100_000)
    assert tree_export.stamped(out) is None
    monkeypatch.undo()
    store.export(child, out)
    assert tree_export.stamped(out) == tree


def test_symbolic_link_inside_the_tree_is_exported(store: Store, tmp_path: Path) -> None:
    """A link inside the tree is exported as a link."""
    up = tmp_path / "up"
    (up / "link.h").symlink_to("include/llama.h")
    git_command.git(up, "add", "link.h")
    git_command.git(up, "commit", "-q", "-m", "link")
    git_command.git(store.path, "fetch", "-q", str(up), "+HEAD:refs/upstream/link", network=True)
    store.export("refs/upstream/link", tmp_path / "out")
    assert (tmp_path / "out/link.h").readlink() == Path("include/llama.h")
    assert not store.compare("refs/upstream/link", tmp_path / "out")
    (tmp_path / "out/link.h").unlink()
    (tmp_path / "out/link.h").symlink_to("elsewhere")
    assert store.compare("refs/upstream/link", tmp_path / "out").changed == ("link.h",)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "src/../../x"])
def test_symbolic_link_outside_the_tree_is_refused(
    store: Store, tmp_path: Path, target: str
) -> None:
    """A link to the outside of the tree is refused with its name."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input=target)
    tree = git_command.git(store.path, "mktree", input=f"120000 blob {blob}\tout\n")
    with pytest.raises(SourceError, match="points outside"):
        store.export(tree, tmp_path / "out")


@pytest.mark.parametrize("target", [b"", b"a\0b", b"a" * 5000])
@pytest.mark.regression(
    "links and names in a tree that cannot be written raised untyped errors during an export",
    by="hostile input",
    of="Python",
)
def test_invalid_symbolic_link_target_is_refused(
    store: Store, tmp_path: Path, target: bytes
) -> None:
    """Git stores any bytes as the target of a link; invalid targets are refused by name."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input=target)
    tree = git_command.git(store.path, "mktree", input=f"120000 blob {blob}\todd\n")
    with pytest.raises(SourceError, match="the link odd has a target"):
        store.export(tree, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["n" * 256, "/".join(["n" * 100] * 6), ".pyllamakv-part", "..pyllamakv-tree.part"]
)
@pytest.mark.parametrize("tail", ["", "/x"])
@pytest.mark.regression(
    "links and names in a tree that cannot be written raised untyped errors during an export",
    by="hostile input",
    of="Python",
)
def test_names_that_cannot_be_written_are_refused(
    store: Store, tmp_path: Path, name: str, tail: str
) -> None:
    """A name that is too long, or reserved for partial files, is not exported."""
    tree, _ = store.commit(None, {f"{name}{tail}": b"x", "x": b"y"}, "m")
    with pytest.raises(SourceError, match="unsafe path"):
        store.export(tree, tmp_path / "out")
    with pytest.raises(SourceError, match="unsafe path"):
        store.compare(tree, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_longest_file_names_are_exported(store: Store, tmp_path: Path) -> None:
    """The name of a partial file does not reduce the maximum length of names."""
    files = {"n" * 255: b"x", "m" * 250 + "/" + "n" * 250: b"y", "a/.pyllamakv-part": b"z"}
    tree, _ = store.commit(None, files, "m")
    store.export(tree, tmp_path / "out")
    assert found(tmp_path / "out") == files


@pytest.mark.parametrize("name", ["..", ".git", ".GIT"])
def test_unsafe_names_are_refused(store: Store, tmp_path: Path, name: str) -> None:
    """A tree with a name outside of it, or inside .git, is not exported."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input="x")
    inner = git_command.git(store.path, "mktree", input=f"100644 blob {blob}\tx\n")
    tree = git_command.git(store.path, "mktree", input=f"040000 tree {inner}\t{name}\n")
    with pytest.raises(SourceError, match="unsafe path"):
        store.export(tree, tmp_path / "out")
    assert not (tmp_path / "x").exists()


def test_export_replaces_a_link_without_following_it(store: Store, tmp_path: Path) -> None:
    """A directory that was replaced by a link is recreated; the link is not followed."""
    out, other = tmp_path / "out", tmp_path / "other"
    store.export(MAIN, out)
    other.mkdir()
    for file in (out / "src").iterdir():
        file.unlink()
    (out / "src").rmdir()
    (out / "src").symlink_to(other)
    store.export(MAIN, out)
    assert list(other.iterdir()) == []
    assert not (out / "src").is_symlink()
    assert found(out) == TREE


@pytest.mark.regression(
    "an export counted files as written that were only reachable through a link, which it then "
    "removed",
    by="hostile input",
    of="Python",
)
def test_export_writes_files_formerly_reached_through_a_link(store: Store, tmp_path: Path) -> None:
    """A file that was only reachable through a link of the previous tree is written."""
    out = tmp_path / "out"
    link = git_command.git(store.path, "hash-object", "-w", "--stdin", input="b")
    one, _ = store.commit(None, {"b/x": b"same", "b/d/y": b"same"}, "one")
    inner = git_command.git(store.path, "rev-parse", f"{one}:b")
    linked = f"120000 blob {link}\ta\n040000 tree {inner}\tb\n"
    before = git_command.git(store.path, "mktree", input=linked)
    after, _ = store.commit(None, {"a/x": b"same", "a/d/y": b"same", "b/x": b"same"}, "two")
    store.export(before, out)
    assert store.compare(after, out).missing == ("a/d/y", "a/x")
    done = store.export(after, out)
    assert (done.written, done.removed) == (2, 2)
    assert not (out / "a").is_symlink()
    assert found(out) == {"a/x": b"same", "a/d/y": b"same", "b/x": b"same"}
    assert not store.compare(after, out)
    store.export(before, out)
    assert (out / "a").is_symlink()
    assert not store.compare(before, out)


@pytest.mark.parametrize("kind", ["100644 blob", "120000 blob"])
@pytest.mark.regression(
    "a tree with the same name for a file and a directory was exported as one of them",
    by="hostile input",
    of="Python",
)
def test_duplicate_name_of_file_and_directory_is_refused(
    store: Store, tmp_path: Path, kind: str
) -> None:
    """Git's objects may give a file and a directory the same name; only one can be written."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input="b")
    inner = git_command.git(store.path, "mktree", input=f"100644 blob {blob}\tx\n")
    raw = b"".join(
        f"{mode} a\0".encode() + bytes.fromhex(sha)
        for mode, sha in ((kind.split()[0], blob), ("40000", inner))
    )
    words = ("hash-object", "-w", "-t", "tree", "--literally", "--stdin")
    tree = git_command.git(store.path, *words, input=raw)
    with pytest.raises(SourceError, match="'a' twice"):
        store.export(tree, tmp_path / "out")
    assert not (tmp_path / "out" / "a").exists()


@pytest.mark.slow
@pytest.mark.regression(
    "a deeply nested tree could raise RecursionError in an export",
    by="hostile input",
    of="Python",
)
def test_too_deep_directories_are_refused(store: Store, tmp_path: Path) -> None:
    """The depth would exceed Python's recursion limit."""
    tree = git_command.git(store.path, "hash-object", "-w", "--stdin", input="b")
    words = "100644 blob {}\tx\n"
    for _ in range(250):
        tree = git_command.git(store.path, "mktree", input=words.format(tree))
        words = "040000 tree {}\ta\n"
    with pytest.raises(SourceError, match="unsafe path"):
        store.export(tree, tmp_path / "out")


def test_export_swaps_a_file_and_a_directory(store: Store, tmp_path: Path) -> None:
    """A file is replaced by a directory of the next tree, and vice versa."""
    one, _ = store.commit(None, {"a": b"file", "b/c": b"deep"}, "one")
    two, _ = store.commit(None, {"a/x": b"deep", "b": b"file"}, "two")
    out = tmp_path / "out"
    for commit in (one, two, one):
        store.export(commit, out)
        assert not store.compare(commit, out)


def test_a_foreign_folder_is_refused(store: Store, tmp_path: Path) -> None:
    """A directory with files that no export wrote is not changed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"letter\.txt"):
        store.export(MAIN, tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_edits_of_an_exported_directory_are_not_lost(store: Store, tmp_path: Path) -> None:
    """A repository is never removed; edits are refused where a user names the directory."""
    folder = tmp_path / "tree"
    tree_export.check_unchanged(store, folder)
    store.export(MAIN, folder)
    tree_export.check_unchanged(store, folder)
    (folder / "new.cpp").write_text("x")
    with pytest.raises(UsageError, match=r"has changes \(stray new\.cpp\)"):
        tree_export.check_unchanged(store, folder)
    (folder / "new.cpp").unlink()
    (folder / ".git").mkdir()
    with pytest.raises(UsageError, match="is a git repository"):
        store.export(MAIN, folder)
    (folder / tree_export.STAMP).write_text('{"tree": "%s", "complete": true}' % ("1" * 40))
    tree_export.check_unchanged(store, folder)


@pytest.mark.regression(
    "a link in a foreign directory, at the path of a partial file, let a write replace any file "
    "of the user",
    by="hostile input",
    of="Python",
)
def test_a_link_in_place_of_a_stamp_is_refused(store: Store, tmp_path: Path) -> None:
    """An interrupted write leaves a file; a link was created by another program."""
    victim, folder = tmp_path / "victim", tmp_path / "theirs"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "..pyllamakv-tree.part").symlink_to(victim)
    with pytest.raises(UsageError, match="holds other files"):
        store.export(MAIN, folder)
    (folder / tree_export.STAMP).write_text("{}")
    store.export(MAIN, folder)
    assert victim.read_text() == "mine"
    assert found(folder) == TREE
