"""A user's patch becomes one of the series, after a strict trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, diff, numbered

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import apply, lint, patch_import, series
from pyllamakv.patching.definition import Port
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
NEW = OLD | {"src/a.cpp": numbered(60, l10="x"), "src/new.h": b"// new\n"}
THEN = NEW | {"src/b.cpp": numbered(20, l9="z")}
MAIL = b"""\
From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
From: A Person <person@example.org>
Date: Mon, 3 Mar 2025 10:00:00 +0000
Subject: [PATCH 1/2] kv: do a thing that takes a great many words to say, too many of them all

%s
---
 src/a.cpp | 2 +-

""" % (b"A long line of words. " * 9)


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return three releases: the base, one where the hunks moved, one where they do not apply."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD, "2025-01-01")
    bench.add_release("0.3.2", OLD | {"src/a.cpp": b"+\n" + numbered(60)}, "2025-01-02")
    bench.add_release("0.3.3", OLD | {"src/a.cpp": numbered(60, l10="other")}, "2025-01-03")
    bench.add_patch("one", {"0.3.1": (OLD, OLD | {"src/b.cpp": numbered(20, l3="one")})})
    return bench


def take(
    bench: SeriesSandbox, path: Path, id_: str = "mine", **words: object
) -> patch_import.Imported:
    return patch_import.import_patch(
        path,
        id_,
        list(bench.releases.values()),
        folder=bench.folder,
        scenarios=["some-scenario"],
        store=bench.store,
        **words,  # type: ignore[arg-type]
    )


def test_file(bench: SeriesSandbox, tmp_path: Path) -> None:
    """It is tried everywhere, written against the nearest base, and clean under lint."""
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    done = take(bench, file)
    assert (done.base, done.applies, done.findings) == ("0.3.1", ("0.3.1", "0.3.2"), ())
    assert [trial.offset for trial in done.trials] == [0, 1, 0]
    assert done.as_json()["applies"] == ["0.3.1", "0.3.2"]
    loaded = series.load(bench.folder)
    assert loaded.order == ("one", "mine")
    mine = loaded.definition("mine")
    assert mine.origin == "imported from mine.patch, by A Person <person@example.org>"
    assert mine.title.startswith("kv: do a thing")
    assert lint.lint(bench.folder) == ()
    patched = apply.apply(bench.releases["0.3.1"], ["mine"], series=loaded, store=bench.store)
    assert bench.store.read(patched.tree, "src/new.h") == b"// new\n"
    with pytest.raises(UsageError, match="already"):
        take(bench, file)


def test_folder_is_one_patch(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The files of a folder, and the mails of a mailbox, become one text."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "0001-a.patch").write_bytes(MAIL + diff(OLD, NEW))
    (folder / "0002-b.patch").write_bytes(MAIL.replace(b"1/2", b"2/2") + diff(NEW, THEN))
    done = take(bench, folder, title="Do both")
    text = Port.from_file(done.path)
    assert set(text.patch.paths) == {"src/a.cpp", "src/new.h", "src/b.cpp"}
    box = tmp_path / "both.mbox"
    box.write_bytes(b"".join(file.read_bytes() for file in sorted(folder.iterdir())))
    again = take(bench, box, "again", title="Do both")
    assert [f.data for f in Port.from_file(again.path).patch.files] == [
        f.data for f in text.patch.files
    ]


def test_new_series(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A folder that is no series yet becomes one."""
    file = tmp_path / "x.diff"
    file.write_bytes(diff(OLD, NEW))
    own = tmp_path / "own"
    done = patch_import.import_patch(
        file, "x", list(bench.releases.values()), folder=own, scenarios=["s"], store=bench.store
    )
    assert done.findings == ()
    assert series.load(own).order == ("x",)


def test_refusals(bench: SeriesSandbox, tmp_path: Path) -> None:
    """Where it does not apply, or cannot be named, nothing is written."""
    file = tmp_path / "mine.patch"
    file.write_bytes(diff(OLD, NEW))
    with pytest.raises(PatchConflict, match="hunk 1"):
        take(bench, file, base="0.3.3")
    with pytest.raises(UsageError, match="not among"):
        take(bench, file, base="0.3.9")
    with pytest.raises(UsageError, match="not an id"):
        take(bench, file, "Mine!")
    file.write_bytes(diff({"src/z.cpp": b"a\n"}, {"src/z.cpp": b"b\n"}))
    with pytest.raises(NoPortApplies, match=r"0\.3\.2: .*z\.cpp"):
        take(bench, file)
    assert not (bench.folder / "mine").exists()
    assert series.load(bench.folder).order == ("one",)
