"""Say what the processes of a trial begin with, whose threads and memory are looked at."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment and ``more``: one thread, and modules found as here."""
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    calm = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **calm, **more}
