"""Carry the library's log lines into `logging`, and keep the last ones for errors."""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import TYPE_CHECKING, Final

from pyllamakv.binding.protocol import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Record = tuple[int, str]

#: Logger of the library's lines. Like other libraries, it is silent until logging is configured.
LOGGER: Final = logging.getLogger("pyllamakv.native")
logging.getLogger("pyllamakv").addHandler(logging.NullHandler())

#: The library's levels 1 to 4, in logging's numbers.
_LEVELS: Final = {
    1: logging.DEBUG,
    2: logging.INFO,
    3: logging.WARNING,
    4: logging.ERROR,
}

#: Maximum number of log lines in an error.
TAIL: Final = 20
#: Maximum number of records for `Log.take`; older ones are dropped.
KEPT: Final = 8192


def forward(records: Iterable[Record]) -> None:
    """Forward records to `logging`."""
    for level, text in records:
        LOGGER.log(_LEVELS.get(level, logging.INFO), "%s", text)


#: The log line about a buffer, in every release: device, kind, size.
_BUFFER: Final = re.compile(r"(\S+)\s+(\w+) buffer size =\s*([0-9.]+) MiB")


def buffers(records: Iterable[Record]) -> list[Buffer]:
    """Return the buffers that log lines report, in their order."""
    found = (_BUFFER.search(text) for _, text in records)
    return [Buffer(m[1], m[2], round(float(m[3]) * 2**20)) for m in found if m is not None]


class Log:
    """Log records of the library that have not been requested yet."""

    def __init__(self, sink: Callable[[Iterable[Record]], None] = forward) -> None:
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._kept: deque[Record] = deque(maxlen=KEPT)

    def add(self, records: list[Record]) -> None:
        """Add records: to the sink, to the tail for errors, and to `take`."""
        if records:
            self._kept.extend(records)
            self._tail.extend(text for level, text in records if level > 1)
            self._sink(records)

    def take(self) -> list[Record]:
        """Return every record since the last call."""
        records = list(self._kept)
        self._kept.clear()
        return records

    def tail(self) -> tuple[str, ...]:
        """Return the last lines above debug, oldest first."""
        return tuple(self._tail)
