"""Verify a patch series on a release: build both sides, run the scenarios, decide the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.building.build import build, build_series
from pyllamakv.errors import (
    BuildError,
    CommandFailed,
    HarnessError,
    NoPortApplies,
    PatchConflict,
    SourceError,
    UsageError,
)
from pyllamakv.patching import apply, drift, port_choice
from pyllamakv.source import fetch, spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.header_tests import HEADERS, HeaderResult, run_header_tests
from pyllamakv.verification.parallel_runs import RunTask
from pyllamakv.verification.verdict import GOOD, Decision, Pair, Verdict, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.building.variant import Variant
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.definition import Definition
    from pyllamakv.patching.series import Series
    from pyllamakv.scenarios.outcome import Kind, Outcome
    from pyllamakv.scenarios.runner import Run
    from pyllamakv.scenarios.scenario import Scenario
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class CheckRequest:
    """A request: a release, patches and scenarios.

    ``patches`` is a series (a path or ``git:REPOSITORY@FROM..TO``; empty: the shipped one),
    ``series`` are ids of its patches (empty: all that apply), and ``isolate`` is one patch to
    verify with its own scenarios. ``scenarios`` are what the patches are asked to pass, or, with
    ``limit``, only those that run: the patches then claim their own alone.
    """

    release: str
    series: tuple[str, ...] = ()
    patches: str = ""
    isolate: str = ""
    scenarios: tuple[str, ...] = ()
    limit: bool = False
    folders: tuple[Path, ...] = ()
    backend: str = "cpu"
    fresh: bool = False
    native: bool = True
    #: Run each scenario in a few settings only.
    quick: bool = False
    #: Seconds of one call into the library after which a run hangs; None: the backend's default.
    timeout: float | None = None


@dataclass(frozen=True)
class CheckResult:
    """A verdict with everything that led to it; ``runs`` by side."""

    question: CheckRequest
    decision: Decision
    pairs: tuple[Pair, ...] = ()
    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    #: Runs that were not made, because too many before them hung.
    stopped: int = 0
    #: Results of the tests of the patches' headers; only in a checkout.
    headers: tuple[HeaderResult, ...] = ()
    #: The base of the port for each patch that was merged from another release.
    carried: dict[str, str] = field(default_factory=dict)

    def to_json(self, *, pictures: bool = True) -> dict[str, Any]:
        """Return the result as JSON values (docs/verification.md explains the verdicts).

        Pictures and timelines are most of its size; without ``pictures``, they are omitted.
        """
        drawn = ("pictures", "timelines")
        found = self.decision
        return {
            "schema": 1,
            "release": self.question.release,
            "backend": self.question.backend,
            "verdict": str(found.verdict),
            "reason": found.reason,
            "exit_code": found.exit_code,
            "runs": found.runs,
            "stock_failed": found.stock_failed,
            "patched_failed": found.patched_failed,
            "shared_failures": found.shared,
            "stopped": self.stopped,
            "header_tests": {each.path: each.problem or "pass" for each in self.headers},
            "fixes": {name: list(where) for name, where in found.fixes.items()},
            "breaks": {name: list(where) for name, where in found.breaks.items()},
            "patches": list(self.patches),
            "carried": self.carried,
            "skipped": self.skipped,
            "variants": self.variants,
            "scenarios": {name: str(verdict) for name, verdict in found.scenarios.items()},
            "results": {
                side: [
                    {
                        key: value
                        for key, value in parallel_runs.to_json(run).items()
                        if pictures or key not in drawn
                    }
                    for run in runs
                ]
                for side, runs in self.runs.items()
            },
        }


@dataclass(frozen=True)
class PatchedSide:
    """The patched side: a variant, or the reason why there is none."""

    variant: Variant | None = None
    patches: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    #: The skipped patches that are meant for the release and that it does not contain.
    torn: tuple[str, ...] = ()
    conflict: str = ""
    build_error: str = ""
    tree: str = ""
    #: The release already contains some changes of a patch.
    partly: bool = False
    #: The release already contains all changes of the only patch.
    contained: bool = False
    #: The base of the port for each patch that was merged from another release.
    carried: dict[str, str] = field(default_factory=dict)


def check(question: CheckRequest, *, progress: Progress | None = None) -> CheckResult:
    """Run a check. Raises UsageError for an invalid request, HarnessError for an internal error.

    A stock build that cannot be fetched or built has the verdict untestable.
    """
    chosen = discovery.select(discovery.discover(question.folders), question.scenarios)
    series = port_choice.load_series(question.patches)
    names = _names(question)
    claimed = {patch.id: set(patch.scenarios) for patch in series}
    asked = [series.definition(name) for name in names or ()]
    claims = _claims(question, series, asked)
    if any(patch.scenarios for patch in asked):
        chosen = _narrowed(chosen, claims)
    try:
        release = fetch.fetch(
            spec_resolver.resolve(question.release, series.lock), progress=progress
        )
        stock = build(
            f"{question.release}+stock",
            backend=question.backend,
            native=question.native,
            lock=series.lock,
            progress=progress,
        )
        made = _patch(question, series, release, names, progress)
    except CommandFailed as error:
        return CheckResult(question, decide((), untestable=f"stock does not build: {error}"))
    except BuildError as error:
        return CheckResult(question, decide((), untestable=f"no build here: {error}"))
    except SourceError as error:
        if error.exit_code != SourceError.exit_code:
            raise
        return CheckResult(question, decide((), untestable=f"cannot be fetched here: {error}"))
    if not question.scenarios and claims:
        brought = {name for patch in made.patches for name in claimed.get(patch, ())}
        chosen = [each for each in chosen if each.kind != "feature" or each.id in brought]
    sides = {"stock": stock} | ({"patched": made.variant} if made.variant else {})
    tasks = [
        RunTask(side, built.folder, built.manifest.library_sha256, each, setting, question.backend)
        for each in chosen
        for setting in (each.few if question.quick else each.settings)
        for side, built in sides.items()
        if side == "stock" or not _left_out(each.id, made, claimed)
    ]
    if made.variant is None and not claims:
        tasks = []  # no run of stock decides whether such a patch is still needed
    try:
        results = parallel_runs.run_tasks(
            tasks, fresh=question.fresh, timeout=question.timeout, progress=progress
        )
    except parallel_runs.CannotLoad as error:
        where = f"stock cannot be loaded here: {error}"
        if error.library == stock.folder:
            return CheckResult(question, decide((), untestable=where))
        tasks = [task for task in tasks if task.side == "stock"]
        results = parallel_runs.run_tasks(
            tasks, fresh=question.fresh, timeout=question.timeout, progress=progress
        )
        made = replace(made, build_error=f"the patched library does not load: {error}")
    runs = {
        side: tuple(run for task, run in results.items() if task.side == side) for side in sides
    }
    faults = [run for each in runs.values() for run in each if run.outcome.status == "fault"]
    if faults:
        msg = f"{faults[0].scenario} [{faults[0].setting}]: {faults[0].outcome.message}"
        raise HarnessError(msg)
    pairs = pair_up(chosen, runs, claims, question.scenarios)
    made_pairs = [pair for pair in pairs if not _is_open(pair)]
    stopped = len(pairs) - len(made_pairs)
    headers = _test_headers(question, made, progress)
    # A patch without claims may use the name of a header for one with other functions.
    problems = [each.problem for each in headers if each.failed or (each.error and claims)]
    judgement = decide(
        made_pairs,
        conflict=made.conflict,
        build_error=made.build_error,
        headers=problems,
        partly=made.partly,
        contained=made.contained,
        carried=[f"{id_} from {base}" for id_, base in made.carried.items()],
        undecided=_undecided(made, pairs, claimed, limited=bool(question.scenarios)),
    )
    if judgement.verdict in GOOD and any(_was_stopped(pair.patched) for pair in pairs):
        reason = f"{stopped} runs were not made, because earlier ones hang on stock and patched"
        judgement = replace(judgement, verdict=Verdict.UNTESTABLE, reason=reason)
    ids = {side: built.id for side, built in sides.items()}
    return CheckResult(
        question,
        judgement,
        tuple(made_pairs),
        runs,
        ids,
        made.patches,
        made.skipped,
        stopped,
        headers,
        made.carried,
    )


def _test_headers(
    question: CheckRequest, made: PatchedSide, progress: Progress | None
) -> tuple[HeaderResult, ...]:
    if question.scenarios or made.variant is None or not made.tree:
        return ()
    paths = [path for each in HEADERS for path in (each.path, *each.needs)]
    found = open_store().read_many(made.tree, paths)
    files = {path: text for path, text in found.items() if text is not None}
    return tuple(run_header_tests(files, progress=progress))


def _is_open(pair: Pair) -> bool:
    """Return whether a run was not made, and the other side alone decides nothing.

    A claim that patched fails is broken, whatever stock would do.
    """
    broken = pair.claimed and pair.patched is not None and pair.patched.failed
    return _was_stopped(pair.patched) or (_was_stopped(pair.stock) and not broken)


def _was_stopped(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.failure == parallel_runs.STOPPED


def pair_up(
    scenarios: Sequence[Scenario],
    runs: dict[str, tuple[Run, ...]],
    claimed: set[str] | None = None,
    named: Sequence[str] = (),
) -> list[Pair]:
    """Return each scenario and setting with its outcome on both sides.

    ``claimed`` are the scenarios that the patches claim to pass; None: all. ``named`` are those of
    the request. For patches without any claim, a guard that stock fails is a fix like any other,
    and so is a named one that the patches do not claim.
    """
    unclaimed = set(named) - (set(named) if claimed is None else claimed)
    kinds: dict[str, Kind] = {
        each.id: "fix"
        if each.kind == "guard" and (claimed == set() or each.id in unclaimed)
        else each.kind
        for each in scenarios
    }
    patched = {(run.scenario, run.setting): run.outcome for run in runs.get("patched", ())}
    return [
        Pair(
            run.scenario,
            kinds[run.scenario],
            run.setting,
            run.outcome,
            patched.get((run.scenario, run.setting)),
            claimed=claimed is None or run.scenario in claimed,
        )
        for run in runs["stock"]
    ]


def _names(question: CheckRequest) -> list[str] | None:
    """Return the ids of the requested patches; None for the whole series."""
    if question.series and question.isolate:
        msg = "choose one of --series and --isolate"
        raise UsageError(msg)
    return [question.isolate] if question.isolate else list(question.series) or None


def _claims(question: CheckRequest, series: Series, asked: Sequence[Definition]) -> set[str]:
    """Return the scenarios that the patches claim to pass: theirs, and those of the request.

    A request that only limits what runs claims nothing.

    A scenario that another patch names is not claimed by the requested ones that have their own.
    """
    own = {name for patch in asked or series for name in patch.scenarios}
    others = {name for patch in series for name in patch.scenarios} if asked and own else set()
    named = set(() if question.limit else question.scenarios)
    return own | set(() if asked else series.scenarios) | (named - others)


def _narrowed(chosen: list[Scenario], own: set[str]) -> list[Scenario]:
    """Return the scenarios of some patches, and all guards.

    A guard of the whole series is a fix of the patch that names it.
    """
    return [
        replace(each, kind="fix") if each.id in own and each.kind == "guard" else each
        for each in chosen
        if each.id in own or each.kind == "guard"
    ]


def _patch(
    question: CheckRequest,
    series: Series,
    release: Release,
    names: list[str] | None,
    progress: Progress | None,
) -> PatchedSide:
    try:
        patched: PatchedRelease = apply.apply(release, names, series=series)
    except (PatchConflict, NoPortApplies) as error:
        first = str(error).split("\n", 1)[0]
        conflicts = error.conflicts if isinstance(error, NoPortApplies) else [error]
        partly = any(each.half_applied for each in conflicts)
        # The conflict of a partly patched tree is better explained than a changed line.
        why = drift.why(release, names, series) or first
        if partly:
            why = f"{first} The release already contains a part of the patch."
        whole = bool(conflicts) and all(each.contained for each in conflicts)
        contained = whole and len(conflicts) == len(names or series.order)
        if contained:
            why = "The release already contains all changes: drop the patch for this release."
        return PatchedSide(conflict=why, partly=partly, contained=contained)
    skipped = {each.id: each.reason for each in patched.skipped}
    torn = {each.id: each.reason for each in patched.skipped if each.failed}
    conflict = "; ".join(torn.values())
    partly = any(c.half_applied for each in patched.skipped for c in each.conflicts)
    if torn:
        conflict = drift.why(release, list(torn), series) or conflict
    try:
        built = build_series(
            question.release,
            names,
            question.patches,
            backend=question.backend,
            native=question.native,
            progress=progress,
        )
    except CommandFailed as error:
        first = error.first_error or str(error)
        return PatchedSide(
            patches=patched.patches, carried=patched.carried, skipped=skipped, build_error=first
        )
    return PatchedSide(
        built,
        patched.patches,
        skipped,
        tuple(torn),
        conflict,
        tree=patched.tree,
        partly=partly,
        carried=patched.carried,
    )


def _undecided(
    made: PatchedSide, pairs: Sequence[Pair], claimed: dict[str, set[str]], *, limited: bool
) -> list[str]:
    """Return the patches that should have been applied and that no run decides on.

    If the request names scenarios (``limited``), patches that claim others do not count.
    """
    decided = {pair.scenario for pair in pairs if pair.decides}
    open_ = [id_ for id_ in made.torn if not claimed.get(id_, set()) & decided]
    return [id_ for id_ in open_ if not (limited and claimed.get(id_))]


def _left_out(name: str, made: PatchedSide, claimed: dict[str, set[str]]) -> bool:
    """Return whether a scenario belongs only to patches that were not selected."""
    owners = {patch for patch, names in claimed.items() if name in names}
    return bool(owners) and owners <= set(made.skipped)
