"""Store the inputs of a target that reached new lines; later runs start with them."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from pyllamakv.home import home
from pyllamakv.source.files import write_bytes_atomic

#: Size limit of a target's stored inputs, the smallest first: each is run every time.
FILES, BYTES = 64, 256 << 10


def saved(name: str) -> list[Path]:
    """Return the inputs of earlier runs of a target in the data directory."""
    return sorted(_folder(name).glob("[!.]*"))


def copied_inputs(name: str, folder: Path) -> list[Path]:
    """Return copies of the stored inputs: another run may replace them meanwhile."""
    folder.mkdir(parents=True)
    for path in saved(name):
        with suppress(FileNotFoundError):
            shutil.copyfile(path, folder / path.name)
    return sorted(folder.iterdir())


def save(name: str, found: Path) -> None:
    """Add the files of a directory to a target's stored inputs, within the size limit."""
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
