"""Say what a step is: one command of the product that faults are tried on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pyllamakv.source import git_command
from qa.faults.attempt import AttemptResult

#: What a killed git may leave: objects that nothing points at, half ones under passing names that
#: it never reads, and what `git init` tries a file system with. `git fsck` tells of the others.
GIT_LEAVES = (r"home/store\.git/objects/.+", r"home/store\.git/t\w{6}")


class FaultTarget:
    """Do one thing in a folder; subclasses say what.

    ``prepare`` fills the folder once; each attempt works on a copy of it at the same place, with
    the home in its ``home``. ``run`` is what is disturbed and repeated, and returns its result as
    plain data, the same each time.
    """

    name = ""
    #: Patterns, below the folder, of what a killed run may leave behind by what the docs say.
    allowed_leftovers: tuple[str, ...] = ()
    #: Errors with which a second run beside the first may be refused.
    allowed_errors: tuple[str, ...] = ()
    #: Kinds of fault that tell nothing about it.
    without: tuple[str, ...] = ()

    def prepare(self, folder: Path) -> None:
        """Make what each attempt begins with."""

    def run(self, folder: Path) -> Any:
        """Do it; return what came of it."""
        raise NotImplementedError

    def close(self) -> None:
        """End what `prepare` started."""

    def check_interrupted(self, folder: Path, outcome: AttemptResult, expected: Any) -> list[str]:
        """Return what is wrong with what a disturbed run left, before it is repeated."""
        return []

    def check_completed(self, folder: Path) -> list[str]:
        """Return what is wrong with a folder in which the step ran through."""
        store = folder / "home" / "store.git"
        if not store.is_dir():
            return []
        done = git_command.run(store, "fsck", "--no-dangling", "--no-progress")
        return [f"git fsck: {done.stderr.decode()[:200]}"] if done.returncode else []

    def files(self, folder: Path) -> set[str]:
        """Return the files and folders there are, without what may be left behind."""
        allowed = re.compile("|".join(f"(?:{each})" for each in self.allowed_leftovers) or r"(?!)")
        found = set()
        for place, folders, files in os.walk(folder):
            below = Path(place).relative_to(folder)
            folders[:] = [name for name in folders if not allowed.fullmatch(str(below / name))]
            found |= {str(below / name) for name in (*folders, *files)}
        return {name for name in found if not allowed.fullmatch(name)}
