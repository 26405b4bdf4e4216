"""Plan the matrix, and verify its cells on any executor, with a result cache.

On one machine, cells are verified one after another, because a build uses every processor, and so
do the parallel scenarios of a cell. A distributed executor receives all cells at once; each of its
machines fetches and builds separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyllamakv.building import backend as backends
from pyllamakv.errors import UsageError
from pyllamakv.patching import port_choice
from pyllamakv.source import lockfile, releases, spec_resolver
from pyllamakv.verification import cell, result_cache
from pyllamakv.verification import cell as cells
from pyllamakv.verification.cell import CellResult, CellSpec

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.progress import Progress

#: Verifies a cell from JSON to JSON; a module-level function, so that it can be pickled.
VerifyCell = Callable[[dict[str, Any], bool], dict[str, Any]]


@dataclass(frozen=True)
class MatrixSelection:
    """The selection of cells; the default is all of them.

    ``patches`` is the series (default: the shipped one), and ``series`` are ids of its patches.
    ``isolate`` names patches to verify alone, with their own scenarios; ``each`` adds all of them
    in this way. ``sample`` selects one release per era: the default one, else the newest.
    ``quick`` runs each scenario in a few settings only.
    """

    releases: tuple[str, ...] = ()
    eras: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("cpu",)
    series: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    isolate: tuple[str, ...] = ()
    each: bool = False
    native: bool = True
    sample: bool = False
    quick: bool = False
    patches: str = ""


def plan(choice: MatrixSelection | None = None) -> tuple[CellSpec, ...]:
    """Return the cells of a matrix, oldest release first; releases of one commit are one.

    A cell that is selected twice is returned once. Raises UsageError or UnknownRelease for names
    that do not exist, and PatchFormatError if the series cannot be read, because these affect all
    cells.
    """
    choice = choice or MatrixSelection()
    series = port_choice.load_series(choice.patches)
    for name in (*choice.series, *choice.isolate):
        series.definition(name)
    alone = ("", *series.order) if choice.each else choice.isolate or ("",)
    selected = (
        CellSpec(
            release,
            () if patch else choice.series,
            patch,
            backends.known(backend),
            choice.native,
            choice.scenarios,
            choice.quick,
            choice.patches,
        )
        for backend in choice.backends
        for release in _names(choice, series.lock)
        for patch in alone
    )
    return tuple(dict.fromkeys(selected))


def _names(choice: MatrixSelection, lock: Path | None) -> list[str]:
    known = lockfile.known()
    if choice.releases:
        resolved = (spec_resolver.resolve(name, lock) for name in choice.releases)
        found = {each.name: each for each in resolved}
    else:
        found = {name: each for name, each in known.items() if each.kind in releases.ARCHIVE_KINDS}
    eras = {release.era for release in known.values()}
    strange = next((era for era in choice.eras if era not in eras), None)
    if strange is not None:
        msg = f"there is no era {strange!r}: {', '.join(sorted(eras))}"
        raise UsageError(msg)
    names, commits = [], set()
    for name, release in sorted(found.items(), key=lambda item: item[1].order):
        if choice.eras and release.era not in choice.eras:
            continue
        if release.commit not in commits or choice.releases:
            names.append(name)
        commits.add(release.commit)
    if choice.sample:
        names = _one_per_era(names, {name: found[name].era for name in names})
    if not names:
        msg = "no release is selected; `pyllamakv upstream list` lists them"
        raise UsageError(msg)
    return names


def _one_per_era(names: Iterable[str], eras: Mapping[str, str]) -> list[str]:
    chosen: dict[str, str] = {}
    for name in names:
        if chosen.get(eras[name]) != releases.TEST_RELEASE:
            chosen[eras[name]] = name
    return list(chosen.values())


@dataclass
class ProgressEstimate:
    """Count the cells that are done, and estimate how long the others take."""

    total: int
    cached: int = 0
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def left(self, now: float | None = None) -> float | None:
        """Return the seconds that are left at the pace so far, or None before the first cell."""
        if not self.done:
            return None
        spent = (time.monotonic() if now is None else now) - self.started
        return spent / self.done * (self.total - self.cached - self.done)

    def __str__(self) -> str:
        text = f"{self.cached + self.done} of {self.total}"
        left = self.left()
        if left is None or self.cached + self.done == self.total:
            return text
        minutes = round(left / 60)
        return f"{text}, about {minutes} min left" if minutes else f"{text}, under a minute left"


def run(
    specs: Sequence[CellSpec],
    *,
    executor: Executor | None = None,
    fresh: bool = False,
    judge: VerifyCell | None = None,
    where: str | None = None,
    each: Callable[[CellResult], None] | None = None,
    progress: Progress | None = None,
) -> tuple[CellResult, ...]:
    """Verify cells and return their results in the same order.

    Every result is stored at once, so that a run after a kill continues. Two concurrent runs share
    the cells: those that the other one verifies come last, and its results are used. ``where``
    names the kind of machine in the cache of results (default without an executor: "here").
    ``each`` is called with each result, as soon as it is known.
    """
    place = where or ("here" if executor is None else "elsewhere")
    keys = {spec: result_cache.key(spec, place) for spec in specs}
    found: dict[CellSpec, CellResult] = {}
    for spec in specs:
        kept = None if fresh else result_cache.load_result(keys[spec])
        if kept is not None:
            found[spec] = kept
            if each:
                each(kept)
    left = [spec for spec in dict.fromkeys(specs) if spec not in found]
    pace = ProgressEstimate(len(left) + len(found), len(found))

    def take(spec: CellSpec, result: CellResult) -> None:
        # The inputs may have changed during the verification: the result has no key then.
        same = result_cache.key(spec, place) == keys[spec]
        result_cache.store_result(keys[spec] if same else None, result)
        found[spec] = result
        pace.done += 1
        if progress:
            progress(f"{spec.name}: {result.verdict} ({pace})", 0, None)
        if each:
            each(result)

    if executor is None:
        for spec, wait in _in_turn(left, found):
            with cell.lock_cell(keys[spec], wait=wait) as mine:
                if not mine:
                    continue
                kept = None if fresh else result_cache.load_result(keys[spec])
                take(
                    spec,
                    kept or _here(spec, fresh, judge, progress and _with_estimate(progress, pace)),
                )
    elif left:
        _elsewhere(left, executor, fresh, judge or cells.verify_cell_json, take)
    return tuple(found[spec] for spec in specs)


def _in_turn(
    specs: Sequence[CellSpec], found: Mapping[CellSpec, CellResult]
) -> Iterator[tuple[CellSpec, bool]]:
    """Yield each cell; yield those without a result again at the end, to wait for them."""
    for wait in (False, True):
        for spec in specs:
            if spec not in found:
                yield spec, wait


def _here(
    spec: CellSpec, fresh: bool, judge: VerifyCell | None, progress: Progress | None
) -> CellResult:
    if judge is None:
        return cells.verify_cell(spec, fresh=fresh, progress=progress)
    return CellResult.from_json(judge(spec.to_json(), fresh))


def _elsewhere(
    specs: Iterable[CellSpec],
    executor: Executor,
    fresh: bool,
    judge: VerifyCell,
    take: Callable[[CellSpec, CellResult], None],
) -> None:
    futures: dict[Future[dict[str, Any]], CellSpec] = {}
    try:
        for spec in specs:
            futures[executor.submit(judge, spec.to_json(), fresh)] = spec
        for future in as_completed(futures):
            take(futures[future], _of(futures[future], future))
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _of(spec: CellSpec, future: Future[dict[str, Any]]) -> CellResult:
    try:
        return CellResult.from_json(future.result())
    except Exception as error:
        # The worker was lost, or sent an invalid result, which is no verdict on the release.
        return cells.untestable(spec, f"a worker was lost: {type(error).__name__}: {error}")


def _with_estimate(progress: Progress, pace: ProgressEstimate) -> Progress:
    return lambda what, done, total: progress(f"[{pace}] {what}", done, total)
