"""The series: order, requirements, and the shipped one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, numbered

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.home import data
from pyllamakv.patching import lint, port_choice, series
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(20)}
NEW = {"src/a.cpp": numbered(20, l9="x")}


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return two patches, the second requiring the first."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_patch("one", {"0.3.1": (OLD, NEW)})
    bench.add_patch("two", {"0.3.1": (NEW, OLD)}, requires=("one",))
    return bench


def test_series_order_is_that_of_series_toml(bench: SeriesSandbox) -> None:
    """The order of patches is that of series.toml."""
    found = series.load(bench.folder)
    assert found.order == ("one", "two")
    assert [patch.id for patch in found] == ["one", "two"]
    assert len(found) == 2
    assert found.definition("two").ports[0].requires == ("one",)


def test_server_patches_are_not_in_the_series_order(bench: SeriesSandbox) -> None:
    """They are found by name, and are neither in the order nor applied by default."""
    bench.add_patch("three", {"0.3.1": (OLD, NEW)}, target="server")
    found = series.load(bench.folder)
    assert found.order == ("one", "two")
    assert [patch.id for patch in found.server] == ["three"]
    assert found.definition("three").target == "server"
    assert found.every.order == ("one", "two", "three")
    assert found.every.folder == bench.folder
    with pytest.raises(UsageError, match="did you mean three"):
        found.definition("thre")


def test_unknown_target_is_refused(bench: SeriesSandbox) -> None:
    """Another word is refused with the known ones."""
    bench.add_patch("three", {"0.3.1": (OLD, NEW)}, target="client")
    with pytest.raises(PatchFormatError, match="expected library or server"):
        series.load(bench.folder)


def test_order_before_a_requirement_is_refused(bench: SeriesSandbox) -> None:
    """A patch must follow the ones that it requires."""
    (bench.folder / "series.toml").write_text('schema = 1\norder = ["two", "one"]\n')
    with pytest.raises(PatchFormatError, match="two requires one"):
        series.load(bench.folder)


def test_the_libraries_require_no_patch_of_the_server(bench: SeriesSandbox) -> None:
    """Such a patch could never be applied to a variant."""
    bench.add_patch("three", {"0.3.1": (OLD, NEW)}, target="server")
    bench.add_patch("four", {"0.3.1": (OLD, NEW)}, requires=("three",))
    with pytest.raises(PatchFormatError, match="four changes the libraries and requires three"):
        series.load(bench.folder)


@pytest.mark.slow
def test_a_series_of_the_user_may_require_shipped_patches(bench: SeriesSandbox) -> None:
    """They precede it; an unknown id is still refused."""
    toml = bench.folder / "one" / "patch.toml"
    text = toml.read_text("utf-8")
    toml.write_text(text.replace("requires = []", 'requires = ["full-defrag"]'), encoding="utf-8")
    both = port_choice.load_series(bench.folder)
    assert both.order[-3:] == ("full-defrag", "one", "two")
    assert both.folder == bench.folder
    toml.write_text(text.replace("requires = []", 'requires = ["nowhere"]'), encoding="utf-8")
    with pytest.raises(PatchFormatError, match="one requires nowhere"):
        series.load(bench.folder)


def test_unknown_id_gets_a_suggestion(bench: SeriesSandbox) -> None:
    """A misspelt id is answered with the closest one."""
    with pytest.raises(UsageError, match="did you mean two"):
        series.load(bench.folder).definition("tow")


def test_missing_port_file_is_refused_unless_allowed(bench: SeriesSandbox) -> None:
    """A port without a file is an error, unless it is being written."""
    bench.file("two", "0.3.1").unlink()
    with pytest.raises(PatchFormatError, match="has no file"):
        series.load(bench.folder)
    assert not series.load(bench.folder, missing_ok=True).definition("two").ports[0].patch.files


def test_the_shipped_series_is_clean() -> None:
    """The patches of this package load and pass lint."""
    assert [str(finding) for finding in lint.lint()] == []
    assert "full-defrag" in series.load().order


def test_a_copy_of_the_shipped_series_is_the_same_series(tmp_path: Path) -> None:
    """Ports, markers, order and claims come from the directory only."""
    copy = tmp_path / "copy"
    shutil.copytree(data("patches"), copy)
    shipped, found = series.load(), port_choice.load_series(str(copy))
    assert found.digest == shipped.digest
    assert (found.order, found.scenarios) == (shipped.order, shipped.scenarios)
    assert {name for patch in found.every for name in patch.scenarios} | set(found.scenarios) >= {
        each.id for each in discovery.discover().values() if each.kind == "fix"
    }
    one = "schema = 1\norder = ['kv-counters']\nscenarios = ['counters']\n"
    (copy / "series.toml").write_text(one)
    assert port_choice.load_series(str(copy)).digest != shipped.digest
