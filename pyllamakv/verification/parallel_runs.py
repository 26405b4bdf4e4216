"""Run scenarios on both sides in parallel workers, and cache the results.

A result is a function of the library, the scenario's file, the setting and this package's own
code; its key is a digest of these, so a run with a full cache starts no worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, local
from typing import TYPE_CHECKING, Any

from pyllamakv.cpus import usable_cpus
from pyllamakv.errors import KvError, LoadError
from pyllamakv.home import home
from pyllamakv.scenarios import runner, synthetic_models
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.frames import Timeline
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.scenarios.runner import Opener, Run, ScenarioRunner
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from pyllamakv.scenarios.scenario import Scenario, Setting
    from pyllamakv.source.progress import Progress

#: Packages and modules that affect a result, besides the library and the scenario.
_CODE = (
    "scenarios/*.py",
    "traces/*.py",
    "runtime/*.py",
    "binding/*.py",
    "verification/discovery.py",
    "verification/parallel_runs.py",
)
_PACKAGE = Path(__file__).resolve().parents[1]
#: Modules of these packages that do not affect results: changes there keep the cache.
_NO_INPUT = ("traces/completion.py", "traces/playback.py")

#: Failures that are not cached: a hang may be caused by a busy machine, and a run that was not made
#: has no result.
STOPPED = "stopped"
_NOT_CACHED = ("hang", STOPPED)

#: Hangs of a library after which its remaining runs are not made.
MAX_HANGS = 3


@dataclass(frozen=True)
class RunTask:
    """Name one run: a side's library, a scenario and a setting."""

    side: str
    library: Path
    digest: str
    scenario: Scenario
    setting: Setting
    backend: str = "cpu"

    @property
    def key(self) -> str:
        """Return the cache key of the result."""
        facts = [
            self.digest,
            self.scenario.id,
            self.scenario.digest,
            synthetic_models.identity(self.scenario.model),
            asdict(self.setting),
            self.scenario.environment,
            self.backend,
            code_digest(),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@cache
def code_digest() -> str:
    """Return the digest of the code that runs scenarios."""
    digest = hashlib.sha256()
    for part in _CODE:
        for path in sorted(_PACKAGE.glob(part)):
            name = path.relative_to(_PACKAGE).as_posix()
            if name not in _NO_INPUT:
                digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class CannotLoad(LoadError):
    """Report which of the sides' libraries cannot be loaded here."""

    def __init__(self, library: Path, error: LoadError) -> None:
        super().__init__(str(error), code=error.code, log=error.log)
        self.library = library


def run_tasks(
    tasks: Sequence[RunTask],
    *,
    fresh: bool = False,
    workers: int | None = None,
    opener: Opener | None = None,
    executor: Executor | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> dict[RunTask, Run]:
    """Return the result of every task; ``fresh`` ignores the result cache.

    Both sides of a scenario run in the same call, the longest tasks first, on ``workers`` threads
    with separate worker processes, and all on one backend. A call that takes more than ``timeout``
    seconds is a hang; after `MAX_HANGS` of a library, its remaining tasks are skipped with the
    failure "stopped". An interrupt ends the running tasks, whose results are not stored.
    """
    done: dict[RunTask, Run] = {}
    for task in tasks:
        found = None if fresh else load_run(task.key)
        if found is not None:
            done[task] = found
    left = [task for task in tasks if task not in done]
    if not left:
        return done
    for library in dict.fromkeys(task.library for task in left):
        check_loadable(library, opener, DevicePlacement(left[0].backend))
    # Deep models take longest; started last they would leave one worker alone with them.
    groups = _groups(left)
    groups.sort(key=lambda group: -len(group) * synthetic_models.cost(group[0].scenario.model))
    runners: list[ScenarioRunner] = []
    mine = local()
    hangs: Counter[Path] = Counter()
    ended: list[RunTask] = []
    stop = Event()

    def work(group: list[RunTask]) -> list[tuple[RunTask, Run]]:
        runner = getattr(mine, "runner", None)
        if runner is None:
            place = DevicePlacement(left[0].backend)
            runner = mine.runner = ScenarioRunner(opener, place, timeout=timeout)
            runners.append(runner)
        results = []
        for task in group:
            if hangs[task.library] >= MAX_HANGS:
                run = _stopped(task)
            else:
                run = runner.run(task.library, task.scenario, task.setting)
            hung = run.outcome.failure == "hang"
            if hung and not hangs[task.library] and not stop.is_set():
                # A busy or suspended machine looks the same; a real hang repeats.
                run = runner.run(task.library, task.scenario, task.setting)
                hung = run.outcome.failure == "hang"
            hangs[task.library] += hung
            if stop.is_set():
                break  # an interrupted run has no result
            store_run(task.key, run)
            results.append((task, run))
            if progress:
                ended.append(task)
                progress(f"run {task.side} {task.scenario.id}", len(ended), len(left))
        return results

    count = workers or default_workers()
    pool = executor or ThreadPoolExecutor(count, thread_name_prefix="scenario")
    futures = [pool.submit(work, group) for group in groups]
    try:
        for future in as_completed(futures):
            done |= dict(future.result())
    except BaseException:
        stop.set()
        while left_over := [each for each in futures if not each.cancel() and not each.done()]:
            for runner in runners:
                runner.cut()
            wait(left_over, timeout=0.2)
        raise
    finally:
        if executor is None:
            pool.shutdown()
        for runner in runners:
            runner.close()
    return {task: done[task] for task in tasks}


def _stopped(task: RunTask) -> Run:
    message = f"not run, because {MAX_HANGS} earlier runs hung"
    return Run(task.scenario.id, task.setting.name, Outcome("skip", STOPPED, message))


def check_loadable(library: Path, opener: Opener | None, place: DevicePlacement) -> None:
    """Open a library once in a worker, as runs do, and close it; raises CannotLoad.

    Such a library has no result for any scenario.
    """
    try:
        (opener or runner.open_worker)(library, place.environment).close()
    except LoadError as error:
        raise CannotLoad(library, error) from error


def default_workers() -> int:
    """Return the number of parallel runs: the usable processors, at most eight."""
    return min(usable_cpus(), 8)


def load_run(key: str) -> Run | None:
    """Return a cached result, or None without a readable one."""
    try:
        raw = json.loads(_file(key).read_text(encoding="utf-8"))
        return from_json(raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_run(key: str, run: Run) -> None:
    """Store a result, unless it may differ the next time."""
    if run.outcome.status == "fault" or run.outcome.failure in _NOT_CACHED:
        return
    # Without a writable data directory, the result is valid but not cached.
    with contextlib.suppress(OSError, KvError):
        write_text_atomic(_file(key), json.dumps(to_json(run)))


def to_json(run: Run) -> dict[str, Any]:
    """Return a result as plain JSON values."""
    raw = asdict(run)
    raw["pictures"] = [picture.to_json() for picture in run.pictures]
    raw["timelines"] = [timeline.to_json() for timeline in run.timelines]
    return raw


def from_json(raw: dict[str, Any]) -> Run:
    """Return the result that `to_json` described."""
    pictures = tuple(Picture.from_json(each) for each in raw["pictures"])
    timelines = tuple(Timeline.from_json(each) for each in raw["timelines"])
    outcome = Outcome(**raw["outcome"])
    return Run(**{**raw, "outcome": outcome, "pictures": pictures, "timelines": timelines})


def _file(key: str) -> Path:
    return home() / "results" / "runs" / key[:2] / f"{key}.json"


def _groups(tasks: Sequence[RunTask]) -> list[list[RunTask]]:
    groups: dict[tuple[str, str], list[RunTask]] = {}
    for task in tasks:
        groups.setdefault((str(task.library), task.scenario.id), []).append(task)
    return list(groups.values())
