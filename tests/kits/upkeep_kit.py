"""Four releases and a patch with two ports for the tests of upkeep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patching_kit import SeriesSandbox, code

from pyllamakv.patching import series
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ONE = {"src/a.cpp": code("first") + code("second"), "src/b.cpp": b"int b;\n"}
PATCHED = ONE | {"src/a.cpp": code("first", "fix(a);") + code("second")}
#: The patch merges here.
TWO = ONE | {"src/a.cpp": ONE["src/a.cpp"].replace(b"first_7();", b"first_7(a);")}
#: Upstream changed the lines that the patch changes; a port of its own.
THREE = ONE | {"src/a.cpp": code("first", "other(b);") + code("second")}
PORTED = ONE | {"src/a.cpp": code("first", "other(b);", "fix(a);") + code("second")}
#: The port for the release before applies.
FOUR = THREE | {"src/b.cpp": b"int c;\n"}


def sandbox(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return the releases in an own data directory, as the known ones."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(folder / "home"))
    bench = SeriesSandbox(open_store(), folder / "patches")
    for day, (name, files) in enumerate(
        {"0.3.1": ONE, "0.3.2": TWO, "0.3.3": THREE, "0.3.4": FOUR}.items(), 1
    ):
        bench.add_release(name, files, f"2026-08-0{day}")
    bench.add_patch("fix", {"0.3.1": (ONE, PATCHED), "0.3.3": (THREE, PORTED)},
                    marker=("src/a.cpp", "first_8"))  # fmt: skip
    plain = series.load
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    monkeypatch.setattr(series, "load", lambda folder=bench.folder: plain(folder))
    return bench
