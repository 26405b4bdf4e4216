"""Test the table of architectures: format, advice, and agreement with the sources."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, imported, isolate

from pyllamakv.errors import LockFileError
from pyllamakv.source import architectures, lockfile, verified
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release

PINNED = lockfile.load(lockfile.shipped())


def tree(file: str, *names: str) -> dict[str, bytes]:
    """Return a tree with some architectures and a similar map after them."""
    rows = "".join(f'    {{ LLM_ARCH_{i}, "{name}" }},\n' for i, name in enumerate(names))
    text = f'x LLM_ARCH_NAMES = {{\n{rows}    {{ LLM_ARCH_UNKNOWN, "(unknown)" }},\n}};\n'
    return TREE | {file: f'{text}y = {{\n    {{ LLM_ARCH_X, "no-name" }},\n}};\n'.encode()}


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Release]:
    """Return three releases of a lock of the test, oldest first."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(architectures, "shipped", lambda: tmp_path / "architectures.toml")
    store = open_store()
    found = [
        imported(store, "0.3.9", tree("src/llama.cpp", "llama"), "2025-01-01T00:00:00Z"),
        imported(
            store, "0.3.10", tree("src/llama-arch.cpp", "llama", "gpt-oss"), "2025-02-01T00:00:00Z"
        ),
        imported(
            store,
            "b1",
            tree("src/llama-arch.cpp", "llama", "gpt-oss", "a.b_c"),
            "2025-03-01T00:00:00Z",
        ),
    ]
    lockfile.save(lockfile.shipped(), found)
    return found


@pytest.mark.slow
def test_the_table_names_the_first_release(releases: list[Release]) -> None:
    """Releases may be added in any order, also again."""
    table = architectures.shipped()
    for order in permutations(releases):
        for release in (*order, order[0]):
            architectures.add(lockfile.shipped(), open_store(), release)
        found = architectures.load(table)
        assert found == {"llama": "0.3.9", "gpt-oss": "0.3.10", "a.b_c": "b1"}
        table.unlink()


def test_architecture_remedy_names_a_verified_release(
    releases: list[Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the newest release that is not older than the first one with the architecture."""
    for release in releases:
        architectures.add(lockfile.shipped(), open_store(), release)
    monkeypatch.setattr(verified, "releases", lambda: [releases[1], releases[0]])
    assert "0.3.10 knows it: run `pyllamakv build 0.3.10`" in architectures.remedy("llama")
    assert "0.3.10 knows it" in architectures.remedy("gpt-oss")
    expected = "0.3.10 knows it: run `pyllamakv build 0.3.10 --server` and use 0.3.10"
    assert architectures.remedy("llama", server=True) == expected
    assert "b1 knows it but is not verified" in architectures.remedy("a.b_c")
    assert "no pinned release knows it" in architectures.remedy("other")


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    """The error names the file; a missing file means an empty table."""
    file = tmp_path / "architectures.toml"
    assert architectures.load(file) == {}
    for text in ("a =", "a = 3"):
        file.write_text(text, "utf-8")
        with pytest.raises(LockFileError, match=r"architectures\.toml"):
            architectures.load(file)


@pytest.mark.parametrize("release", PINNED, ids=lambda release: release.name)
def test_shipped_architecture_table_matches_the_sources(release: Release) -> None:
    """A fetched release has exactly the architectures of the table up to its own."""
    store = open_store()
    if not store.has(release):
        pytest.skip(f"{release.name} is not fetched: pyllamakv upstream fetch {release.name}")
    order = {each.name: each.order for each in PINNED}
    table = architectures.load(architectures.shipped())
    expected = {name for name, first in table.items() if order[first] <= release.order}
    assert architectures.read(store, release) == expected
