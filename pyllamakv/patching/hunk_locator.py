"""Find the old lines of a hunk in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.hunks import Hunk


def lines_of(data: bytes) -> list[bytes]:
    """Split content into lines as git does, at line feeds only; the line ends are kept."""
    cut = [line + b"\n" for line in data.split(b"\n")]
    last = cut.pop()[:-1]
    return [*cut, last] if last else cut


def start_of(hunk: Hunk) -> int:
    """Return the index of the hunk's first old line, or of the line after it if it has none."""
    return hunk.old_start - 1 if hunk.old_count else hunk.old_start


class LineIndex:
    """An index of a file's lines by their text."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.lines = lines
        self._at: dict[bytes, list[int]] = {}
        for number, line in enumerate(lines):
            self._at.setdefault(line, []).append(number)

    def find(self, block: Sequence[bytes], hunk: Hunk) -> list[int]:
        """Return every place where a side of a hunk matches, respecting the ends of the file.

        A hunk that starts at line 1 is anchored at the start of the file, and one without context
        after its last change is anchored at the end, as in git.
        """
        return [
            at
            for at in self.matches(block)
            if (at == 0 or not _at_beginning(hunk))
            and (at + len(block) == len(self.lines) or hunk.context[1])
        ]

    def matches(self, block: Sequence[bytes]) -> list[int]:
        """Return every place where these consecutive lines occur."""
        if not block:
            return [0] if not self.lines else []
        rarest = min(range(len(block)), key=lambda i: len(self._at.get(block[i], ())))
        starts = (at - rarest for at in self._at.get(block[rarest], ()))
        return [at for at in starts if at >= 0 and self.lines[at : at + len(block)] == [*block]]

    def nearest(self, block: Sequence[bytes], start: int) -> tuple[int, bytes, bytes]:
        """Return the place that fits best, and there the first line expected and the one found."""
        votes: dict[int, int] = {}
        for ahead, line in enumerate(block):
            if line.strip(b" \t\r\n{}();"):  # blank lines and lone braces prove nothing
                for at in self._at.get(line, ()):
                    votes[at - ahead] = votes.get(at - ahead, 0) + 1
        start = max(0, min(start, len(self.lines)))
        best = max(votes, key=lambda at: (votes[at], -abs(at - start)), default=start)
        for ahead, line in enumerate(block):
            at = best + ahead
            seen = self.lines[at] if 0 <= at < len(self.lines) else b"(the file ends)"
            if seen != line:
                return max(at, 0), line, seen
        return max(best, 0), b"", b""


def _at_beginning(hunk: Hunk) -> bool:
    return hunk.old_start <= 1
