"""Test the choice of the nearest release where a port applies, and the found conflicts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, code

from pyllamakv.errors import NoPortApplies
from pyllamakv.patching import series
from pyllamakv.patching.base_choice import nearest
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

STOCK = {"src/a.cpp": code("first")}
FIXED = {"src/a.cpp": code("first", "fix(a);")}
OTHER = {"src/a.cpp": code("second")}


@pytest.mark.parametrize("requires", [(), ("base",)])
def test_every_conflict_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requires: tuple[str, ...]
) -> None:
    """A conflict of a required patch is reported as well."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    onto = bench.add_release("0.3.1", OTHER)
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    bench.add_patch("base", {"0.3.1": (STOCK, FIXED)}, marker=("src/a.cpp", "second"))
    bench.add_patch("fix", {"0.3.1": (STOCK, FIXED)}, requires=requires)
    whole = series.load(bench.folder)
    with pytest.raises(NoPortApplies, match="No port of fix applies") as caught:
        nearest(whole.definition("fix"), whole, onto, store=bench.store)
    (conflict,) = caught.value.conflicts
    assert conflict.patch.startswith(requires[0] if requires else "fix")
    again = "if base was edited, .* `pyllamakv patch export fix --base 0.3.1 --from DIR`"
    assert bool(re.search(again, str(caught.value))) is bool(requires)
