"""Show a timeline in the terminal, frame by frame: cells, moves, statistics.

If the output is not a terminal, each frame with a change is printed once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from pyllamakv.printable import printable
from pyllamakv.scenarios.cell_picture import FREE, Picture
from pyllamakv.view import cell_drawing, palette

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from pyllamakv.scenarios.frames import Frame

#: Number of intermediate pictures of moving cells, and maximum seconds for each.
_STEPS, _TICK = 12, 0.06
#: Operations that stay readable below the cells.
_LINES = 4
#: Style of a cell that has just moved, on a dark or light terminal.
_ARRIVED = "bold reverse"
#: Columns beside the cells, and lines above and below them.
_BESIDE, _AROUND = 8, 9


class Screen:
    """Show frames on a console, ``speed`` of them per second (0: unlimited).

    Use it as a context manager. ``width`` is the maximum number of cells per line.
    """

    def __init__(
        self,
        title: str,
        *,
        console: Console | None = None,
        speed: float = 0.0,
        width: int = 64,
        live: bool | None = None,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        from rich.console import Console

        self.title = printable(title)
        self.console = console or Console()
        self._live_wanted = self.console.is_terminal if live is None else live
        self._speed, self._width, self._sleep = speed, width, sleep
        self._live: Live | None = None
        self._last: Picture | None = None
        self._operations: deque[tuple[str, str]] = deque(maxlen=_LINES)
        self._failures = self._moved = self._count = 0
        self._notes: Sequence[str] = ()

    def __enter__(self) -> Self:
        if self._live_wanted:
            from rich.live import Live

            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, frame: Frame, notes: Sequence[str] = ()) -> None:
        """Show a frame, with ``notes`` as lines below the cells; animate moving cells in time."""
        self._notes = notes
        self._count += 1
        self._failures += bool(frame.failed)
        self._moved += frame.moved
        mood = "red" if frame.failed else "cyan" if frame.moved else ""
        self._operations.append((f"{frame.number:>6} {frame.caption()}", mood))
        if self._live is None:
            self._print(frame)
        else:
            self._animate(frame)
        self._last = frame.picture

    def _print(self, frame: Frame) -> None:
        changed = self._last is None or self._last.owner != frame.picture.owner
        summary, mood = self._operations[-1]
        self.console.print(summary, style=mood, markup=False, highlight=False, soft_wrap=True)
        if changed or frame.op == "snapshot":
            self.console.print(cell_drawing.draw(frame.picture, self._width), soft_wrap=True)
            for note in self._notes:
                self.console.print(printable(note), markup=False, highlight=False, soft_wrap=True)

    def _animate(self, frame: Frame) -> None:
        budget = 1 / self._speed if self._speed else 0.0
        steps = min(_STEPS, len(frame.moves)) if budget else 0
        tick = min(_TICK, budget / (2 * steps)) if steps else 0.0
        if self._last is not None and len(self._last.owner) == len(frame.picture.owner):
            for step in range(1, steps):
                gone = frame.moves[: step * len(frame.moves) // steps]
                picture, arrived = on_the_way(self._last, gone)
                self._refresh(picture, dict.fromkeys(arrived, _ARRIVED))
                self._sleep(tick)
        self._refresh(frame.picture, {})
        if budget:
            self._sleep(max(0.0, budget - tick * max(0, steps - 1)))

    def _refresh(self, picture: Picture, styles: dict[int, str]) -> None:
        assert self._live is not None
        self._live.update(self._compose(picture, styles), refresh=True)

    def _compose(self, picture: Picture, styles: dict[int, str]) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        width = max(8, min(self._width, self.console.width - _BESIDE))
        rows = max(2, self.console.height - _AROUND - _LINES - len(self._notes))
        step, shown = picture.scaled(width * rows)
        places = {cell // step: style for cell, style in styles.items()}
        head = Text(self.title, style="bold")
        head.append(f"  operation {self._count}", style="dim")
        if self._failures:
            head.append(f"  {self._failures} failed", style="red")
        if self._moved:
            head.append(f"  {self._moved} cells moved", style="cyan")
        numbers = Text(picture.numbers())
        if step > 1:
            numbers.append(f" ({step} cells to a place)", style="dim")
        operations = [
            Text(summary, style=mood, no_wrap=True, overflow="ellipsis")
            for summary, mood in self._operations
        ]
        notes = [Text(printable(each), no_wrap=True, overflow="ellipsis") for each in self._notes]
        cells = cell_drawing.cells(shown, width, step, places)
        return Group(
            head, Text(), cells, Text(), numbers, legend(picture), *notes, Text(), *operations
        )


def legend(picture: Picture) -> Text:
    """Return the legend of a picture's letters and colours, in one line."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    owners = sorted(set(picture.owner), key=lambda each: (each < 0, each))
    for owner in owners:
        text.append(cell_drawing.letter(owner), style=cell_drawing.ink(owner))
        name = palette.name(owner) if owner < 0 or len(owners) <= 6 else str(owner)
        text.append(f" {name}   ", style="dim")
    return text


def on_the_way(
    before: Picture, moves: tuple[tuple[int, int, int], ...]
) -> tuple[Picture, list[int]]:
    """Return the cells during an animation, and the cells that have reached their new place."""
    owner = list(before.owner)
    for source, _, length in moves:
        owner[source : source + length] = [FREE] * length
    arrived: list[int] = []
    for source, target, length in moves:
        owner[target : target + length] = before.owner[source : source + length]
        arrived += range(target, target + length)
    return Picture(before.label, tuple(owner), before.streams), arrived
