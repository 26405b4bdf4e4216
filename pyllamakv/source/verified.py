"""Find the verified releases: those with a good accepted verdict for the shipped series on the CPU.

They are read from ``patches/expected.toml``, which `pyllamakv matrix accept` writes. The newest one
is the default wherever a release can be named.
"""

from __future__ import annotations

import os
import tomllib
from typing import TYPE_CHECKING

from pyllamakv import home
from pyllamakv.errors import UsageError
from pyllamakv.source import lockfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.source.releases import Kind, Release

#: Verdicts of a patch that does no harm.
GOOD = frozenset({"needed", "works", "redundant", "harmless", "native"})


def shipped() -> Path:
    """Return the file of accepted verdicts beside the patches."""
    return home.data("patches") / "expected.toml"


def local_file() -> Path:
    """Return the file that accepting writes: in the checkout, else in the data directory."""
    path = shipped()
    root = home.checkout()
    writable = root is not None and os.access(path if path.exists() else path.parent, os.W_OK)
    return path if writable else home.home() / "expected.toml"


def releases(kind: Kind | None = None) -> list[Release]:
    """Return the verified releases of the locks, newest first; ``kind`` selects those of a source.

    Local verdicts override shipped ones. Raises UsageError for a file that cannot be read.
    """
    verdicts = dict(
        pair for file in dict.fromkeys((shipped(), local_file())) for pair in _verdicts(file)
    )
    known = reversed(lockfile.known().values())
    return [
        release
        for release in known
        if verdicts.get(release.name) in GOOD and kind in (None, release.kind)
    ]


def newest(kind: Kind | None = None) -> Release:
    """Return the newest verified release. Raises UsageError if no release is verified."""
    found = releases(kind)
    if not found:
        msg = (
            f"no release is verified in {shipped()}: name a release, or verify one with "
            "`pyllamakv matrix run RELEASE` and `pyllamakv matrix accept`"
        )
        raise UsageError(msg)
    return found[0]


def _verdicts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield releases with their verdicts for the whole series on the CPU."""
    try:
        cells = tomllib.loads(file.read_text("utf-8")).get("cell", [])
        for cell in cells:
            if "patches" not in cell and cell.get("backend", "cpu") == "cpu":
                yield cell["release"], cell["verdict"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"cannot read {file}: {error!r}; each [[cell]] needs a release and a verdict"
        raise UsageError(msg) from error
