"""What earlier code promised is kept: trees, interface, exit codes, JSON, verdicts.

Each test says what differs. A wanted change goes into the record with `python tests/kits/records.py
NAME`, and its reason into the commit.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import records

from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

TREES = records.read("trees")
SCHEMAS = records.read("schemas")


def differences(kept: Any, now: Any, at: str = "") -> list[str]:
    """Return where two JSON values differ, as paths with both values."""
    if isinstance(kept, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(kept.keys() | now.keys())
            for line in differences(kept.get(key), now.get(key), f"{at}/{key}")
        ]
    return [] if kept == now else [f"{at}: recorded {kept!r}, now {now!r}"]


def compare(name: str, now: Any) -> None:
    """Fail with every difference between a record and what is there now."""
    found = differences(records.read(name), json.loads(json.dumps(now)))
    hint = f"\nif wanted: python tests/kits/records.py {name}, with the reason in the commit"
    assert not found, "\n".join(found[:40]) + hint


def test_differences_are_named() -> None:
    """By path; a key that is gone and one that is new are both told."""
    found = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "d": 4}})
    assert found == [
        "/a/b: recorded 1, now 3",
        "/a/c: recorded 2, now None",
        "/a/d: recorded None, now 4",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TREES))
def test_patches_make_the_recorded_trees(name: str) -> None:
    """Of a fetched release: each patch alone, and the series, to the tree and the commit."""
    release = lockfile.known().get(name)
    if release is None or not open_store().has(release):
        pytest.skip(f"{name} is not fetched: pyllamakv upstream fetch {name}")
    now = records.trees([name])[name]
    assert not differences(TREES[name], now)


def test_every_pinned_release_has_recorded_trees() -> None:
    """A release that is pinned is recorded in the same commit."""
    pinned = {one.name for one in lockfile.load(records.ROOT / "vendor" / "upstream.lock.toml")}
    assert pinned <= TREES.keys()


def test_public_names_and_signatures_are_as_recorded() -> None:
    """`pyllamakv.__all__`, with the public members of its classes."""
    compare("api", records.api())


def test_exit_codes_are_as_recorded() -> None:
    """Of each error class and of each verdict."""
    compare("exit_codes", records.exit_codes())


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("words", records.COMMANDS, ids=" ".join)
def test_json_has_the_recorded_shape(words: tuple[str, ...], stock: Any, patched: Any) -> None:
    """Keys and types of what a verb prints with --json, and its exit status."""
    done = records.run(*words)
    now = {"exit": done.returncode, "shape": records.shape(json.loads(done.stdout))}
    assert not differences(SCHEMAS[" ".join(words)], now), done.stderr


def test_shipped_schemas_are_as_recorded() -> None:
    """The schema of the matrix, word by word."""
    from pyllamakv.verification import matrix_reports

    assert SCHEMAS["matrix.schema.json"] == matrix_reports.schema()


@pytest.mark.slow
def test_verdicts_are_as_recorded() -> None:
    """README's tables, and what runs are compared with."""
    compare("verdicts", records.verdicts())
    accepted = tomllib.loads((records.ROOT / "patches" / "expected.toml").read_text("utf-8"))
    table = {
        f"{one['release']} {one.get('backend', 'cpu')}": one["verdict"] for one in accepted["cell"]
    }
    kept = records.read("verdicts")
    assert {name: word for name, word in table.items() if kept[name]["verdict"] != word} == {}
    assert all(one["patched_fails"] == 0 for one in kept.values())
