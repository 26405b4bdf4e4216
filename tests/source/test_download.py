"""Test downloads: resume, restart, checks, and previous files after a failure."""

from __future__ import annotations

import errno
import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from source_kit import isolate, serving

from pyllamakv.errors import DiskFull, FetchError, HashMismatch
from pyllamakv.source.download import TRIES, download
from pyllamakv.source.index import PackageIndex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = bytes(range(256)) * 4096
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the HTTP client that downloads use."""
    isolate(tmp_path, monkeypatch)
    with PackageIndex() as index:
        yield index.session


def test_complete_download_creates_the_file(session: Any, tmp_path: Path) -> None:
    """A complete transfer creates the file, and reports progress to the end."""
    reports: list[tuple[str, int, int | None]] = []
    with serving({"/f": DATA}) as server:
        place = tmp_path / "d" / "f"
        found = download(
            session, server.url + "/f", place, sha256=SHA, progress=lambda *x: reports.append(x)
        )
    assert found == SHA
    assert place.read_bytes() == DATA
    assert reports[-1] == ("f", len(DATA), len(DATA))
    assert [p.name for p in place.parent.iterdir()] == ["f"]


def test_a_broken_transfer_is_resumed(session: Any, tmp_path: Path) -> None:
    """An interrupted transfer continues where it stopped."""
    with serving({"/f": DATA}) as server:
        server.cut = [300_000, 200_000]
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
        starts = [wanted for _, wanted in server.asked]
    assert (tmp_path / "f").read_bytes() == DATA
    assert starts[0] is None
    assert len(starts) == 3
    assert all(wanted and wanted.startswith("bytes=") for wanted in starts[1:])


def test_server_without_ranges_sends_the_whole_file(session: Any, tmp_path: Path) -> None:
    """If a server ignores ranges, the whole file is downloaded again."""
    (tmp_path / "f.part").write_bytes(b"old rubbish")
    with serving({"/f": DATA}) as server:
        server.ranges = False
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_part_of_another_file_is_discarded(session: Any, tmp_path: Path) -> None:
    """A partial file of another download is discarded, and the download restarts."""
    (tmp_path / "f.part").write_bytes(b"not the beginning")
    with serving({"/f": DATA}) as server:
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_part_longer_than_the_file_is_discarded(session: Any, tmp_path: Path) -> None:
    """A partial file that is longer than the server's file is discarded."""
    (tmp_path / "f.part").write_bytes(DATA + b"more")
    with serving({"/f": DATA}) as server:
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_a_wrong_hash_keeps_the_old_file(session: Any, tmp_path: Path) -> None:
    """A file with another hash is deleted, the error has both hashes, and the old file is kept."""
    (tmp_path / "f").write_bytes(b"old")
    with serving({"/f": DATA}) as server, pytest.raises(HashMismatch) as caught:
        download(session, server.url + "/f", tmp_path / "f", sha256="0" * 64)
    assert (caught.value.expected, caught.value.found) == ("0" * 64, SHA)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "f.part").exists()


def test_a_truncated_download_is_reported_and_kept(session: Any, tmp_path: Path) -> None:
    """If every attempt is interrupted, the error has the received size, and the part is kept."""
    with serving({"/f": DATA}) as server:
        server.cut = [1000] * TRIES
        with pytest.raises(FetchError, match="resumes it"):
            download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
        kept = (tmp_path / "f.part").stat().st_size
        assert kept == 1000 * TRIES
        assert not (tmp_path / "f").exists()
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
        assert server.asked[-1][1] == f"bytes={kept}-"
    assert (tmp_path / "f").read_bytes() == DATA


def test_status_503_is_retried_and_404_is_not(session: Any, tmp_path: Path) -> None:
    """A response of 503 is retried; one of 404 is not."""
    with serving({"/f": DATA}) as server:
        server.fail = [503, 503]
        download(session, server.url + "/f", tmp_path / "f", sha256=SHA)
        before = len(server.asked)
        with pytest.raises(FetchError, match="404"):
            download(session, server.url + "/none", tmp_path / "g", sha256=SHA)
        assert len(server.asked) == before + 1


def test_unreachable_server_raises_fetch_error_without_credentials(
    session: Any, tmp_path: Path
) -> None:
    """An unreachable server raises FetchError, whose message hides the credentials of the URL."""
    with serving({}) as server:
        port = server.url.rpartition(":")[2]
    url = f"http://user:secret@127.0.0.1:{port}/f"
    with pytest.raises(FetchError, match="cannot download f") as caught:
        download(session, url, tmp_path / "f", sha256=SHA)
    assert "secret" not in str(caught.value)


def test_file_url_is_downloaded(session: Any, tmp_path: Path) -> None:
    """A file:// index works like one on the network."""
    (tmp_path / "source").write_bytes(DATA)
    download(session, (tmp_path / "source").as_uri(), tmp_path / "f", sha256=SHA)
    assert (tmp_path / "f").read_bytes() == DATA


class _Full:
    """Simulate a client whose data cannot be written because the disk is full."""

    status_code = 200
    headers: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, number: int) -> None:
        self.number = number

    def get_stream(self, _url: str, *, headers: Any) -> _Full:
        return self

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def iter_bytes(self) -> Iterator[bytes]:
        yield b"some"
        raise OSError(self.number, "disk error")


def test_full_disk_keeps_the_existing_file(tmp_path: Path) -> None:
    """A full disk raises DiskFull, not a network error; the old file is kept."""
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(DiskFull, match="the disk is full"):
        download(_Full(errno.ENOSPC), "http://x/f", tmp_path / "f", sha256=SHA)
    with pytest.raises(FetchError, match="cannot write"):
        download(_Full(errno.EROFS), "http://x/f", tmp_path / "f", sha256=SHA)
    assert (tmp_path / "f").read_bytes() == b"old"
