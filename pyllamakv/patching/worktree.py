"""Create work trees of the store, in which a user resolves a merge conflict.

Symbolic links of a tree are regular files in a work tree, with the target as text. Otherwise, an
editor or a build would follow a link from a foreign patch. They are links again in the tree that is
read back.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import GitError
from pyllamakv.source import git_command
from pyllamakv.source.files import inheritable_lock, translate_disk_errors

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from pyllamakv.source.store import Store

#: Minimum similarity of a renamed file, lower than git's 50 %: upstream rewrites much of a file
#: when it splits or renames it, and a user reviews the conflicts.
_LIKENESS = "-Xfind-renames=30%"

_NO_LINKS = ("-c", "core.symlinks=false")

#: Settings that store resolutions, and use them for the same conflict.
_REMEMBER = ("-c", "rerere.enabled=true", "-c", "rerere.autoUpdate=true")

_MARK = re.compile(rb"^(<{7}|\|{7}|>{7}) ", re.MULTILINE)
#: Files that editors and merge tools create.
_LITTER = tuple(f":(exclude,glob)**/{name}" for name in ("*.orig", "*.rej", "*~", ".*.swp"))


@dataclass(frozen=True)
class UnmergedFile:
    """Name one file that git could not merge.

    ``kind`` is "content" (marked places), "gone" (the target has no such file), "kept" (the patch
    deletes it, the target changed it) or "both" (both sides add it).
    """

    path: str
    kind: str


def make(store: Store, folder: Path, commit: str) -> None:
    """Check a commit of the store out into a new folder."""
    words = (*_NO_LINKS, "worktree", "add", "--quiet", "--force", "--detach", str(folder), commit)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with translate_disk_errors(folder), store.lock("worktrees"), _busy(folder) as held:
        done = git_command.run(store.path, *words, hold=(held,))
        if done.returncode:
            raise _failed(words, done)


def remove(store: Store, folder: Path) -> None:
    """Remove a work tree, complete or not, and its entry in the store."""
    if folder.parent.is_dir():
        with _busy(folder):
            if folder.exists():
                shutil.rmtree(folder)
    with store.lock("worktrees"):
        for known in (store.path / "worktrees").glob("*/gitdir"):
            place = Path(known.read_text("utf-8", "surrogateescape").strip()).parent
            if place == folder or folder in place.parents:
                shutil.rmtree(known.parent)
        # an add that was killed early has not written where it belongs
        for half in (store.path / "worktrees").glob("*"):
            if not (half / "gitdir").is_file():
                shutil.rmtree(half)


def cherry_pick(folder: Path, commit: str) -> tuple[tuple[UnmergedFile, ...], bool]:
    """Merge the change of a commit into a work tree.

    Returns what git could not merge, and whether it used a resolution that `remember` stored.
    Raises GitError when git fails for another reason than a conflict.
    """
    words = (*_NO_LINKS, *_REMEMBER, "cherry-pick", "--no-commit", _LIKENESS, commit)
    with translate_disk_errors(folder), _busy(folder) as held:
        done = git_command.run(folder, *words, hold=(held,))
        if not done.returncode:
            return (), False
        known = b"using previous resolution" in done.stdout + done.stderr
        found = unmerged_files(folder)
        if not found and not known:
            raise _failed(words, done)
    return found, known


def remember(folder: Path) -> None:
    """Store the resolutions of the conflicts in a work tree, for later merges in the store."""
    git_command.git(folder, *_REMEMBER, "rerere")


def unmerged_files(folder: Path) -> tuple[UnmergedFile, ...]:
    """Return the files that have not been marked as merged."""
    stages: dict[str, set[str]] = {}
    for record in git_command.git(folder, "ls-files", "--unmerged", "-z").split("\0"):
        if record:
            facts, path = record.split("\t", 1)
            stages.setdefault(path, set()).add(facts.rsplit(" ", 1)[1])
    kinds = {
        frozenset("123"): "content",
        frozenset("13"): "gone",
        frozenset("12"): "kept",
        frozenset("23"): "both",
    }
    return tuple(
        UnmergedFile(path, kinds.get(frozenset(s), "content")) for path, s in stages.items()
    )


def with_conflict_markers(folder: Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Return those files that still have conflict markers."""
    return tuple(path for path in paths if _is_marked(folder / path))


def _is_marked(file: Path) -> bool:
    # A link may have come from the person, by hand; what it leads to is not of the tree.
    plain = file.is_file() and not file.is_symlink()
    return plain and _MARK.search(file.read_bytes()) is not None


def write_tree(folder: Path) -> str:
    """Write the content of a work tree to the store and return its tree.

    Files that upstream's ``.gitignore`` lists, such as build directories, and backup files of
    editors are ignored.
    """
    with translate_disk_errors(folder):
        git_command.git(folder, *_NO_LINKS, "add", "--all", "--", ".", *_LITTER)
        return git_command.git(folder, "write-tree")


def changed(folder: Path, commit: str) -> tuple[str, ...]:
    """Return the files of a work tree that differ from a commit."""
    out = git_command.git(folder, *_NO_LINKS, "diff", "--name-only", "--no-renames", "-z", commit)
    return tuple(path for path in out.split("\0") if path)


def _busy(folder: Path) -> AbstractContextManager[int]:
    """Lock a work tree, because a surviving git would continue to write into it."""
    return inheritable_lock(folder.with_name(f"{folder.name}.busy"))


def _failed(words: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> GitError:
    said = (done.stderr or done.stdout).decode("utf-8", "replace")
    return GitError(["git", *words], done.returncode, said)
