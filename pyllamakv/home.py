"""Locate the data directory, the data files of the package, and prebuilt variants."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

#: The distribution that contains prebuilt variants, and its module.
PREBUILT = "pyllamakv-prebuilt"
PREBUILT_MODULE = "pyllamakv_prebuilt"

_PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """Return the root of the git checkout that this package runs from, or None when installed."""
    root = _PACKAGE.parent
    return root if (root / "patches").is_dir() and (root / "pyproject.toml").is_file() else None


def home() -> Path:
    """Return the data directory, which contains store, trees, builds and results.

    ``$PYLLAMAKV_HOME`` first, then ``vendor/`` of a checkout that can be written, then the user's
    cache directory. The folder is not created.
    """
    named = os.environ.get("PYLLAMAKV_HOME")
    if named:
        return Path(named).expanduser().resolve()
    root = checkout()
    if root is not None and os.access(root / "vendor", os.W_OK):
        return root / "vendor"
    import platformdirs  # most programs name a variant or are run in a checkout

    return Path(platformdirs.user_cache_dir("pyllamakv"))


def data(name: str) -> Path:
    """Return the path of shipped data: ``patches``, or a file in ``vendor``."""
    root = checkout()
    return _PACKAGE / "data" / name if root is None else root / name


def prebuilt() -> Path | None:
    """Return the directory of the variants in pyllamakv-prebuilt, or None if it is not installed.

    Nothing of the distribution is imported.
    """
    found = importlib.util.find_spec(PREBUILT_MODULE)
    # A directory without code, which may be any directory of that name, has no origin.
    if found is None or found.origin is None:
        return None
    return Path(found.origin).resolve().parent / "built"


def variant_roots() -> tuple[Path, ...]:
    """Return the directories with variants: the data directory's, then pyllamakv-prebuilt's."""
    there = prebuilt()
    return (home() / "built",) if there is None else (home() / "built", there)


def shim() -> Path:
    """Return the directory of the shim: ``plk.h``, its sources and its CMake files."""
    return _PACKAGE / "native"
