"""One measured figure, and the machine and day it was measured on."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One line of qa/results/benchmarks.md.

    ``value`` is text with its unit and bounds, ``target`` what was promised or empty, ``met``
    whether it holds, ``limit`` the physical limit beside it, ``data`` the raw numbers.

    A figure with a ``row`` is a row of a table of its own: ``table`` is what stands above it, the
    same for all its rows, and ``row`` has a text per column.
    """

    group: str
    name: str
    value: str
    target: str = ""
    met: bool | None = None
    limit: str = ""
    how: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    table: str = ""
    row: dict[str, str] = field(default_factory=dict)

    def dated(self, command: str) -> Figure:
        """Return the figure with day, machine and command filled in."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Figure(**{**asdict(self), "measured": f"{today}, {machine()}, `{command}`"})


def machine() -> str:
    """Describe processor, cores, system and Python in one line."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    python = ".".join(map(str, sys.version_info[:3]))
    cores = os.cpu_count() or 0
    return f"{model or platform.machine()}, {cores} cores, {platform.system()}, Python {python}"
