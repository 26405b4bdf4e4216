"""Test the three signs of an obsolete patch, two of which are required."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox

from pyllamakv.patching import obsolete, series
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

HEAD = b"#include <x>\n\n"
OLD = HEAD + b"int cache::defrag_prepare(int n) {\n    int plan_old = 0;\n    return plan_old;\n}\n"
NEW = OLD.replace(b"int plan_old = 0", b"int plan_old = plan_all_moves(n)")
RENAMED = OLD.replace(b"defrag_prepare", b"other").replace(b"plan_old", b"plan")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a base, a release that has the change, one whose hooks are gone, and one like it."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    trees = {"0.3.0": RENAMED, "0.3.1": OLD, "0.3.2": NEW, "0.3.3": RENAMED, "0.3.4": OLD + b"//\n"}
    for number, (name, data) in enumerate(trees.items(), 1):
        bench.add_release(name, {"src/a.cpp": data}, f"2025-01-0{number}")
    one = ({"src/a.cpp": OLD}, {"src/a.cpp": NEW})
    bench.add_patch("one", {"0.3.1": one}, marker=("src/a.cpp", "#include"))
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def signs(
    bench: SeriesSandbox, name: str, **stock: str
) -> tuple[obsolete.Obsolescence, dict[str, bool | None]]:
    (found,) = obsolete.obsolete(
        bench.releases[name],
        ["one"],
        series=series.load(bench.folder),
        stock={"one": stock},
        store=bench.store,
    )
    assert found.as_json()["obsolete"] is found.obsolete
    return found, {sign.name: sign.obsolete for sign in found.signs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "text", "symbols"),
    [
        ("0.3.1", False, False),
        ("0.3.2", True, True),
        ("0.3.3", False, True),
        ("0.3.4", False, False),
        ("0.3.0", False, None),
    ],
)
def test_obsolete_signs_come_from_text_and_names(
    bench: SeriesSandbox, release: str, text: bool, symbols: bool | None
) -> None:
    """The signs come from text and names; without a run there is no third one."""
    found, states = signs(bench, release)
    assert states == {"text": text, "symbols": symbols, "behaviour": None}
    assert found.obsolete is (text and symbols is True)


def test_obsolete_requires_stock_to_pass_every_fix(bench: SeriesSandbox) -> None:
    """A failure on stock excludes the third sign."""
    assert signs(bench, "0.3.3", a="pass", b="skip")[0].obsolete
    assert not signs(bench, "0.3.3", a="pass", b="fail")[0].obsolete
    assert signs(bench, "0.3.3", a="skip")[1]["behaviour"] is None
