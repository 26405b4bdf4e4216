"""Fuzz everything that reads foreign bytes or arguments.

`python_targets` reads files and messages in Python, `native_targets` restores states and files into
contexts, `entry_point_calls` calls the functions of plk.h, and `libfuzzer` tests the C++ code that
reads a cache file. Each target runs in a process
of its own. A crash, a hang, or any result except success and this package's errors is a finding.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyllamakv.errors import Untestable
from pyllamakv.home import checkout
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.fuzzing import corpus_store, libfuzzer
from qa.fuzzing.fuzz_result import entry, known
from qa.fuzzing.job import FOUND
from qa.fuzzing.processes import Processes
from qa.fuzzing.target import memory
from qa.fuzzing.target_process import fuzz

#: The targets, by the names of entries and of the directories of their corpora.
TARGETS = {
    "gguf": "python_targets:gguf",
    "states": "python_targets:states",
    "state-rows": "python_targets:rows",
    "stored-pages": "python_targets:stored_pages",
    "traces": "python_targets:traces",
    "lock": "python_targets:locks",
    "patches": "python_targets:patches",
    "series": "python_targets:tables",
    "wire": "python_targets:messages",
    "restore": "native_targets:restored",
    "kept": "native_targets:kept",
    "entry-points": "entry_point_calls:entry_points",
}
HEADER = "kept-header"


def names() -> tuple[str, ...]:
    """Return the names of all targets."""
    return (*TARGETS, HEADER)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Fuzz every selected target, each for its share of the time."""
    wanted = [name for name in (*TARGETS, HEADER) if effort.wants(name)]
    jobs = min(effort.jobs, max(1, len(wanted)))
    seconds = effort.shared(len(wanted)).seconds * jobs
    with (
        tempfile.TemporaryDirectory(prefix="pyllamakv-fuzz-", dir=memory()) as folder,
        ThreadPoolExecutor(jobs) as pool,
        Processes() as processes,  # the inner one: the threads wait for them
    ):

        def one(name: str) -> Entry:
            place = Path(folder) / name
            if name == HEADER:
                return _header(seconds, effort.seed, place, tick, processes)
            outcome = fuzz(
                f"{__name__}.{TARGETS[name]}", seconds, folder=place, seed=effort.seed,
                kept=(
                    *known(name), *kept(name), *corpus_store.copied_inputs(name, place / "saved"),
                ),
                alive=lambda inputs: tick(f"{name}: {inputs} inputs"), processes=processes,
            )  # fmt: skip
            corpus_store.save(name, place / FOUND)
            return entry(name, outcome, effort.seed)

        return list(pool.map(one, wanted))


def _header(seconds: float, seed: int, place: Path, tick: Tick, processes: Processes) -> Entry:
    began = time.monotonic()
    tick(f"{HEADER}: compiling")
    try:
        program = libfuzzer.build(place)
    except Untestable as reason:
        return skipped_entry("fuzzing", HEADER, str(reason))
    left = max(1.0, seconds - (time.monotonic() - began))
    inputs = (*known(HEADER), *kept(HEADER), *corpus_store.copied_inputs(HEADER, place / "saved"))
    outcome = libfuzzer.fuzz(
        program, left, place, seed=seed, kept=inputs, tick=tick, processes=processes
    )
    corpus_store.save(HEADER, place / FOUND)
    return entry(HEADER, outcome, seed, "edges")


def kept(name: str) -> list[Path]:
    """Return the inputs of a target in the repository; empty outside a checkout."""
    root = checkout()
    folder = root / "tests" / "data" / "corpora" / name if root else None
    return sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
