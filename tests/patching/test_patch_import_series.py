"""Test foreign patches as a series: files, directories, quilt and mailboxes."""

from __future__ import annotations

import base64
import quopri
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, diff, numbered

from pyllamakv.errors import PatchFormatError, UnknownPatch, UsageError
from pyllamakv.patching import (
    apply,
    foreign_series,
    mail_header,
    patch_import,
    status,
)
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
ONE = diff(OLD, OLD | {"src/a.cpp": numbered(60, l10="x")})
TWO = diff(OLD, OLD | {"src/b.cpp": numbered(20, l9="y")})


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return a release without any series."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    return bench


def test_file_is_a_series_of_one_patch(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The id of the patch is the name of the file."""
    file = tmp_path / "0001-Some Fix.patch"
    file.write_bytes(ONE)
    found = foreign_series.load(file)
    assert found.order == ("0001-some-fix",)
    patched = apply.apply(bench.releases["0.3.1"], series=found, store=bench.store)
    assert patched.patches == ("0001-some-fix",)
    assert bench.store.read(patched.commit, "src/a.cpp") == numbered(60, l10="x")
    (row,) = status.status([bench.releases["0.3.1"]], series=found, store=bench.store)
    assert row.state == "applies"


def test_folder_in_the_order_of_names(tmp_path: Path) -> None:
    """Plain files are read in the order of their names; other files are not patches."""
    for name, data in {"b.patch": ONE, "a.diff": TWO, "README": b"words"}.items():
        (tmp_path / name).write_bytes(data)
    assert foreign_series.load(tmp_path).order == ("a", "b")


def test_quilt_series_file_defines_the_order(tmp_path: Path) -> None:
    """A quilt series file gives the order."""
    (tmp_path / "b.patch").write_bytes(ONE)
    (tmp_path / "a.patch").write_bytes(TWO)
    (tmp_path / "series").write_text("# ours\nb.patch -p1\n\na.patch # why\n")
    assert foreign_series.load(tmp_path).order == ("b", "a")


@pytest.mark.parametrize("name", ["../b.patch", "sub/../../b.patch", "{folder}/b.patch"])
@pytest.mark.regression(
    "files outside of the directory could be listed by a quilt series, and were read",
    by="hostile input",
    of="Python",
)
def test_quilt_series_contains_no_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    """Only files of the directory are read."""
    (tmp_path / "b.patch").write_bytes(ONE)
    (tmp_path / "theirs" / "sub").mkdir(parents=True)
    (tmp_path / "theirs" / "series").write_text(name.format(folder=tmp_path))
    with pytest.raises(PatchFormatError, match="outside of its directory"):
        foreign_series.load(tmp_path / "theirs")


def test_directory_with_series_toml_is_a_series(bench: SeriesSandbox) -> None:
    """A directory with series.toml is read like the shipped one."""
    bench.add_patch("one", {"0.3.1": (OLD, OLD | {"src/b.cpp": numbered(20, l9="y")})})
    (definition,) = foreign_series.load(bench.folder)
    assert definition.ports[0].markers


@pytest.mark.regression(
    "names of sources that are invalid as paths raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_missing_paths_and_empty_directories_are_refused(tmp_path: Path) -> None:
    """Missing paths, empty directories and duplicates are refused with the expected content."""
    for name in ("none.patch", "x" * 300):
        with pytest.raises(UsageError, match="no patch file"):
            foreign_series.load(tmp_path / name)
    with pytest.raises(UsageError, match="expected series"):
        foreign_series.load(tmp_path)
    for name in ("a.patch", "A.diff"):
        (tmp_path / name).write_bytes(ONE)
    with pytest.raises(UsageError, match="Two files"):
        foreign_series.load(tmp_path)


def test_a_mailbox_is_a_series(tmp_path: Path) -> None:
    """Its mails are patches in order, named after the file unless they have a name."""
    mail = b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n\n"
    box = tmp_path / "box.patch"
    box.write_bytes(mail + ONE + mail + b"Patch: mine\n\n" + TWO)
    assert foreign_series.load(box).order == ("box-1", "mine")
    assert foreign_series.load(tmp_path).order == ("box-1", "mine")
    box.write_bytes(mail + ONE + mail + b"nothing\n")
    with pytest.raises(PatchFormatError, match="box-2 has no change"):
        foreign_series.load(box)
    refused: dict[str, str] = {}
    box.write_bytes(mail + ONE + mail.strip() + b"\nSubject: [PATCH] cut\n\n" + TWO[:-9])
    assert foreign_series.load(box, refused=refused).order == ("box-1",)
    assert list(refused) == ["box-2 (cut)"]


def test_cover_letters_are_left_out(tmp_path: Path) -> None:
    """They have no change; without another mail there is no patch."""
    mail = b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    cover = mail + b"Subject: [PATCH v2 00/12] all\n\n a | 2 +-\n 1 file changed\n\n"
    (tmp_path / "0000.patch").write_bytes(cover)
    with pytest.raises(UsageError, match="has no patch"):
        foreign_series.load(tmp_path)
    (tmp_path / "0001.patch").write_bytes(ONE)
    assert foreign_series.load(tmp_path).order == ("0001",)
    box = tmp_path / "box"
    box.write_bytes(cover + mail + b"Subject: [PATCH v2 10/12] a\n\n" + ONE)
    assert foreign_series.load(box).order == ("box-2",)


@pytest.mark.parametrize("name", ["0002.patch.txt", "mail", "more/0002.patch"])
def test_patches_with_other_names_are_reported(tmp_path: Path, name: str) -> None:
    """A directory is not read without them; other files of it are no patches."""
    (tmp_path / "0001.eml").write_bytes(ONE)
    (tmp_path / "0003.patch~").write_bytes(TWO)
    (tmp_path / "README").write_bytes(b"words\n")
    assert foreign_series.load(tmp_path).order == ("0001",)
    lost = tmp_path / name
    lost.parent.mkdir(exist_ok=True)
    lost.write_bytes(TWO)
    with pytest.raises(PatchFormatError, match=f"{name} is not read: move it"):
        foreign_series.load(tmp_path)


def test_a_series_without_a_patch_is_refused(bench: SeriesSandbox, tmp_path: Path) -> None:
    """No verb has a result for it, but patches can be imported into it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "series.toml").write_text("schema = 1\norder = []\n", "utf-8")
    with pytest.raises(UsageError, match="lists no patch"):
        foreign_series.load(own)
    releases = [*bench.releases.values()]
    with pytest.raises(UsageError, match=f"is a series already: use it with --patches {own}"):
        patch_import.import_patch(own, "x", releases, folder=tmp_path / "to", store=bench.store)
    (tmp_path / "one.patch").write_bytes(ONE)
    patch_import.import_patch(tmp_path / "one.patch", "x", releases, folder=own, store=bench.store)
    assert foreign_series.load(own).order == ("x",)


def test_crlf_patch_applies_like_the_original(tmp_path: Path) -> None:
    """A file with CRLF in every line applies like the original; a single CRLF is content."""
    data = diff({"a": b"one\n"}, {"a": b"two\n"})
    file = tmp_path / "mail.patch"
    file.write_bytes(data.replace(b"\n", b"\r\n"))
    (text,) = next(iter(foreign_series.load(file))).ports
    assert text.patch.data == data
    for cut in (data[:-1], data.replace(b"\n", b"\r\n")[:-1], data.replace(b"\n", b"\r\n")[:-2]):
        file.write_bytes(cut)  # an editor removed the last newline
        (text,) = next(iter(foreign_series.load(file))).ports
        assert text.patch.data == data
    mixed = diff({"a": b"one\r\n"}, {"a": b"two\r\n"})
    file.write_bytes(mixed)
    (text,) = next(iter(foreign_series.load(file))).ports
    assert text.patch.data == mixed


@pytest.mark.parametrize("encoding", ["quoted-printable", "Base64"])
def test_transfer_encoded_mail_is_decoded(tmp_path: Path, encoding: str) -> None:
    """The text of a mail may be encoded; an invalid encoding is named."""
    data = diff({"a": b"one = \xc3\xbc\n"}, {"a": b"two = 2\n"})
    head = f"From: A <a@b>\nSubject: x\nContent-Transfer-Encoding: {encoding}\n\n".encode()
    encode = quopri.encodestring if encoding[0] == "q" else base64.encodebytes
    file = tmp_path / "mail.patch"
    for body in (encode(data), encode(data.replace(b"\n", b"\r\n"))):
        file.write_bytes(head + body)
        (text,) = next(iter(foreign_series.load(file))).ports
        assert text.patch.files[0].data == data
    if encoding == "Base64":
        file.write_bytes(head + b"a")
        with pytest.raises(PatchFormatError, match="is not Base64"):
            foreign_series.load(file)


def test_attached_patch_is_read(tmp_path: Path) -> None:
    """`git format-patch --attach` writes text and patch as parts of a mail."""
    separator = b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    head = b"From: A B <a@b.c>\nSubject: [PATCH] x: do it\nMIME-Version: 1.0\n"
    kind = b'Content-Type: multipart/mixed; boundary="----------2.39"\n\n'
    parts = b"".join(
        b"------------2.39\nContent-Type: text/%s\n%s\n%s\n" % part
        for part in (
            (b"plain; charset=UTF-8", b"Content-Transfer-Encoding: 8bit\n", b"The reason.\n---"),
            (b'x-patch; name="x.patch"', b"Content-Disposition: attachment\n", ONE),
        )
    )
    file = tmp_path / "x.patch"
    for first in (separator, b""):
        text = b"This is a multi-part message in MIME format.\n"
        file.write_bytes(first + head + kind + text + parts + b"------------2.39--\n")
        (port,) = next(iter(foreign_series.load(file))).ports
        assert port.patch.files[0].data.endswith(ONE[ONE.index(b"--- a") :])
        assert mail_header.parse(port.patch.header).body.strip() == "The reason."
        assert port.title == "x: do it"


def test_strip_level_removes_leading_directories(tmp_path: Path) -> None:
    """It is quilt's -pN, or an argument; a path with fewer directories is refused."""
    deep = ONE.replace(b"a/src", b"a/vendor/llama.cpp/src").replace(
        b"b/src", b"b/vendor/llama.cpp/src"
    )
    (tmp_path / "deep.patch").write_bytes(deep)
    (tmp_path / "flat.patch").write_bytes(TWO)
    (tmp_path / "series").write_text("deep.patch -p3\nflat.patch\n")
    found = foreign_series.load(tmp_path)
    assert [patch.ports[0].patch.paths for patch in found] == [("src/a.cpp",), ("src/b.cpp",)]
    (one,) = foreign_series.load(tmp_path / "deep.patch", strip=3)
    assert one.ports[0].patch.paths == ("src/a.cpp",)
    with pytest.raises(PatchFormatError, match="no 4 directories"):
        foreign_series.load(tmp_path / "deep.patch", strip=5)


@pytest.mark.parametrize(
    ("old", "new", "option"),
    [
        ("work/llama.cpp-b1.orig/src/a.cpp", "work/llama.cpp-b1/src/a.cpp", "-p2"),
        ("x/y/src/a.cpp", "x/y/src/a.cpp", "-p2"),
        ("a/llama.cpp/src/a.cpp", "b/llama.cpp/src/a.cpp", "-p2"),
        ("/dev/null", "b/llama.cpp/src/a.cpp", "-p2"),
        ("a/llama.cpp/src/a.cpp", "/dev/null", "-p2"),
        ("src/a.cpp.orig", "src/a.cpp", "-p0"),
        ("a/src/a.cpp", "b/src/a.cpp", "-pab"),
    ],
)
def test_strip_level_counts_the_directories_that_diff_wrote(
    tmp_path: Path, old: str, new: str, option: str
) -> None:
    """The directories that were compared are among those to strip."""
    ranges = {"/dev/null": "-0,0 +1"}.get(old, {"/dev/null": "-1 +0,0"}.get(new, "-1 +1"))
    lines = ("" if ranges == "-0,0 +1" else "-1;\n") + ("" if ranges == "-1 +0,0" else "+2;\n")
    (tmp_path / "x.patch").write_text(f"--- {old}\n+++ {new}\n@@ {ranges} @@\n{lines}")
    (tmp_path / "series").write_text(f"x.patch {option}\n")
    (patch,) = foreign_series.load(tmp_path)
    assert patch.ports[0].patch.paths == ("src/a.cpp",)


@pytest.mark.parametrize("option", ["-R", "-p1 -R", "-p 2", "-p12"])
def test_other_options_of_a_quilt_series_are_refused(tmp_path: Path, option: str) -> None:
    """A patch that quilt applies in reverse must not be applied forward."""
    (tmp_path / "x.patch").write_bytes(ONE)
    (tmp_path / "series").write_text(f"x.patch {option}\n")
    with pytest.raises(PatchFormatError, match=f"not {option}; write a reversed"):
        foreign_series.load(tmp_path)


def test_stripped_path_stays_in_the_tree(tmp_path: Path) -> None:
    """The names of plain output of diff are checked as they are written."""
    file = tmp_path / "x.patch"
    file.write_text("--- w/x/../b/src/a.c\n+++ w/x/../c/src/a.c\n@@ -1 +1 @@\n-1;\n+2;\n")
    with pytest.raises(PatchFormatError, match="leaves the tree"):
        foreign_series.load(file, strip=2)
    (patch,) = foreign_series.load(file, strip=4)
    assert patch.ports[0].patch.paths == ("src/a.c",)


def test_files_that_are_no_patches_are_named_one_by_one(
    bench: SeriesSandbox, tmp_path: Path
) -> None:
    """All are in one error; an import writes the others and reports these."""
    folder = tmp_path / "mails"
    folder.mkdir()
    binary = b"diff --git a/x b/x\nindex 1111111..2222222 100644\nGIT binary patch\nliteral 0\n"
    for name, data in {"1.patch": ONE, "2.patch": binary, "3.patch": b"words\n"}.items():
        (folder / name).write_bytes(data)
    with pytest.raises(
        PatchFormatError, match=r"(?s)2 patches.*2\.patch:.*binary.*3\.patch has no"
    ):
        foreign_series.load(folder)
    done = patch_import.import_patch(
        folder, "mine", [*bench.releases.values()], folder=tmp_path / "own", store=bench.store
    )
    assert (done.ids, sorted(done.refused)) == (("mine",), ["2.patch", "3.patch"])
    with pytest.raises(UnknownPatch, match="patch import"):
        foreign_series.load(folder / "1.patch").definition("./1.patch")
