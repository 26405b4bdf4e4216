"""Test that a watch completes each release once, and resumes after an interrupt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import cell_results

from pyllamakv.errors import BranchRefused, GitError, KvError, Locked, UsageError
from pyllamakv.patching import conflict_report, status
from pyllamakv.patching.conflict_report import UncarriedPatch
from pyllamakv.patching.status import PatchStatus
from pyllamakv.source import lockfile
from pyllamakv.source.releases import Release
from pyllamakv.verification import release_watch, result_cache, review_branch
from pyllamakv.verification.cell import CellSpec, FailedRun
from pyllamakv.verification.release_watch import ReleaseWatch
from pyllamakv.verification.review_branch import Checkout, ReviewBranch

if TYPE_CHECKING:
    from pathlib import Path

RELEASE = Release("b2", "xllamacpp", "1" * 40, "2" * 40, "streams", "2026-11-01T00:00:00Z")
SPEC = CellSpec("b2")
CONTAINED = PatchStatus("b2", "fix", "contained", reason="drop it; it is in 123456 (fix it)")
BOTH = (SPEC, CellSpec("b2", backend="cuda"))


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Use a data directory with one added release; return the results of each branch."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    lockfile.save(lockfile.added(), [RELEASE])
    found: list[Any] = []

    def write(checkout: Any, name: str, release: Release, results: Any, **_: Any) -> ReviewBranch:
        found.append(results)
        return ReviewBranch(name, "3" * 40)

    monkeypatch.setattr(review_branch, "repository", lambda _: Checkout(tmp_path, "4" * 40))
    monkeypatch.setattr(review_branch, "check_free", lambda root, name: "")
    monkeypatch.setattr(review_branch, "write", write)
    monkeypatch.setattr(result_cache, "latest_result", lambda spec: cell_results.result("b2"))
    monkeypatch.setattr(status, "contained", lambda release, *_, **__: (CONTAINED,))
    return found


def started(*specs: CellSpec) -> ReleaseWatch:
    """Return a watch that waits for the results of cells."""
    watch = ReleaseWatch("watch/{release}")
    assert watch.start(RELEASE)
    watch.expect(specs)
    return watch


def test_branch_is_written_after_the_last_result(written: list[Any]) -> None:
    """The branch has the results of all backends; afterwards the release is not pending."""
    watch = started(*BOTH)
    results = tuple(cell_results.result("b2", spec=spec) for spec in BOTH)
    watch.take(results[0])
    assert not watch.followed
    assert release_watch.pending(BOTH) == ["b2"]
    watch.take(results[1])
    (found,) = watch.followed
    assert found.branch and found.branch.name == "watch/b2"
    assert found.contained == (CONTAINED,)
    assert found.as_json()["contained"] == [{"id": "fix", "reason": CONTAINED.reason}]
    assert written == [results]
    assert release_watch.pending(BOTH) == []


HANG = FailedRun("many-moves", "flash", "hang", "no end after 60 s")


@pytest.mark.parametrize(
    ("verdict", "failing", "left"),
    [
        ("harmful", (), []),
        ("broken-build", (), []),
        ("broken-carry", (HANG,), []),
        ("harmful", (HANG,), ["b2"]),
        ("untestable", (), ["b2"]),
    ],
)
def test_bad_verdict_has_no_branch(
    written: list[Any], verdict: str, failing: tuple[FailedRun, ...], left: list[str]
) -> None:
    """One backend is enough; after an untestable cell or a hang, the release is not complete."""
    watch = started(*BOTH)
    watch.take(cell_results.result("b2", verdict, spec=BOTH[1], failing=failing))
    watch.take(cell_results.result("b2"))
    (found,) = watch.followed
    assert (found.branch, found.error, written) == (None, None, [])
    assert release_watch.pending(BOTH) == left


def test_good_verdict_with_a_hang_has_a_branch(written: list[Any]) -> None:
    """The release has its branch, and is complete."""
    watch = started(SPEC)
    watch.take(cell_results.result("b2", failing=(HANG,)))
    assert watch.followed[0].branch
    assert release_watch.pending([SPEC]) == []


def test_conflicts_are_reported(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that requires manual work is reported, and no branch is written."""
    patch = UncarriedPatch("fix", "manual", "0.3.36", "a conflict")
    monkeypatch.setattr(conflict_report, "of_release", lambda release, **_: (patch,))
    watch = started(SPEC)
    watch.take(cell_results.result("b2", "broken-apply"))
    assert watch.followed[0].conflicts == (patch,)
    assert not written


@pytest.mark.parametrize(
    ("error", "left"),
    [(BranchRefused("Ada"), []), (GitError(["git"], 1, "no room"), ["b2"])],
    ids=["refused", "failed"],
)
def test_failed_branch_is_written_by_the_next_watch(
    monkeypatch: pytest.MonkeyPatch, error: KvError, left: list[str]
) -> None:
    """After an error of git the release is pending; after a refused branch it is complete."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(review_branch, "write", fail)
    watch = started(SPEC)
    watch.take(cell_results.result("b2"))
    assert watch.error is error
    assert watch.followed[0].results
    assert release_watch.pending([SPEC]) == left


def test_release_of_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its error, and is not marked as pending."""
    watch = ReleaseWatch("")
    folder = replace(RELEASE, name="path:/x", kind="path")
    assert not watch.start(folder)
    assert isinstance(watch.error, UsageError)
    assert "`pyllamakv matrix run`" in str(watch.error)
    assert release_watch.pending([SPEC]) == []


def test_second_release_for_one_branch_is_refused() -> None:
    """It would replace the branch of the first one."""
    watch = ReleaseWatch("review")
    assert watch.start(RELEASE)
    assert not watch.start(replace(RELEASE, name="b3"))
    assert "put {release} into --branch" in str(watch.error)


def test_added_release_without_a_result_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no mark."""
    monkeypatch.setattr(result_cache, "latest_result", lambda spec: None)
    assert release_watch.pending(BOTH) == ["b2"]
    assert [release.name for release in release_watch.added()] == ["b2"]


def test_release_added_by_a_user_is_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older release that a user added is not pending unless a watch marked it."""
    monkeypatch.setattr(result_cache, "latest_result", lambda spec: None)
    older = replace(RELEASE, name="b1", date="2026-10-01T00:00:00Z")
    lockfile.save(lockfile.added(), [older])
    specs = (CellSpec("b1"), *BOTH)
    assert release_watch.pending(specs) == ["b2"]
    assert ReleaseWatch("").start(older)
    assert release_watch.pending(specs) == ["b1", "b2"]


def test_shipped_release_is_not_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not pending, even with the mark of a watch."""
    started(SPEC)
    assert release_watch.pending([SPEC]) == ["b2"]
    monkeypatch.setattr(lockfile, "shipped", lambda: tmp_path / "shipped.lock.toml")
    lockfile.save(lockfile.shipped(), [RELEASE])
    assert release_watch.pending([SPEC]) == []


def test_second_watch_is_refused_while_the_lock_is_held() -> None:
    """The second watch ends with the name of the lock; errors in the block are unchanged."""
    with (
        release_watch.only_one(),
        pytest.raises(Locked, match=r"another .* holds .*watch\.lock; wait until"),
        release_watch.only_one(),
    ):
        pass
    with pytest.raises(Locked, match=r"^inner$"), release_watch.only_one():
        raise Locked("inner")
