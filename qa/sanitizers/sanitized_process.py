"""Run programs and scenarios under a sanitizer, and return what it reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyllamakv.binding.library import open_library
from pyllamakv.errors import Untestable
from qa.sanitizers import instrument, reports
from qa.sanitizers.reports import Report

#: A sanitized library is about ten times slower than the original.
PATIENCE = 600.0
#: The status of a program that was killed.
HUNG = -9


@dataclass(frozen=True)
class ProcessResult:
    """The result of a program: its status, its output, and its reports."""

    code: int
    out: str = ""
    err: str = ""
    found: list[Report] = field(default_factory=list)

    @property
    def output(self) -> str:
        """Return the end of its output, for error messages."""
        return (self.out + self.err).strip()[-400:]


@contextmanager
def logs() -> Iterator[Path]:
    """Yield a directory for reports."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-sanitizers-") as name:
        yield Path(name)


def environment(kind: str, folder: Path, *, preload: bool) -> dict[str, str]:
    """Return the environment of a process under a sanitizer, with reports in ``folder``.

    ``preload`` is for a program that is not instrumented, such as Python.
    """
    common = "halt_on_error=0:exitcode=0"
    suppressed = instrument.native("threads.supp")
    env = {
        # Leaks are tested in `leaks`, and Python frees much only at its end.
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:{common}"
        f":log_path={folder}/address.log",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{common}:log_path={folder}/undefined.log",
        "TSAN_OPTIONS": f"suppressions={suppressed}:{common}:log_path={folder}/thread.log",
        # Python objects get blocks of their own, so that overruns are detected.
        "PYTHONMALLOC": "malloc",
        "GGML_NO_BACKTRACE": "1",
    }
    if preload:
        env["LD_PRELOAD"] = ":".join(map(str, instrument.runtimes(kind)))
    return env


def opener(kind: str, folder: Path) -> Any:
    """Return the function that opens a library in a worker under a sanitizer."""

    def open_(path: Path, more: dict[str, str]) -> Any:
        env = {**more, **environment(kind, folder, preload=True)}
        return open_library(path, isolated=True, env=env, timeout=PATIENCE)

    return open_


def run(
    command: Sequence[str],
    kind: str,
    folder: Path,
    *,
    preload: bool = False,
    env: Mapping[str, str] | None = None,
) -> ProcessResult:
    """Run a program to its end; a timeout ends it with the status `HUNG`."""
    words = [*_unmoved(kind), *command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **environment(kind, folder, preload=preload), **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = HUNG, "", f"no end within {PATIENCE:g} seconds"
    found = reports.collect(folder)
    known = {report.key for report in found}
    found += [report for report in reports.parse(out + err) if report.key not in known]
    return ProcessResult(code, out, err, found)


def _unmoved(kind: str) -> list[str]:
    """Return the prefix that runs a program without address randomization.

    Kernels with more random bits than the thread sanitizer supports end the program at its start.
    """
    if kind != "thread":
        return []
    tool = shutil.which("setarch")
    if tool is None:
        return []
    asked = subprocess.run([tool, "-R", "true"], capture_output=True, check=False)
    return [tool, "-R"] if asked.returncode == 0 else []


def planted(kind: str, library: Path, fault: str) -> list[Report]:
    """Load a library with a planted fault; return the reports.

    Raises Untestable if the process does not get that far.
    """
    script = f"import ctypes; ctypes.CDLL({str(library)!r}); print('loaded')"
    with logs() as folder:
        ended = run(
            [sys.executable, "-c", script],
            kind,
            folder,
            preload=True,
            env={"PLK_PLANTED": fault},
        )
    if ended.code != 0 and not ended.found:
        msg = f"a process under the {kind} sanitizer ended with status {ended.code}: {ended.output}"
        raise Untestable(msg)
    return ended.found
