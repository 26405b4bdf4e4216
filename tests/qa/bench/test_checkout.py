"""The benchmark of the checkout runs make targets in new clones with an empty home."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qa.bench import checkout

MAKEFILE = """
test check:
\t@test "$$PWD" != "{root}" && test -z "$$(ls -A "$$HOME" | grep -v '^ran$$')"
\t@touch "$$HOME/ran"; echo "$@ $$(cat version)" >> "{log}"
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository of two revisions whose targets log what they run."""
    place = tmp_path / "repository"
    (place / "pyllamakv" / "cache").mkdir(parents=True)
    (place / "pyllamakv" / "cache" / "one.py").write_text("a = 1\nb = 2\n", "utf-8")
    (place / "Makefile").write_text(MAKEFILE.format(root=place, log=tmp_path / "log"), "utf-8")

    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(place), *author, *words], check=True, capture_output=True)

    git("init", "-q")
    for version in ("old", "new"):
        (place / "version").write_text(version, "utf-8")
        git("add", "-A")
        git("commit", "-q", "-m", version)
    monkeypatch.setattr(checkout, "checkout", lambda: place)
    monkeypatch.setattr(checkout, "_wheel", lambda *_: 700_000)
    return place


def test_revisions_alternate_in_new_clones(root: Path, tmp_path: Path) -> None:
    """`make test` runs twice in one clone, `make check` once in a clone of each revision."""
    ticks: list[None] = []
    found = checkout.figures(lambda: ticks.append(None), old=["HEAD~1"])
    log = (tmp_path / "log").read_text("utf-8").splitlines()
    assert log == ["test new", "test new", *["check old", "check new"] * checkout.ROUNDS]
    assert len(ticks) == len(log)
    test, wheel, old, new, *rows = found
    assert set(test.data) == {"first", "again"} and test.met
    assert (wheel.value, wheel.met) == ("700 kB", False)
    assert "revision HEAD~1" in old.name and "revision" not in new.name
    assert len(new.data["seconds"]) == checkout.ROUNDS
    assert {row.name: row.value for row in rows} == {"pyllamakv": "2", "pyllamakv.cache": "2"}


def test_a_target_that_fails_is_an_error(root: Path) -> None:
    """A failing target has no time."""
    (root / "Makefile").write_text("test:\n\t@false\n", "utf-8")
    subprocess.run(
        [
            "git",
            "-C",
            str(root),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "-qam",
            "x",
        ],
        check=True,
    )
    with pytest.raises(subprocess.CalledProcessError):
        checkout.figures(lambda: None)
