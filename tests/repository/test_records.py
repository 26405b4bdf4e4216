"""Test recorded promises: trees, public names, exit codes, JSON and verdicts.

Each test reports the differences. An intended change is recorded with `python tests/kits/records.py
NAME`, and its reason is in the commit.
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
    """Fail with every difference between a record and the current value."""
    found = differences(records.read(name), json.loads(json.dumps(now)))
    hint = f"\nif intended: python tests/kits/records.py {name}, with the reason in the commit"
    assert not found, "\n".join(found[:40]) + hint


def test_differences_are_named() -> None:
    """Each has its path, also a removed and a new key."""
    found = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "d": 4}})
    assert found == [
        "/a/b: recorded 1, now 3",
        "/a/c: recorded 2, now None",
        "/a/d: recorded None, now 4",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TREES))
def test_patches_make_the_recorded_trees(name: str) -> None:
    """Each patch of a fetched release, and the series, has the recorded tree and commit."""
    release = lockfile.known().get(name)
    if release is None or not open_store().has(release):
        pytest.skip(f"{name} is not fetched: pyllamakv upstream fetch {name}")
    now = records.trees([name])[name]
    assert not differences(TREES[name], now)


def test_every_pinned_release_has_recorded_trees() -> None:
    """A release is recorded in the commit that pins it."""
    pinned = {one.name for one in lockfile.load(records.ROOT / "vendor" / "upstream.lock.toml")}
    assert pinned <= TREES.keys()


def test_public_names_and_signatures_are_as_recorded() -> None:
    """`pyllamakv.__all__`, with the public members of its classes."""
    compare("api", records.api())


def test_exit_codes_are_as_recorded() -> None:
    """They are those of each error class and of each verdict."""
    compare("exit_codes", records.exit_codes())


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("words", records.COMMANDS, ids=" ".join)
def test_json_has_the_recorded_shape(words: tuple[str, ...], stock: Any, patched: Any) -> None:
    """The keys and types of --json, and the exit status, are recorded."""
    done = records.run(*words)
    now = {"exit": done.returncode, "shape": records.shape(json.loads(done.stdout))}
    assert not differences(SCHEMAS[" ".join(words)], now), done.stderr


def test_shipped_schemas_are_as_recorded() -> None:
    """The schema of the matrix is equal."""
    from pyllamakv.verification import matrix_reports

    assert SCHEMAS["matrix.schema.json"] == matrix_reports.schema()


@pytest.mark.slow
def test_verdicts_are_as_recorded() -> None:
    """They are README's tables, and the verdicts that runs are compared with."""
    compare("verdicts", records.verdicts())
    accepted = tomllib.loads((records.ROOT / "patches" / "expected.toml").read_text("utf-8"))
    table = {
        f"{one['release']} {one.get('backend', 'cpu')}": one["verdict"] for one in accepted["cell"]
    }
    kept = records.read("verdicts")
    assert {name: word for name, word in table.items() if kept[name]["verdict"] != word} == {}
    assert all(one["patched_fails"] == 0 for one in kept.values())
