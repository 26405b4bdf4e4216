"""Measure the make targets in new clones with an empty home, and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pyllamakv.home import checkout
from qa.bench.figure import Figure
from qa.bench.measure import clock

GROUP = "The checkout"
Tick = Callable[[], None]
#: Runs of `make check` per revision, alternating.
ROUNDS = 1
_KIB = 1000


def figures(tick: Tick, old: Sequence[str] = ()) -> list[Figure]:
    """Measure `make test`, `make check`, the wheel, and the lines of each package.

    ``old`` is an earlier revision: `make check` then alternates between it and HEAD.
    """
    root = checkout()
    if root is None:
        return []
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        place = Path(folder)
        first, again = _test(root, place, tick)
        checks = _checks(root, place, [*old[:1], "HEAD"], tick)
        wheel = _wheel(root, place)
    found = [
        Figure(
            GROUP,
            "`make test` in a new clone with an empty home",
            f"{first:.0f} s, {again:.0f} s when repeated",
            "<= 300 s",
            first <= 300,
            "",
            "set-up, build of the default release, and the quick tests",
            {"first": first, "again": again},
        ),
        Figure(
            GROUP,
            "wheel",
            f"{wheel / _KIB:.0f} kB",
            "<= 600 kB",
            wheel <= 600 * _KIB,
            "",
            "",
            {"bytes": wheel},
        ),
    ]
    for revision, seconds in checks.items():
        shown = "`make check` in a new clone with an empty home"
        if revision != "HEAD":
            shown += f", revision {revision}"
        value = ", ".join(f"{each:.0f} s" for each in seconds)
        found.append(Figure(GROUP, shown, value, data={"seconds": seconds}))
    return [*found, *_lines(root)]


def _environment(home: Path) -> dict[str, str]:
    """Return an environment with an empty home and without a compiler cache."""
    home.mkdir()
    environment = dict(os.environ, HOME=str(home), CCACHE_DISABLE="1")
    for name in ("PYLLAMAKV_HOME", "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    # The programs of this environment are not those of a new user.
    own = str(Path(sys.executable).parent)
    paths = [each for each in environment["PATH"].split(os.pathsep) if each != own]
    return environment | {"PATH": os.pathsep.join(paths)}


def _clone(root: Path, place: Path, revision: str) -> None:
    subprocess.run(["git", "clone", "-q", str(root), str(place)], check=True)
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", revision], check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["git", "-C", str(place), "checkout", "-q", commit], check=True)


def _make(folder: Path, environment: dict[str, str], target: str) -> float:
    """Return the seconds of a make target. Raises CalledProcessError if it fails."""

    def run() -> None:
        subprocess.run(
            ["make", target],
            cwd=folder,
            env=environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    return clock(run)


def _test(root: Path, place: Path, tick: Tick) -> tuple[float, float]:
    clone = place / "test"
    _clone(root, clone, "HEAD")
    environment = _environment(place / "test-home")
    first = _make(clone, environment, "test")
    tick()
    again = _make(clone, environment, "test")
    tick()
    return first, again


def _checks(
    root: Path, place: Path, revisions: Sequence[str], tick: Tick
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        for revision in revisions:
            name = f"check-{revision}-{turn}"
            _clone(root, place / name, revision)
            environment = _environment(place / f"{name}-home")
            seconds.setdefault(revision, []).append(_make(place / name, environment, "check"))
            tick()
    return seconds


def _wheel(root: Path, place: Path) -> int:
    """Return the size of the wheel in bytes."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place / "dist")]
    subprocess.run([*command, str(root)], check=True)
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel.stat().st_size


def _lines(root: Path) -> list[Figure]:
    """Return the modules and lines of Python of each package, as rows of a table."""
    rows = []
    parts = [each for each in sorted((root / "pyllamakv").iterdir()) if each.is_dir()]
    for name, files in [
        ("pyllamakv", [*(root / "pyllamakv").rglob("*.py")]),
        *((f"pyllamakv.{part.name}", [*part.rglob("*.py")]) for part in parts),
        ("qa", [*(root / "qa").rglob("*.py")]),
        ("tests", [*(root / "tests").rglob("*.py")]),
    ]:
        lines = sum(len(file.read_bytes().splitlines()) for file in files)
        if not lines:
            continue
        row = {"package": name, "modules": f"{len(files)}", "lines": f"{lines:,}"}
        table = "Modules and lines of Python per package."
        rows.append(Figure(GROUP, name, f"{lines:,}", data={"lines": lines}, table=table, row=row))
    return rows
