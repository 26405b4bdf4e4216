"""What goes wrong with patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors.base import KvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class PatchError(KvError):
    """Stand above the errors of patches."""


class UnknownPatch(PatchError, UsageError):
    """Name a patch that the series does not have, with the closest ids."""

    exit_code = 2

    def __init__(self, message: str, name: str = "", close: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.close = tuple(close)


class PatchFormatError(PatchError):
    """Report a patch file that cannot be read, with its line."""

    def __init__(self, message: str, path: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class PatchLintError(PatchError):
    """List everything that lint found."""

    exit_code = 1

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class PatchConflict(PatchError):
    """Name the hunk that does not apply: patch, file, line, what was expected and found."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        patch: str = "",
        file: str = "",
        hunk: int = 0,
        line: int = 0,
        expected: str = "",
        found: str = "",
    ) -> None:
        super().__init__(message)
        self.patch = patch
        self.file = file
        self.hunk = hunk
        self.line = line
        self.expected = expected
        self.found = found


class NoTextApplies(PatchError):
    """Report that none of a patch's texts applies to a release, with every conflict."""

    exit_code = 3

    def __init__(self, message: str, conflicts: Sequence[PatchConflict] = ()) -> None:
        super().__init__(message)
        self.conflicts = tuple(conflicts)


class RebaseWaiting(PatchError):
    """Say that a rebase stopped at a conflict and waits for a person."""

    exit_code = 3

    def __init__(self, message: str, folder: Path | None = None, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.folder = folder
        self.files = tuple(files)
