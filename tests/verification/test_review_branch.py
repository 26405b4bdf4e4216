"""Test that a review branch has the lock entry, ports and verdicts, and no other change."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import tomlkit
from fakes import cell_results
from patching_kit import SeriesSandbox, code, repository

from pyllamakv import home
from pyllamakv.errors import BranchRefused, GitError, UsageError
from pyllamakv.patching import apply, series
from pyllamakv.source import lockfile
from pyllamakv.source.git_command import git
from pyllamakv.source.store import open_store
from pyllamakv.verification import expected, review_branch
from pyllamakv.verification.cell import CellSpec

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.verification.cell import CellResult
    from pyllamakv.verification.review_branch import ReviewBranch

STOCK = {"src/a.cpp": code("first")}
FIXED = {"src/a.cpp": code("first", "fix(a);")}
NEAR = {
    "src/a.cpp": STOCK["src/a.cpp"].replace(b"first_7();", b"first_7(a);"),
    "src/llama-arch.cpp": b"""LLM_ARCH_NAMES = {
    { LLM_ARCH_LLAMA, "llama" },
    { LLM_ARCH_NEW,   "new"   },
};
""",
}
NAME = "watch/0.3.2"


class Checkout:
    """Create a repository with a series, and a release to which one of its patches is carried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.bench = SeriesSandbox(open_store(folder / "store.git"), self.root / "patches")
        pinned = self.bench.add_release("0.3.1", STOCK)
        self.release = self.bench.add_release("0.3.2", NEAR, "2025-01-02")
        self.bench.add_patch("fix", {"0.3.1": (STOCK, FIXED)}, marker=("src/a.cpp", "first_7"))
        (self.root / "pyproject.toml").write_text("# the project\n")
        lockfile.save(self.root / "vendor" / "upstream.lock.toml", [pinned])
        table = self.root / "vendor" / "architectures.toml"
        table.write_text('"0.3.1" = [\n  "llama",\n]\n')
        expected.accept([cell_results.result("0.3.1")], self.root / "patches" / "expected.toml")
        repository(self.root, {"README.md": b"read me\n"})

    def result(self, **more: str) -> CellResult:
        """Return the result of the carried release."""
        found = cell_results.result("0.3.2", carried={"fix": "0.3.1"})
        return replace(found, verified="2026-11-02T03:04:05+00:00", **more)

    def write(
        self, *results: CellResult, start: review_branch.Checkout | None = None
    ) -> ReviewBranch | None:
        """Write the branch of the release, verified on the current commit or on ``start``."""
        found = start or review_branch.repository()
        given = results or (self.result(),)
        return review_branch.write(found, NAME, self.release, given, store=self.bench.store)

    def git(self, *args: str) -> str:
        """Run git in the repository."""
        return git(self.root, *args)

    def commit_as(self, name: str, *args: str) -> None:
        """Make a commit with the identity of a person."""
        person = {f"GIT_{who}_NAME": name for who in ("AUTHOR", "COMMITTER")}
        person |= {f"GIT_{who}_EMAIL": "person@example.com" for who in ("AUTHOR", "COMMITTER")}
        git(self.root, "commit", "-q", *args, env=person)

    def state(self) -> tuple[str, ...]:
        """Return the state of the repository except for new objects."""
        index = (self.root / ".git" / "index").read_bytes().hex()
        refs = git(self.root, "for-each-ref", "--format=%(refname) %(objectname)")
        head = git(self.root, "symbolic-ref", "HEAD")
        return (
            index,
            refs,
            head,
            git(self.root, "--no-optional-locks", "status", "--porcelain", "--ignored"),
        )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """Return a checkout that is used as that of the package."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    made = Checkout(tmp_path)
    monkeypatch.setattr(home, "checkout", lambda: made.root)
    monkeypatch.setattr(lockfile, "known", lambda: made.bench.releases)
    return made


@pytest.mark.slow
def test_branch_has_one_commit_with_port_lock_entry_and_verdict(
    checkout: Checkout, tmp_path: Path
) -> None:
    """The port applies strictly."""
    before = checkout.state()
    made = checkout.write()
    assert made is not None
    assert checkout.git("rev-parse", NAME) == made.commit
    assert checkout.git("rev-parse", f"{NAME}^") == checkout.git("rev-parse", "HEAD")
    assert made.files == (
        "patches/expected.toml",
        "patches/fix/0.3.2.patch",
        "patches/fix/patch.toml",
        "vendor/architectures.toml",
        "vendor/upstream.lock.toml",
    )
    assert made.notes == ("review the proposed markers of port 0.3.2 in patches/fix/patch.toml",)
    lock = tomlkit.parse(checkout.git("show", f"{NAME}:vendor/upstream.lock.toml"))
    assert [each["name"] for each in lock["release"]] == ["0.3.1", "0.3.2"]
    known = tomlkit.parse(checkout.git("show", f"{NAME}:vendor/architectures.toml"))
    assert known == {"0.3.1": ["llama"], "0.3.2": ["new"]}
    accepted = tomlkit.parse(checkout.git("show", f"{NAME}:patches/expected.toml"))
    assert [each["release"] for each in accepted["cell"]] == ["0.3.1", "0.3.2"]
    message = checkout.git("show", "-s", "--format=%B%n%cI", NAME)
    assert message.startswith("Add release 0.3.2\n\n0.3.2: needed: stock fails 55 of 77 runs")
    assert "Ports that a merge wrote: fix from 0.3.1." in message
    assert message.endswith("2026-11-02T03:04:05+00:00")
    after = checkout.state()
    assert (after[0], *after[2:]) == (before[0], *before[2:])
    worktree = tmp_path / "review"
    git(tmp_path, "clone", "-q", "-b", NAME, str(checkout.root), str(worktree),
        env={"GIT_ALLOW_PROTOCOL": "file"})  # fmt: skip
    reviewed = series.load(worktree / "patches")
    strict = apply.apply(checkout.release, series=reviewed, store=checkout.bench.store)
    shipped = series.load(checkout.root / "patches")
    carried = apply.apply(checkout.release, series=shipped, store=checkout.bench.store)
    assert (strict.carried, strict.tree) == ({}, carried.tree)


@pytest.mark.slow
def test_repeated_review_branch_has_the_same_commit(checkout: Checkout) -> None:
    """A second call changes nothing, and the commit is the same on every machine."""
    first = checkout.write()
    state = checkout.state()
    assert first is not None
    assert checkout.write() == first
    assert checkout.state() == state
    checkout.git("branch", "-D", NAME)
    assert checkout.write() == first


@pytest.mark.slow
def test_branch_of_an_earlier_watch_is_replaced(checkout: Checkout) -> None:
    """On a new commit, the branch starts there."""
    first = checkout.write()
    checkout.git("commit", "-q", "--allow-empty", "-m", "more")
    second = checkout.write()
    assert first and second and first.commit != second.commit
    assert checkout.git("rev-parse", f"{NAME}^") == checkout.git("rev-parse", "HEAD")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--allow-empty", "-m", "mine"), ("--amend", "-m", "mine")])
def test_branch_with_commits_of_a_user_is_not_replaced(
    checkout: Checkout, options: tuple[str, ...]
) -> None:
    """Neither an additional commit nor an amended one is replaced."""
    checkout.write()
    checkout.git("switch", "-q", NAME)
    checkout.commit_as("Ada", *options)
    checkout.git("switch", "-q", "main")
    checkout.git("commit", "-q", "--allow-empty", "-m", "more")
    state = checkout.state()
    with pytest.raises(BranchRefused, match="has commits of Ada: merge or delete it"):
        checkout.write()
    assert checkout.state() == state


@pytest.mark.slow
def test_branch_with_an_amended_tree_is_not_replaced(checkout: Checkout) -> None:
    """A commit with the package's name and another tree is not its commit."""
    checkout.write()
    checkout.git("switch", "-q", NAME)
    (checkout.root / "README.md").write_text("changed\n")
    checkout.git("commit", "-q", "-a", "--amend", "--no-edit")
    checkout.git("switch", "-q", "main")
    with pytest.raises(BranchRefused):
        checkout.write()


@pytest.mark.slow
def test_checked_out_branch_is_not_moved(checkout: Checkout, tmp_path: Path) -> None:
    """The branch of a work tree is not moved."""
    checkout.write()
    checkout.git("worktree", "add", "-q", str(tmp_path / "review"), NAME)
    checkout.git("commit", "-q", "--allow-empty", "-m", "more")
    state = checkout.state()
    with pytest.raises(BranchRefused, match=r"checked out in .*review; switch to another branch"):
        checkout.write()
    assert checkout.state() == state


@pytest.mark.slow
def test_branch_changed_during_the_write_keeps_its_commit(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that changes while it is written keeps its commit."""
    checkout.write()
    checkout.git("commit", "-q", "--allow-empty", "-m", "more")
    accept = expected.accept

    def meanwhile(*given: Any) -> list[str]:
        checkout.git("branch", "-f", NAME, "HEAD")
        return accept(*given)

    monkeypatch.setattr(expected, "accept", meanwhile)
    with pytest.raises(GitError, match=r"is at .* but expected"):
        checkout.write()
    assert checkout.git("rev-parse", NAME) == checkout.git("rev-parse", "HEAD")


@pytest.mark.slow
def test_branch_name_that_is_a_prefix_of_another_is_refused(checkout: Checkout) -> None:
    """An existing branch below the name is not replaced."""
    checkout.git("branch", f"{NAME}/more")
    state = checkout.state()
    with pytest.raises(GitError, match=r"watch/0\.3\.2/more"):
        checkout.write()
    assert checkout.state() == state


@pytest.mark.slow
def test_merged_release_gets_no_branch(checkout: Checkout) -> None:
    """Without a change, no branch is written."""
    made = checkout.write()
    assert made is not None
    checkout.git("merge", "-q", "--ff-only", NAME)
    checkout.git("branch", "-D", NAME)
    merged = replace(checkout.result(), carried={})
    assert checkout.write(merged) is None
    assert not checkout.git("branch", "--list", NAME)


@pytest.mark.slow
def test_branch_of_unverified_carried_patches_is_refused(checkout: Checkout) -> None:
    """A carried patch that was not verified as such is not accepted."""
    state = checkout.state()
    verified = replace(checkout.result(), carried={"fix": "0.3.0"})
    with pytest.raises(UsageError, match=r"the patches changed while 0\.3\.2 was verified"):
        checkout.write(verified)
    assert checkout.state() == state


@pytest.mark.slow
def test_branch_of_patches_changed_since_the_verification_is_refused(checkout: Checkout) -> None:
    """The branch starts at the verified commit, and needs the same patches."""
    start = review_branch.repository()
    checkout.git("commit", "-q", "--allow-empty", "-m", "more")
    made = checkout.write(start=start)
    assert made
    assert checkout.git("rev-parse", f"{NAME}^") == start.commit
    table = checkout.root / "patches" / "fix" / "patch.toml"
    table.write_text(table.read_text() + "\n")
    state = checkout.state()
    with pytest.raises(UsageError, match=r"^patches/fix/patch.toml has changes"):
        checkout.write(start=start)
    assert checkout.state() == state
    checkout.git("commit", "-q", "-a", "-m", "another patch")
    state = checkout.state()
    with pytest.raises(UsageError, match=r"the patches changed while 0\.3\.2 was verified"):
        checkout.write(start=start)
    assert checkout.state() == state


@pytest.mark.slow
def test_branch_accepts_the_verdict_of_every_backend(checkout: Checkout) -> None:
    """Each result of the release has its entry."""
    checkout.write(
        checkout.result(), replace(checkout.result(), spec=CellSpec("0.3.2", backend="cuda"))
    )
    accepted = tomlkit.parse(checkout.git("show", f"{NAME}:patches/expected.toml"))
    assert [each.get("backend") for each in accepted["cell"]] == [None, None, "cuda"]


@pytest.mark.slow
def test_repository_requires_committed_patches_and_lock(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must be a git checkout with committed patches and lock; other changes are allowed."""
    (checkout.root / "README.md").write_text("changed\n")
    (checkout.root / "patches" / "new.txt").write_text("not tracked\n")
    state = checkout.state()
    head = checkout.git("rev-parse", "HEAD")
    assert review_branch.repository() == review_branch.Checkout(checkout.root, head)
    assert checkout.state() == state
    place = checkout.root / "patches" / "fix" / "patch.toml"
    place.write_text(place.read_text() + "\n")
    with pytest.raises(UsageError, match=r"^patches/fix/patch.toml has changes .*commit or stash"):
        review_branch.repository()
    checkout.git("checkout", "-q", "--", "patches")
    table = checkout.root / "vendor" / "architectures.toml"
    table.write_text("")
    with pytest.raises(UsageError, match=r"^vendor/architectures.toml has changes"):
        review_branch.repository()
    checkout.git("checkout", "-q", "--", "vendor")
    shutil.rmtree(checkout.root / ".git")
    with pytest.raises(UsageError, match="requires a git checkout"):
        review_branch.repository()
    monkeypatch.setattr(home, "checkout", lambda: None)
    with pytest.raises(UsageError, match="--branch ''"):
        review_branch.repository()


def test_branch_name_contains_the_release_and_is_valid() -> None:
    """The release is inserted, and git validates the name."""
    assert review_branch.name_of("watch/{release}", "b11549") == "watch/b11549"
    for name in ("", "-x", "a..b", "a b", "@{-1}", "x.lock"):
        with pytest.raises(UsageError, match="not a name of a branch"):
            review_branch.name_of(name, "b1")


@pytest.mark.slow
def test_hooks_of_the_user_do_not_run(checkout: Checkout) -> None:
    """Hooks of the repository are not used."""
    hook = checkout.root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    assert checkout.write() is not None


@pytest.mark.slow
@pytest.mark.parametrize("place", ["series", "."])
def test_branch_of_another_series_is_written_to_its_repository(
    checkout: Checkout, tmp_path: Path, place: str
) -> None:
    """It has only its ports and verdicts."""
    root = tmp_path / "fork"
    folder = root / place
    shutil.copytree(checkout.bench.folder, folder)
    (folder / "expected.toml").unlink()
    with pytest.raises(UsageError, match="requires a git checkout"):
        review_branch.repository(str(folder))
    repository(root, {"README.md": b"our fork\n"})
    start = review_branch.repository(str(folder.resolve()))
    made = checkout.write(start=start)
    assert made is not None
    prefix = "" if place == "." else f"{place}/"
    names = [f"{prefix}expected.toml", f"{prefix}fix/0.3.2.patch", f"{prefix}fix/patch.toml"]
    assert sorted(made.files) == names
    assert git(root, "rev-parse", NAME) == made.commit
    assert "records.py" not in git(root, "log", "-1", "--format=%B", NAME)
    (folder / "series.toml").write_text((folder / "series.toml").read_text() + "# changed\n")
    with pytest.raises(UsageError, match="not committed"):
        review_branch.repository(str(folder.resolve()))
