"""One measured figure, with the machine, date and commit of the measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyllamakv.home import checkout


@dataclass(frozen=True)
class Figure:
    """One measurement.

    ``value`` is text with its unit and bounds, ``target`` the required value or empty, ``met``
    whether it is met, ``limit`` the physical limit, ``data`` the raw numbers. A stored record has
    ``median``, ``low`` and ``high`` (the first number of the value and its interval), the number of
    ``samples``, and only counts as data.

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
    median: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    hardware: str = ""
    date: str = ""
    commit: str = ""
    command: str = ""
    table: str = ""
    row: dict[str, str] = field(default_factory=dict)

    def dated(self, command: str, day: str = "") -> Figure:
        """Return the figure with date (default: today), machine, commit and command."""
        day = day or datetime.datetime.now(datetime.UTC).date().isoformat()
        return replace(self, date=day, hardware=machine(), commit=commit(), command=command)


def commit() -> str:
    """Return the commit of the checkout, with "+" if files differ from it; empty outside of one."""
    root = checkout()
    if root is None:
        return ""
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run([*words, "--exclude=*"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


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
