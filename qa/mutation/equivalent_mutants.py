"""Read the list of equivalent mutants, each with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import strict_toml
from qa.mutation.mutant import HUNK, listed

if TYPE_CHECKING:
    from pyllamakv.patching.series import Series
    from qa.mutation.mutant import Mutant

#: The shipped list.
FILE = Path(__file__).with_name("equivalent.toml")

_KEYS = {"file", "above", "was", "now", "hunk", "why"}


@dataclass(frozen=True)
class EquivalentMutant:
    """An accepted mutant: file, original and mutated line or dropped hunk, and reason.

    Lines are compared without surrounding whitespace, so that one entry covers every release and
    every patch with the file. ``above`` is the code above the line, if the same line exists several
    times. ``hunk`` has all lines of code that the dropped hunk added.
    """

    file: str
    was: str
    now: str
    why: str
    above: str = ""
    hunk: str = ""

    def covers(self, mutant: Mutant) -> bool:
        """Return whether the entry describes a mutant."""
        if self.hunk:
            return (self.file, HUNK, self.hunk) == (mutant.file, mutant.operator, mutant.hunk)
        return (
            self.file == mutant.file
            and (self.was, self.now) == (mutant.was.strip(), mutant.now.strip())
            and self.above in ("", mutant.above.strip())
        )

    def __str__(self) -> str:
        if self.hunk:
            return f"{self.file}: {HUNK}: `{self.hunk}`"
        return f"{self.file}: `{self.was}` became `{self.now}`"


def load(path: Path | None = None) -> tuple[EquivalentMutant, ...]:
    """Read the file. Raises PatchFormatError for an entry without a reason, or a duplicate."""
    path = path or FILE
    table = strict_toml.load(path, {"schema", "mutant"}, schema=1)
    found = tuple(map(_entry, table.tables("mutant", _KEYS)))
    names = [f"{each.above}, {each}" for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise PatchFormatError(f"{path}: {twice} is listed twice.", str(path))
    return found


def _entry(part: strict_toml.Table) -> EquivalentMutant:
    hunk = part.string("hunk", "").strip()
    if hunk and not part.data.keys().isdisjoint(("was", "now", "above")):
        raise part.wrong("`hunk` excludes `was`, `now` and `above`")
    return EquivalentMutant(
        part.string("file"),
        part.string("was", "" if hunk else None).strip(),
        part.string("now", "").strip(),
        part.string("why").strip(),
        part.string("above", "").strip(),
        hunk,
    )


def stale(known: Iterable[EquivalentMutant], series: Series) -> list[EquivalentMutant]:
    """Return the entries that match no mutant of any port."""
    left = list(known)
    for text in (text for patch in series for text in patch.ports):
        touched = {file.path for file in text.patch.files}
        if any(each.file in touched for each in left):
            for mutant in listed(text):
                left = [each for each in left if not each.covers(mutant)]
    return left
