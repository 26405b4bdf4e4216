"""Repeat an operation many times, and check that memory, descriptors and threads do not grow.

Each workload runs in its own process (`leak_workloads`). Python and C share one malloc there, whose
count of allocated bytes includes everything but mappings. Anonymous mappings are counted by their
resident memory, shared mappings and mapped files only by their number. All are sampled a hundred
times, after a garbage collection and `malloc_trim`. There is no leak if the slope over the second
half is below a bound per operation (`Slope`, `Kind.most`), and if mappings, descriptors and threads
at the end equal those after the first tenth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pyllamakv.errors import HarnessError
from qa import child_environment
from qa.built import SPEC
from qa.entry import Entry, StressOptions, Tick, strip_directories

_CHURN: Final = "qa.leaks.leak_workloads"
#: Seconds beyond its share that a workload may take to start, finish a round, and end.
_GRACE: Final = 120.0
#: Bytes by which memory may grow in a run of any length. Caches of Python and pools of malloc grow
#: once, by some 20 KB on the heap (240 workers: after the first 40 nothing more). The first
#: contexts in mapped memory add 110 KB: 1,560 B each after 24 of them, 200 after 168, 19 over
#: 1,033. A short run has its second half, which is measured, among them: 38 KB in the last 112 of
#: 224. The heap is an exact count; resident memory is counted in pages, which malloc touches as
#: its blocks fragment: by up to 141 KB in 32,000 failing decodes whose heap grew by 12 KB, and by
#: 210 KB in 650,000.
_ONCE: Final = {"heap": 64 * 1024, "resident": 512 * 1024}
#: The largest single step that counts as such: CPython's table of interned strings, where `pathlib`
#: adds each file name, grew by 536 KB after 3,200 prompts, and never again.
_STEP: Final = 1024 * 1024
#: Minimum number of operations for a result: with fewer, a leak of 10 KB each would pass for
#: one-time growth.
_FEWEST: Final = 100
#: Allowed growth of these numbers. No workload needed one more mapping, but malloc maps large
#: blocks separately, which may include a pool.
_MORE: Final = {"maps": 4, "fds": 0, "threads": 0}


@dataclass(frozen=True)
class LeakWorkload:
    """One workload: its function in `leak_workloads`, and the number of operations of a long run.

    ``bound`` is the allowed growth in bytes per operation, by pages and by fragments: about five
    times the growth seen in ten seconds on two loaded cores.
    """

    work: str
    target: int
    bound: float

    def most(self, what: str, operations: int) -> float:
        """Return the allowed bytes per operation of ``what``, over a number of operations.

        One-time growth is spread over all operations: the fewer there are, the more each may use.
        """
        return max(self.bound, _ONCE[what] / operations)


KINDS: Final = {
    "contexts": LeakWorkload(f"{_CHURN}:contexts", 10_000, 256),
    "contexts in mapped memory": LeakWorkload(f"{_CHURN}:mapped", 10_000, 256),
    "refused contexts": LeakWorkload(f"{_CHURN}:refused", 10_000, 16),
    "libraries and models": LeakWorkload(f"{_CHURN}:models", 1_000, 512),
    "decodes": LeakWorkload(f"{_CHURN}:decodes", 1_000_000, 0.5),
    "decodes in C": LeakWorkload(f"{_CHURN}:advances", 1_000_000, 0.5),
    "failing decodes": LeakWorkload(f"{_CHURN}:failing", 100_000, 4),
    "defragmentations": LeakWorkload(f"{_CHURN}:defrags", 20_000, 16),
    "saves and restores": LeakWorkload(f"{_CHURN}:saves", 20_000, 16),
    "snapshots": LeakWorkload(f"{_CHURN}:snapshots", 20_000, 8),
    "recordings": LeakWorkload(f"{_CHURN}:recordings", 5_000, 256),
    "slot cache prompts": LeakWorkload(f"{_CHURN}:slots", 10_000, 16),
    "prefix cache prompts": LeakWorkload(f"{_CHURN}:prefixes", 10_000, 64),
    "workers": LeakWorkload(f"{_CHURN}:workers", 1_000, 512),
}


@dataclass(frozen=True)
class Slope:
    """A slope in bytes per operation, and its noise.

    The slope is the median of the slopes between all pairs of samples (Theil and Sen), after the
    largest step between adjacent samples is removed: a pool that grows once is no leak, and in the
    middle of the samples it would move the median. ``noise`` is three standard errors, from the
    median distance of the samples to the line.
    """

    value: float
    noise: float

    @classmethod
    def of(cls, counts: Sequence[float], sizes: Sequence[float]) -> Slope:
        """Fit a line through at least three samples."""
        x, y = np.asarray(counts, dtype=float), _without_step(np.asarray(sizes, dtype=float))
        first, second = np.triu_indices(len(x), 1)
        value = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        rest = y - value * x
        spread = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
        return cls(value, 3 * spread / (float(x.std()) * len(x) ** 0.5))

    def exceeds(self, bound: float) -> bool:
        """Return whether the growth exceeds a bound and the noise."""
        return self.value > bound and self.value > self.noise

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.noise:.2g} B"


def _without_step(sizes: np.ndarray) -> np.ndarray:
    """Return samples without the largest step up, if a pool can cause it."""
    steps = np.diff(sizes)
    largest = int(np.argmax(steps))
    level = sizes.copy()
    if 0 < steps[largest] <= _STEP:
        level[largest + 1 :] -= steps[largest]
    return level


def names() -> tuple[str, ...]:
    """Return the names of all workloads."""
    return tuple(KINDS)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Run workloads for about ``effort.seconds``; return an entry per workload. Raises NotBuilt.

    A failing workload is a defect of its entry, and the others run.
    """
    from pyllamakv.open_variant import find_built

    wanted = {name: kind for name, kind in KINDS.items() if effort.wants(name)}
    if not wanted:
        return []
    variant = find_built(SPEC)
    share = effort.shared(len(wanted)).seconds
    made = []
    for name, kind in wanted.items():
        tick(name)
        try:
            made.append(evaluate(name, kind, run_workload(kind, variant, share), effort.seed))
        except HarnessError as error:
            broken = f"{name}: {strip_directories(str(error))}"
            made.append(Entry("leaks", name, {"operations": "broke"}, (broken,), effort.seed))
    return made


def run_workload(kind: LeakWorkload, variant: Path, seconds: float) -> list[dict[str, int]]:
    """Run a workload in its own process until the time or target is reached; return the samples.

    A sample has ``count`` operations, ``heap`` and ``resident`` bytes, ``maps``, ``fds`` and
    ``threads``. Raises HarnessError if the workload fails.
    """
    env = child_environment.environment(PYTHONMALLOC="malloc", MALLOC_ARENA_MAX="1")
    with tempfile.TemporaryDirectory(prefix="pyllamakv-leaks-") as folder:
        words = [kind.work, str(variant), str(seconds), str(kind.target), folder]
        command = [sys.executable, "-m", _CHURN, *words]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=seconds + _GRACE
            )
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"{kind.work} did not end within {error.timeout:.0f} s") from error
    if done.returncode:
        output = done.stderr.strip()[-600:]
        raise HarnessError(f"{kind.work} ended with status {done.returncode}: {output}")
    samples: list[dict[str, int]] = json.loads(next(reversed(done.stdout.splitlines()), "[]"))
    if not samples:
        raise HarnessError(f"{kind.work} ended without a sample")
    return samples


def evaluate(
    name: str, kind: LeakWorkload, samples: Sequence[Mapping[str, int]], seed: int
) -> Entry:
    """Return the row of a workload from its samples."""
    counts = [sample["count"] for sample in samples]
    last = samples[-1]
    early = next(sample for sample in samples if sample["count"] >= last["count"] / 10)
    second = [sample for sample in samples if sample["count"] >= last["count"] / 2]
    row = {"operations": f"{counts[-1]:,}", "resident at 10 %": _mib(early["resident"])}
    row |= {"at the end": _mib(last["resident"])}
    defects = []
    data: dict[str, Any] = {"samples": len(samples), "early": dict(early), "last": dict(last)}
    if len(second) < 3:
        defects.append(f"{name}: too few samples within the time limit")
    for what in ("heap", "resident") if len(second) >= 3 else ():
        slope = Slope.of([each["count"] for each in second], [each[what] for each in second])
        row[f"{what} per operation"] = str(slope)
        data[what] = [slope.value, slope.noise]
        most = kind.most(what, second[-1]["count"] - second[0]["count"])
        row[f"{what} bound"] = f"{_bytes(most)} B"
        if slope.exceeds(most):
            defects.append(
                f"{name}: {what} memory grows by {slope} per operation, allowed {_bytes(most)}"
            )
    for what, more in _MORE.items():
        row[what] = f"{early[what]} to {last[what]}"
        if last[what] > early[what] + more:
            defects.append(f"{name}: {what} grow from {early[what]} to {last[what]}")
    few = "too few operations" if last["count"] < _FEWEST else ""
    few = few or ("" if last["heap"] else "this libc does not count the heap")
    return Entry("leaks", name, row, tuple(defects), seed=seed, data=data, skip_reason=few)


def _bytes(size: float) -> str:
    return f"{size:,.0f}" if size >= 10 else f"{size:.3g}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
