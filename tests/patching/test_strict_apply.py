"""Test strict application: unique places only, complete or not at all, with reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patching_kit import (
    SHOWN,
    WITH,
    MemoryTree,
    code,
    diff,
    fill,
    git,
    git_apply,
    numbered,
    repository,
)

from pyllamakv.errors import PatchConflict
from pyllamakv.patching import hunks
from pyllamakv.patching.strict_apply import DraftEntry, TreeOverlay

FEW = st.lists(st.sampled_from("abc"), min_size=0, max_size=14)
MANY = st.lists(st.integers(0, 40).map(str), min_size=1, max_size=40)
Files = dict[str, bytes]

if TYPE_CHECKING:
    from pathlib import Path


def content(lines: list[str], ended: bool = True) -> bytes:
    text = "\n".join(lines)
    return (text + "\n" if ended and lines else text).encode()


def applied(files: Files, data: bytes) -> Files | PatchConflict:
    """Apply strictly; return the files, or the reason for the refusal."""
    draft = TreeOverlay(MemoryTree(files))
    try:
        draft.apply(hunks.parse(data), "p")
    except PatchConflict as error:
        assert draft.changes == {}
        return error
    found = {path: DraftEntry(data) for path, data in files.items()} | draft.changes
    return {path: entry.data for path, entry in found.items() if entry is not None}


def refused(files: Files, data: bytes) -> PatchConflict:
    found = applied(files, data)
    assert isinstance(found, PatchConflict)
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(FEW, FEW, st.booleans(), st.booleans())
def test_strict_apply_on_the_base_equals_git(
    old: list[str], new: list[str], a: bool, b: bool
) -> None:
    """On its base, a patch gives the tree that it was made from."""
    before, after = {"f": content(old, a), "k": b""}, {"f": content(new, b), "k": b""}
    data = diff(before, after)
    if data:
        assert applied(before, data) == after == git_apply(before, data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(MANY, st.data())
def test_strict_apply_refuses_what_git_refuses(lines: list[str], choice: st.DataObject) -> None:
    """On any other tree it refuses, or git has the same result."""
    edit = st.tuples(st.integers(0, len(lines)), st.integers(0, 3), FEW)

    def edited(edits: list[tuple[int, int, list[str]]]) -> bytes:
        found = list(lines)
        for at, gone, new in edits:
            found[at : at + gone] = new
        return content(found)

    base = content(lines)
    new = edited(choice.draw(st.lists(edit, min_size=1, max_size=3)))
    other = edited(choice.draw(st.lists(edit, max_size=2)))
    data = diff({"f": base}, {"f": new})
    if data:
        found = applied({"f": other}, data)
        if not isinstance(found, PatchConflict):
            assert found == git_apply({"f": other}, data)


def test_offset_is_reported() -> None:
    """Moved lines are found, and the report has the offset."""
    data = diff({"f": numbered(40)}, {"f": numbered(40, l20="x")})
    draft = TreeOverlay(MemoryTree({"f": b"new\n" * 7 + numbered(40)}))
    (place,) = draft.apply(hunks.parse(data))
    assert (place.state, place.offset, place.line, place.at) == ("offset", 7, 17, 24)


def test_fuzz_is_refused() -> None:
    """A patch that applies only with fuzz is refused, although `patch` would apply it."""
    data = diff({"f": numbered(40)}, {"f": numbered(40, l20="x")})
    error = refused({"f": numbered(40, l17="other")}, data)
    assert (error.patch, error.file, error.hunk, error.line) == ("p", "f", 1, 17)
    assert (error.expected, error.found) == ("line 17", "other")
    assert "fuzz" in str(error)
    assert "line 17" in str(error)


def test_ambiguous_place_is_refused() -> None:
    """Moved lines that match twice are refused: git would use the nearer place."""
    block = numbered(9)
    data = diff({"f": block}, {"f": numbered(9, l5="x")})
    moved = b"a\n" + block + b"b\n" + block
    data = data.replace(b"@@ -2,7 +2,7 @@", b"@@ -12,7 +12,7 @@")
    error = refused({"f": moved + b"c\n"}, data)
    assert "several places" in str(error)


def test_conflict_in_one_file_changes_no_file() -> None:
    """If the second file conflicts, the first is not changed either."""
    old = {"a": numbered(9), "b": numbered(9)}
    data = diff(old, {"a": numbered(9, l5="x"), "b": numbered(9, l5="y")})
    error = refused({"a": numbered(9), "b": b"something else\n"}, data)
    assert error.file == "b"


@pytest.mark.parametrize("every", [1, 2])
def test_other_line_ends_are_named(every: int) -> None:
    """A patch with some CRLF fails on a file with LF for that reason only."""
    old = {"f": numbered(20)}
    lines = diff(old, {"f": numbered(20, l10="x")}).splitlines(keepends=True)
    ends = [
        line.replace(b"\n", b"\r\n") if line[:1] in b" +-" and not number % every else line
        for number, line in enumerate(lines)
    ]
    names = next(number for number, line in enumerate(lines) if line.startswith(b"@@"))
    error = refused(old, b"".join([*lines[:names], *ends[names:]]))
    assert "the line ends of the patch and the file differ" in str(error)
    found = {1: "CRLF", 2: "CRLF and LF"}[every]
    assert (error.expected, error.found) == (found, "LF")


def test_half_patched_tree_is_named() -> None:
    """A tree with one of two hunks is reported as partly patched, with the hunk."""
    old, new = {"f": numbered(60)}, {"f": numbered(60, l10="x", l50="y")}
    error = refused({"f": numbered(60, l10="x")}, diff(old, new))
    assert "partly patched" in str(error)
    assert "f#1" in str(error)
    added = refused(
        {"f": numbered(9, l4="new\nline 4")},
        diff({"f": numbered(9)}, {"f": numbered(9, l4="new\nline 4")}),
    )
    assert (added.expected, added.found) == ("the unchanged lines", "the changed lines")


def test_patched_tree_is_named() -> None:
    """A tree with all hunks is reported as patched, and not changed."""
    old = {"f": numbered(60)}
    new = {"f": numbered(60, l10="x", l50="y"), "new": b"text\n"}
    data = diff(old, new)
    error = refused(new, data)
    assert "already applied" in str(error)
    assert "partly patched" not in str(error)


def test_existing_file_is_not_overwritten() -> None:
    """A new file never replaces an existing one."""
    data = diff({}, {"n": b"ours\n"})
    assert "already exists" in str(refused({"n": b"theirs\n"}, data))
    assert applied({}, data) == {"n": b"ours\n"}


@pytest.mark.regression(
    "a patch with a new file at the path of a directory deleted the directory with its content",
    by="hostile input",
    of="Python",
)
def test_directory_is_not_replaced_by_a_file() -> None:
    """A file never replaces a directory, which would be removed with its content."""
    made = diff({}, {"d": b"ours\n"})
    moved = b"diff --git a/z b/d\nsimilarity index 100%\nrename from z\nrename to d\n"
    for data in (made, moved, moved.replace(b"rename", b"copy")):
        assert refused({"d/f": b"theirs\n", "z": b"1\n"}, data).found == "a file d/f"
    below = diff({}, {"d/f": b"1\n"})
    assert refused({}, below + made).file == "d"
    # Git writes the file first, and empties the directory then.
    turned = made + diff({"d/f": b"1\n"}, {})
    assert applied({"d/f": b"1\n"}, turned) == {"d": b"ours\n"}
    back = diff({"d": b"ours\n"}, {}) + below
    assert applied({"d": b"ours\n"}, back) == {"d/f": b"1\n"}


def test_file_is_deleted_only_if_identical() -> None:
    """A file is deleted only if its content is the expected one."""
    data = diff({"g": numbered(3), "k": b""}, {"k": b""})
    assert applied({"g": numbered(3), "k": b""}, data) == {"k": b""}
    assert refused({"g": numbered(4)}, data).file == "g"
    assert refused({"k": b""}, data).found == "no file g"


def test_order_of_hunks_is_kept() -> None:
    """Hunks whose places have another order upstream are refused."""
    data = diff({"f": numbered(60)}, {"f": numbered(60, l10="x", l50="y")})
    lines = numbered(60).splitlines(keepends=True)
    turned = b"".join(lines[30:] + lines[:30])
    assert refused({"f": turned}, data).hunk == 2


def test_mode_changes_are_applied_and_checked() -> None:
    """A mode is changed, kept by content changes, and checked."""
    data = b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n"
    draft = TreeOverlay(MemoryTree({"f": DraftEntry(b"x\n")}))
    draft.apply(hunks.parse(data))
    assert draft.entry("f") == DraftEntry(b"x\n", "100755")
    draft.apply(hunks.parse(diff({"f": b"x\n"}, {"f": b"y\n"})))
    assert draft.entry("f") == DraftEntry(b"y\n", "100755")
    with pytest.raises(PatchConflict, match="mode"):
        draft.apply(hunks.parse(data))


def test_foreign_rename_moves_the_file() -> None:
    """A rename of a foreign patch removes the old file."""
    data = (
        b"diff --git a/old b/new\nsimilarity index 90%\nrename from old\nrename to new\n"
        b"--- a/old\n+++ b/new\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    )
    assert applied({"old": b"a\nb\n"}, data) == {"new": b"a\nc\n"}


def test_survey_changes_nothing_and_sees_everything() -> None:
    """There is a state for every hunk, also after the first failure."""
    data = diff({"f": numbered(90)}, {"f": numbered(90, l10="x", l40="y", l70="z")})
    draft = TreeOverlay(MemoryTree({"f": b"+\n" + numbered(90, l39="other")}))
    states = [(p.hunk, p.state) for p in draft.dry_run(hunks.parse(data))]
    assert states == [(1, "offset"), (2, "conflict"), (3, "offset")]
    assert draft.changes == {}


#: Adds a line in the middle of a function.
INTO = diff(
    {"src/a.cpp": code("first", *SHOWN) + code("other")},
    {"src/a.cpp": code("first", *WITH) + code("other")},
)


def bare(data: bytes) -> bytes:
    """Return a patch whose hunks have no headings, like `diff -u`."""
    return re.sub(rb"(?m)^(@@ .* @@).*$", rb"\1", data)


@pytest.mark.parametrize("above", [b"", b"// new\n" * 7])
@pytest.mark.parametrize("count", [20, 500])
def test_applied_hunk_is_not_applied_to_another_function(above: bytes, count: int) -> None:
    """A hunk that its function contains is refused, although another one has the old lines.

    Git would apply it at the only place that matches.
    """
    tree = above + code("first", *WITH) + code("other", count=count) + code("second", *SHOWN)
    assert git_apply({"src/a.cpp": tree}, INTO) is not None
    (place,) = TreeOverlay(MemoryTree({"src/a.cpp": tree})).dry_run(hunks.parse(INTO))
    assert (place.state, place.at) == ("already", 12 + above.count(b"\n"))
    error = refused({"src/a.cpp": tree}, INTO)
    assert (error.file, error.hunk, error.line) == ("src/a.cpp", 1, 12)
    assert f"the changed lines at {place.at}, the unchanged ones only at" in str(error)


def test_applied_hunk_without_a_heading_is_recognized() -> None:
    """Without a heading, the line number counts, corrected by the offset of adjacent hunks."""
    data = bare(INTO)
    tree = code("first", *WITH) + code("other", count=90) + code("second", *SHOWN)
    assert "already applied" in str(refused({"src/a.cpp": tree}, data))
    near = diff(
        {"f.txt": numbered(20) + code("first", *SHOWN)},
        {"f.txt": numbered(20, l10="x") + code("first", *WITH)},
    )
    moved = b"+\n" * 7 + numbered(20) + tree
    assert git_apply({"f.txt": moved}, near) is not None
    error = refused({"f.txt": moved}, near)
    assert (error.hunk, "partly patched" in str(error)) == (2, True)
    # Nothing shows that a place is that of the hunk: the lines match once.
    assert not isinstance(applied({"src/a.cpp": b"+\n" * 7 + tree}, data), PatchConflict)


def test_changed_lines_in_another_function_do_not_block_a_hunk() -> None:
    """Another function may always have had the changed lines: a hunk still moves."""
    old = code("always", *WITH) + code("first", *SHOWN)
    data = diff({"src/a.cpp": old}, {"src/a.cpp": code("always", *WITH) + code("first", *WITH)})
    found = applied({"src/a.cpp": b"+\n" * 30 + old}, data)
    assert found == {"src/a.cpp": b"+\n" * 30 + code("always", *WITH) + code("first", *WITH)}


@pytest.mark.parametrize("above", [b"", b"// new\n" * 7])
def test_match_in_another_function_is_refused(above: bytes) -> None:
    """Lines of another function than the hunk's do not match, even at the hunk's line number.

    Git does not read the heading.
    """
    tree = {"src/a.cpp": above + code("second", *SHOWN) + code("other")}
    assert git_apply(tree, INTO) is not None
    (place,) = TreeOverlay(MemoryTree(tree)).dry_run(hunks.parse(INTO))
    assert (place.state, place.good, place.at) == ("function", False, 12 + above.count(b"\n"))
    error = refused(tree, INTO)
    assert (error.patch, error.file, error.hunk, error.line) == ("p", "src/a.cpp", 1, 12)
    assert error.expected == "a place in `static int first(int a, int b) {`"
    assert error.found == f"line {place.at} in `static int second(int a, int b) {{`"
    assert "patch rebase" in str(error)


@pytest.mark.parametrize(
    "signature",
    [
        b"static int first(int a, int b) {",
        b"static bool first(int a, long b, int c) {",
        b"int first(\n        int a,\n        int b) {",
        b"template <typename T>\nint first(T a) {\nlabel:",
    ],
)
def test_a_function_may_change_its_signature(signature: bytes) -> None:
    """A hunk moves within its function, even if the parameters changed."""
    there = b"// new\n" * 7 + code("second") + code("first", *SHOWN)
    there = there.replace(b"static int first(int a, int b) {", signature)
    patched = there.replace(b"    use(n);\n", b"    use(n);\n    log(n);\n")
    assert applied({"src/a.cpp": there}, INTO) == {"src/a.cpp": patched}


def test_without_a_heading_one_match_is_enough() -> None:
    """A patch without headings, and a file that is not C, have nothing to compare."""
    there = code("second", *SHOWN)
    patched = code("second", *WITH)
    assert applied({"src/a.cpp": there}, bare(INTO)) == {"src/a.cpp": patched}
    text = INTO.replace(b"src/a.cpp", b"docs/a.md")
    assert applied({"docs/a.md": there}, text) == {"docs/a.md": patched}


def test_git_does_nothing_inside_another_repository(tmp_path: Path) -> None:
    """Below another work tree plain git apply may exit 0 without a change."""
    outer = repository(tmp_path / "outer", {"k": b""})
    inner = outer / "vendor" / "tree"
    old, new = {"f": numbered(9)}, {"f": numbered(9, l5="x")}
    fill(inner, old)
    data = diff(old, new)
    assert git(inner, "apply", "-", input=data).returncode == 0
    assert (inner / "f").read_bytes() == new["f"]
    assert applied(old, data) == new
