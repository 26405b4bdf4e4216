"""Minimize a failing trace to the operations that matter, and record these again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyllamakv.errors import KvError, UsageError
from pyllamakv.scenarios.runner import Opener, ScenarioRunner
from pyllamakv.traces import (
    batch_encoding,
    script,
    script_player,
    trace,
    trace_scenario,
    variant_selection,
)
from pyllamakv.traces.script import Line
from pyllamakv.traces.script_session import ScriptSession

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.scenarios.outcome import Outcome
    from pyllamakv.traces.trace import Head


#: Results that a line requires; the others are recorded again.
_EXPECTED = ("status", "done", "error", "polls")

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class MinimizedTrace:
    """A minimal trace: its failure, the number of runs, and whether the search was interrupted."""

    failure: str
    message: str
    before: int
    lines: tuple[Line, ...]
    runs: int
    minimal: bool = True


class FailureProbe:
    """Run operations on one build, each time as a scenario, and return the failure.

    An operation is a line of a script as JSON text, with its expected result. `ScenarioRunner`
    reuses the worker, and replaces it after a crash.
    """

    def __init__(
        self, head: Head, first: Line, library: Path, model: Path, runner: ScenarioRunner
    ) -> None:
        self._head, self._first, self._library, self._runner = head, first, library, runner
        self._model = str(model)
        self.n_batch = int(first.arguments.get("n_batch", first.arguments.get("n_ctx", 256)))

    def outcome(self, items: tuple[str, ...]) -> Outcome:
        """Return the outcome of these operations."""
        lines = [self._first, *script.parse(items)]
        one = trace_scenario.scenario_of_lines(self._head, lines, "shrink", self._model)
        return self._runner.run(self._library, one, one.settings[0]).outcome


def minimize(
    head: Head,
    lines: list[Line],
    library: Path,
    *,
    model: Path,
    opener: Opener | None = None,
    progress: ProgressCallback | None = None,
) -> MinimizedTrace:
    """Return the fewest operations with the same failure on the library at a path.

    ``progress`` receives the number of remaining operations and of runs. Ctrl-C ends the search
    with the best result so far. Raises UsageError if the operations do not fail, or fail because of
    an internal error.
    """
    first, rest = _split(lines)
    items = tuple(json.dumps(_item(line)) for line in rest)
    with ScenarioRunner(opener) as runner:
        failing = FailureProbe(head, first, library, model, runner)
        outcome = failing.outcome(items)
        if not outcome.failed:
            why = f": {outcome.message}" if outcome.message else ""
            msg = (
                f"the trace does not fail on that build ({outcome.status}{why}); name another "
                f"--variant"
            )
            raise UsageError(msg)
        wanted = failure_key(outcome)

        def left(best: tuple[str, ...]) -> None:
            if progress:
                progress(len(best), minimizer.runs)

        minimizer = Minimizer(
            items,
            lambda some: failure_key(failing.outcome(some)) == wanted,
            Sizes(_size, _cut, lambda one, other: _join(one, other, failing.n_batch)),
            left,
        )
        minimal = True
        try:
            minimizer.offer(tuple(map(_without_positions, items)))
            minimizer.run()
        except KeyboardInterrupt:
            minimal = False
    found = (first, *script.parse(minimizer.best))
    return MinimizedTrace(
        wanted[0], failure_message(outcome), len(rest), found, minimizer.runs, minimal
    )


def record(head: Head, lines: tuple[Line, ...], path: Path, *, spec: str, model: Path) -> None:
    """Play operations on a build, and write them with their results as a trace."""
    with (
        variant_selection.opened(spec, head) as library,
        closing(ScriptSession(library.native, file=model, lenient=True)) as session,
    ):
        variant = library.about.variant
        about = replace(head, variant=variant, spec=trace.spec_of(variant), start="empty")
        # An operation that ends the process is in the last row.
        with closing(trace.Recorder(path, about, session)) as recorder, suppress(KvError):
            script_player.play(
                (replace(line, result=None) for line in lines), session, recorder.observe
            )


def failure_key(outcome: Outcome) -> tuple[str, str]:
    """Return the identity of a failure: its class, and the broken claim."""
    claim = failure_message(outcome) if outcome.failure == "claim" else ""
    return outcome.failure, re.sub(r"\d+", "#", claim)


def failure_message(outcome: Outcome) -> str:
    """Return the message of a failure without its line number, which differs between runs."""
    return re.sub(r"^row \d+ \(\w+\): ", "", outcome.message)


def _split(lines: list[Line]) -> tuple[Line, list[Line]]:
    first = lines[0]
    if first.op == "context":
        return replace(first, arguments={**first.arguments, "guard": False}, result=None), lines[1:]
    return Line(1, "context", {"guard": False}), lines


def _item(line: Line) -> dict[str, Any]:
    recorded = line.result
    if recorded is None and line.op in script.DECODES and "expect" not in line.arguments:
        recorded = {"status": 0}
    result = {name: recorded[name] for name in _EXPECTED if name in recorded} if recorded else None
    return replace(line, result=result or None).to_json()


def _without_positions(item: str) -> str:
    raw = json.loads(item)
    raw.pop("pos", None)
    return json.dumps(raw)


def _size(item: str) -> int:
    raw = json.loads(item)
    match raw["op"]:
        case "batch":
            return len(raw["tokens"])
        case "advance":
            return len(raw["steps"])
        case "decode":
            return sum(map(_length, raw["feed"].values()))
    return 0


def _cut(item: str, n: int) -> str:
    raw = json.loads(item)
    if raw["op"] == "batch":
        raw = batch_encoding.cut(raw, n)
    elif raw["op"] == "advance":
        raw["steps"] = raw["steps"][:n]
    else:
        raw["feed"] = _drop_tokens(raw["feed"], n)
    return json.dumps(raw)


def _drop_tokens(feed: dict[str, Any], n: int) -> dict[str, Any]:
    """Remove tokens from the longest sequences until ``n`` are left."""
    lengths = {key: _length(what) for key, what in feed.items()}
    while sum(lengths.values()) > n:
        lengths[max(lengths, key=lambda key: lengths[key])] -= 1
    return {
        key: lengths[key] if isinstance(what, int) else what[: lengths[key]]
        for key, what in feed.items()
        if lengths[key]
    }


def _length(what: Any) -> int:
    return what if isinstance(what, int) else len(what)


def _join(one: str, other: str, n_batch: int) -> str | None:
    """Return one batch of two adjacent successful decodes."""
    first, second = json.loads(one), json.loads(other)
    both = [_batch(each) for each in (first, second)]
    if both[0] is None or both[1] is None:
        return None
    joined = batch_encoding.join(both[0], both[1])
    if len(joined["tokens"]) > n_batch:
        return None
    return json.dumps({"op": "batch", **joined, "result": {"status": 0}})


def _batch(raw: dict[str, Any]) -> dict[str, Any] | None:
    if "pos" in raw or "expect" in raw or raw.get("result") != {"status": 0}:
        return None
    if raw["op"] == "step":
        return {"tokens": [raw["token"]], "seq": raw["seq"]}
    return raw if raw["op"] == "batch" else None


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Sizes(Generic[T]):
    """How an operation is reduced: ``size`` of one, and ``cut`` to a smaller size, at least 1.

    ``join`` returns one operation for two adjacent ones, or None if that is impossible.
    """

    size: Callable[[T], int]
    cut: Callable[[T, int], T]
    join: Callable[[T, T], T | None]


class Minimizer(Generic[T]):
    """Minimize ``items``, which fail; ``best`` is the shortest failing list so far.

    ``fails`` returns whether a list fails in the same way, and is called once per list.
    ``progress`` receives ``best`` when it becomes shorter. ``runs`` counts the calls.
    """

    def __init__(
        self,
        items: Sequence[T],
        fails: Callable[[tuple[T, ...]], bool],
        sizes: Sizes[T],
        progress: Callable[[tuple[T, ...]], None] | None = None,
    ) -> None:
        self.best = tuple(items)
        self.runs = 0
        self._fails, self._sizes, self._progress = fails, sizes, progress
        self._asked: dict[tuple[T, ...], bool] = {self.best: True}

    def run(self) -> tuple[T, ...]:
        """Return a minimal list."""
        before: tuple[T, ...] = ()
        while before != self.best:
            before = self.best
            self._join()
            self._remove()
            self._cut()
        return self.best

    def offer(self, items: tuple[T, ...]) -> bool:
        """Accept a list as the best one if it fails; return whether it fails."""
        if items not in self._asked:
            self.runs += 1
            self._asked[items] = self._fails(items)
        if not self._asked[items]:
            return False
        self.best = items
        if self._progress:
            self._progress(items)
        return True

    def _remove(self) -> None:
        step = max(1, len(self.best) // 2)
        while True:
            before = len(self.best)
            # From the end: operations after the failure are removed first.
            start = len(self.best) - step
            while start > -step and self.best:
                low = max(0, start)
                self.offer(self.best[:low] + self.best[start + step :])
                start -= step
            if step > 1:
                step //= 2
            elif len(self.best) == before:
                return

    def _join(self) -> None:
        place = 0
        while place < len(self.best) - 1:
            end = place + 1
            while end < len(self.best) and self._joined(place, end + 1) is not None:
                end += 1
            self._join_all(place, end)
            place += 1

    def _join_all(self, start: int, end: int) -> None:
        """Replace all adjacent items by joined ones; if that does not fail, one half at a time."""
        if end - start < 2:
            return
        one = self._joined(start, end)
        if one is not None and self.offer((*self.best[:start], one, *self.best[end:])):
            return
        middle = (start + end) // 2
        # The second half first, so that indices in the first half stay valid.
        self._join_all(middle, end)
        self._join_all(start, middle)

    def _joined(self, start: int, end: int) -> T | None:
        one: T | None = self.best[start]
        for other in self.best[start + 1 : end]:
            one = None if one is None else self._sizes.join(one, other)
        return one

    def _cut(self) -> None:
        for place in range(len(self.best)):
            step = self._sizes.size(self.best[place]) // 2
            while step:
                size = self._sizes.size(self.best[place]) - step
                if size < 1 or not self.offer(self._smaller(place, size)):
                    step //= 2

    def _smaller(self, place: int, size: int) -> tuple[T, ...]:
        one = self._sizes.cut(self.best[place], size)
        return (*self.best[:place], one, *self.best[place + 1 :])
