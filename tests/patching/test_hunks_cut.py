"""Test that a truncated patch is refused at every byte, if its format shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import MemoryTree, diff, fill, git, repository

from pyllamakv.errors import PatchConflict, PatchFormatError
from pyllamakv.patching import hunks
from pyllamakv.patching.strict_apply import TreeOverlay

if TYPE_CHECKING:
    from pathlib import Path

LINES = [b"a line %d\n" % number for number in range(40)]
OLD = {"a.txt": b"".join(LINES), "b.txt": b"one\ntwo\nthree\n"}
NEW = {
    "a.txt": b"".join([*LINES[:5], b"five\nand more\n", *LINES[6:30], b"thirty\n", *LINES[31:]]),
    "b.txt": b"one\ntwo\n3\n",
    "c.txt": b"new\n",
}


def applied(patch: bytes) -> dict[str, bytes]:
    """Return the files that a patch changes, with their contents."""
    draft = TreeOverlay(MemoryTree(OLD))
    draft.apply(hunks.parse(patch))
    return {path: entry.data for path, entry in draft.changes.items() if entry}


def accepted(patch: bytes) -> list[int]:
    """Return the lengths at which a truncated patch applies with another result."""
    assert applied(patch) == NEW
    found = []
    for length in range(len(patch)):
        try:
            if applied(patch[:length]) != NEW:
                found.append(length)
        except (PatchFormatError, PatchConflict):
            continue
    return found


def boundaries(patch: bytes, mark: bytes) -> list[int]:
    """Return where the lines after the first one begin that start with a mark."""
    at, found = patch.find(b"\n" + mark), []
    while at >= 0:
        found.append(at + 1)
        at = patch.find(b"\n" + mark, at + 1)
    return found[mark == b"diff --git" and not patch.startswith(mark) :]


def test_a_cut_mail_is_refused_at_every_byte(tmp_path: Path) -> None:
    """The diffstat states how much a mail of git has, and a signature ends it."""
    folder = repository(tmp_path / "r", OLD)
    fill(folder, NEW)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Change three files")
    mail = git(folder, "format-patch", "-1", "--stdout", "--no-renames").stdout
    assert b"3 files changed, 5 insertions(+), 3 deletions(-)" in mail
    assert accepted(mail) == []


def test_a_cut_diff_is_refused_except_between_files() -> None:
    """The ids of the contents show a missing hunk; a diff of fewer files is complete."""
    patch = diff(OLD, NEW)
    starts = boundaries(patch, b"diff --git")
    assert len(starts) == 2
    # The newline before the next file's part may be missing as well.
    assert accepted(patch) == starts


def test_a_cut_plain_diff_is_refused_except_between_hunks() -> None:
    """Without ids, only the counts of each hunk show its end."""
    lines = diff(OLD, NEW).splitlines(keepends=True)
    bare = b"".join(line for line in lines if not line.startswith(b"index "))
    cuts = accepted(bare)
    assert len(cuts) == len(boundaries(bare, b"@@ -")) - 1


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (b"diff --git a/x b/x\n", False),
        (b"diff --git a/x b/x\nindex 1111111..2222222 100644\n", False),
        (b"diff --git a/x b/x\n--- a/x\n+++ b/x\n", False),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", True),
        (b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n", True),
        (b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", True),
    ],
)
def test_a_part_without_hunks_needs_another_change(part: bytes, whole: bool) -> None:
    """A mode, a name or an empty file is a change; a header alone is a truncated part."""
    if whole:
        assert hunks.parse(part).data == part
    else:
        with pytest.raises(PatchFormatError, match="has no hunk: the patch is cut off"):
            hunks.parse(part)


def test_an_edited_patch_with_a_signature_is_accepted() -> None:
    """Numbers and ids from before an edit do not matter if the end of the text is present."""
    patch = diff(OLD, NEW).replace(b"+new\n", b"+newer\n") + b"-- \n2.39.5\n"
    assert applied(patch)["c.txt"] == b"newer\n"
    with pytest.raises(PatchFormatError, match=r"c\.txt is cut off: it makes blob"):
        applied(patch.partition(b"-- \n2")[0])
