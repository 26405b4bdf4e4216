"""Fuzz the header of the patch mmap-kv with libFuzzer and sanitizers, without llama.cpp."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from pyllamakv.errors import HarnessError, Untestable
from pyllamakv.home import data
from qa.entry import Tick
from qa.fuzzing.fuzz_loop import MOST, FuzzFinding
from qa.fuzzing.fuzz_result import FuzzResult
from qa.fuzzing.job import FOUND
from qa.fuzzing.processes import Processes
from qa.fuzzing.target import memory

HEADER = "llama-kv-mmap.h"
_FLAGS = ("-std=c++17", "-g", "-O1", "-fsanitize=fuzzer,address,undefined",
          "-fno-sanitize-recover=all")  # fmt: skip
_STATUS = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)/(\d+)(b|Kb|Mb)")
_UNITS = {"b": 1, "Kb": 1 << 10, "Mb": 1 << 20}


def compiler() -> str:
    """Return a clang with libFuzzer. Raises Untestable if there is none."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(22, 10, -1))):
        found = shutil.which(name)
        if found:
            return found
    raise Untestable("found no clang, which contains libFuzzer: install clang and libclang-rt-dev")


def header_text() -> str:
    """Return the shared file of mmap-kv that reads cache files."""
    return (data("patches") / "shared" / "src" / HEADER).read_text(encoding="utf-8")


def build(folder: Path, text: str | None = None) -> Path:
    """Compile the fuzzer for a header, by default the shipped one. Raises Untestable."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).write_text(header_text() if text is None else text, encoding="utf-8")
    program = folder / "kept_header"
    command = [
        compiler(),
        *_FLAGS,
        "-I",
        str(folder),
        str(Path(__file__).parent / "native" / "kept_header.cpp"),
        "-o",
        str(program),
    ]
    made = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if made.returncode:
        said = made.stderr.strip().splitlines()
        raise Untestable(
            f"{command[0]} cannot build the fuzzer: {said[0] if said else 'no error message'}"
        )
    return program


def fuzz(
    program: Path,
    seconds: float,
    folder: Path,
    *,
    seed: int,
    kept: Iterable[Path],
    tick: Tick,
    most: int = MOST,
    processes: Processes | None = None,
) -> FuzzResult:
    """Run the fuzzer for some seconds; restart it after each fault, ``most`` times.

    Raises HarnessError if ``processes`` are ended.
    """
    if processes is None:
        with Processes() as processes:
            return fuzz(program, seconds, folder, seed=seed, kept=kept, tick=tick, most=most,
                        processes=processes)  # fmt: skip
    outcome = FuzzResult()
    corpus, found = folder / "corpus", folder / FOUND
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    for path in kept:
        shutil.copy(path, corpus)
    files = tempfile.TemporaryDirectory(prefix="pyllamakv-kept-", dir=memory())
    began, ends = time.monotonic(), 0
    while ends < most and (left := began + seconds - time.monotonic()) > 0.5:
        command = [
            str(program), f"-max_total_time={max(1, int(left))}", f"-seed={seed + ends}",
            f"-artifact_prefix={folder}/", "-timeout=10", "-rss_limit_mb=2048", "-max_len=65536",
            "-print_final_stats=1", str(found), str(corpus),  # into the first it writes
        ]  # fmt: skip
        tick(f"{folder.name}: {outcome.inputs} inputs")
        log = folder / "log"
        process = processes.start(command, log, {"FUZZ_FOLDER": files.name})
        while (used := processes.ended(process)) is None:
            time.sleep(0.05)
        outcome.cpu += used.ru_utime + used.ru_stime
        _read(log.read_text("utf-8", "replace"), outcome)
        if not process.returncode:
            break
        outcome.add(_finding(folder, log, process.returncode))
        ends += 1
    files.cleanup()
    outcome.seconds = time.monotonic() - began
    return outcome


def _read(said: str, outcome: FuzzResult) -> None:
    counters = re.search(r"\((\d+) inline 8-bit counters\)", said)
    units = re.search(r"stat::number_of_executed_units: (\d+)", said)
    status = _STATUS.findall(said)
    outcome.total = int(counters.group(1)) if counters else outcome.total
    outcome.inputs += int(units.group(1)) if units else 0
    if status:
        edges, inputs, size, unit = status[-1]
        outcome.coverage = max(outcome.coverage, int(edges))
        outcome.corpus, outcome.corpus_bytes = int(inputs), int(size) * _UNITS[unit]


def _finding(folder: Path, log: Path, code: int) -> FuzzFinding:
    """Return the error that ended the fuzzer, and the input, which it wrote into the directory."""
    said = log.read_text("utf-8", "replace")
    marks = re.findall(r"^(?:CHECK .*|.*runtime error: .*|.*ERROR: \w+: .*)$", said, re.MULTILINE)
    inputs = [path for path in folder.glob("*-*") if path.is_file()]
    if not inputs:
        raise HarnessError(f"the fuzzer ended with status {code}: {said[-1000:]}")
    data = inputs[0].read_bytes()
    for path in inputs:
        path.unlink()
    where = re.search(rf"{HEADER}:\d+", said)
    mark = marks[0] if marks else f"died: status {code}"
    return FuzzFinding(mark, where.group() if where else "", data)
