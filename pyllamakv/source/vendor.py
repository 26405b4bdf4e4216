"""Export releases into directories of the data directory, and detect changes in them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import SourceError, UnknownRelease
from pyllamakv.home import home
from pyllamakv.source.files import locked, translate_disk_errors, write_text_atomic
from pyllamakv.source.releases import canonical_name, natural_sort_key

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store
    from pyllamakv.source.tree_export import Difference, Exported

_RECORD = ".json"


@dataclass(frozen=True)
class Vendored:
    """A vendored tree."""

    #: What was asked for: ``0.3.9`` or ``0.3.9+full-defrag``.
    spec: str
    release: str
    #: The names of the patches; None is the complete series, an empty tuple is stock.
    series: tuple[str, ...] | None
    commit: str
    tree: str
    folder: str


def trees() -> Path:
    """Return the directory of vendored trees."""
    return home() / "trees"


def place_of(release: Release, series: tuple[str, ...] | None) -> Path:
    """Return the folder for a release with these patches."""
    words = "patched" if series is None else ",".join(series)
    return trees() / (f"{release.key}+{words}" if words else release.key)


def sync(
    store: Store,
    release: Release,
    commit: str,
    *,
    spec: str,
    series: tuple[str, ...] | None = (),
    folder: Path | None = None,
) -> tuple[Vendored, Exported]:
    """Export the tree of a commit into its directory or ``folder``, and record it."""
    place = (folder or place_of(release, series)).absolute()
    record = _record_of(place)
    with _locked(place), translate_disk_errors(place):
        if folder is None:
            known = _read(record)
            if known is None or (known.spec, known.commit) != (spec, commit):
                # One that stays as it is can be found all the time, by others beside us too.
                record.unlink(missing_ok=True)
            _forget(place)
        done = store.export(commit, place)
        vendored = Vendored(spec, release.name, series, commit, done.tree, str(place))
        if folder is None:
            write_text_atomic(record, json.dumps(asdict(vendored), indent=2) + "\n")
    return vendored, done


def listed() -> list[Vendored]:
    """Return the records, ordered by name; damaged ones are ignored."""
    found = (_read(path) for path in trees().glob(f"*{_RECORD}"))
    there = [vendored for vendored in found if vendored is not None]
    return sorted(there, key=lambda vendored: natural_sort_key(Path(vendored.folder).name))


def find(spec: str) -> Vendored:
    """Return the record of a spec. Raises UnknownRelease, naming what there is.

    ``0.3.9+stock`` is ``0.3.9``, and so are ``v0.3.9`` and ``llama-cpp-python==0.3.9``, unless the
    lock has a release of that name.
    """
    from pyllamakv.source import lockfile

    there = listed()
    for vendored in there:
        if spec in (vendored.spec, Path(vendored.folder).name):
            return vendored
    release, plus, names = spec.removesuffix("+stock").partition("+")
    plain = canonical_name(release, lockfile.known()) + plus + names
    for vendored in there:
        if plain in (vendored.spec, Path(vendored.folder).name):
            return vendored
    names = ", ".join(v.spec for v in there) or "none"
    msg = f"{spec!r} is not vendored (there is: {names}); run `pyllamakv upstream sync {spec}`"
    raise UnknownRelease(msg, name=spec, suggestions=[v.spec for v in there])


def verify(store: Store, vendored: Vendored) -> Difference:
    """Compare a vendored folder with its tree."""
    if not Path(vendored.folder).is_dir():
        msg = f"{vendored.folder} is missing; run `pyllamakv upstream sync {vendored.spec}`"
        raise SourceError(msg)
    return store.compare(vendored.tree, Path(vendored.folder))


def clean(vendored: Vendored) -> Path:
    """Remove a vendored folder and its record; return the folder."""
    folder = Path(vendored.folder)
    if folder.parent != trees().absolute():
        msg = f"{folder} is not in {trees()}; remove it manually"
        raise SourceError(msg)
    with _locked(folder), translate_disk_errors(folder):
        _record_of(folder).unlink(missing_ok=True)
        _forget(folder)
        if folder.is_dir():
            # In one step, because half a tree without its stamp would look like files of the user.
            folder.rename(_gone(folder))
            _forget(folder)
    return folder


def _gone(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.gone")


def _forget(folder: Path) -> None:
    """Remove the remains of a removed directory."""
    if _gone(folder).is_dir():
        shutil.rmtree(_gone(folder))


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Prevent the removal of a directory while another process fills it.

    The record of the directory is removed too.
    """
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return locked(home() / "locks" / f"vendored-{name}.lock")


def _record_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _RECORD)


def _read(path: Path) -> Vendored | None:
    try:
        facts = json.loads(path.read_text("utf-8"))
        series = facts.pop("series")
        vendored = Vendored(series=None if series is None else tuple(series), **facts)
        # A record describes only the directory next to it.
        return vendored if _record_of(Path(vendored.folder)) == path else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
