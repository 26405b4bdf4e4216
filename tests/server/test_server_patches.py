"""The patches of a server are applied after those of its variant, or left out with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, numbered

from pyllamakv.errors import NoPortApplies
from pyllamakv.patching import series
from pyllamakv.server import server_patches
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.server.server_patches import ServerSources

STOCK = {"src/a.cpp": numbered(20), "tools/server/server.cpp": numbered(20)}
COUNTED = {**STOCK, "src/a.cpp": numbered(20, l9="count")}
SHOWN = {**COUNTED, "tools/server/server.cpp": numbered(20, l9="show")}


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return a patch of the library, and one of the server that requires it."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", STOCK)
    bench.add_patch("count", {"0.3.1": (STOCK, COUNTED)})
    bench.add_patch("other", {"0.3.1": (COUNTED, {**COUNTED, "src/b.cpp": b"other\n"})})
    bench.add_patch(
        "show", {"0.3.1": (COUNTED, SHOWN)}, requires=("count",), target="server"
    )
    return bench


def chosen(bench: SeriesSandbox, *names: str, release: str = "0.3.1") -> ServerSources:
    """Choose the patches of a server of a release."""
    found = series.load(bench.folder)
    return server_patches.choose(
        bench.releases[release], names or None, series=found, store=bench.store
    )


def read(bench: SeriesSandbox, tree: str) -> dict[str, bytes | None]:
    """Return the files of a tree."""
    return dict(bench.store.read_many(tree, ["src/a.cpp", "tools/server/server.cpp"]))


def test_patches_of_the_server_follow_those_of_the_variant(bench: SeriesSandbox) -> None:
    """The tree has the changes of both; nothing is left out."""
    found = chosen(bench)
    assert found.patches == ("show",)
    assert not found.left_out
    assert read(bench, found.tree) == SHOWN


def test_a_server_without_the_required_patch(bench: SeriesSandbox) -> None:
    """The tree is that of the variant, and the reason names the required patch."""
    found = chosen(bench, "other")
    assert found.patches == ()
    assert found.left_out == {"show": "requires count, which is not applied here"}
    assert read(bench, found.tree) == STOCK


def test_a_release_without_a_port(bench: SeriesSandbox) -> None:
    """The server is built without the patch, with the reason."""
    bench.add_release("0.3.2", {**STOCK, "tools/server/server.cpp": b"rewritten\n"})
    found = chosen(bench, "count", release="0.3.2")
    assert found.patches == ()
    assert "server.cpp" in found.left_out["show"]
    assert read(bench, found.tree)["src/a.cpp"] == COUNTED["src/a.cpp"]


def test_a_release_that_the_patch_is_not_meant_for(bench: SeriesSandbox) -> None:
    """It is not mentioned."""
    toml = bench.folder / "show" / "patch.toml"
    toml.write_text(toml.read_text("utf-8").replace('releases = ""', 'releases = ">0.3.1"'))
    found = chosen(bench)
    assert (found.patches, found.left_out) == ((), {})


def test_stock_gets_no_patch_of_the_server(bench: SeriesSandbox) -> None:
    """Also not one that requires nothing."""
    bench.add_patch("alone", {"0.3.1": (STOCK, {**STOCK, "src/c.cpp": b"c\n"})}, target="server")
    found = server_patches.choose(
        bench.releases["0.3.1"], (), series=series.load(bench.folder), store=bench.store
    )
    assert found.patches == ()
    assert found.tree == bench.store.tree_of(bench.releases["0.3.1"])


def test_a_variant_that_cannot_be_patched(bench: SeriesSandbox) -> None:
    """The errors of applying pass."""
    bench.add_release("0.3.3", {"src/a.cpp": b"rewritten\n"})
    with pytest.raises(NoPortApplies):
        chosen(bench, release="0.3.3")


def test_the_digest_changes_with_ports_and_shared_files(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the patches of the libraries."""
    shared = {**SHOWN, "tools/server/h.h": b"h\n"}
    bench.add_patch(
        "more", {"0.3.1": (SHOWN, {**shared, "src/d.cpp": b"d\n"})},
        shared=("tools/server/h.h",), target="server",
    )  # fmt: skip
    load = series.load
    monkeypatch.setattr(server_patches.series_module, "load", lambda: load(bench.folder))
    digests = [server_patches.digest()]
    with bench.file("count", "0.3.1").open("ab") as file:
        file.write(b"\n")
    assert server_patches.digest() == digests[0]
    with (bench.folder / "shared" / "tools" / "server" / "h.h").open("ab") as file:
        file.write(b"more\n")
    digests.append(server_patches.digest())
    toml = bench.folder / "show" / "patch.toml"
    toml.write_text(toml.read_text("utf-8").replace("Because", "Since"))
    digests.append(server_patches.digest())
    assert len(set(digests)) == 3


def test_the_shipped_patches_of_the_server() -> None:
    """They are listed apart from those of the libraries, and change only the server."""
    found = series.load()
    assert [patch.id for patch in found.server] == ["server-metrics", "server-defrag-thold"]
    assert not set(found.order) & {patch.id for patch in found.server}
    paths = {path for patch in found.server for port in patch.ports for path in port.patch.paths}
    assert all(path.startswith(("tools/server/", "common/")) for path in paths)
