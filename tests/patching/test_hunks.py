"""Test that patches are parsed and written unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patching_kit import diff, git_apply, numbered

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.patching import hunks

LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "\tq\r", "\\ x", "- y", "+z"]), max_size=24)
MAIL = b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"


def content(lines: list[str], ended: bool = True) -> bytes:
    text = "\n".join(lines)
    return (text + "\n" if ended and lines else text).encode()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LINES, LINES, st.booleans(), st.booleans())
def test_parsed_diff_is_written_back_unchanged(
    old: list[str], new: list[str], one: bool, other: bool
) -> None:
    """Git's patch is written byte for byte, and both sides of each hunk are right."""
    before, after = content(old, one), content(new, other)
    data = diff({"src/f": before, "k": b"k\n"}, {"src/f": after, "k": b"k\n"})
    if not data:
        return
    patch = hunks.parse(b"Some words.\n\n" + data)
    assert patch.data == b"Some words.\n\n" + data
    for hunk in patch.files[0].hunks:
        assert (len(hunk.old), len(hunk.new)) == (hunk.old_count, hunk.new_count)
        assert b"".join(hunk.old) in before
        assert b"".join(hunk.new) in after


def three_hunks() -> tuple[dict[str, bytes], bytes]:
    old = {"src/a.cpp": numbered(60), "src/b.cpp": b"one\n"}
    new = {"src/a.cpp": numbered(60, l10="x\ny", l30="", l50="z"), "src/b.cpp": b"two\n"}
    return old, diff(old, new)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_patch_without_one_hunk_applies(gone: int) -> None:
    """The remaining patch applies, and makes exactly the other changes."""
    old, data = three_hunks()
    left = hunks.parse(data).without("src/a.cpp", gone)
    kept = {1: {"l10": "x\ny"}, 2: {"l30": ""}, 3: {"l50": "z"}}
    changes = {k: v for number, part in kept.items() if number != gone for k, v in part.items()}
    assert git_apply(old, left.data) == {
        "src/a.cpp": numbered(60, **changes),
        "src/b.cpp": b"two\n",
    }
    assert hunks.parse(left.data).data == left.data


def test_without_the_only_hunk_drops_the_file() -> None:
    """A file without hunks is not changed."""
    _, data = three_hunks()
    left = hunks.parse(data).without("src/b.cpp", 1)
    assert left.paths == ("src/a.cpp",)
    assert hunks.parse(left.data) == left


def test_unknown_hunks_are_refused() -> None:
    """The usage error lists the existing hunks and files."""
    patch = hunks.parse(three_hunks()[1])
    with pytest.raises(UsageError, match="hunks 1 to 3"):
        patch.without("src/a.cpp", 4)
    with pytest.raises(UsageError, match=r"src/a\.cpp, src/b\.cpp"):
        patch.without("src/c.cpp", 1)


def test_patch_is_restricted_to_some_files() -> None:
    """A patch can be cut down to some of its files."""
    old, data = three_hunks()
    part = hunks.parse(data).only("src/b.cpp")
    assert git_apply(old, part.data) == {**old, "src/b.cpp": b"two\n"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((b"@@ -7,7 +7,8 @@", b"@@ -7,6 +7,7 @@"), "more lines than its counts|do not fit"),
        ((b"@@ -7,7 +7,8 @@", b"@@ -7,9 +7,10 @@"), "require more lines|do not fit"),
        ((b"+++ b/src/b.cpp", b"+++ b/../b.cpp"), "leaves the tree"),
        ((b"+++ b/src/b.cpp", b"+++ b/.git/hooks/x"), "leaves the tree"),
        ((b"@@ -7,7 +7,8 @@", b"@@ what @@"), "expected `@@"),
        ((b"@@ -7,7 +7,8 @@", b"@@ -7,7 +%s,8 @@" % (b"9" * 5000)), "expected `@@"),
        ((b"+++ b/src/b.cpp", b"+++ b/" + b"d/" * 100_000 + b"f"), "longer than 512"),
    ],
)
@pytest.mark.regression(
    "a path of 200 KB in a patch took all memory", by="hostile input", of="Python"
)
def test_damaged_patches_are_refused(change: tuple[bytes, bytes], says: str) -> None:
    """Wrong counts, hostile paths and broken lines are errors with the line."""
    _, data = three_hunks()
    assert change[0] in data
    with pytest.raises(PatchFormatError, match=says) as caught:
        hunks.parse(data.replace(*change), "some.patch")
    assert caught.value.line > 0
    assert "some.patch" in str(caught.value)


def test_truncated_patch_is_refused() -> None:
    """A patch that ends within a hunk is refused."""
    _, data = three_hunks()
    with pytest.raises(PatchFormatError, match="end of the patch"):
        hunks.parse(data[: data.index(b"-one")])


def test_text_without_a_change_is_refused() -> None:
    """A text without hunks is not a patch."""
    with pytest.raises(PatchFormatError, match="no change"):
        hunks.parse(b"Hello.\n")


def test_binary_patch_is_refused() -> None:
    """A binary change cannot be reviewed and is refused."""
    data = diff({"x": b"\0\1"}, {"x": b"\0\2"}, "--binary")
    with pytest.raises(PatchFormatError, match="binary"):
        hunks.parse(data)


def test_mailbox_is_split() -> None:
    """A mailbox is split into its mails, and refused as one patch."""
    _, data = three_hunks()
    box = MAIL + b"Subject: a\n\n" + data + MAIL + b"Subject: b\n\n" + data
    pieces = hunks.split(box)
    assert b"".join(pieces) == box
    assert [hunks.parse(piece).header.count(b"Subject") for piece in pieces] == [1, 1]
    with pytest.raises(PatchFormatError, match="split"):
        hunks.parse(box)
    assert hunks.split(data) == (data,)


@pytest.mark.parametrize(
    "line",
    [
        b"From a@b.example Sun Nov 29 19:30:31 2026",
        b"From git@z Thu Jan  1 00:00:00 1970",
        b"From a@b.example Sun Nov  9 19:30:31 2026 +0100",
        b"From a@b.example Sun Nov  9 19:30:31 +0100 2026",
    ],
)
def test_mailbox_of_a_mail_program_is_split(line: bytes) -> None:
    """Mail programs and archives write the sender and a date before each mail."""
    _, data = three_hunks()
    box = (line + b"\nSubject: a\n\n" + data) * 2
    pieces = [hunks.parse(piece).header for piece in hunks.split(box)]
    assert [header.count(b"Subject") for header in pieces] == [1, 1]
    with pytest.raises(PatchFormatError, match="split"):
        hunks.parse(box)


def test_signature_is_kept_as_the_trailer() -> None:
    """The signature of git format-patch belongs to no hunk."""
    _, data = three_hunks()
    patch = hunks.parse(data + b"-- \n2.39.5\n\n")
    assert patch.trailer == b"-- \n2.39.5\n\n"


def test_extended_headers_have_modes_and_created_files() -> None:
    """Creation, deletion and modes are read from the extended header."""
    patch = hunks.parse(diff({"gone": b"x\n", "k": b""}, {"k": b"", "a b/ü": b"y\n", "empty": b""}))
    facts = {file.path: (file.old, file.new, file.new_mode) for file in patch.files}
    assert facts == {
        "gone": ("gone", None, None),
        "a b/ü": (None, "a b/ü", "100644"),
        "empty": (None, "empty", "100644"),
    }


def test_quoted_file_names_are_parsed() -> None:
    """Names that git quotes are unquoted."""
    name = 'tab\there "q" ü'
    assert hunks.parse(diff({}, {name: b"x\n"})).paths == (name,)


def test_unified_diff_without_git_header_is_parsed() -> None:
    """A unified diff without git's header is parsed."""
    data = b"Index: x\n====\n--- a/x\t2020\n+++ b/x\t2021\n@@ -1 +1 @@\n-a\n+b\n"
    patch = hunks.parse(data)
    assert patch.paths == ("x",)
    assert patch.data == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a", "b"),
        ("llama.cpp.orig", "llama.cpp"),
        ("a", "b2"),
        ("/tmp/llama.cpp.orig", "/tmp/llama.cpp"),
        ("vendor/one", "vendor/two"),
        ("../llama.cpp.orig", "."),
    ],
)
def test_directories_of_a_plain_diff_are_left_out(old: str, new: str) -> None:
    """Diffs of `diff -ruN` and quilt have two directories, and files in only one of them."""
    data = f"""\
diff -ruN {old}/src/x.cpp {new}/src/x.cpp
--- {old}/src/x.cpp\t2026-11-25 13:10:02.889251518 +0000
+++ {new}/src/x.cpp\t2026-11-25 13:15:06.522532770 +0000
@@ -1 +1 @@
-one
+two
--- {old}/src/added.h\t1970-01-01 00:00:00.000000000 +0000
+++ {new}/src/added.h\t2026-11-25 13:15:06.522532770 +0000
@@ -0,0 +1 @@
+new
--- {old}/src/gone.h\t2026-11-25 13:10:02.889251518 +0000
+++ /dev/null
@@ -1 +0,0 @@
-old
""".encode()
    patch = hunks.parse(data)
    names = [(file.old, file.new) for file in patch.files]
    assert names == [("src/x.cpp",) * 2, (None, "src/added.h"), ("src/gone.h", None)]
    assert patch.data == data


def test_added_file_of_a_plain_diff_has_its_path() -> None:
    """Both names of `diff -N` have the directories, even without another file."""
    data = b"--- llama.cpp.orig/src/x.h\n+++ llama.cpp/src/x.h\n@@ -0,0 +1 @@\n+a\n"
    assert hunks.parse(data).paths == ("src/x.h",)


@pytest.mark.parametrize("rest", ["../x", ".git/config", "/etc/x", ""])
def test_a_path_outside_of_the_directories_is_refused(rest: str) -> None:
    """Paths are checked without the directories, which may be anywhere."""
    data = f"--- /a/one/{rest}\n+++ /a/two/{rest}\n@@ -1 +1 @@\n-a\n+b\n".encode()
    with pytest.raises(PatchFormatError, match=r"^patch:1: the path .* leaves the tree"):
        hunks.parse(data)


def test_orig_suffix_is_removed_from_the_path() -> None:
    """Some tools keep the old version under this name."""
    patch = hunks.parse(b"--- src/x.cpp.orig\n+++ src/x.cpp\n@@ -1 +1 @@\n-a\n+b\n")
    assert (patch.files[0].old, patch.files[0].new) == ("src/x.cpp",) * 2


def test_hunk_context_is_counted() -> None:
    """The context is the number of lines before the first and after the last change."""
    _, data = three_hunks()
    assert [hunk.context for hunk in hunks.parse(data).files[0].hunks] == [(3, 3)] * 3
