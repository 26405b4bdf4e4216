"""Time `matrix watch` on a local git remote: with one new commit, and with nothing new."""

from __future__ import annotations

import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import HarnessError
from pyllamakv.home import home
from pyllamakv.patching import trees
from pyllamakv.source import git_command
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

#: What the remote has, in the order of the two watches.
NEW = "one new commit"
NOTHING = "nothing new"


@dataclass(frozen=True)
class WatchTime:
    """The duration of a watch, by the wall clock and of all processors, and its verdict.

    ``load`` is the mean number of processes that wanted a processor in the last 15 minutes,
    including those of the watch.
    """

    release: str
    state: str
    verdict: str
    seconds: float
    cpu_seconds: float
    load: float
    measured: str


def measure(release: Release, store: Store, progress: Progress) -> list[WatchTime]:
    """Watch a new commit on the tree of a release, then the same commit again; keep the times.

    The data directory is empty before the first watch, so that it fetches the commit, and builds
    stock and patched. Raises HarnessError if a watch does not end with a verdict.
    """
    release = trees.ensure_fetched(store, release, progress)
    found = []
    with tempfile.TemporaryDirectory() as name:
        remote, data = Path(name) / "llama.cpp", Path(name) / "data"
        _remote(remote, store, store.tree_of(release))
        for state in (NEW, NOTHING):
            progress(f"watching {release.name}: {state}", 0, None)
            found.append(_watch(release.name, state, remote, data))
    others = [each for each in kept() if each.release != release.name]
    write_text_atomic(_file(), json.dumps([asdict(each) for each in (*others, *found)], indent=1))
    return found


def kept() -> list[WatchTime]:
    """Return the times of earlier runs."""
    file = _file()
    rows = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return [WatchTime(**row) for row in rows]


def lines(found: Sequence[WatchTime]) -> list[str]:
    """Return the table of the page."""
    if not found:
        return ["No watch has been timed yet: `python -m qa upkeep --watch RELEASE`."]
    head = ("release", "state", "verdict", "time", "CPU time", "load", "measured")
    rows = [
        (
            one.release,
            one.state,
            one.verdict,
            f"{one.seconds:.0f} s",
            f"{one.cpu_seconds:.0f} s",
            f"{one.load:.1f}",
            one.measured,
        )
        for one in found
    ]
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return [first, f"|{'---|' * len(head)}", *others]


def _file() -> Path:
    return home() / "results" / "upkeep-watch.json"


def _remote(folder: Path, store: Store, tree: str) -> None:
    """Create a bare repository whose branch has a tree and one commit after it."""
    folder.mkdir(parents=True)
    git_command.git(folder, "init", "-q", "--bare", ".")
    (folder / "objects" / "info" / "alternates").write_text(f"{store.path}/objects\n")
    git_command.git(folder, "read-tree", tree)
    base = git_command.git(folder, "commit-tree", tree, input="base\n")
    blob = git_command.git(folder, "hash-object", "-w", "--stdin", input="a new commit\n")
    git_command.git(folder, "update-index", "--add", "--cacheinfo", f"100644,{blob},new.txt")
    changed = git_command.git(folder, "write-tree")
    commit = git_command.git(folder, "commit-tree", changed, "-p", base, input="new commit\n")
    git_command.git(folder, "update-ref", "refs/heads/main", commit)


def _watch(release: str, state: str, remote: Path, data: Path) -> WatchTime:
    words = ("matrix", "watch", f"git:{remote}@main", "--branch", "", "--json")
    environment = {**os.environ, "PYLLAMAKV_HOME": str(data)}
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pyllamakv", *words],
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
    )
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cells = json.loads(done.stdout)["cells"] if done.returncode in (0, 1) and done.stdout else []
    if not cells:
        msg = f"the watch of {release} with {state} ended with {done.returncode} and no verdict"
        raise HarnessError(msg)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    load = os.getloadavg()[2]
    facts = (cells[0]["verdict"], round(seconds, 1), round(spent, 1), round(load, 1), today)
    return WatchTime(release, state, *facts)
