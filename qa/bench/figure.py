"""One measured figure, with the machine and date of the measurement."""

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

    ``value`` is text with its unit and bounds, ``target`` the required value or empty, ``met``
    whether it is met, ``limit`` the physical limit, ``data`` the raw numbers.

    A figure with a ``row`` is a row of its own table: ``table`` is the caption, equal in all its
    rows, and ``row`` has a text per column.
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

    def dated(self, command: str, day: str = "") -> Figure:
        """Return the figure with date (default: today), machine and command."""
        day = day or datetime.datetime.now(datetime.UTC).date().isoformat()
        return Figure(**{**asdict(self), "measured": f"{day}, {machine()}, `{command}`"})


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
