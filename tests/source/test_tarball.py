"""Headers of a tar that are without end, or claim what cannot be."""

from __future__ import annotations

import gzip
import tarfile
from typing import TYPE_CHECKING

import pytest
from source_kit import (
    isolate,
)

from pyllamakv.source import tarball, tree_limits
from pyllamakv.source.sdist_import import import_sdist
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path
from archive_kit import PLAIN, UNPACKED, refused, sdist


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a home of its own."""
    return isolate(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "a long name or an extended header of an archive was taken into memory whatever its size",
    by="hostile input",
    of="Python",
)
def test_a_header_without_end(tmp_path: Path, kind: bytes) -> None:
    """A name or an extended header of many megabytes is not taken into memory."""
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 3 << 30
    refused(open_store(), sdist(tmp_path, {"x": info}), "of text")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "headers about headers, or without number, in an archive took memory without bound, or were "
    "bare errors of Python",
    by="hostile input",
    of="Python",
)
def test_headers_about_headers(tmp_path: Path, kind: bytes) -> None:
    """A header may follow another, which tarfile goes down into, but not without end."""
    chain = {}
    for number in range(3000):
        chain[str(number)] = info = tarfile.TarInfo("x")
        info.type = kind
    refused(open_store(), sdist(tmp_path, chain), "of text")


@pytest.mark.regression(
    "headers about headers, or without number, in an archive took memory without bound, or were "
    "bare errors of Python",
    by="hostile input",
    of="Python",
)
def test_a_sparse_map_without_end(tmp_path: Path) -> None:
    """Each block of the map says that there is another one."""
    info = tarfile.TarInfo("x")
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[482] = 1
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    file = tmp_path / "llama_cpp_python-1.0.tar.gz"
    with gzip.open(file, "wb") as out:
        out.write(bytes(head) + (bytes(504) + b"\1" + bytes(7)) * 1000)
    refused(open_store(), file, "of text")


@pytest.mark.regression(
    "headers about headers, or without number, in an archive took memory without bound, or were "
    "bare errors of Python",
    by="hostile input",
    of="Python",
)
def test_headers_without_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All headers are counted together, and none of them is kept."""
    many = {f"x/{number}": b"" for number in range(300)}
    with tarball.open_tar(sdist(tmp_path, PLAIN | many)) as tar:
        assert all(len(tar.members) <= 1 for _ in tar)
    monkeypatch.setattr(tarball, "HEADERS", 128 << 10)
    refused(open_store(), sdist(tmp_path, PLAIN | many), "of text")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "headers about headers, or without number, in an archive took memory without bound, or were "
    "bare errors of Python",
    by="hostile input",
    of="Python",
)
def test_attributes_without_number(tmp_path: Path, kind: bytes) -> None:
    """What holds for all members is kept by tarfile: a few of them are enough."""
    text = b"".join(b"11 k%02d=abc\n" % number for number in range(40))
    head = tarfile.TarInfo("x")
    head.type, head.size = kind, len(text)
    file = tmp_path / "llama_cpp_python-1.0.tar.gz"
    with gzip.open(file, "wb") as out:
        out.write(head.tobuf(tarfile.GNU_FORMAT) + text.ljust(512, b"\0"))
        info = tarfile.TarInfo(f"{UNPACKED}/include/llama.h")
        out.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    if kind == tarfile.XGLTYPE:
        refused(open_store(), file, "attributes for all")
    else:
        assert import_sdist(open_store(), file)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"size": str(1 << 95)}, "unpacks to more than"),
        ({"size": str(tree_limits.MAX_BYTES + 1)}, "unpacks to more than"),
        ({"size": "-5"}, "below zero"),
        ({"size": "-5000"}, "below zero"),
        ({"GNU.sparse.size": "x", "GNU.sparse.map": "0,0"}, "cannot be read"),
        ({"GNU.sparse.size": "1", "GNU.sparse.map": "a,b"}, "cannot be read"),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "cannot be read"),
    ],
)
@pytest.mark.parametrize("name", [f"{UNPACKED}/src/x", "elsewhere"])
@pytest.mark.regression(
    "a member of an archive that claimed a size past all bounds was looked for for ever",
    by="hostile input",
    of="Python",
)
def test_a_member_that_claims_what_cannot_be(
    tmp_path: Path, claims: dict[str, str], words: str, name: str
) -> None:
    """A size past all bounds is no place to read on to, and what is no number no error of ours."""
    info = tarfile.TarInfo(name)
    info.pax_headers = claims
    refused(open_store(), sdist(tmp_path, PLAIN | {"x": info}), words)


@pytest.mark.regression(
    "a sparse member of an archive passed for a plain file, larger than what the archive holds",
    by="hostile input",
    of="Python",
)
def test_a_sparse_member(tmp_path: Path) -> None:
    """A member that is larger than its content is not a plain file."""
    info = tarfile.TarInfo(f"{UNPACKED}/src/sparse")
    info.pax_headers = {"GNU.sparse.size": str(1 << 29), "GNU.sparse.map": "0,0"}
    refused(open_store(), sdist(tmp_path, PLAIN | {"x": info}), "not a plain file")
