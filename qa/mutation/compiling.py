"""Run a compiler, an archiver or a linker, and distinguish invalid input from a failed run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyllamakv.building import cmake
from pyllamakv.errors import BuildError, HarnessError

#: Timeout of one compiler in seconds, on a loaded machine.
PATIENCE = 900.0

#: Errors that only the input can cause: an error with a source location, or, if a dropped hunk
#: defined something, a missing name in the linker. A tool that is killed, runs out of memory or
#: crashes ("internal compiler error") reports neither.
_REFUSAL: Final = re.compile(
    r":\d+:\d+: (?:fatal )?error: "
    r"|undefined (?:reference to|(?:hidden )?symbol)|isn't defined|multiple definition of",
    re.IGNORECASE,
)


class CompileError(Exception):
    """A tool refused its input; has its first error and all output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class CompilerCrash(HarnessError):
    """A tool failed without an error about its input, so that there is no result."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def refusal(text: str) -> bool:
    """Return whether a tool's output is about its input."""
    return _REFUSAL.search(text) is not None


def run(words: Sequence[str], folder: Path) -> None:
    """Run a tool in a directory.

    Raises CompileError for an error in its input, BuildError for a full disk, and CompilerCrash for
    any other failure: a timeout, a signal, an internal error.
    """
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=cmake.environment(),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{Path(words[0]).name} took more than {PATIENCE:g} seconds"
        raise CompilerCrash(msg) from error
    if not done.returncode:
        return
    output = done.stdout + done.stderr
    if "No space left on device" in output:
        msg = f"the disk is full at {folder}: free some space, and run the same command again"
        raise BuildError(msg)
    said = cmake.first_error(output) or output.strip()[-400:]
    if done.returncode > 0 and refusal(output):
        raise CompileError(said, output)
    msg = f"{Path(words[0]).name} crashed with status {done.returncode}: {said}"
    raise CompilerCrash(msg, output)
