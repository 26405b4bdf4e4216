"""Test that runs are distributed and cached, and that an interrupt leaves no result."""

from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path

import pytest
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

from pyllamakv.errors import WorkerDied, WorkerTimeout
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.scenarios.runner import Run
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.parallel_runs import RunTask

PATIENCE = 120


class Stuck(SimulatedNative):
    """Compute forever, until the worker is killed."""

    def __init__(self, *words, **more) -> None:
        super().__init__(*words, **more)
        self.ended = threading.Event()
        self.at_work = threading.Event()

    def decode(self, *_):
        self.at_work.set()
        assert self.ended.wait(PATIENCE)
        raise WorkerDied("ended by SIGKILL", signal=9)

    def close(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def task(side: str, name: str) -> RunTask:
    found = discovery.find(name)
    return RunTask(side, Path("/nowhere") / side, side, found, found.settings[0])


def test_an_interrupt_ends_a_run_at_once() -> None:
    """The interrupted run has no result; the finished ones are cached."""
    stuck = Stuck()

    def make(path: Path) -> SimulatedNative:
        return stuck if path.name == "stuck" else SimulatedNative(heals=True)

    make.by_path = True

    def interrupt(*_: object) -> None:
        assert stuck.at_work.wait(PATIENCE)
        raise KeyboardInterrupt

    quick, slow = task("patched", "fragmented"), task("stuck", "fragmented")
    with pytest.raises(KeyboardInterrupt):
        parallel_runs.run_tasks([slow, quick], workers=2, opener=Opener(make), progress=interrupt)
    assert parallel_runs.load_run(quick.key).outcome.status == "pass"
    assert parallel_runs.load_run(slow.key) is None


class Silent(SimulatedNative):
    """Exceed the timeout of a request."""

    def decode(self, *_):
        raise WorkerTimeout("no answer within 120 s")


@pytest.mark.parametrize(("silent", "ended"), [(1, "pass"), (2, "fail")])
def test_only_a_repeated_hang_is_a_failure(silent: int, ended: str) -> None:
    """A single timeout may have been caused by a machine that was suspended."""
    made = iter(range(9))
    opener = Opener(
        lambda: (
            Silent() if 0 < next(made) <= silent else SimulatedNative(heals=True)
        )  # 0 only loads the library
    )
    one = task("patched", "fragmented")
    run = parallel_runs.run_tasks([one], workers=1, opener=opener)[one]
    assert run.outcome.status == ended
    assert (parallel_runs.load_run(one.key) is None) is (ended == "fail")


def test_full_disk_leaves_a_run_uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result that cannot be written is not cached, and no error is raised."""
    run = Run("a", "b", Outcome("pass"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", full)
        parallel_runs.store_run("key", run)
    assert parallel_runs.load_run("key") is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    parallel_runs.store_run("key", run)
    assert parallel_runs.load_run("key") == run


def test_trial_of_a_library_has_the_device_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases find no software device of Vulkan without that variable."""
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    opener = Opener(lambda: SimulatedNative(heals=True))
    one = dataclasses.replace(task("patched", "fragmented"), backend="vulkan")
    parallel_runs.run_tasks([one], workers=1, opener=opener)
    assert {each.get("GGML_VK_VISIBLE_DEVICES") for each in opener.environments} == {"0"}


def test_cached_runs_are_not_repeated() -> None:
    """They are repeated only on request."""
    opener = Opener(lambda: SimulatedNative(heals=True))
    words = {"workers": 1, "opener": opener}
    tasks = [task("patched", "fragmented"), task("patched", "fork-then-defrag")]
    first = parallel_runs.run_tasks(tasks, **words)
    count = len(opener.opened)
    again = parallel_runs.run_tasks(tasks, **words)
    assert [run.outcome for run in again.values()] == [run.outcome for run in first.values()]
    assert len(opener.opened) == count
    parallel_runs.run_tasks(tasks, fresh=True, **words)
    assert len(opener.opened) > count


def test_no_more_runs_are_made_after_three_hangs() -> None:
    """Only the first hang is repeated; the other side still runs."""
    made: list[str] = []

    def make(path: Path) -> SimulatedNative:
        made.append(path.name)
        return Silent() if path.name == "patched" else SimulatedNative(heals=True)

    make.by_path = True
    names = ("fragmented", "fork-then-defrag", "many-moves", "shift-then-defrag", "used-count")
    tasks = [task(side, name) for name in names for side in ("stock", "patched")]
    runs = parallel_runs.run_tasks(tasks, workers=1, opener=Opener(make))
    failures = [run.outcome.failure for one, run in runs.items() if one.side == "patched"]
    assert failures == ["hang"] * 3 + ["stopped"] * 2
    # One worker to load it, and one per run that hung.
    assert made.count("patched") == 1 + 4
    assert all(run.outcome.status != "skip" for one, run in runs.items() if one.side == "stock")
    assert all(parallel_runs.load_run(one.key) is None for one in tasks if one.side == "patched")


def test_timeout_is_set_on_every_worker() -> None:
    """On every worker that runs scenarios."""
    libraries: list[SimulatedNative] = []

    def make() -> SimulatedNative:
        libraries.append(SimulatedNative(heals=True))
        return libraries[-1]

    parallel_runs.run_tasks(
        [task("patched", "fragmented")], workers=1, opener=Opener(make), timeout=7.5
    )
    assert libraries[-1].timeout == 7.5
