"""Shrink a trace that fails on a build to the operations that matter, and record these again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import KvError, UsageError
from pyllamakv.record import batches, builds, playing, script, trace, traced
from pyllamakv.record.script import Line
from pyllamakv.record.shrink import Shrinker, Sizes
from pyllamakv.record.stage import Stage
from pyllamakv.scenarios.runner import Bench, Opener

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.record.trace import Head
    from pyllamakv.scenarios.outcome import Outcome

#: Results that say what is expected of a line; the others are made anew.
_EXPECTED = ("status", "done", "error", "polls")

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Shrunk:
    """Hold a minimal trace: how it fails, how many runs it took, whether it was cut short."""

    failure: str
    message: str
    before: int
    lines: tuple[Line, ...]
    runs: int
    minimal: bool = True


class Failing:
    """Play operations on one build, each time as a scenario, and say how they fail.

    An operation is a line of a script as JSON text, with what is expected of it. `Bench` keeps the
    worker, and replaces it after a crash.
    """

    def __init__(self, head: Head, first: Line, library: Path, model: Path, bench: Bench) -> None:
        self._head, self._first, self._library, self._bench = head, first, library, bench
        self._model = str(model)
        self.n_batch = int(first.arguments.get("n_batch", first.arguments.get("n_ctx", 256)))

    def outcome(self, items: tuple[str, ...]) -> Outcome:
        """Return how these operations end."""
        lines = [self._first, *script.parse(items)]
        one = traced.of(self._head, lines, "shrink", self._model)
        return self._bench.run(self._library, one, one.settings[0]).outcome


def shrink(
    head: Head,
    lines: list[Line],
    library: Path,
    *,
    model: Path,
    opener: Opener | None = None,
    told: Told | None = None,
) -> Shrunk:
    """Return the fewest operations that fail as these do on the library at a path.

    ``told`` is called with the operations that are left, and the runs so far. A Ctrl-C ends it with
    what was found by then. Raises UsageError when they do not fail, or not for a fault of theirs.
    """
    first, rest = _split(lines)
    items = tuple(json.dumps(_item(line)) for line in rest)
    with Bench(opener) as bench:
        failing = Failing(head, first, library, model, bench)
        outcome = failing.outcome(items)
        if not outcome.failed:
            why = f": {outcome.message}" if outcome.message else ""
            msg = f"the trace does not fail there ({outcome.status}{why}); name another --variant"
            raise UsageError(msg)
        wanted = kind(outcome)

        def left(best: tuple[str, ...]) -> None:
            if told:
                told(len(best), shrinker.runs)

        shrinker = Shrinker(
            items,
            lambda some: kind(failing.outcome(some)) == wanted,
            Sizes(_size, _cut, lambda one, other: _join(one, other, failing.n_batch)),
            left,
        )
        minimal = True
        try:
            shrinker.offer(tuple(map(_without_positions, items)))
            shrinker.run()
        except KeyboardInterrupt:
            minimal = False
    found = (first, *script.parse(shrinker.best))
    return Shrunk(wanted[0], said(outcome), len(rest), found, shrinker.runs, minimal)


def record(head: Head, lines: tuple[Line, ...], path: Path, *, spec: str, model: Path) -> None:
    """Play operations on a build once more, and write them with their results as a trace."""
    with (
        builds.opened(spec, head) as library,
        closing(Stage(library.native, file=model, lenient=True)) as stage,
    ):
        variant = library.about.variant
        about = replace(head, variant=variant, spec=trace.spec_of(variant), start="empty")
        # What ends the process is the last row.
        with closing(trace.Recorder(path, about, stage)) as recorder, suppress(KvError):
            playing.play((replace(line, result=None) for line in lines), stage, recorder.observe)


def kind(outcome: Outcome) -> tuple[str, str]:
    """Return what makes two failures the same: their class, and what claim was broken."""
    claim = said(outcome) if outcome.failure == "claim" else ""
    return outcome.failure, re.sub(r"\d+", "#", claim)


def said(outcome: Outcome) -> str:
    """Return the message of a failure without the row, which is another one in each run."""
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
        raw = batches.cut(raw, n)
    elif raw["op"] == "advance":
        raw["steps"] = raw["steps"][:n]
    else:
        raw["feed"] = _thinner(raw["feed"], n)
    return json.dumps(raw)


def _thinner(feed: dict[str, Any], n: int) -> dict[str, Any]:
    """Take tokens away from the longest lanes until ``n`` are left."""
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
    """Make one batch of two decodes that went well."""
    first, second = json.loads(one), json.loads(other)
    both = [_batch(each) for each in (first, second)]
    if both[0] is None or both[1] is None:
        return None
    joined = batches.join(both[0], both[1])
    if len(joined["tokens"]) > n_batch:
        return None
    return json.dumps({"op": "batch", **joined, "result": {"status": 0}})


def _batch(raw: dict[str, Any]) -> dict[str, Any] | None:
    if "pos" in raw or "expect" in raw or raw.get("result") != {"status": 0}:
        return None
    if raw["op"] == "step":
        return {"tokens": [raw["token"]], "seq": raw["seq"]}
    return raw if raw["op"] == "batch" else None
