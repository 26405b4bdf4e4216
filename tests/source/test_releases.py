"""Test names of releases: the release of a spec, and the error if there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from source_kit import isolate, repository

from pyllamakv.errors import UnknownRelease
from pyllamakv.source import lockfile
from pyllamakv.source.releases import Release, is_safe_name, natural_sort_key
from pyllamakv.source.spec_resolver import resolve

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test its own data directory, and a lock of two releases."""
    place = isolate(tmp_path, monkeypatch)
    lockfile.save(lockfile.shipped(), [release("0.3.9"), release("b4980")])
    return place


def release(name: str) -> Release:
    return Release(name, "sdist", "1" * 40, "2" * 40, "split", "2025-01-01T00:00:00Z")


@pytest.mark.parametrize("spec", ["0.3.9", " 0.3.9 ", "v0.3.9", "llama-cpp-python==0.3.9"])
def test_spellings_of_a_version(spec: str) -> None:
    """A version is found by its common spellings."""
    assert resolve(spec).name == "0.3.9"


def test_added_releases_are_found() -> None:
    """Added releases are found like shipped ones."""
    lockfile.save(lockfile.added(), [release("0.4.0")])
    assert resolve("0.4.0").name == "0.4.0"


def test_a_commit_is_found_by_its_first_digits() -> None:
    """Its key works too; two names of one commit are one release, two commits are ambiguous."""
    git = replace(release("git:/up@main"), kind="git", commit="abcdef0" + "1" * 33)
    pinned = replace(git, name=f"git:/up@{git.commit}")
    lockfile.save(lockfile.added(), [git, pinned])
    for spec in ("abcdef0", "ABCDEF01", git.commit, git.key):
        assert resolve(spec).commit == git.commit
    lockfile.save(lockfile.added(), [replace(git, name="git:/up@b", commit="abcdef0" + "2" * 33)])
    with pytest.raises(UnknownRelease):
        resolve("abcdef0")


def test_an_unknown_release_names_close_ones() -> None:
    """The error for an unknown name has the closest names and the commands to run."""
    with pytest.raises(UnknownRelease, match=r"upstream add 0\.3\.8") as caught:
        resolve("0.3.8")
    assert "0.3.9" in caught.value.suggestions
    assert caught.value.name == "0.3.8"
    with pytest.raises(UnknownRelease, match="`pyllamakv upstream list --new` new versions from"):
        resolve("b99999")  # no package has this version


def test_a_folder_and_a_git_source_are_resolved(tmp_path: Path) -> None:
    """path:DIR and git:URL@REF are releases with their own commits."""
    commit = repository(tmp_path / "up")
    by_git = resolve(f"git:{tmp_path / 'up'}@HEAD")
    by_path = resolve(f"path:{tmp_path / 'up'}")
    assert by_git.commit == commit
    assert by_git.tree == by_path.tree
    assert by_git.key == f"git-{commit[:12]}"
    assert by_path.key.startswith("path-")


def test_order_is_by_date_then_number() -> None:
    """Releases of one date are sorted by number, not alphabetically."""
    names = ["0.3.10", "0.3.9", "0.3.2"]
    ordered = sorted(map(release, names), key=lambda r: r.order)
    assert [r.name for r in ordered] == ["0.3.2", "0.3.9", "0.3.10"]
    assert natural_sort_key("b10") > natural_sort_key("b9")


@pytest.mark.parametrize("name", ["git:a1²2", "git:a٣", "git:a" + "1" * 5000])
@pytest.mark.regression(
    "a name in the lock with digits of other scripts, or thousands of them, made the whole lock "
    "unreadable",
    by="hostile input",
    of="Python",
)
def test_unicode_digits_in_a_name_sort_without_error(name: str) -> None:
    """A URL may contain Unicode digits, or more digits than Python converts."""
    assert natural_sort_key(name) < natural_sort_key("git:b")


@pytest.mark.parametrize("name", ["", "-x", "../x", "a/b", "a..b", "x.lock", "a b", ".x"])
def test_unsafe_names_are_recognized(name: str) -> None:
    """Names that could be options, paths or broken refs are distinguished."""
    assert not is_safe_name(name)
    assert is_safe_name("0.3.9-rc1")
