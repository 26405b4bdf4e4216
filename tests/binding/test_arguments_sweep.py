"""Call the public API with invalid arguments: no crash, no change by a refused call, no bypass.

`sweep_kit` defines the calls. By default a part of the calls is made on the test release.
``PYLLAMAKV_SWEEP_RELEASES`` names other releases, separated by commas; ``eras`` selects one
release per era. Each variant makes another part, the same one in each run.
``PYLLAMAKV_SWEEP_PARTS`` is the number of parts (1: make all calls).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sweep_kit
from native_kit import TEST_RELEASE, built, swept_releases

TESTS = Path(__file__).resolve().parents[1]
#: The calls of a variant are split into this number of runs; a test makes one of them.
PARTS = 16
#: Seconds after which a call counts as one that never ends.
SILENCE = 120
#: Maximum memory of a worker, in MiB.
MEMORY = 800
#: Makes glibc return each large block when it is freed. Otherwise the heap keeps the blocks of
#: closed contexts, and the peak depends on their order (900 to 2,000 MiB for the same calls).
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072"}
#: Maximum number of calls that end a worker, which are identified one by one.
ENDS = 10


@dataclass
class Swept:
    """Findings of a sweep, and its counts."""

    found: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def sweep(spec: str, folder: Path, part: int, parts: int) -> Swept:
    """Run workers until all calls are made; a worker that ends early is replaced."""
    swept, first = Swept(), 0
    for _ in range(ENDS):
        last = _one_worker(spec, folder, first, part, parts, swept)
        if swept.numbers:
            return swept
        first = last + 1
    return swept


def _one_worker(spec: str, folder: Path, first: int, part: int, parts: int, swept: Swept) -> int:
    """Run a worker, starting at a call; return the number of its last call."""
    command = [sys.executable, str(TESTS / "kits" / "sweep_kit.py"), spec, str(first)]
    path = os.pathsep.join(
        (str(TESTS / "kits"), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
    )
    with subprocess.Popen(
        [*command, str(part), str(parts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **RETURN_MEMORY},
    ) as worker:
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        readers = [
            threading.Thread(target=_read, args=(worker.stdout, lines)),
            threading.Thread(target=lambda: errors.extend(worker.stderr or ())),
        ]
        for each in readers:
            each.start()
        last, name = first, "the start"
        try:
            while (line := lines.get(timeout=SILENCE)) is not None:
                mark, _, text = line.rstrip().partition(" ")
                if mark == ">":
                    number, _, name = text.partition(" ")
                    last = int(number)
                elif mark == "!":
                    swept.found.append(text)
                elif mark == "=":
                    swept.numbers = json.loads(text)
        except queue.Empty:
            swept.found.append(f"{name} did not end in {SILENCE} s")
            worker.kill()
        code = worker.wait()
        for each in readers:
            each.join()
    if not swept.numbers and code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        swept.found.append(f"{name} ended the process ({how}): {''.join(errors)[-300:]}")
    return last


def _read(pipe: Any, lines: queue.Queue[str | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def test_every_parameter_has_a_rule_for_what_it_accepts() -> None:
    """A sweep makes a part of the calls, so that a missing rule could stay unnoticed."""
    answers = [
        f"{call.name}: {sweep_kit.accepts(call, parameter, None)}"
        for call in sweep_kit.calls()
        for parameter in call.parameters
    ]
    assert len(answers) > 300
    assert not [each for each in answers if ": no rule" in each]


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("kind", ["stock", "patched"])
@pytest.mark.parametrize("release", swept_releases())
def test_invalid_arguments_raise_typed_errors(release: str, kind: str, tmp_path: Path) -> None:
    """Replace each argument of each call by invalid values, and check the results."""
    built(f"{release}+{kind}")
    parts = int(os.environ.get("PYLLAMAKV_SWEEP_PARTS", PARTS))
    part = (2 * swept_releases().index(release) + (kind == "patched")) % parts
    swept = sweep(f"{release}+{kind}", tmp_path, part, parts)
    assert not swept.found, "\n".join(swept.found[:40])
    numbers = swept.numbers
    assert numbers["refused"] > numbers["accepted"] > 0
    assert numbers["peak_mib"] < MEMORY
    if release == TEST_RELEASE and kind == "patched":
        # A call that is refused with valid arguments is refused before the invalid one is checked.
        assert numbers["failing"] == []


def test_every_public_class_is_swept_or_excluded() -> None:
    """Check that exclusions name existing classes, and that all other classes have an object."""
    public = sweep_kit.classes()
    assert sweep_kit.excluded(sweep_kit.NOT_CONSTRUCTED) <= set(public)
    for name in sweep_kit.excluded(sweep_kit.NOT_CALLED):
        owner, _, method = name.partition(".")
        assert callable(getattr(public[owner], method)), name
    for call in sweep_kit.calls():
        if call.owner and call.method:
            assert call.owner in sweep_kit.LIVE, f"{call.name}: add its object to LIVE"
    # A stale key after a rename would leave its parameter without a valid value.
    parameters = [(call.name, each.name) for call in sweep_kit.calls() for each in call.parameters]
    known = {name for _, name in parameters} | {".".join(pair) for pair in parameters}
    assert set(sweep_kit.RIGHT) <= known
    assert set(sweep_kit.BY_CALL) <= known
    swept = {call.name for call in sweep_kit.calls()}
    assert {"Sequence.remove", "Batch.of", "open", "ContextCache", "metrics.expose"} <= swept


def test_ended_worker_is_reported_and_the_next_one_continues(tmp_path: Path) -> None:
    """The call that ends a process is named, and the next worker continues after it."""
    worker = tmp_path / "kits" / "sweep_kit.py"
    worker.parent.mkdir()
    worker.write_text(
        "import os, sys\n"
        "if int(sys.argv[2]) < 4:\n"
        "    print('> 3 Thing.call(n=-1)', flush=True)\n"
        "    os.abort()\n"
        "print('= {\"calls\": 1}', flush=True)\n",
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "TESTS", tmp_path)
        swept = sweep("none", tmp_path, 0, 1)
    assert swept.numbers == {"calls": 1}
    assert len(swept.found) == 1
    assert swept.found[0].startswith("Thing.call(n=-1) ended the process (signal SIGABRT)")
