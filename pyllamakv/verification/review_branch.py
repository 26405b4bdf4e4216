"""Write a branch for review that adds a verified release to a checkout.

The branch has one commit on top of the current one: a port for each carried patch, the accepted
verdicts, and for the shipped series the lock entry and the architectures that no older release
knows. The commit is created in a
temporary index, so that the work tree, the index and the current branch stay as they are.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv import home
from pyllamakv.errors import BranchRefused, UsageError
from pyllamakv.patching import carry_acceptance
from pyllamakv.source import architectures, git_command, lockfile
from pyllamakv.source.releases import ARCHIVE_KINDS
from pyllamakv.source.store import open_store
from pyllamakv.verification import expected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.carry_acceptance import AcceptedPort
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store
    from pyllamakv.verification.cell import CellResult

#: What a branch with the shipped series may change; the work tree must have no changes there.
PATCHES = "patches"
LOCK = "vendor/upstream.lock.toml"
ARCHITECTURES = "vendor/architectures.toml"

#: The last line of the message of a commit that `write` made: its tree. A commit that was amended
#: has another tree or committer.
_TRAILER = "Watch-Tree"
_NOTHING = "0" * 40


@dataclass(frozen=True)
class ReviewBranch:
    """A branch for review: its name, its commit, the files that it changes, what to look at."""

    name: str
    commit: str
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class Checkout:
    """A checkout that branches are written to: its root, and the commit that is verified.

    ``patches`` is the directory of the series, and ``paths`` is what a branch may change.
    """

    root: Path
    commit: str
    patches: str = PATCHES
    paths: tuple[str, ...] = (PATCHES, LOCK, ARCHITECTURES)


def repository(patches: str = "") -> Checkout:
    """Return the checkout that branches are written to, with its current commit.

    It is that of a series (default: of this package). Raises UsageError if the series is no
    directory with ``series.toml`` in a git checkout, or if the patches, the lock or the
    architectures have changes that are not committed: these would be verified, and not be in the
    branch.
    """
    root = root_of(patches)
    if root is None or git_command.run(root, "rev-parse", "-q", "--verify", "HEAD").returncode:
        what = f"of {patches}, with its series.toml" if patches else "of pyllamakv"
        msg = (
            f"a branch for review requires a git checkout {what}; run the command from one, "
            "or turn the branch off with --branch ''"
        )
        raise UsageError(msg)
    commit = git_command.git(root, "rev-parse", "--verify", "HEAD^{commit}")
    found = Checkout(root, commit)
    if patches:
        place = Path(patches).relative_to(root).as_posix()
        found = Checkout(root, commit, "" if place == "." else place, (place,))
    _check_clean(found)
    if git_command.run(root, "cat-file", "-e", f"{commit}:{found.patches}").returncode:
        msg = f"{patches} is not committed in {root}; commit it first"
        raise UsageError(msg)
    return found


def root_of(patches: str = "") -> Path | None:
    """Return the root of the checkout that contains a series with ``series.toml``, if any."""
    folder = Path(patches)
    if not patches:
        return home.checkout()
    if not (folder / "series.toml").is_file():
        return None
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)


def _check_clean(checkout: Checkout) -> None:
    root = checkout.root
    words = ("status", "--porcelain", "--untracked-files=no", "--", *checkout.paths)
    changed = git_command.git(root, "--no-optional-locks", *words).split("\n")[0][3:]
    if changed:
        msg = f"{changed} has changes that are not committed; commit or stash them first"
        raise UsageError(msg)


def name_of(template: str, release: str) -> str:
    """Return the name of a release's branch; raises UsageError if git cannot have one of it."""
    name = template.replace("{release}", release)
    if git_command.run(Path("/"), "check-ref-format", "--branch", name).returncode:
        msg = f"{name!r} is not a name of a branch; choose another one with --branch"
        raise UsageError(msg)
    return name


def check_free(root: Path, name: str) -> str:
    """Return the commit of a branch that may be replaced, or an empty text if there is none.

    Raises BranchRefused if the branch was not written by `write`, was changed since, or is checked
    out in a work tree.
    """
    ref = f"refs/heads/{name}"
    words = ("for-each-ref", "--format=%(refname)%00%(objectname)%00%(worktreepath)", ref)
    found = [line.split("\0") for line in git_command.git(root, *words).split("\n")]
    # The pattern also matches branches below it.
    _, commit, tree = next((each for each in found if each[0] == ref), (ref, "", ""))
    if not commit:
        return ""
    if tree:
        msg = f"branch {name} is checked out in {tree}; switch to another branch there"
        raise BranchRefused(msg)
    if not _is_own(root, commit):
        who = git_command.git(root, "show", "-s", "--format=%cn", commit)
        msg = (
            f"branch {name} has commits of {who}: merge or delete it, or choose another name with "
            f"--branch"
        )
        raise BranchRefused(msg)
    return commit


def write(
    checkout: Checkout,
    name: str,
    release: Release,
    results: Sequence[CellResult],
    *,
    store: Store | None = None,
    progress: Progress | None = None,
) -> ReviewBranch | None:
    """Write the branch of a verified release, or replace the one of an earlier call.

    The branch starts at the commit of ``checkout``. Returns None if this commit contains all of it.
    Raises BranchRefused as `check_free` does, and UsageError if the patches are no longer those of
    that commit, which were verified; the repository is unchanged then.
    """
    root, base = checkout.root, checkout.commit
    before = check_free(root, name)
    _check_clean(checkout)
    if _patches(checkout, "HEAD") != _patches(checkout, base):
        raise _changed(release)
    if progress:
        progress(f"writing branch {name}", 0, None)
    with tempfile.TemporaryDirectory(prefix="pyllamakv-") as scratch:
        folder = Path(scratch) / "tree"
        folder.mkdir()
        env = {
            "GIT_DIR": git_command.git(root, "rev-parse", "--absolute-git-dir"),
            "GIT_WORK_TREE": str(folder),
            "GIT_INDEX_FILE": str(Path(scratch) / "index"),
        }
        git_command.git(folder, "read-tree", base, env=env)
        git_command.git(folder, "checkout", "-q", "--", *checkout.paths, env=env)
        ports = _change(folder, checkout, release, results, store, progress)
        notes = tuple(note.replace(f"{folder}/", "") for port in ports for note in port.notes)
        git_command.git(folder, "add", "--", *checkout.paths, env=env)
        tree = git_command.git(folder, "write-tree", env=env)
    if tree == git_command.git(root, "rev-parse", f"{base}^{{tree}}"):
        return None
    changed = git_command.git(root, "diff-tree", "-r", "-z", "--name-only", base, tree)
    files = tuple(changed.split("\0")[:-1])
    if before and _parts(root, before) == (tree, base):
        return ReviewBranch(name, before, files, notes)
    date = max((each.verified for each in results), default="") or git_command.DATE
    message = _message(checkout, release, results, tree)
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    commit = git_command.git(root, "commit-tree", tree, "-p", base, input=message, env=dates)
    git_command.git(root, "update-ref", f"refs/heads/{name}", commit, before or _NOTHING)
    return ReviewBranch(name, commit, files, notes)


def _change(
    folder: Path,
    checkout: Checkout,
    release: Release,
    results: Sequence[CellResult],
    store: Store | None,
    progress: Progress | None,
) -> tuple[AcceptedPort, ...]:
    """Change the files of a checkout so that they include a release; return the new ports."""
    patches = folder / checkout.patches
    ports: tuple[AcceptedPort, ...] = ()
    wanted = {id_: base for each in results for id_, base in each.carried.items()}
    if wanted:
        ports = carry_acceptance.accept(release, patches=patches, store=store, progress=progress)
    found = {port.id: port.carried_from for port in ports}
    if found != wanted:
        raise _changed(release)
    if LOCK in checkout.paths and release.kind in ARCHIVE_KINDS:
        lockfile.save(folder / LOCK, [release])
        architectures.add(folder / LOCK, store or open_store(), release)
    expected.accept(results, patches / "expected.toml")
    return ports


def _patches(checkout: Checkout, commit: str) -> str:
    words = ("rev-parse", "--verify", f"{commit}:{checkout.patches}")
    return git_command.git(checkout.root, *words)


def _changed(release: Release) -> UsageError:
    msg = f"the patches changed while {release.name} was verified; run the command again"
    return UsageError(msg)


def _message(checkout: Checkout, release: Release, results: Sequence[CellResult], tree: str) -> str:
    carried = {id_: base for each in results for id_, base in each.carried.items()}
    lines = [f"Add release {release.name}", ""]
    lines += [f"{each.spec.name}: {each.verdict}: {each.measured}." for each in results]
    if carried:
        names = ", ".join(f"{id_} from {base}" for id_, base in carried.items())
        lines.append(f"Ports that a merge wrote: {names}.")
    if LOCK in checkout.paths:
        lines += ["", "To complete it: python tests/kits/records.py trees verdicts"]
    return "\n".join([*lines, "", f"{_TRAILER}: {tree}"]) + "\n"


def _is_own(root: Path, commit: str) -> bool:
    """Return whether a commit was made by `write` and is unchanged since."""
    words = ("show", "-s", f"--format=%ce%n%T%n%(trailers:key={_TRAILER},valueonly)", commit)
    who, tree, *trailers = git_command.git(root, *words).split("\n")
    return who == git_command.EMAIL and trailers[:1] == [tree]


def _parts(root: Path, commit: str) -> tuple[str, ...]:
    return tuple(git_command.git(root, "show", "-s", "--format=%T%n%P", commit).split("\n"))
