"""Show the progress of a long step as one bar on stderr."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.source.progress import Progress


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Lend a function that takes what is being done, how much is done, and of how much.

    On a terminal it moves one bar; elsewhere each new step that has no measure is a line, so that
    a log stays short. The bar appears with the first call: what takes no time shows nothing.
    """
    from rich.console import Console

    from pyllamakv.printable import printable

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def line(what: str, _done: int, total: int | None) -> None:
            nonlocal last
            if total is None and what != last:
                last = what
                console.print(printable(what), markup=False, highlight=False, soft_wrap=True)

        yield line
        return

    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = None

        def move(what: str, done: int, total: int | None) -> None:
            nonlocal task
            what = printable(what)
            if task is None:
                task = bars.add_task(what, total=None)
            bars.update(task, description=what, completed=done, total=total)

        yield move
