"""Test that patches that would write outside of the tree are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, numbered

from pyllamakv.errors import PatchConflict, PatchFormatError, SourceError
from pyllamakv.patching import apply, hunks
from pyllamakv.patching.definition import Port
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(20), "src/b.cpp": numbered(9)}
OUTSIDE = [
    "../x", "a/../../x", "a/..", "..", ".", "", "/etc/x", "//etc/x", "a//x", "./x", "a/./x", "a/",
    ".git/config", ".GIT/config", "sub/.git/hooks/post-checkout", ".git", "/dev/null",
]  # fmt: skip


def quoted(path: str) -> str:
    """Quote every character like git can, to find readers that unquote only some."""
    return '"' + "".join(f"\\{byte:03o}" for byte in path.encode()) + '"'


def creating(name: str) -> bytes:
    head = "diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n"
    return f"{head}+++ {name}\n@@ -0,0 +1 @@\n+x\n".encode()


def headers(path: str) -> list[bytes]:
    """Return patches with a path in each place of a patch that contains one."""
    twice = f"diff --git a/{path} b/{path}\n"
    found = [
        creating(f"b/{path}"),
        creating(quoted(f"b/{path}")),
        f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n".encode(),
        f"diff --git a/x b/x\ndeleted file mode 100644\n--- a/{path}\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-x\n".encode(),
        f"{twice}old mode 100644\nnew mode 100755\n".encode(),
        f"{twice}new file mode 100644\n".encode(),
        f"diff --git {quoted(f'a/{path}')} {quoted(f'b/{path}')}\n"
        "old mode 100644\nnew mode 100755\n".encode(),
    ]
    for word in ("rename", "copy"):
        for shown in (path, quoted(path)):
            start = "diff --git a/x b/y\nsimilarity index 100%\n"
            found.append(f"{start}{word} from src/a.cpp\n{word} to {shown}\n".encode())
            found.append(f"{start}{word} from {shown}\n{word} to src/c.cpp\n".encode())
    return found


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leaves_the_tree(path: str) -> None:
    """A path with `..`, an absolute one or one in .git is refused everywhere."""
    for data in headers(path):
        with pytest.raises(PatchFormatError):
            hunks.parse(data, "hostile.patch")


MAIL = "From {0:040d} Mon Sep 17 00:00:00 2001\n{1}\n\n{2}---\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("From: a\0b <x@y>", ""),
        ("From: a <x\0@y>", ""),
        ("From: =?utf-8?q?a=00b?= <x@y>", ""),
        ("From: =?utf-7?q?+2AA-?= <x@y>", ""),
        (f"From: {'a' * 200_000} <x@y>", ""),
        ("Subject: =?utf-7?q?+2AA-?=", ""),
        ("Subject: a\0b", ""),
        ("Subject: a", "b\0c\n"),
    ],
)
@pytest.mark.regression(
    "an author or a subject that is invalid in a commit was passed to git, or raised an untyped "
    "error",
    by="hostile input",
    of="Python",
)
def test_invalid_commit_texts_are_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    """Zero bytes, lone surrogates and endless authors are refused with their name."""
    with pytest.raises(PatchFormatError, match="a commit cannot contain that"):
        applied(tmp_path, MAIL.format(0, *words).encode() + creating("b/src/x"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        "Date: Fri, 20 Nov 2026 00:00:00 +99999999999999999999",
        f"Date: Fri, 20 Nov 2026 00:00:00 +{'9' * 5000}",
        "Date: Fri, 20 Nov 2026 00:00:00 +9999",
        "Date: Fri, 20 Nov 0001 00:00:00 +0000",
        "Date: Fri, 20 Nov 9999 00:00:00 +0000",
        "Date: Thu, 1 Jan 1970 00:00:00 +2300",
        "Date: @",
        "Date: 1 1 1 1 1",
        'From: "<>" <x@y>',
        "From: ... <x@y>",
        "From: <>",
        "From: =?utf-8?q?a=0Ab?= <x@y>",
        "From: =?utf-8?b?/w==?= <x@y>",
    ],
)
@pytest.mark.regression(
    "an author or a subject that is invalid in a commit was passed to git, or raised an untyped "
    "error",
    by="hostile input",
    of="Python",
)
@pytest.mark.regression(
    "a date in a patch that git cannot parse was accepted",
    by="hostile input",
    of="Python",
)
def test_invalid_authors_and_dates_are_ignored(tmp_path: Path, field: str) -> None:
    """Headers that git ignores are ignored; a name cannot contain a newline."""
    mail = MAIL.format(0, field, "")
    assert applied(tmp_path, mail.encode() + creating("b/src/x"))["src/x"] == b"x\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["a b", "-x", "--output=x", "a\nb", "a\tb", "x.git", ".gitignore"])
def test_special_characters_in_names_are_literal(path: str, tmp_path: Path) -> None:
    """A space, a dash or a newline in a name has no special meaning."""
    patched = applied(tmp_path, creating(quoted(f"b/src/{path}")))
    assert patched[f"src/{path}"] == b"x\n"
    assert set(patched) == {*OLD, f"src/{path}"}


@pytest.mark.parametrize("mode", ["160000", "040000", "100666", "104755", "x"])
@pytest.mark.regression(
    "modes of a patch other than those of files, executables and links were accepted",
    by="hostile input",
    of="Python",
)
def test_invalid_file_modes_are_refused(mode: str) -> None:
    """A submodule, a directory or an unknown mode is refused."""
    made = creating("b/src/x").replace(b"100644", mode.encode())
    changed = f"diff --git a/src/a.cpp b/src/a.cpp\nold mode 100644\nnew mode {mode}\n".encode()
    for data in (made, changed):
        with pytest.raises(PatchFormatError):
            hunks.parse(data)


def applied(folder: Path, *texts: bytes) -> dict[str, bytes | None]:
    """Apply patches to a release in a store; return the patched tree's files."""
    bench = SeriesSandbox(open_store(folder / "store.git"), folder / "patches")
    bench.add_release("0.3.1", OLD)
    names: list[str | Port] = []
    for number, data in enumerate(texts):
        file = folder / f"{number}.patch"
        file.write_bytes(data)
        names.append(str(file))
    done = apply.apply(bench.releases["0.3.1"], names, store=bench.store)
    bench.store.export(done.commit, folder / "tree")
    return dict(bench.store.read_many(done.commit, bench.store.ls(done.commit)))


def linking(at: str, to: str) -> bytes:
    made = creating(f"b/{at}").replace(b"100644", b"120000").replace(b"+x\n", f"+{to}\n".encode())
    return made + b"\\ No newline at end of file\n"


@pytest.mark.slow
@pytest.mark.parametrize("to", ["/etc", "../..", "src", "."])
@pytest.mark.regression(
    "a patch with a new file below a link or a file of the tree replaced that by a directory",
    by="hostile input",
    of="Python",
)
def test_nothing_is_written_through_a_link(tmp_path: Path, to: str) -> None:
    """A file below a link of an earlier patch is a conflict, whatever the link's target is."""
    renaming = (
        b"diff --git a/src/b.cpp b/out/x\nsimilarity index 100%\n"
        b"rename from src/b.cpp\nrename to out/x\n"
    )
    for number, text in enumerate((creating("b/out/x"), creating("b/out/a/x"), renaming)):
        with pytest.raises(PatchConflict, match="out"):
            applied(tmp_path / str(number), linking("out", to), text)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["/etc", "../..", "src/../.."])
def test_a_link_out_of_the_tree_is_not_exported(tmp_path: Path, to: str) -> None:
    """A patch may create a link; one to the outside is not exported."""
    with pytest.raises(SourceError, match="points outside"):
        applied(tmp_path, linking("out", to))
    assert not (tmp_path / "tree" / "out").exists()
