"""Define a step: one operation of the product that faults are injected into."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pyllamakv.source import git_command
from qa.faults.attempt import AttemptResult

#: Files that a killed git may leave: unreferenced objects, partial objects under temporary names
#: that it never reads, and the files that `git init` tests a file system with. `git fsck` reports
#: others.
GIT_LEAVES = (r"home/store\.git/objects/.+", r"home/store\.git/t\w{6}")


class FaultTarget:
    """One operation in a directory, defined by subclasses.

    ``prepare`` fills the directory once; each attempt works on a copy of it at the same path, with
    the data directory in its ``home``. ``run`` is disturbed and repeated, and returns its result as
    plain data, equal each time.
    """

    name = ""
    #: Patterns, below the directory, of files that a killed run may leave according to the docs.
    allowed_leftovers: tuple[str, ...] = ()
    #: Errors with which a concurrent second run may be refused.
    allowed_errors: tuple[str, ...] = ()
    #: Kinds of fault that cannot reveal a defect in it.
    without: tuple[str, ...] = ()
    #: Whether the library may refuse the operation as Unsupported: the step is skipped then.
    optional = False

    def prepare(self, folder: Path) -> None:
        """Create the initial state of each attempt."""

    def run(self, folder: Path) -> Any:
        """Run the operation; return its result."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes that `prepare` started."""

    def check_interrupted(self, folder: Path, outcome: AttemptResult, expected: Any) -> list[str]:
        """Return the defect in the state after a disturbed run, before the repeat; "" if none."""
        return []

    def check_completed(self, folder: Path) -> list[str]:
        """Return the defect in the state after a completed run; "" if none."""
        store = folder / "home" / "store.git"
        if not store.is_dir():
            return []
        done = git_command.run(store, "fsck", "--no-dangling", "--no-progress")
        return [f"git fsck: {done.stderr.decode()[:200]}"] if done.returncode else []

    def files(self, folder: Path) -> set[str]:
        """Return files and directories, except those that may be left over."""
        allowed = re.compile("|".join(f"(?:{each})" for each in self.allowed_leftovers) or r"(?!)")
        found = set()
        for place, folders, files in os.walk(folder):
            below = Path(place).relative_to(folder)
            folders[:] = [name for name in folders if not allowed.fullmatch(str(below / name))]
            found |= {str(below / name) for name in (*folders, *files)}
        return {name for name in found if not allowed.fullmatch(name)}
