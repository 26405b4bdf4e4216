"""Verify one cell of the matrix: a release, a series and a backend.

Spec and result are plain values that survive JSON, so any executor can verify a cell: in this
process, in another one, or on another machine. A cell that cannot be verified has the result
untestable, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import filelock

from pyllamakv.building import variant as variants
from pyllamakv.building.build import build, build_series
from pyllamakv.errors import HarnessError, KvError
from pyllamakv.home import home
from pyllamakv.patching import drift, port_choice
from pyllamakv.source import fetch
from pyllamakv.verification import check as checking
from pyllamakv.verification import check_report, discovery
from pyllamakv.verification.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyllamakv.scenarios.outcome import Outcome
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from pyllamakv.verification.check import CheckResult


@contextlib.contextmanager
def lock_cell(name: str | None, *, wait: bool) -> Iterator[bool]:
    """Lock the cell of a key among the processes of this data directory.

    Yields False if another process holds the lock and ``wait`` is False. A killed process holds no
    lock.
    """
    if name is None:
        yield True
        return
    folder = home() / "locks"
    lock = filelock.FileLock(folder / f"cell-{name[:16]}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        yield False
        return
    except OSError:
        # Nothing is cached in a read-only data directory.
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def build_lock(progress: Progress | None) -> Iterator[None]:
    """Limit fetching and building to one cell at a time: a build uses every processor."""
    folder = home() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "matrix.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if progress:
                progress("waiting for the build of another cell", 0, None)
            lock.acquire()
    except OSError:
        # A read-only data directory may contain every build; `check` reports a missing one.
        yield
        return
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class CellSpec:
    """The name of a cell: a release, patches (default: all that apply) and a backend.

    ``patches`` is the series (default: the shipped one), and ``series`` are ids of its patches.
    ``isolate`` verifies one patch with its own scenarios; ``scenarios`` limits what runs; ``quick``
    runs each scenario in a few settings only.
    """

    release: str
    series: tuple[str, ...] = ()
    isolate: str = ""
    backend: str = "cpu"
    native: bool = True
    scenarios: tuple[str, ...] = ()
    quick: bool = False
    patches: str = ""

    @property
    def name(self) -> str:
        """Return the cell in a few words: ``0.3.9``, ``0.3.9 [kv-counters] cuda``."""
        return self.what if self.backend == "cpu" else f"{self.what} {self.backend}"

    @property
    def what(self) -> str:
        """Return the cell in a few words, without its backend."""
        words = [self.release]
        if self.isolate or self.series:
            words.append(f"[{self.isolate or ','.join(self.series)}]")
        if self.patches:
            words.append(f"of {self.patches.rstrip('/').rsplit('/', 1)[-1]}")
        if self.scenarios:
            words.append(f"({','.join(self.scenarios)})")
        words += ["portable"] * (not self.native) + ["quick"] * self.quick
        return " ".join(words)

    def check_request(self, *, fresh: bool = False) -> checking.CheckRequest:
        """Return the check request of this cell."""
        return checking.CheckRequest(
            release=self.release,
            series=self.series,
            patches=self.patches,
            isolate=self.isolate,
            scenarios=self.scenarios,
            limit=True,
            backend=self.backend,
            fresh=fresh,
            native=self.native,
            quick=self.quick,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON values."""
        raw = asdict(self) | {"series": list(self.series), "scenarios": list(self.scenarios)}
        if not self.patches:
            del raw["patches"]
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellSpec:
        """Return the spec that `to_json` described."""
        lists = {key: tuple(raw[key]) for key in ("series", "scenarios")}
        return cls(**{**raw, **lists})


@dataclass(frozen=True)
class ScenarioRow:
    """One scenario of a cell; ``word`` is its verdict for display."""

    id: str
    kind: str
    verdict: str
    word: str
    stock: str
    patched: str
    claim: str = ""
    issue: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ScenarioRow:
        """Return the row of a stored result. Version 0.1 and earlier call a fix a cure."""
        return cls(**{**raw, "kind": "fix" if raw["kind"] == "cure" else raw["kind"]})

    @property
    def on_stock(self) -> str:
        """Return the result on stock: "pass", "fail", or "skip" if it is not meaningful."""
        ended = self.stock.split(" ", 1)[0]
        lacks = ended == "absent" and self.kind == "feature"
        return "pass" if ended == "passes" else "fail" if ended == "fails" or lacks else "skip"


@dataclass(frozen=True)
class FailedRun:
    """One run that patched did not pass."""

    scenario: str
    setting: str
    failure: str
    message: str


@dataclass(frozen=True)
class CellResult:
    """The result of a cell. Drift and pictures are stored as JSON."""

    spec: CellSpec
    verdict: str
    reason: str
    era: str = ""
    date: str = ""
    commit: str = ""
    runs: int = 0
    stock_failed: int = 0
    patched_failed: int = 0
    patches: tuple[str, ...] = ()
    #: The base of the port for each patch that was merged from another release.
    carried: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    scenarios: tuple[ScenarioRow, ...] = ()
    failing: tuple[FailedRun, ...] = ()
    drift: tuple[dict[str, Any], ...] = ()
    pictures: tuple[dict[str, Any], ...] = ()
    timelines: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    machine: str = ""
    #: When the cell was verified, ISO 8601 in UTC; `date` is the release's.
    verified: str = ""
    #: A verdict on inputs that have changed since.
    stale: bool = False

    @property
    def measured(self) -> str:
        """Return the counts of the verdict in one line."""
        if not self.runs:
            return self.reason.splitlines()[0] if self.reason else ""
        if self.variants.get("patched"):
            return (
                f"stock fails {self.stock_failed} of {self.runs} runs, "
                f"patched {self.patched_failed}"
            )
        return f"stock fails {self.stock_failed} of {self.runs} runs, not patched"

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        raw = asdict(self) | {"spec": self.spec.to_json()}
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in raw.items()
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellResult:
        """Return the result that `to_json` described; raises ValueError when it is none."""
        try:
            facts = dict(raw)
            facts["spec"] = CellSpec.from_json(raw["spec"])
            facts["scenarios"] = tuple(ScenarioRow.from_json(row) for row in raw["scenarios"])
            facts["failing"] = tuple(FailedRun(**run) for run in raw["failing"])
            for key in ("patches", "drift", "pictures"):
                facts[key] = tuple(raw[key])
            # Results of version 0.1 and earlier have the older names.
            for old, new in (("films", "timelines"), ("judged", "verified")):
                if old in facts:
                    facts[new] = facts.pop(old)
            facts["timelines"] = tuple(facts.get("timelines", ()))
            facts["verdict"] = str(Verdict(raw["verdict"]))
            return cls(**facts)
        except (KeyError, TypeError) as error:
            msg = f"this is not a result of a cell: {type(error).__name__}: {error}"
            raise ValueError(msg) from error


def verify_cell(
    spec: CellSpec, *, fresh: bool = False, progress: Progress | None = None
) -> CellResult:
    """Verify a cell, fetching and building if necessary; ``fresh`` ignores the result cache."""
    started = time.monotonic()
    release: Release | None = None
    try:
        with build_lock(progress):
            lock = port_choice.lock_of(spec.patches)
            release = fetch.ensure(spec.release, lock=lock, progress=progress)
            _build(spec, lock, progress)
            drifted = _drift(spec, release)
        answer = checking.check(spec.check_request(fresh=fresh), progress=progress)
        result = _result(spec, answer, drifted)
    except HarnessError as error:
        result = untestable(spec, f"a fault of the harness: {error}")
    except KvError as error:
        result = untestable(spec, str(error))
    except Exception as error:
        # An error in one cell must not end the others. It is reported as a regression.
        result = untestable(spec, f"a fault of the harness: {type(error).__name__}: {error}")
    known = {} if release is None else _facts(release)
    taken = {
        "seconds": round(time.monotonic() - started, 1),
        "machine": os.uname().machine,
        "verified": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return CellResult(**{**vars(result), **known, **taken})


def verify_cell_json(raw: dict[str, Any], fresh: bool = False) -> dict[str, Any]:
    """Verify a cell from JSON to JSON, for executors of other processes."""
    return verify_cell(CellSpec.from_json(raw), fresh=fresh).to_json()


def untestable(spec: CellSpec, reason: str) -> CellResult:
    """Return the result of a cell that cannot be verified here."""
    return CellResult(spec, str(Verdict.UNTESTABLE), reason)


def _facts(release: Release) -> dict[str, str]:
    return {"era": release.era, "date": release.date, "commit": release.commit}


def _result(spec: CellSpec, answer: CheckResult, drifted: tuple[dict[str, Any], ...]) -> CellResult:
    found = answer.decision
    return CellResult(
        spec=spec,
        verdict=str(found.verdict),
        reason=found.reason,
        runs=found.runs,
        stock_failed=found.stock_failed,
        patched_failed=found.patched_failed,
        patches=answer.patches,
        carried=dict(answer.carried),
        skipped=dict(answer.skipped),
        variants=dict(answer.variants),
        scenarios=_rows(answer),
        failing=tuple(
            FailedRun(
                pair.scenario,
                pair.setting,
                pair.patched.failure or pair.patched.status,
                pair.patched.message,
            )
            for pair in answer.pairs
            if pair.patched is not None and _is_reported(pair.patched, pair.stock)
        ),
        drift=drifted,
        pictures=tuple(
            {"side": side, **picture.to_json()} for side, picture in check_report.pictures(answer)
        ),
        timelines=tuple(
            {"scenario": name, "side": side, **timeline.to_json()}
            for name, side, timeline in check_report.timelines(answer)
        ),
    )


def _is_reported(patched: Outcome, stock: Outcome) -> bool:
    """Return whether to report a run that patched did not pass, unless both lack a capability."""
    return patched.failed or (patched.status == "absent" and stock.status != "absent")


def _rows(answer: CheckResult) -> tuple[ScenarioRow, ...]:
    known = discovery.discover(answer.question.folders)
    rows = []
    for name, verdict in answer.decision.scenarios.items():
        mine = [pair for pair in answer.pairs if pair.scenario == name]
        row = ScenarioRow(
            name,
            mine[0].kind,
            str(verdict),
            check_report.word(verdict, mine),
            check_report.summary([pair.stock for pair in mine]),
            check_report.summary([pair.patched for pair in mine]),
            known[name].claim if name in known else "",
            known[name].issue if name in known else "",
        )
        rows.append(row)
    return tuple(rows)


def _build(spec: CellSpec, lock: Path | None, progress: Progress | None) -> None:
    """Build both sides. `check` reports a failure here when it occurs again."""
    names = (spec.isolate,) if spec.isolate else (spec.series or None)
    options: Any = {"backend": spec.backend, "native": spec.native, "progress": progress}
    with contextlib.suppress(KvError):
        build(variants.Spec(spec.release, ()), **options, lock=lock)
        build_series(spec.release, names, spec.patches, **options)


def _drift(spec: CellSpec, release: Release) -> tuple[dict[str, Any], ...]:
    ids = (spec.isolate,) if spec.isolate else spec.series
    try:
        series = port_choice.load_series(spec.patches)
        return tuple(one.as_json() for one in drift.drift(release, ids, series=series))
    except KvError:
        # Where the verdict can be had without it, a report without drift is better than none.
        return ()
