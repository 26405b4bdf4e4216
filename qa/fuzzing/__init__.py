"""Fuzz everything that reads foreign bytes, with libFuzzer.

`python_targets` reads files and messages in Python, `native_targets` restores states and files into
contexts; these run with Atheris (`program`). The C++ code that reads a cache file is compiled with
clang (`libfuzzer`). Each target runs in a process of its own. A crash, a hang, or any result except
success and this package's errors is a finding.

To add a target, write a function that returns a `Target`, and name it in `TARGETS`.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from pyllamakv.errors import Untestable
from pyllamakv.home import checkout, home
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.fuzzing import libfuzzer
from qa.fuzzing.libfuzzer import FuzzResult
from qa.fuzzing.target import memory

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
}
HEADER = "kept-header"


def names() -> tuple[str, ...]:
    """Return the names of all targets."""
    return (*TARGETS, HEADER)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Fuzz every selected target, each for its share of the time."""
    wanted = [name for name in names() if effort.wants(name)]
    seconds = effort.shared(len(wanted)).seconds
    found = []
    for name in wanted:
        tick(name)
        try:
            found.append(_entry(name, *run(name, seconds, effort.seed), effort.seed))
        except Untestable as reason:
            found.append(skipped_entry("fuzzing", name, str(reason)))
    return found


def run(name: str, seconds: float, seed: int) -> tuple[FuzzResult, tuple[int, int]]:
    """Fuzz a target; return the result, and how many inputs were accepted and refused.

    Inputs that reach new code are stored in the data directory, and run again next time. Without
    ``seconds``, the seeds and the stored inputs run. The program for the header counts no answers.
    Raises Untestable if it cannot run here.
    """
    corpus = home() / "fuzzing" / "corpora" / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyllamakv-fuzz-", dir=memory()) as place:
        folder = Path(place)
        if name == HEADER:
            program = libfuzzer.header_program(folder)
        else:
            program = libfuzzer.python_program(f"{__name__}.{TARGETS[name]}", folder)
        shipped = corpora(name)
        outcome = libfuzzer.fuzz(
            program, seconds, folder, seed=seed, corpora=(corpus, *([shipped] if shipped else ()))
        )
        return outcome, libfuzzer.counts(folder)


def corpora(name: str) -> Path | None:
    """Return the directory of a target's inputs in the repository, if there is one."""
    root = checkout()
    folder = root / "tests" / "data" / "corpora" / name if root else None
    return folder if folder is not None and folder.is_dir() else None


def _entry(name: str, outcome: FuzzResult, counts: tuple[int, int], seed: int) -> Entry:
    """Return the row of a target, and save its findings in the data directory."""
    defects = []
    for finding in outcome.findings.values():
        path = home() / "fuzzing" / name / hashlib.sha256(finding.data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(finding.data)
        place = f"the input is fuzzing/{name}/{path.name} in the data directory"
        defects.append(f"{finding.what} {finding.where}".strip() + f" ({place})")
    data = {key: value for key, value in vars(outcome).items() if key != "findings"}
    data |= {"accepted": counts[0], "refused": counts[1]}
    row = {
        "inputs": f"{outcome.inputs:,}",
        "accepted": f"{100 * counts[0] / sum(counts):.3g} %" if sum(counts) else "",
        "CPU seconds": f"{outcome.cpu:,.0f}",
        "per CPU second": f"{outcome.inputs / outcome.cpu if outcome.cpu else 0:,.0f}",
        "reached": f"{outcome.coverage:,} edges",
        "corpus": f"{outcome.corpus} inputs, {-(-outcome.corpus_bytes // 1024)} KB",
    }
    return Entry("fuzzing", name, row, tuple(defects), seed, data)
