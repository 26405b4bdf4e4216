"""Test `pyllamakv cache`: content, verification and pruning of a prefix store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cli_kit import cli

from pyllamakv.cache.prefix_store import PrefixStore
from pyllamakv.cache.radix_tree import tokens_to_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    """Return a closed store of two pages."""
    made = PrefixStore(tmp_path / "store", {"model": "m", "build": "1"})
    first = made.add("cells", b"", None, 0, tokens_to_key(range(10)), b"x" * 100)
    made.add("cells", b"", first, 10, tokens_to_key(range(5)), b"y" * 100)
    made.close()
    return made


def test_cache_list_shows_identity_totals_and_pages(
    store: PrefixStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The identity and totals; each page with -v and in the JSON."""
    code, out, err = cli(capsys, "cache", "list", store.folder)
    assert (code, err) == (0, "")
    assert out == f"model: m\nbuild: 1\npages: 2, tokens: 15, bytes: {store.size}\n"
    code, out, _ = cli(capsys, "cache", "list", store.folder, "-v")
    heads, *rows = out.splitlines()[4:]
    assert heads.split() == ["page", "kind", "tokens", "bytes", "last", "use"]
    assert sorted(row.split()[2] for row in rows) == ["0..10", "10..15"]
    assert all(len(row) <= 80 for row in rows)
    found = json.loads(cli(capsys, "cache", "list", store.folder, "--json")[1])
    assert (found["pages"], found["tokens"], found["bytes"]) == (2, 15, store.size)
    assert {row["page"] for row in found["stored"]} == set(store.pages)
    assert found["identity"] == {"model": "m", "build": "1"}


def test_cache_verify_exits_with_1_until_prune_removes_the_page(
    store: PrefixStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed page is status 1; `prune` removes it, and more to meet a budget."""
    assert cli(capsys, "cache", "verify", store.folder)[:2] == (
        0,
        "usable pages: 2, unusable: 0\n",
    )
    last = next(page for page in store.pages.values() if page.start)
    path = store.path(last)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (store.folder / "x.part").write_bytes(b"half")
    code, out, _ = cli(capsys, "cache", "verify", store.folder)
    assert code == 1
    assert out == (
        f"{path.name}: the checksum of its content does not match\nusable pages: 1, unusable: 1\n"
    )
    code, out, _ = cli(capsys, "cache", "verify", store.folder, "--json")
    assert code == 1
    assert list(json.loads(out)["damaged"]) == [path.name]
    assert "unusable files: 1; run:" in cli(capsys, "cache", "list", store.folder)[1]
    size = store.size - last.size
    out = cli(capsys, "cache", "prune", store.folder)[1]
    assert out == f"removed pages: 1, left: 1 ({size} bytes)\n"
    out = cli(capsys, "cache", "prune", store.folder, "--budget", 0, "--json")[1]
    assert json.loads(out) == {"removed": 1, "pages": 0, "bytes": 0}


def test_cache_verbs_refuse_busy_and_foreign_directories(
    store: PrefixStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store in use is not pruned; other directories are not stores, and get no files."""
    owner = PrefixStore(store.folder, None)
    code, _, err = cli(capsys, "cache", "prune", store.folder)
    assert (code, err.split(":")[0]) == (2, "PrefixStoreBusy")
    assert cli(capsys, "cache", "verify", store.folder)[0] == 0
    owner.close()
    for verb in ("list", "verify", "prune"):
        for place in (tmp_path, tmp_path / "nothing", store.folder / "store.json"):
            code, out, err = cli(capsys, "cache", verb, place)
            assert (code, out, err.split(":")[0]) == (2, "", "PrefixStoreForeign"), (verb, place)
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    (store.folder / "store.json").write_text("?")
    code, out, _ = cli(capsys, "cache", "list", store.folder, "--json")
    assert code == 1
    assert json.loads(out)["error"]["type"] == "PrefixStoreDamaged"
