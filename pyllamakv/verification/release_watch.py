"""Follow new releases: write a branch for each verified one, and report what needs manual work.

Every step keeps its result in the data directory: archives in the store, builds, verdicts. A
release is marked as unfinished from its fetch to its branch, so that a watch continues where an
interrupted one ended.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import BranchRefused, KvError, Locked, UsageError
from pyllamakv.home import home
from pyllamakv.patching import conflict_report, port_choice, status
from pyllamakv.source import fetch, lockfile, spec_resolver
from pyllamakv.source.files import locked, write_text_atomic
from pyllamakv.source.releases import ARCHIVE_KINDS
from pyllamakv.verification import result_cache, review_branch
from pyllamakv.verification.verdict import GOOD, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyllamakv.patching.conflict_report import UncarriedPatch
    from pyllamakv.patching.status import PatchStatus
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.verification.cell import CellResult, CellSpec
    from pyllamakv.verification.review_branch import ReviewBranch


#: Transient verdicts that finish a release all the same: most errors of a compiler come again.
_COMPILE_ERRORS = (Verdict.BROKEN_BUILD, Verdict.BROKEN_CARRY)


@dataclass(frozen=True)
class FollowedRelease:
    """What a watch did with a release.

    ``name`` is the version that an index offers if the release could not be fetched. ``conflicts``
    are the patches that require manual work, and ``contained`` those to drop. ``branch`` is None if
    a verdict is not good, without changes to review, or if no branch was requested. ``error`` ended
    the work on this release.
    """

    name: str
    results: tuple[CellResult, ...] = ()
    conflicts: tuple[UncarriedPatch, ...] = ()
    branch: ReviewBranch | None = None
    error: KvError | None = None
    contained: tuple[PatchStatus, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``; the results are among the cells."""
        return {
            "release": self.name,
            "conflicts": [each.as_json() for each in self.conflicts],
            "contained": [{"id": each.id, "reason": each.reason} for each in self.contained],
            "branch": self.branch.as_json() if self.branch else None,
            "error": str(self.error) if self.error else None,
        }


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Hold the lock of watches; raises Locked if another one uses the data directory."""
    file = home() / "locks" / "watch.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(file, 0))
        except Locked as error:
            msg = (
                f"another `pyllamakv matrix watch` uses this data directory: it holds {file}; wait "
                "until it has ended, or set PYLLAMAKV_HOME to another directory"
            )
            raise Locked(msg) from error
        yield


class ReleaseWatch:
    """Finish each release as soon as all its cells are verified.

    ``branch`` is the template of the branch names, with ``{release}``; empty for no branches.
    ``patches`` is the series (default: the shipped one). Raises UsageError if branches cannot be
    written from here.
    """

    def __init__(self, branch: str, patches: str = "", progress: Progress | None = None) -> None:
        self._branch = branch
        self._patches = patches
        self._checkout = review_branch.repository(patches) if branch else None
        self._progress = progress
        self._names: set[str] = set()
        self._left: dict[str, int] = {}
        self._releases: dict[str, Release] = {}
        self._results: dict[str, list[CellResult]] = defaultdict(list)
        #: The releases so far, in the order in which they were finished.
        self.followed: list[FollowedRelease] = []

    @property
    def error(self) -> KvError | None:
        """Return the first error."""
        return next((each.error for each in self.followed if each.error), None)

    def start(self, release: Release) -> bool:
        """Mark a release as unfinished; return whether to verify it.

        A release whose branch must not be replaced is not verified.
        """
        try:
            if release.kind == "path":
                msg = f"{release.name} is a directory; use `pyllamakv matrix run`"
                raise UsageError(msg)
            if self._checkout is not None:
                name = review_branch.name_of(self._branch, release.key)
                if name in self._names:
                    msg = f"branch {name} is of another release: put {{release}} into --branch"
                    raise UsageError(msg)
                review_branch.check_free(self._checkout.root, name)
                self._names.add(name)
            write_text_atomic(_mark(release), "")
        except KvError as error:
            self.failed(release.name, error)
            return False
        self._releases[release.name] = release
        return True

    def failed(self, name: str, error: KvError) -> None:
        """Add a release that cannot be verified."""
        self.followed.append(FollowedRelease(name, error=error))

    def expect(self, specs: Iterable[CellSpec]) -> None:
        """Set the cells to be verified."""
        for spec in specs:
            self._left[spec.release] = self._left.get(spec.release, 0) + 1

    def take(self, result: CellResult) -> None:
        """Add a result; the last one of a release finishes it."""
        name = result.spec.release
        self._results[name].append(result)
        self._left[name] -= 1
        if not self._left[name]:
            self.followed.append(self._finish(self._releases[name], tuple(self._results[name])))

    def _finish(self, release: Release, results: tuple[CellResult, ...]) -> FollowedRelease:
        conflicts: tuple[UncarriedPatch, ...] = ()
        contained: tuple[PatchStatus, ...] = ()
        made: ReviewBranch | None = None
        error: KvError | None = None
        try:
            series = port_choice.load_series(self._patches)
            if any(result.skipped for result in results):
                contained = status.contained(release, series, progress=self._progress)
            if any(result.verdict == Verdict.BROKEN_APPLY for result in results):
                conflicts = conflict_report.of_release(
                    release, series=series, progress=self._progress
                )
            elif self._checkout is not None and all(result.verdict in GOOD for result in results):
                name = review_branch.name_of(self._branch, release.key)
                made = review_branch.write(
                    self._checkout, name, release, results, progress=self._progress
                )
        except KvError as problem:
            error = problem
        # With a branch that must not be replaced, the release is under review.
        if isinstance(error, BranchRefused) or (not error and not any(map(_is_open, results))):
            _mark(release).unlink(missing_ok=True)
        return FollowedRelease(release.name, results, conflicts, made, error, contained)


def obtain(name: str, lock: Path | None = None, progress: Progress | None = None) -> Release:
    """Return a release to follow; a git reference is pinned to the commit that it has now.

    ``lock`` is the lock file of a series. Raises the errors of `fetch.ensure`.
    """
    if name.startswith("git:") and name not in lockfile.pins(lock):
        known = lockfile.known().get(name)
        if known is None or spec_resolver.remote_commit(known) != known.commit:
            return spec_resolver.pin_git(name)
    return fetch.ensure(name, lock=lock, progress=progress)


def added() -> list[Release]:
    """Return the releases that a watch can continue with, oldest first.

    These are all from package indexes, and the git references that are unfinished.
    """
    return [
        each
        for each in lockfile.load(lockfile.added())
        if each.kind in ARCHIVE_KINDS or _mark(each).exists()
    ]


def pending(specs: Iterable[CellSpec]) -> list[str]:
    """Return the releases that an interrupted watch left: unfinished, or new and not verified.

    A release is new if it is newer than every shipped one; others were added for another purpose.
    A release that ships is finished, also if it was never verified here.
    """
    shipped = {each.name: each.date for each in lockfile.load(lockfile.shipped())}
    newest = max(shipped.values(), default="")
    marked, new = set(), set()
    for release in added():
        if release.name in shipped:
            continue
        if _mark(release).exists():
            marked.add(release.name)
        elif release.date > newest:
            new.add(release.name)
    left = (
        spec.release
        for spec in specs
        if spec.release in marked or (spec.release in new and not result_cache.latest_result(spec))
    )
    return list(dict.fromkeys(left))


def _is_open(result: CellResult) -> bool:
    """Return whether the next watch verifies a cell again: it is `untestable`, or has a hang."""
    decided = result.verdict in GOOD or result.verdict in _COMPILE_ERRORS
    return not decided and result_cache.is_transient(result)


def _mark(release: Release) -> Path:
    """Return the file that exists while a release is unfinished."""
    return home() / "results" / "unfinished" / release.key
