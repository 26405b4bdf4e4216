"""End a generation at a stop string, and withhold text that may be the start of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_stop_strings(stop: str | Iterable[str], *, has_vocab: bool = True) -> tuple[str, ...]:
    """Return the stop strings of an argument.

    Raises UsageError for an empty one, or no text, and Unsupported without a vocabulary.
    """
    texts = "text, or an iterable of texts"
    found = (stop,) if isinstance(stop, str) else tuple(arguments.items("stop", stop, texts))
    for each in found:
        if not arguments.text("a stop string", each):
            msg = "a stop string must have at least one character"
            raise UsageError(msg)
    if found and not has_vocab:
        msg = "this model has no vocabulary: stop strings need text"
        raise Unsupported(msg, "vocabulary")
    return found


class StopStrings:
    """Emit text up to the first stop string; withhold a possible start of one."""

    __slots__ = ("_held", "_longest", "_stop", "found")

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop))
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be emitted. `found` reports a complete stop string."""
        data = self._held + text
        # The stop string that ends first, so that the result does not depend on the pieces.
        first = min(
            ((at + len(each), at, each) for each in self._stop if (at := data.find(each)) >= 0),
            default=None,
        )
        if first is not None:
            self.found, self._held = first[2], ""
            return data[: first[1]]
        held = self._half(data)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def flush(self) -> str:
        """Return the withheld text at the end of the generation."""
        held, self._held = self._held, ""
        return held

    def _half(self, data: str) -> int:
        """Return the length of the longest end of ``data`` that starts a stop string."""
        longest = min(len(data), self._longest - 1)
        ends = (
            n for n in range(longest, 0, -1) if any(s.startswith(data[-n:]) for s in self._stop)
        )
        return next(ends, 0)
