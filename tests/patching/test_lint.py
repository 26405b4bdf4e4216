"""Test that lint finds each fault once, with its file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, diff, numbered

from pyllamakv.errors import PatchLintError
from pyllamakv.patching import lint
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60)}
OTHER = {"src/a.cpp": b"+\n" + numbered(60)}
SHARED = {"src/shared.h": b"// shared\n"}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x"), "src/own.h": b"// own\n"} | SHARED


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return a patch with two ports that add a shared file."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    two = {"src/a.cpp": b"+\n" + numbered(60, l10="y")}
    ports = {"0.3.1": (OLD, ONE), "0.3.2": (OTHER, two | SHARED)}
    bench.add_patch("one", ports, shared=("src/shared.h",))
    return bench


def rules(bench: SeriesSandbox, scenarios: set[str] | None = None) -> list[tuple[str, str]]:
    found = lint.lint(bench.folder, scenarios=scenarios)
    return [(finding.path, finding.rule) for finding in found]


def test_a_clean_series_has_no_finding(bench: SeriesSandbox) -> None:
    """A written export has no finding."""
    assert rules(bench, {"some-scenario"}) == []
    lint.check(bench.folder)


FILE = "one/0.3.1.patch"
SHARED_FILE = "shared/src/shared.h"
TOML = "one/patch.toml"


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        (FILE, b"diff --git a/src/a", b"As one.\ndiff --git a/src/a", (FILE, "format")),
        (FILE, b"+// own\n", b"+// own\n-- \n2.39\n", (FILE, "format")),
        (FILE, b"+x\n", b"+x \n", (FILE, "blanks")),
        (FILE, b"+x\n", b"+x\r\n", (FILE, "line-ends")),
        (FILE, b"+++ b/src/own.h", b"+++ b/docs/own.h", (FILE, "path")),
        (FILE, b"+// own\n", b"+// own\n\\ No newline at end of file\n", (FILE, "last-line")),
        (SHARED_FILE, b"// shared\n", b"// shared \n", (SHARED_FILE, "blanks")),
        (SHARED_FILE, b"// shared\n", b"// shared\r\n", (SHARED_FILE, "line-ends")),
        (SHARED_FILE, b"// shared\n", b"// shared", (SHARED_FILE, "format")),
        (TOML, b'["src/shared.h"]', b'["src/gone.h"]', ("shared/src/gone.h", "format")),
        (TOML, b'["src/shared.h"]', b'["../shared.h"]', (".", "format")),
        (TOML, b'shared = ["src/shared.h"]', b"", (SHARED_FILE, "shared")),
        (TOML, b"Do what", b"Do \xc3\xa4hnlich", (TOML, "title")),
        (TOML, b"Because", b"Because it is a very long line that goes on and on and on and on " * 2,
         (TOML, "why")),
        (TOML, b'"not submitted"', b'"who knows"', (TOML, "upstream")),
        (TOML, b'"some-scenario"', b'"unknown"', (TOML, "scenario")),
        (TOML, b'base = "0.3.2"', b'base = "0.3.1"', (TOML, "base")),
        (TOML, b'base = "0.3.2"', b'base = "0.3.9"', (TOML, "format")),
        (TOML, b'id = "one"', b'id = "two"', (TOML, "format")),
        (TOML, b"schema = 1", b"schema = 2", (TOML, "format")),
        (TOML, b"schema = 1", b"schema = 1\nwhim = 1", (TOML, "format")),
        (TOML, b'releases = ""', b'releases = "3 or so"', (TOML, "format")),
        (TOML, b'requires = []', b'requires = ["two"]', ("series.toml", "format")),
        ("series.toml", b'"one"', b'"one", "one"', ("series.toml", "format")),
        ("series.toml", b'"one"', b'"one", "two"', ("series.toml", "format")),
    ],
)  # fmt: skip
def test_each_fault_has_its_lint_rule(
    bench: SeriesSandbox, path: str, old: bytes, new: bytes, expected: tuple[str, str]
) -> None:
    """Each fault has one rule that names it."""
    file = bench.folder / path
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    assert expected in rules(bench, {"some-scenario"})


def test_unlisted_directories_and_files_are_found(bench: SeriesSandbox) -> None:
    """Unlisted directories, and files of no port and no patch, are found."""
    (bench.folder / ".git").mkdir()
    (bench.folder / ".git" / "HEAD").write_text("x")
    (bench.folder / "stray").mkdir()
    (bench.folder / "stray" / "patch.toml").write_text("")
    (bench.folder / "one" / "old.patch").write_text("x")
    (bench.folder / "shared" / "notes").write_text("x\n")
    assert rules(bench) == [
        ("one/old.patch", "series"),
        ("shared/notes", "path"),
        ("shared/notes", "shared"),
        ("stray", "series"),
    ]


def test_rename_in_a_patch_is_found(bench: SeriesSandbox) -> None:
    """A rename hides changes: lint requires a deletion and a new file."""
    file = bench.file("one", "0.3.1")
    extra = (
        b"diff --git a/src/c b/src/d\nsimilarity index 100%\nrename from src/c\nrename to src/d\n"
    )
    file.write_bytes(file.read_bytes() + extra)
    assert (FILE, "rename") in rules(bench)


def test_check_error_lists_every_finding(bench: SeriesSandbox) -> None:
    """The error lists every finding."""
    for name in ("stray", "other"):
        (bench.folder / name).mkdir()
        (bench.folder / name / "patch.toml").write_text("")
    with pytest.raises(PatchLintError) as caught:
        lint.check(bench.folder)
    assert len(caught.value.findings) == 2


def test_the_changes_of_a_foreign_patch_are_checked(tmp_path: Path) -> None:
    """A file has no description; its lines are checked."""
    file = tmp_path / "mine.patch"
    file.write_bytes(diff({"src/a.cpp": b"a\n"}, {"src/a.cpp": b"b \n"}))
    assert [(each.path, each.rule) for each in lint.lint(file)] == [("mine", "blanks")]
    assert lint.lint(tmp_path) == lint.lint(file)
    file.write_bytes(b"nothing")
    assert [each.rule for each in lint.lint(file)] == ["format"]


def test_a_missing_series_is_a_finding(tmp_path: Path) -> None:
    """A directory without series.toml is reported without a traceback."""
    (finding,) = lint.lint(tmp_path)
    assert finding.rule == "format"
    assert "series.toml" in str(finding)
