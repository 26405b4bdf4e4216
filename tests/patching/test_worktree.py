"""Test that work trees of the store are created, merged, read and removed completely."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from patching_kit import numbered

from pyllamakv.errors import GitError, PatchError
from pyllamakv.patching import rebase_session, worktree
from pyllamakv.source import git_command
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a.c": numbered(9), "b.c": numbered(9), ".gitignore": b"build/\n"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store."""
    return open_store(tmp_path / "store.git")


def test_merged_and_edited_files_become_a_tree(store: Store, tmp_path: Path) -> None:
    """Merged and edited files are in the tree; ignored and stray files are not."""
    base, _ = store.commit(None, FILES, "base")
    change, _ = store.commit(base, {"a.c": numbered(9, l2="x")}, "change")
    onto, _ = store.commit(base, {"a.c": numbered(9, l8="y")}, "onto")
    folder = tmp_path / "deep" / "tree"
    worktree.make(store, folder, onto)
    assert worktree.cherry_pick(folder, change) == ((), False)
    (folder / "build").mkdir()
    (folder / "build" / "a.o").write_bytes(b"x")
    (folder / "b.c~").write_bytes(b"x")
    tree = worktree.write_tree(folder)
    assert store.ls(tree) == [".gitignore", "a.c", "b.c"]
    assert store.read(tree, "a.c") == numbered(9, l2="x", l8="y")
    assert worktree.changed(folder, onto) == ("a.c",)
    worktree.remove(store, folder)
    assert not folder.exists()
    assert not list((store.path / "worktrees").glob("*"))
    worktree.remove(store, folder)  # a missing one is not an error


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "a") as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_removal_waits_for_an_orphaned_git(store: Store, tmp_path: Path) -> None:
    """The git of a killed process keeps its inherited lock until it ends."""
    base, _ = store.commit(None, FILES, "base")
    folder = tmp_path / "tree"
    worktree.make(store, folder, base)
    lock = tmp_path / "tree.busy"
    remover = threading.Thread(target=worktree.remove, args=(store, folder))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as orphan:
        assert orphan.stdin is not None and orphan.stdout is not None
        assert orphan.stdout.readline() == b"held\n"
        remover.start()
        remover.join(0.3)
        assert remover.is_alive()
        assert (folder / "a.c").is_file()
        orphan.stdin.close()
    remover.join(120)
    assert not folder.exists()


def test_each_kind_of_conflict_has_a_name(store: Store, tmp_path: Path) -> None:
    """Each kind of conflict has its name."""
    base, _ = store.commit(None, FILES, "base")
    change, _ = store.commit(
        base, {"a.c": numbered(9, l2="x"), "b.c": None, "n.c": b"1\n", "d.c": None}, "change"
    )
    onto, _ = store.commit(base, {"a.c": None, "b.c": numbered(9, l2="y"), "n.c": b"2\n"}, "onto")
    worktree.make(store, tmp_path / "t", onto)
    found = {clash.path: clash.kind for clash in worktree.cherry_pick(tmp_path / "t", change)[0]}
    assert found == {"a.c": "gone", "b.c": "kept", "n.c": "both"}
    assert worktree.with_conflict_markers(tmp_path / "t", ["a.c", "b.c", "n.c"]) == ("n.c",)


def linked(store: Store, parent: str, name: str, target: str) -> str:
    """Return a commit on another one that adds a link."""
    blob = git_command.git(store.path, "hash-object", "-w", "--stdin", input=target)
    lines = git_command.git(store.path, "ls-tree", parent) + f"\n120000 blob {blob}\t{name}\n"
    tree = git_command.git(store.path, "mktree", input=lines)
    return store.commit_tree(tree, [parent], "link")


@pytest.mark.regression(
    "links of a tree were links in the work tree of a rebase, where their targets could be edited"
    " by mistake",
    by="hostile input",
    of="Python",
)
def test_links_of_a_tree_are_plain_files(store: Store, tmp_path: Path) -> None:
    """A person edits there, and would follow links of a foreign patch."""
    (tmp_path / "secret").write_text("<<<<<<< mine\n")
    base, _ = store.commit(None, FILES, "base")
    conflict, _ = store.commit(base, {"a.c": numbered(9, l2="x")}, "change")
    change = linked(store, conflict, "out", "../secret")
    one = store.commit_tree(store.tree_of(change), [base], "both")
    changed, _ = store.commit(base, {"a.c": numbered(9, l2="y")}, "onto")
    onto = linked(store, changed, "up", "/etc/passwd")
    folder = tmp_path / "t"
    worktree.make(store, folder, onto)
    assert [clash.path for clash in worktree.cherry_pick(folder, one)[0]] == ["a.c"]
    for name, target in (("out", "../secret"), ("up", "/etc/passwd")):
        assert not (folder / name).is_symlink()
        assert (folder / name).read_text() == target
    assert set(worktree.changed(folder, onto)) == {"a.c", "out"}
    (folder / "a.c").write_bytes(numbered(9, l2="z"))
    modes = {entry.path: entry.mode for entry in store.entries(worktree.write_tree(folder))}
    assert {name for name, mode in modes.items() if mode == "120000"} == {"out", "up"}
    (folder / "by-hand").symlink_to("../secret")
    assert worktree.with_conflict_markers(folder, ["a.c", "by-hand", "out"]) == ()


def test_failure_other_than_a_conflict_is_raised(store: Store, tmp_path: Path) -> None:
    """Other errors of git are raised."""
    base, _ = store.commit(None, FILES, "base")
    worktree.make(store, tmp_path / "t", base)
    with pytest.raises(GitError):
        worktree.cherry_pick(tmp_path / "t", "0" * 39 + "1")


@pytest.mark.regression(
    "records of vendored trees and rebases that are JSON of another structure raised untyped "
    "errors",
    by="hostile input",
    of="Python",
)
def test_rebase_state_survives_and_damage_is_reported(store: Store) -> None:
    """The state is read as it was written; a damaged one is reported and can be removed."""
    session = rebase_session.Session(
        "one", "0.3.2", "era", *"abc", "0.3.1", "d", requires=("x",), remaining=("y",)
    )
    assert rebase_session.load(store, "one") is None
    written = session.write(store, phase="waiting")
    assert rebase_session.load(store, "one") == written
    assert rebase_session.ids(store) == ("one",)
    for damage in ("{", "1", "[" * 100_000):
        (rebase_session.place(store, "one") / "state.json").write_text(damage)
        with pytest.raises(PatchError, match="--abort"):
            rebase_session.load(store, "one")
    assert rebase_session.clear(store, "one")
    assert not rebase_session.clear(store, "one")
    assert rebase_session.ids(store) == ()
