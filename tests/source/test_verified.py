"""Test the list of verified releases, which comes from the accepted verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import UsageError
from pyllamakv.source import lockfile, verified
from pyllamakv.source.releases import Release

if TYPE_CHECKING:
    from pathlib import Path

LOCK = [
    Release(name, kind, "c" * 40, "d" * 40, "rows", date)
    for name, kind, date in (
        ("0.3.9", "sdist", "2025-05-08T00:00:00Z"),
        ("0.3.10", "sdist", "2026-10-01T00:00:00Z"),
        ("b9000", "npm", "2026-10-02T00:00:00Z"),
        ("0.3.8", "sdist", "2026-10-03T00:00:00Z"),
    )
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a lock and two files of accepted verdicts; return the shipped one."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(lockfile, "shipped", lambda: tmp_path / "lock.toml")
    lockfile.save(lockfile.shipped(), LOCK)
    monkeypatch.setattr(verified, "shipped", lambda: tmp_path / "shipped.toml")
    monkeypatch.setattr(verified, "local_file", lambda: tmp_path / "local.toml")
    return verified.shipped()


def write(path: Path, *cells: str) -> None:
    """Write cells: the release, the verdict, and other keys."""
    lines = ["schema = 1"]
    for cell in cells:
        release, verdict, *more = cell.split()
        lines += ["[[cell]]", f"release = '{release}'", f"verdict = '{verdict}'"]
        lines += [f"{key} = '{value}'" for key, value in (word.split("=") for word in more)]
    path.write_text("\n".join(lines), "utf-8")


def test_verified_releases_are_ordered_by_date(files: Path) -> None:
    """Neither names nor the order in the file matter; sources can be selected."""
    write(files, "0.3.10 needed", "b9000 works", "0.3.9 needed backend=cpu")
    assert [each.name for each in verified.releases()] == ["b9000", "0.3.10", "0.3.9"]
    assert verified.newest() == LOCK[2]
    assert verified.newest("sdist") == LOCK[1]


@pytest.mark.parametrize(
    "cell",
    [
        "0.3.8 harmful",
        "0.3.8 untestable",
        "0.3.8 broken-carry",
        "0.3.8 needed backend=rpc",
        "0.3.8 needed patches=full-defrag",
        "0.3.99 needed",
    ],
)
def test_only_good_verdicts_of_the_series_on_the_cpu_count(files: Path, cell: str) -> None:
    """A release that is in no lock is ignored as well."""
    write(files, "0.3.10 needed", cell)
    assert verified.newest() == LOCK[1]


def test_local_verdicts_override_shipped_ones(files: Path) -> None:
    """They do in both directions."""
    write(files, "0.3.10 needed", "b9000 works")
    write(verified.local_file(), "b9000 harmful", "0.3.8 native")
    assert [each.name for each in verified.releases()] == ["0.3.8", "0.3.10"]


def test_error_without_verified_releases_names_the_command(files: Path) -> None:
    """The error has the commands that verify a release."""
    assert verified.releases() == []
    write(files, "b9000 works")
    with pytest.raises(UsageError, match="matrix accept"):
        verified.newest("sdist")


@pytest.mark.parametrize("text", ["cell = 3", "[[cell]]\nrelease = 'a'", "cell = [3]", "cell ="])
def test_a_file_of_another_shape_is_refused(files: Path, text: str) -> None:
    """The error names the file."""
    files.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"shipped\.toml"):
        verified.releases()
