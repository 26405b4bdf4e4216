"""What goes wrong while variants are built and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors.base import KvError

if TYPE_CHECKING:
    from collections.abc import Sequence


class BuildError(KvError):
    """Stand above the errors of building."""


class ToolMissing(BuildError):
    """Name a tool that is not installed, and the command that installs it."""

    def __init__(self, message: str, tool: str = "", cure: str = "") -> None:
        super().__init__(message)
        self.tool = tool
        self.cure = cure


class CommandFailed(BuildError):
    """Show a command that failed: command, exit status, first error and where the log lies."""

    exit_code = 1

    def __init__(
        self, message: str, command: Sequence[str], code: int, output: str, first_error: str = ""
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.code = code
        self.output = output
        self.first_error = first_error


class ManifestError(BuildError):
    """Report a variant whose manifest is missing, damaged or does not match its library."""


class NotBuilt(BuildError):
    """Say that a variant was not built yet, and the command that builds it."""
