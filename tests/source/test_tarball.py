"""Test tar headers of unlimited number or size, or with invalid values."""

from __future__ import annotations

import gzip
import tarfile
from typing import TYPE_CHECKING

import pytest

from pyllamakv.source import tarball, tree_limits
from pyllamakv.source.sdist_import import import_sdist
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path
from archive_kit import PLAIN, UNPACKED, refused, sdist

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "a long name or an extended header of an archive was read into memory without a limit",
    by="hostile input",
    of="Python",
)
def test_oversized_header_is_refused(tmp_path: Path, kind: bytes) -> None:
    """A name or an extended header of many megabytes is not read into memory."""
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 3 << 30
    refused(open_store(), sdist(tmp_path, {"x": info}), "of text")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "nested or countless headers in an archive took unlimited memory, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_nested_headers_are_limited(tmp_path: Path, kind: bytes) -> None:
    """Headers that follow headers, which tarfile reads recursively, are limited."""
    chain = {}
    for number in range(3000):
        chain[str(number)] = info = tarfile.TarInfo("x")
        info.type = kind
    refused(open_store(), sdist(tmp_path, chain), "of text")


@pytest.mark.regression(
    "nested or countless headers in an archive took unlimited memory, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_endless_sparse_map_is_refused(tmp_path: Path) -> None:
    """Each block of the map announces another one."""
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
    "nested or countless headers in an archive took unlimited memory, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_total_size_of_headers_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All headers are counted together, and none of them is kept."""
    many = {f"x/{number}": b"" for number in range(300)}
    with tarball.open_tar(sdist(tmp_path, PLAIN | many)) as tar:
        assert all(len(tar.members) <= 1 for _ in tar)
    monkeypatch.setattr(tarball, "HEADERS", 128 << 10)
    refused(open_store(), sdist(tmp_path, PLAIN | many), "of text")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.regression(
    "nested or countless headers in an archive took unlimited memory, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_number_of_global_attributes_is_limited(tmp_path: Path, kind: bytes) -> None:
    """Global attributes, which tarfile keeps in memory, are limited in number."""
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
    "a member of an archive with a huge claimed size caused an endless search",
    by="hostile input",
    of="Python",
)
def test_member_with_an_invalid_size_is_refused(
    tmp_path: Path, claims: dict[str, str], words: str, name: str
) -> None:
    """A size that is too large or not a number is refused."""
    info = tarfile.TarInfo(name)
    info.pax_headers = claims
    refused(open_store(), sdist(tmp_path, PLAIN | {"x": info}), words)


@pytest.mark.regression(
    "a sparse member of an archive was accepted as a plain file larger than the archive",
    by="hostile input",
    of="Python",
)
def test_sparse_member_is_refused(tmp_path: Path) -> None:
    """A member that is larger than its content is not a plain file."""
    info = tarfile.TarInfo(f"{UNPACKED}/src/sparse")
    info.pax_headers = {"GNU.sparse.size": str(1 << 29), "GNU.sparse.map": "0,0"}
    refused(open_store(), sdist(tmp_path, PLAIN | {"x": info}), "not a plain file")
