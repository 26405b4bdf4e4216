"""Keep the inputs of a target that reached something new: later runs begin where this one ended."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from pyllamakv.home import home
from pyllamakv.source.files import write_bytes_atomic

#: What is kept of a target, the smaller inputs first: each of them is tried in every run.
FILES, BYTES = 64, 256 << 10


def saved(name: str) -> list[Path]:
    """Return the inputs that earlier runs of a target left in the home."""
    return sorted(_folder(name).glob("[!.]*"))


def copied_inputs(name: str, folder: Path) -> list[Path]:
    """Return copies of what is saved, in a folder: another run may replace it meanwhile."""
    folder.mkdir(parents=True)
    for path in saved(name):
        with suppress(FileNotFoundError):
            shutil.copyfile(path, folder / path.name)
    return sorted(folder.iterdir())


def save(name: str, found: Path) -> None:
    """Add the files of a folder to what is kept of a target, as far as there is room."""
    inputs = {path.read_bytes() for path in (*saved(name), *found.glob("*"))}
    names, room = set(), BYTES
    for data in sorted(inputs, key=lambda each: (len(each), each))[:FILES]:
        room -= len(data)
        if room < 0:
            break
        path = _folder(name) / hashlib.sha256(data).hexdigest()[:16]
        names.add(path.name)
        if not path.is_file():
            write_bytes_atomic(path, data)
    for path in saved(name):
        if path.name not in names:
            path.unlink(missing_ok=True)


def _folder(name: str) -> Path:
    return home() / "fuzzing" / "corpora" / name
