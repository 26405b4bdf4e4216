"""Download a file to a ``.part`` file in the same directory, check it, and rename it."""

from __future__ import annotations

import hashlib
import ssl
import time
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import FetchError, HashMismatch
from pyllamakv.source import tree_limits
from pyllamakv.source.files import translate_disk_errors
from pyllamakv.source.pipconfig import redacted
from pyllamakv.source.progress import no_progress

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.progress import Progress

TRIES = 4
#: An attempt that received this many bytes does not count as a failure.
_PROGRESS = 1 << 20
_PAUSE = 0.5


class _Broken(Exception):
    """A transfer ended early and may be retried."""


def download(
    session: Any, url: str, place: Path, *, sha256: str | None, progress: Progress | None = None
) -> str:
    """Download ``url`` to ``place`` and return its SHA-256.

    An interrupted transfer is resumed, also by a later call. An existing file at ``place`` remains
    until the new one is complete and has the right hash. Raises FetchError, HashMismatch or
    DiskFull.
    """
    part = place.with_name(place.name + ".part")
    try:
        with translate_disk_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            return _download(
                session, url, part, place=place, sha256=sha256, tell=progress or no_progress
            )
    except OSError as error:
        msg = f"cannot write {part}: {error}"
        raise FetchError(msg) from error


def _download(
    session: Any, url: str, part: Path, *, place: Path, sha256: str | None, tell: Progress
) -> str:
    problem = ""
    tell(f"download {place.name}", 0, None)
    failed = 0
    while failed < TRIES:
        time.sleep(_PAUSE * failed)
        have = part.stat().st_size if part.is_file() else 0
        try:
            _transfer(session, url, part, place.name, tell)
        except _Broken as error:
            problem = str(error)
            grown = part.stat().st_size - have if part.is_file() else 0
            failed = 0 if grown >= _PROGRESS else failed + 1
            continue
        found = file_hash(part)
        if sha256 is None or found == sha256:
            part.replace(place)
            return found
        part.unlink()
        if have:
            # The first part may be from another file, so only a new download proves a wrong hash.
            problem = "the resumed file had another hash"
            failed += 1
            continue
        msg = (
            f"{place.name} from {redacted(url)} has SHA-256 {found}, expected {sha256}; the file "
            "was deleted"
        )
        raise HashMismatch(msg, sha256, found)
    kept = " The received part is kept; the next attempt resumes it." if part.is_file() else ""
    msg = f"cannot download {place.name} from {redacted(url)}: {problem}.{kept}"
    raise FetchError(msg)


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _transfer(session: Any, url: str, part: Path, name: str, tell: Progress) -> None:
    have = part.stat().st_size if part.is_file() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with session.get_stream(url, headers=headers) as response:
            start = _start(response, have, part, url, name)
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            with part.open("r+b" if start else "wb") as out:
                out.seek(start)
                done = start
                tell(name, done, total)
                for chunk in response.iter_bytes():
                    done += len(chunk)
                    if done > tree_limits.MAX_BYTES:
                        raise _too_long(part, url, name)
                    out.write(chunk)
                    tell(name, done, total)
                out.truncate()
    except (FetchError, _Broken):
        raise
    except (ConnectionError, TimeoutError, ssl.SSLError) as error:
        msg = f"{type(error).__name__}: {error}"
        raise _Broken(msg) from error
    except OSError:
        # Other errors come from the disk, and a retry would not help.
        raise
    # The HTTP clients of unearth's versions share no base class for what they raise.
    except Exception as error:
        msg = f"{type(error).__name__}: {error}"
        raise _Broken(msg) from error
    if total is not None and done < total:
        msg = f"the transfer ended after {done} of {total} bytes"
        raise _Broken(msg)


def _too_long(part: Path, url: str, name: str) -> FetchError:
    part.unlink()
    return FetchError(
        f"{name} from {redacted(url)} is longer than {tree_limits.MAX_BYTES} bytes; it was deleted"
    )


def _start(response: Any, have: int, part: Path, url: str, name: str) -> int:
    """Return the offset in the file at which the server's response starts."""
    status = int(response.status_code)
    if status == 206:
        content_range = response.headers.get("Content-Range", "")
        if content_range.startswith(f"bytes {have}-"):
            return have
        part.unlink()
        msg = "the server resumed at another offset"
        raise _Broken(msg)
    if status == 200:
        return 0
    if status == 416 and have:
        part.unlink()
        msg = "the server has fewer bytes than were downloaded before"
        raise _Broken(msg)
    if status >= 500 or status == 429:
        msg = f"the server answered {status}"
        raise _Broken(msg)
    msg = f"cannot download {name} from {redacted(url)}: the server answered {status}"
    raise FetchError(msg)
