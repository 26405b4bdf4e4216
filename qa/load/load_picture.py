"""Draw runs of a load test: answered and lost requests over time, and the ends of servers.

A run of few requests has a bar for each: waiting, answered, and gaps without a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.view.drawing import Area, Box, Drawing, Mark, Segment, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from qa.load.load_result import LoadResult

_WIDTH, _LEFT, _RIGHT, _TOP = 860.0, 56.0, 20.0, 34.0
#: Height of the bars of a run, with the space above them for its name and marks.
_PANEL, _ABOVE, _BELOW = 88.0, 42.0, 34.0
_BINS = 80
#: Number of requests up to which each has a bar, and how many times longer than the mean time per
#: token a gap is drawn.
_FEW, _LONG_GAP = 16, 5.0


def draw(title: str, runs: Mapping[str, LoadResult]) -> Drawing:
    """Return a drawing with a panel per run: requests that ended, over the time of the run."""
    height = _TOP + len(runs) * (_ABOVE + _PANEL) + _BELOW
    made = Drawing(_WIDTH, height, title)
    made.add(Text(title, _LEFT, 26, role="ink", size=14, bold=True))
    seconds = max((run.seconds - _begin(run) for run in runs.values()), default=0.0) or 1.0
    counts = {name: _binned(run, seconds) for name, run in runs.items()}
    most = max((a + b for bins in counts.values() for a, b in bins), default=0) or 1
    for number, (name, run) in enumerate(runs.items()):
        top = _TOP + number * (_ABOVE + _PANEL) + _ABOVE
        _panel(made, top, name, run, counts[name], most, seconds)
    plot = _WIDTH - _LEFT - _RIGHT
    bottom = height - _BELOW + 16
    made.add(
        Text("0 s", _LEFT, bottom),
        Text(
            f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s",
            _LEFT + plot,
            bottom,
            anchor="end",
        ),
        Text(_caption(runs.values()), _LEFT + plot / 2, bottom, anchor="middle"),
    )
    return made


def _begin(run: LoadResult) -> float:
    """Return when the first of few requests arrives; a run of many is drawn from its start."""
    if len(run.timings) > _FEW:
        return 0.0
    return min((each.arrived for each in run.timings), default=0.0)


def _caption(runs: Iterable[LoadResult]) -> str:
    if any(len(run.timings) > _FEW for run in runs):
        return "requests that ended, over time"
    return "a bar per request; grey: no tokens; a cross: it ended with an error"


def _panel(
    made: Drawing,
    top: float,
    name: str,
    run: LoadResult,
    bins: list[tuple[int, int]],
    most: int,
    seconds: float,
) -> None:
    plot = _WIDTH - _LEFT - _RIGHT
    count = len(run.timings)
    words = f"{name}: {count - run.lost:,} of {count:,} requests answered"
    if run.lost:
        words += f", {run.lost:,} lost"
    if run.deaths:
        words += f"; aborts of the server (crosses): {len(run.deaths):,}"
    made.add(
        Text(words, _LEFT, top - 18, role="ink", size=12),
        *(Mark("bad", "cross", _LEFT + at / seconds * plot, top - 7, 3) for at, _ in run.deaths),
    )
    if 0 < count <= _FEW:
        _bars(made, top, run, plot / seconds)
        return
    step, unit, base = plot / _BINS, _PANEL / most, top + _PANEL
    answered: list[Box] = []
    lost: list[Box] = []
    for index, (good, bad) in enumerate(bins):
        left = _LEFT + index * step
        if good:
            answered.append((left, base - good * unit, step - 1, good * unit))
        if bad:
            lost.append((left, base - (good + bad) * unit, step - 1, bad * unit))
    made.add(
        Area("s2", tuple(answered), "answered"),
        Area("bad", tuple(lost), "lost"),
        Segment("line", ((_LEFT, base), (_LEFT + plot, base))),
        Text(str(most), _LEFT - 8, top + 8, anchor="end"),
        Text("0", _LEFT - 8, base, anchor="end"),
    )


def _bars(made: Drawing, top: float, run: LoadResult, unit: float) -> None:
    """Draw a bar per request; ``unit`` is the width of a second."""
    height = _PANEL / len(run.timings)
    left = _LEFT - _begin(run) * unit
    for row, each in enumerate(run.timings):
        y, size = top + row * height, height - 2
        mean = (each.ended - each.first) / max(each.tokens, 1)
        idle = [(each.arrived, each.first)]
        idle += [(begin, end) for begin, end in each.gaps if end - begin > _LONG_GAP * mean]
        whole: Box = (left + each.arrived * unit, y, (each.ended - each.arrived) * unit, size)
        made.add(
            Text(str(row + 1), _LEFT - 8, y + size / 2 + 4, anchor="end"),
            Area("s2", (whole,), each.error or f"{each.tokens} tokens"),
            Area("free", tuple((left + a * unit, y, (b - a) * unit, size) for a, b in idle)),
        )
        if each.error:
            made.add(Mark("bad", "cross", left + each.ended * unit, y + size / 2, 5))


def _binned(run: LoadResult, seconds: float) -> list[tuple[int, int]]:
    """Return how many requests were answered and lost in each part of the time."""
    bins = [[0, 0] for _ in range(_BINS)]
    for each in run.timings:
        bins[min(int(each.ended / seconds * _BINS), _BINS - 1)][bool(each.error)] += 1
    return [(good, bad) for good, bad in bins]
