"""Unpack what an installed package ships packed, once, into the home.

The texts of a patch are alike, and so are the many small sources in C, which a wheel cannot see: it
compresses each file alone. Together they take a sixth of the room, and less than half, and are
files again before anybody reads them.
"""

from __future__ import annotations

import atexit
import hashlib
import lzma
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath

#: What packs texts best: the bits of a byte say more than where it lies.
_TEXT = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}


@cache
def unpacked(packed: Path, home: Path) -> Path:
    """Return the folder with the files of an archive, below ``home`` under the archive's digest.

    Where the home cannot be written they lie in a temporary folder for as long as this runs.
    """
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()[:16]
    place = home / "shipped" / digest
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=place.parent))
    except OSError:
        part = Path(tempfile.mkdtemp(prefix="pyllamakv-"))
        atexit.register(shutil.rmtree, part, ignore_errors=True)
        _unpack(packed, part)
        return part
    try:
        _unpack(packed, part)
        part.chmod(0o755)
        part.rename(place)
    except OSError:
        # Another process was faster, and its folder is the same.
        if not place.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def pack(folder: Path, file: Path, *patterns: str) -> None:
    """Write files below a folder, but for Python's own, into an archive, the same anywhere."""
    with (
        lzma.open(file, "wb", filters=[_TEXT]) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                member = tarfile.TarInfo(path.relative_to(folder).as_posix())
                member.size, member.mode = path.stat().st_size, 0o644
                with path.open("rb") as source:
                    tar.addfile(member, source)


def _unpack(packed: Path, folder: Path) -> None:
    with tarfile.open(packed, "r:xz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            source = tar.extractfile(member) if member.isreg() else None
            if source is None or ".." in parts or member.name.startswith("/"):
                continue  # `pack` writes no such thing
            place = folder.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            with source, place.open("xb") as out:
                shutil.copyfileobj(source, out)
