"""Run programs of libFuzzer, and read their counts and findings.

Targets of Python run with Atheris, which contains libFuzzer (`program`); the header of the patch
mmap-kv is compiled with clang and sanitizers, without llama.cpp.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import qa
from pyllamakv.errors import HarnessError, Untestable
from pyllamakv.home import data
from qa.entry import strip_directories
from qa.fuzzing.target import COUNTS, COUNTS_FORMAT

#: Findings after which a target ends: enough to fix.
MOST = 3
#: Seconds after which an input counts as a hang: a loaded machine is slow.
TIMEOUT = 60
HEADER = "llama-kv-mmap.h"
_FLAGS = ("-std=c++17", "-g", "-O1", "-fsanitize=fuzzer,address,undefined",
          "-fno-sanitize-recover=all")  # fmt: skip
_STATUS = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)/(\d+)(b|Kb|Mb)")
_UNITS = {"b": 1, "Kb": 1 << 10, "Mb": 1 << 20}
#: Lines that state what ended a program, the most specific kind first.
_MARKS = (
    r"=== Uncaught Python exception: ===\n(.*)",
    r"^(CHECK .*)$",
    r"^(.*GGML_ASSERT.*)$",
    r"^(.*runtime error: .*)$",
    r"^(.*ERROR: \w+: .*)$",
)
_PLACE = re.compile(rf'pyllamakv/([\w/]+\.py)", line (\d+)|({HEADER}:\d+)')
_ARTIFACT = re.compile(r"(crash|timeout|oom|leak)-\w+")
#: Waiting threads of OpenMP must not spin: there may be more of them than processors.
_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "2"}


@dataclass(frozen=True)
class FuzzFinding:
    """A defect, its location, and the input."""

    what: str
    where: str
    data: bytes


@dataclass
class FuzzResult:
    """The counts of a target, and each finding once. Seconds are wall and CPU time."""

    inputs: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    coverage: int = 0
    corpus: int = 0
    corpus_bytes: int = 0
    findings: dict[str, FuzzFinding] = field(default_factory=dict)


def python_program(target: str, folder: Path) -> list[str]:
    """Return the command that fuzzes a target of Python, named "module:function".

    Raises Untestable without Atheris.
    """
    if importlib.util.find_spec("atheris") is None:
        raise Untestable(
            "found no Atheris: it has wheels for Linux on x86-64 (pip install atheris)"
        )
    script = Path(__file__).with_name("program.py")
    return [sys.executable, "-P", str(script), target, str(folder)]


def counts(folder: Path) -> tuple[int, int]:
    """Return how many inputs the program in a directory accepted and refused; 0 if not counted."""
    path = folder / COUNTS
    accepted, refused = COUNTS_FORMAT.unpack(path.read_bytes()) if path.exists() else (0, 0)
    return accepted, refused


def compiler() -> str:
    """Return a clang with libFuzzer. Raises Untestable if there is none."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(22, 10, -1))):
        found = shutil.which(name)
        if found:
            return found
    raise Untestable("found no clang, which contains libFuzzer: run tools/bootstrap.sh clang")


def header_text() -> str:
    """Return the shared file of mmap-kv that reads cache files."""
    return (data("patches") / "shared" / "src" / HEADER).read_text(encoding="utf-8")


def header_program(folder: Path, text: str | None = None) -> list[str]:
    """Compile the fuzzer for a header, by default the shipped one. Raises Untestable."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).write_text(header_text() if text is None else text, encoding="utf-8")
    source, program = Path(__file__).parent / "native" / "kept_header.cpp", folder / "kept_header"
    command = [compiler(), *_FLAGS, "-I", str(folder), str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        reason = lines[0] if lines else "no error message"
        raise Untestable(f"{command[0]} cannot build the fuzzer: {reason}")
    return [str(program), "-max_len=65536", "-rss_limit_mb=2048"]


def fuzz(
    program: Sequence[str], seconds: float, folder: Path, *, seed: int, corpora: Iterable[Path],
    most: int = MOST, timeout: int = TIMEOUT,
) -> FuzzResult:  # fmt: skip
    """Run a program for some seconds; restart it after each finding, ``most`` times.

    New inputs are written to the first of the ``corpora``, which are directories. Without time,
    only the existing inputs run. Raises HarnessError if the program cannot start.
    """
    outcome = FuzzResult()
    files = folder / "memory"
    files.mkdir(parents=True, exist_ok=True)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for ends in range(most):
        left = began + seconds - time.monotonic()
        if ends and left < 0.5:
            break
        limit = f"-max_total_time={max(1, int(left))}" if seconds else "-runs=0"
        command = [
            *program, limit, f"-seed={seed + ends}", f"-timeout={timeout}",
            f"-artifact_prefix={folder}/", "-print_final_stats=1", *map(str, corpora),
        ]  # fmt: skip
        code = _run(command, folder / "log", files)
        log = (folder / "log").read_text("utf-8", "replace")
        _read(log, outcome)
        if not code:
            break
        finding = _finding(folder, log, code)
        outcome.findings.setdefault(f"{finding.what} {finding.where}", finding)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome.cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    outcome.seconds = time.monotonic() - began
    return outcome


def _run(command: Sequence[str], log: Path, files: Path) -> int:
    """Run a program to its end; kill it if this process is interrupted."""
    paths = [str(Path(qa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    env = {**os.environ, **_ENVIRONMENT, "FUZZ_FOLDER": str(files), "PYTHONPATH": path}
    with log.open("wb") as out:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, check=False
        ).returncode


def _read(log: str, outcome: FuzzResult) -> None:
    units = re.search(r"stat::number_of_executed_units: (\d+)", log)
    status = _STATUS.findall(log)
    outcome.inputs += int(units.group(1)) if units else 0
    if status:
        edges, inputs, size, unit = status[-1]
        outcome.coverage = max(outcome.coverage, int(edges))
        outcome.corpus, outcome.corpus_bytes = int(inputs), int(size) * _UNITS[unit]


def _finding(folder: Path, log: str, code: int) -> FuzzFinding:
    """Return what ended the program, and the input, which libFuzzer wrote into the directory."""
    inputs = [path for path in folder.iterdir() if _ARTIFACT.fullmatch(path.name)]
    if not inputs:
        raise HarnessError(f"the fuzzer ended with status {code}: {log[-2000:]}")
    content = inputs[0].read_bytes()
    for path in inputs:
        path.unlink()
    marks = (re.search(mark, log, re.MULTILINE) for mark in _MARKS)
    what = next((mark.group(1) for mark in marks if mark), f"ended with status {code}")
    places = _PLACE.findall(log)
    where = ""
    if places:
        # The last frame of a traceback of Python, the first one of a sanitizer.
        file, line, header = places[-1] if places[-1][0] else places[0]
        where = header or f"{file}:{line}"
    return FuzzFinding(strip_directories(re.sub(r"^==\d+== ?", "", what))[:300], where, content)
