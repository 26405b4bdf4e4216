"""Write results to stdout and notes to stderr; detect a closed reader and a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import DiskFull
from pyllamakv.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def to_json(data: Any, indent: int | None = None) -> str:
    """Return JSON in ASCII, so that any terminal and any encoding can take it."""
    separators = (",", ": ") if indent else (",", ":")
    return json.dumps(data, indent=indent, separators=separators, default=str)


def write_json(data: Any, indent: int | None = 2) -> None:
    """Write one JSON document to stdout; on one line without ``indent``."""
    sys.stdout.write(to_json(data, indent) + "\n")
    if indent and isinstance(sys.stdout, Guarded):
        sys.stdout.finished = True


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, with control characters escaped: names and patches are foreign."""
    sys.stdout.writelines(printable(line, keep="\n\t") + "\n" for line in lines)


def note(text: str) -> None:
    """Write a line to stderr, unless it is closed, with control characters escaped."""
    if sys.stderr is None:
        return
    sys.stderr.write(printable(text, keep="\n\t") + "\n")


class StdoutClosed(Exception):
    """The reader of stdout has ended (a pager, head)."""


class StdoutFull(DiskFull):
    """Report that the result cannot be written to stdout."""


class Guarded:
    """Write to a file, and raise `StdoutClosed` or `StdoutFull` where it cannot take more.

    Click and rich turn a broken pipe into status 1, which means a regression here.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        #: Whether a whole JSON document was written; after it stdout takes no other.
        self.finished = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write text."""
        with _translate_errors():
            return int(self._file.write(text))

    def flush(self) -> None:
        """Write buffered output."""
        with _translate_errors():
            self._file.flush()


@contextlib.contextmanager
def translate_stdout_errors() -> Iterator[Guarded]:
    """Translate errors of stdout in the block, and at its flush, to StdoutClosed or DiskFull.

    A stdout that was closed takes everything and keeps nothing, as it does for `print`.
    """
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    whole = sys.stdout
    sys.stdout = guard = Guarded(whole)
    left = None
    try:
        try:
            yield guard
        finally:
            # The exit status of a raised exception takes precedence.
            try:
                sys.stdout.flush()
            except (StdoutClosed, StdoutFull) as error:
                _drop(whole)
                left = error
        if left is not None:
            raise left
    finally:
        sys.stdout = whole


def _drop(file: Any) -> None:
    """Discard buffered output, which Python would report at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise StdoutClosed from None
    except OSError as error:
        msg = f"the result cannot be written to stdout: {error.strerror}"
        raise StdoutFull(msg) from error
