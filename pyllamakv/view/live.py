"""Show the cells of a context in the terminal while a program uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.runtime.context import Context, intercept
from pyllamakv.scenarios import cell_samples, frames
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.frames import Frame
from pyllamakv.scenarios.player import word
from pyllamakv.view.screen import Screen

if TYPE_CHECKING:
    from rich.console import Console

    from pyllamakv.scenarios.cell_samples import CellSample

#: Calls that change the cells and decode nothing, as traces name them.
_CHANGES = {
    "clear": "clear",
    "seq_rm": "remove",
    "seq_cp": "copy",
    "seq_keep": "keep",
    "seq_add": "shift",
    "seq_div": "divide",
    "state_load": "restore",
    "defrag": "defrag",
    "update": "update",
}


class _ScreenNative:
    """Forward every call to a library, and show the cells after those that change them."""

    def __init__(self, context: Context, screen: Screen, managers: Mapping[str, Any]) -> None:
        self._managers = managers
        self.inner = context.native
        self.about = context.native.about
        self._mine, self._info, self._screen = context.handle, context.info, screen
        self._last: CellSample | None = None
        self._number = 0
        self._show("context", "", 0)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        return self._changing(call, _CHANGES[name]) if name in _CHANGES else call

    def decode(self, context: Any, token: Any, *words: Any) -> Any:
        """Decode a batch."""
        status = self.inner.decode(context, token, *words)
        if context == self._mine:
            n = len(token)
            self._show("step" if n == 1 else "batch", f"{n} token{'s' * (n > 1)}", status)
        return status

    def run(self, sampler: Any, context: Any, *words: Any) -> Any:
        """Decode and choose many times."""
        found = self.inner.run(sampler, context, *words)
        if context == self._mine:
            self._show("advance", f"{len(found[1])} steps", found[0])
        return found

    def _changing(self, call: Any, op: str) -> Any:
        def change(context: Any, *words: Any) -> Any:
            found = call(context, *words)
            if context == self._mine:
                plain = (str(each) for each in words if isinstance(each, int) and each != -1)
                self._show(op, ", ".join(plain) if op not in ("clear", "restore") else "", 0)
            return found

        return change

    def _show(self, op: str, detail: str, status: int) -> None:
        now = cell_samples.sample_cells(self.inner, self._mine, self._info)
        if now is None:
            return
        moves: tuple[tuple[int, int, int], ...] = ()
        if self._last is not None and op in frames.MOVING:
            moves = tuple((a, b, n) for a, b, n in now.moved(self._last))
        self._last, self._number = now, self._number + 1
        moved = sum(length for *_, length in moves)
        failed = word(status) if status else ""
        picture = Picture.of(now.snapshot)
        notes = [manager_line(*each) for each in self._managers.items()]
        frame = Frame(self._number, op, detail, picture, failed, moves, moved)
        self._screen.show(frame, notes)


#: Numbers of a cache manager that are shown, if they are not 0.
_SHOWN = (
    *("reused_tokens", "evaluated_tokens", "parked", "parks", "resumes", "evicted_tokens"),
    *("paged_out_tokens", "paged_in_tokens"),
)


def manager_line(name: str, manager: Any) -> str:
    """Return the name of a cache manager or batcher, and the numbers of its ``stats()``."""
    values = manager.stats().to_json()
    shown = [f"{values[key]} {key.replace('_', ' ')}" for key in _SHOWN if values.get(key)]
    return f"{name}: {', '.join(shown) or 'nothing yet'}"


@contextmanager
def watch(
    context: Context,
    *,
    title: str = "",
    speed: float = 0.0,
    width: int = 64,
    console: Console | None = None,
    managers: Mapping[str, Any] | None = None,
) -> Iterator[Screen]:
    """Show the cells of a context in the terminal until the end of the block.

    ``speed`` limits the display to this number of operations per second; 0 is unlimited.
    ``managers`` maps names to cache managers and batchers, whose reuse is shown below the cells.
    Without a terminal, each change is printed. Raises Unsupported if the build cannot read the
    cells.
    """
    arguments.instance("context", context, Context, "a Context")
    arguments.text("title", title)
    speed = arguments.number("speed", speed, 0.0)
    width = arguments.integer("width", width, 1, arguments.INT32)
    if console is not None and not callable(getattr(console, "print", None)):
        raise arguments.wrong_type("console", console, "a console of rich, or None")
    if managers is not None:
        expected = "a mapping of names to cache managers, or None"
        arguments.instance("managers", managers, Mapping, expected)  # type: ignore[type-abstract]
        for key, each in managers.items():
            arguments.text("a name in managers", key)
            if not callable(getattr(each, "stats", None)) or isinstance(each, type):
                what = "a cache manager or batcher"
                raise arguments.wrong_type(f"managers[{arguments.shown(key)}]", each, what)
    context.kv.snapshot()
    name = title or f"{context.native.about.variant}, {context.model.path.name}"
    with (
        Screen(name, speed=speed, width=width, console=console) as screen,
        intercept(context, lambda: _ScreenNative(context, screen, managers or {})),
    ):
        yield screen
