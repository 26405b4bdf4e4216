"""Test the number of CPUs that a process may use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pyllamakv import cpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"": "max 100000"}, None),
        ({"": "150000 100000"}, 2),
        ({"a/b": "50000 100000", "a": "400000 100000"}, 1),
        ({"a/b": "max 100000", "a": "300000 100000"}, 3),
        ({"a/b": "garbage"}, None),
        ({"a/b": "1 0"}, None),
        ({"c": "100000 100000"}, None),
    ],
    ids=str,
)
def test_the_smallest_quota_counts(
    tmp_path: Path, limits: dict[str, str], expected: int | None
) -> None:
    """The cgroup of the process and its parents are read."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    for group, text in limits.items():
        (tmp_path / group / "cpu.max").write_text(text)
    own = tmp_path / "own"
    own.write_text("4:memory:/x\n0::/a/b\n")
    assert cpus.quota(own, tmp_path) == expected
    own.write_text("4:cpu:/x\n")
    assert cpus.quota(own, tmp_path) is None
    assert cpus.quota(tmp_path / "missing", tmp_path) is None


def test_affinity_and_quota_limit_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    for limit, expected in ((None, 3), (2, 2), (8, 3), (0, 3)):
        monkeypatch.setattr(cpus, "quota", lambda *_, limit=limit: limit)
        assert cpus.usable_cpus() == expected


def test_cpus_of_others_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread runs as well; without the file, all are free."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cpus, "_LOAD", tmp_path / "loadavg")
    for text, most, expected in (
        ("0.10 0.20 0.30 1/123 4567", 4, 4),
        ("0.10 0.20 0.30 2/123 4567", 4, 3),
        ("0.10 0.20 0.30 3/123 4567", 2, 2),
        ("9.10 0.20 0.30 40/123 4567", 4, 1),
        ("0.00 0.00 0.00 0/0 0", 4, 4),
        ("garbage", 3, 3),
    ):
        cpus._LOAD.write_text(text)
        assert cpus.free_cpus(most) == expected, text
    cpus._LOAD.unlink()
    assert cpus.free_cpus(4) == 4
