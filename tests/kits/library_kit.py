"""Make the folder of a variant around the fake library."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from fakes.build import fake

from pyllamakv.binding import loading
from pyllamakv.building.manifest import Manifest


def variant(folder: Path, source: Path | None = None, **changes: object) -> Path:
    """Make a variant's folder around the fake library."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libplk.so"
    shutil.copy(source or fake(), target)
    facts: dict[str, object] = {
        "variant": "fake",
        "release": "0.0.0",
        "commit": "c",
        "tree": "t",
        "patched_tree": "t",
        "patches": (),
        "series_digest": "",
        "backend": "cpu",
        "options": {},
        "compiler": "cc",
        "cpu_flags": (),
        "abi": loading.ABI,
        "library": "libplk.so",
        "library_sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
    }
    Manifest(**{**facts, **changes}).save(folder)  # type: ignore[arg-type]
    return folder
