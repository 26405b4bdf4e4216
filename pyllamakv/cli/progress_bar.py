"""Show the progress of a long step as one bar on stderr."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from pyllamakv.source.progress import Progress


#: Seconds after which a step without news is reported again when stderr is not a terminal.
INTERVAL = 30.0


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Yield a function that reports a step, how much of it is done, and of how much.

    A terminal shows one bar, from the first call on. Elsewhere each new step is a line, and a step
    that takes longer prints a line every `INTERVAL` seconds, so that a log shows that it is alive.
    """
    from rich.console import Console

    from pyllamakv.printable import printable

    console = Console(stderr=True)
    if not console.is_terminal:
        with _Log(console).reporting() as report:
            yield report
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


class _Log:
    """Print steps as lines, and repeat the present one when nothing was printed for a while."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._began = self._printed = time.monotonic()
        self._step = ""
        self._state = "working"
        self._over = threading.Event()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[Progress]:
        """Yield the function that reports steps; a thread repeats the last one."""
        thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        thread.start()
        try:
            yield self._report
        finally:
            self._over.set()
            thread.join()

    def _report(self, what: str, done: int, total: int | None) -> None:
        with self._lock:
            self._state = what if total is None else f"{what} ({done} of {total})"
            # Steps with a measure are many; a line for each would flood a log.
            if total is None and what != self._step:
                self._step = what
                self._print(what)

    def _repeat(self) -> None:
        while not self._over.wait(min(1.0, INTERVAL / 4)):
            with self._lock:
                now = time.monotonic()
                if now - self._printed >= INTERVAL:
                    self._print(f"{self._state}, {now - self._began:.0f} s")

    def _print(self, text: str) -> None:
        from pyllamakv.printable import printable

        self._printed = time.monotonic()
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
