"""What goes wrong while releases are found and fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors.base import KvError

if TYPE_CHECKING:
    from collections.abc import Sequence


class SourceError(KvError):
    """Stand above the errors of finding and fetching releases."""

    exit_code = 4


class UnknownRelease(SourceError):
    """Name a release that neither the lock nor the index has, with the closest names."""

    exit_code = 2

    def __init__(self, message: str, name: str = "", close: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.close = tuple(close)


class FetchError(SourceError):
    """Report that an archive could not be fetched; what was there before is untouched."""


class HashMismatch(FetchError):
    """Report an archive, commit or tree whose hash is not the one in the lock."""

    def __init__(self, message: str, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class ArchiveError(FetchError):
    """Report an archive that is truncated, hostile or not of the expected shape."""


class DiskFull(FetchError):
    """Report that there is no room left, and where."""


class DiskFailed(FetchError):
    """Report a disk that fails or may only be read, and where."""


class LockFileError(SourceError):
    """Report a lock file that cannot be read."""

    exit_code = 2


class GitError(SourceError):
    """Show a git command that failed: command, exit status and what it said."""

    exit_code = 2

    def __init__(self, command: Sequence[str], code: int, output: str) -> None:
        shown = " ".join(command)
        super().__init__(f"`{shown}` exited with {code}: {output.strip() or 'no output'}")
        self.command = tuple(command)
        self.code = code
        self.output = output


class TreeDirty(SourceError):
    """Name the files of a vendored tree that differ from what was put there."""

    exit_code = 1

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = tuple(files)
