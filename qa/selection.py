"""Select sections and entries by name; all names are validated first."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from pyllamakv.errors import UsageError
from qa import SECTIONS

#: Number of names that a message lists if none is similar: random operations have one per release.
_LISTED = 20


def module(section: str) -> Any:
    """Return the module of a section, with its ``entries`` and ``names``."""
    return importlib.import_module(f"qa.{section}")


def select(sections: Sequence[str], only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the sections to run (default: all), each with its entries of ``only``.

    A section without any of the names is left out. Raises UsageError for an unknown section, and
    for a name that none of the selected sections has.
    """
    chosen = tuple(dict.fromkeys(sections or SECTIONS))
    for section in chosen:
        if section not in SECTIONS:
            msg = f"there is no section {section!r}: choose from {', '.join(SECTIONS)}"
            raise UsageError(msg)
    if not only:
        return dict.fromkeys(chosen, ())
    names = {section: module(section).names() for section in chosen}
    known = [name for each in names.values() for name in each]
    for name in only:
        if not any(_has(section, names[section], name) for section in chosen):
            close = difflib.get_close_matches(name, known, n=3)
            some = [*known[:_LISTED], *(["..."] if len(known) > _LISTED else [])]
            hint = f"did you mean {' or '.join(close)}?" if close else ", ".join(some)
            msg = f"--only {name!r} matches nothing in {', '.join(chosen)}: {hint}"
            raise UsageError(msg)
    own = {
        section: tuple(name for name in only if _has(section, names[section], name))
        for section in chosen
    }
    return {section: wanted for section, wanted in own.items() if wanted}


def _has(section: str, names: Sequence[str], name: str) -> bool:
    """Return whether a section has an entry of a name, or of an unpinned source."""
    return name in names or (section == "random_operations" and name.startswith(("path:", "git:")))
