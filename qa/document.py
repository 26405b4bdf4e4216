"""Write results into a document and its JSON file, keeping those that were not measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyllamakv.errors import UsageError
from pyllamakv.source.files import write_text_atomic
from qa import SECTIONS
from qa.entry import Entry

HEAD = """# Reliability

Written by `python -m qa stress --write qa/results/reliability.md`: what was tested, how often, and
which defects were found. `make qa` runs a short version.
"""


def read(path: Path) -> list[Entry]:
    """Return the entries stored with a document; empty if there are none.

    Raises UsageError for a path where no document can be written, and for a file of another format.
    """
    kept = path.with_suffix(".json")
    if path == kept or path.is_dir() or path.parent.is_file():
        msg = f"expected a path such as reliability.md, for that file and reliability.json: {path}"
        raise UsageError(msg)
    if not kept.exists():
        return []
    try:
        items = json.loads(kept.read_text(encoding="utf-8"))["entries"]
        found = [_entry(item) for item in items]
        strange = [each.section for each in found if each.section not in SECTIONS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        strange = [f"{type(error).__name__}: {error}"]
    if strange:
        msg = (
            f"{kept} was not written by `python -m qa stress` ({strange[0]}): "
            "choose another --write"
        )
        raise UsageError(msg)
    return found


def _entry(item: dict[str, Any]) -> Entry:
    listed = {"defects": tuple(item["defects"]), "notes": tuple(item.get("notes", ()))}
    return Entry(**{**item, **listed})


def merge(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """Replace entries that ran again, in the order of sections and of first appearance.

    An entry that could not run replaces none.
    """
    found = {(entry.section, entry.name): entry for entry in old}
    for entry in new:
        if entry.ran or not found.get((entry.section, entry.name), entry).ran:
            found[entry.section, entry.name] = entry
    order = list(SECTIONS)
    return sorted(found.values(), key=lambda entry: order.index(entry.section))


def render(entries: Iterable[Entry]) -> str:
    """Return the document's text."""
    kept = list(entries)
    parts = [HEAD]
    for section, about in SECTIONS.items():
        members = [entry for entry in kept if entry.section == section]
        if members:
            parts += [
                f"\n## {section.replace('_', ' ').capitalize()}\n\n{about}\n",
                *_table(members),
            ]
            parts += [*_listed(members), "", *_measured(members)]
    return "\n".join(parts) + "\n"


def _table(members: list[Entry]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for entry in members for name in entry.row))
    yield _row(["what", *columns, "defects"])
    yield "|" + "---|" * (len(columns) + 2)
    for entry in members:
        wrong = "; ".join(entry.defects) or entry.skip_reason or "none"
        yield _row([entry.name, *(entry.row.get(name, "") for name in columns), wrong])


def _listed(members: list[Entry]) -> Iterator[str]:
    for entry in members:
        if entry.notes:
            yield f"\n{entry.name.capitalize()}:\n"
            yield from (f"- {' '.join(note.split())}" for note in entry.notes)


def _measured(members: list[Entry]) -> Iterator[str]:
    tried = [entry for entry in members if entry.ran]
    for measured in dict.fromkeys(entry.measured for entry in tried):
        names = ", ".join(entry.name for entry in tried if entry.measured == measured)
        yield f"Measured {measured}: {names}.\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write the document and its JSON file."""
    merged = merge(read(path), entries)
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in merged)
    write_text_atomic(path.with_suffix(".json"), f'{{"entries": [\n{lines}\n]}}\n')
    write_text_atomic(path, render(merged))
