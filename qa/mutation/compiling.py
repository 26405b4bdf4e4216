"""Run a compiler, an archiver or a linker, and tell a refusal of its input from a broken run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyllamakv.building import cmake
from pyllamakv.errors import BuildError, HarnessError

#: Seconds for one compiler, on a machine that is busy with other things.
PATIENCE = 900.0

#: What only the input can bring about: an error at a place in it, or, where a hunk is gone that
#: defines something, a name that the linker misses. A tool that is killed, runs out of memory or
#: breaks ("internal compiler error") says neither.
_REFUSAL: Final = re.compile(
    r":\d+:\d+: (?:fatal )?error: "
    r"|undefined (?:reference to|(?:hidden )?symbol)|isn't defined|multiple definition of",
    re.IGNORECASE,
)


class CompileError(Exception):
    """Say that a tool refused its input, with its first error and all that it said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class CompilerCrash(HarnessError):
    """Say that a tool ended without a word about its input, which so is not judged."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def refusal(text: str) -> bool:
    """Return whether what a tool said is about its input."""
    return _REFUSAL.search(text) is not None


def run(words: Sequence[str], folder: Path) -> None:
    """Run a tool in a folder.

    Raises Refused for an error in its input, BuildError where there is no room, and Broken for
    all else that keeps it from a result: a timeout, a signal, an error of its own.
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
        msg = f"no room left in {folder}: free some space, and run the same command again"
        raise BuildError(msg)
    said = cmake.first_error(output) or output.strip()[-400:]
    if done.returncode > 0 and refusal(output):
        raise CompileError(said, output)
    msg = f"{Path(words[0]).name} ended with {done.returncode}, not for its input: {said}"
    raise CompilerCrash(msg, output)
