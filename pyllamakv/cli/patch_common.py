"""Hold what the commands of `pyllamakv patch` share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv import errors
from pyllamakv.printable import printable
from pyllamakv.source import sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release

Patches = Annotated[
    Path | None,
    typer.Option("--patches", help="A foreign patch file or folder instead of the shipped series."),
]


def series_of(patches: Path | None) -> Series:
    """Return the shipped series, or a foreign one."""
    from pyllamakv.patching import foreign_series, series

    return series.load() if patches is None else foreign_series.load(patches)


def release_of(name: str) -> Release:
    """Return the release that a spec means."""
    return sources.resolve(name)


def releases_of(names: Sequence[str], *, every: bool, none: bool = False) -> list[Release]:
    """Return the releases named; without names those fetched, or every one of the lock."""
    from pyllamakv.source import lock
    from pyllamakv.source.store import open_store

    if names:
        return [release_of(name) for name in names]
    known = sorted(lock.known().values(), key=lambda release: release.order)
    store = open_store()
    found = [release for release in known if every or store.has(release)]
    if not found and not none:
        raise errors.UsageError("No release is fetched yet: name one, or use --all.")
    return found


def scenarios(*, features: bool = True) -> frozenset[str] | None:
    """Return the names of the scenarios, or None where the harness does not load.

    Features are what certain patches bring; of others nobody expects them.
    """
    try:
        from pyllamakv.verification import discovery
    except ImportError:
        return None
    found = discovery.discover()
    return frozenset(name for name, one in found.items() if features or one.kind != "feature")


def result(facts: dict[str, Any], as_json: bool) -> None:
    """Write facts as lines, or as JSON."""
    if as_json:
        return to_json(facts)
    for key, value in facts.items():
        if isinstance(value, list):
            lines(f"{key}: {item}" for item in value)
        elif not isinstance(value, dict):
            lines([f"{key}: {value}"])
    return None


def to_json(data: Any) -> None:
    """Write JSON to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")


def lines(found: Iterable[str]) -> None:
    """Write lines to stdout, without orders to the terminal: patches may be anybody's."""
    sys.stdout.writelines(printable(line, keep="\n\t") + "\n" for line in found)


def note(text: str) -> None:
    """Write a line to stderr, like `lines`."""
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
