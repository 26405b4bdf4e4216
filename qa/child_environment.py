"""The environment of child processes whose threads and memory are measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment and ``more``: one thread, and the same module path."""
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    calm = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **calm, **more}
