"""Inject faults into steps in a process that has preload.c loaded; `run_injections` starts it.

It has no threads and opens no native library, so that every attempt can be a fork of it. It writes
one JSON line per tried fault to stdout, and at the end a record per step and kind.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyllamakv.errors import HarnessError
from qa import child_environment
from qa.entry import Tick
from qa.faults import preload
from qa.faults.fault_injection import FaultInjector, InjectionRecord

#: Size of the tmpfs for steps: many copies of a data directory.
_DISK = "192m"


def run_injections(
    steps: Sequence[tuple[str, Sequence[str]]],
    kinds: Sequence[str],
    *,
    seconds: float,
    seed: int,
    tick: Tick,
) -> list[InjectionRecord]:
    """Try faults of some kinds on steps, each for its share of the time; return the records.

    A step is ``module:Class`` with its arguments. It runs on a small tmpfs; if none can be mounted,
    the kind "room" is left out. Raises ToolMissing without a C compiler, HarnessError if the
    process fails.
    """
    with tempfile.TemporaryDirectory(prefix="pyllamakv-faults-") as name:
        folder = Path(name).resolve()
        (folder / "disk").mkdir()
        library = preload.compiled(folder)
        mounted = _mounts(folder)
        chosen = [kind for kind in kinds if kind != "room" or mounted]
        orders = {"steps": steps, "kinds": chosen, "seconds": seconds, "seed": seed}
        (folder / "orders.json").write_text(json.dumps(orders), encoding="utf-8")
        env = child_environment.environment(LD_PRELOAD=str(library), PYTHONDONTWRITEBYTECODE="1")
        command = [sys.executable, "-m", "qa.faults.preloaded_process", str(folder)]
        if mounted:
            command = [*_mounting(folder), *command]
        with (folder / "stderr").open("w+", encoding="utf-8") as log:
            return _listen(command, env, log, tick)


def _mounting(folder: Path) -> list[str]:
    """Return the command prefix that mounts a tmpfs for the life of the command."""
    script = f'mount -t tmpfs -o size={_DISK} none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder / "disk")]


def _mounts(folder: Path) -> bool:
    try:
        done = subprocess.run([*_mounting(folder), "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _listen(command: list[str], env: dict[str, str], log: Any, tick: Tick) -> list[InjectionRecord]:
    records = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as stage:
        try:
            assert stage.stdout is not None
            for line in stage.stdout:
                message = json.loads(line)
                if "step" in message:
                    records.append(
                        InjectionRecord(**{**message, "errors": Tally(message["errors"])})
                    )
                else:
                    tick(message["tried"])
        except BaseException:
            stage.terminate()
            raise
    if stage.returncode:
        log.seek(0)
        last = log.read()[-2000:]
        msg = f"the process that injects faults ended with status {stage.returncode}: {last}"
        raise HarnessError(msg)
    return records


def main(folder: Path) -> None:
    """Run the orders in a directory."""
    # Ends the steps' child processes with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    orders = json.loads((folder / "orders.json").read_text(encoding="utf-8"))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    begin = time.monotonic()
    for number, (name, arguments) in enumerate(orders["steps"]):
        module, _, kind = name.partition(":")
        place = folder / "disk" / f"step-{number}"
        place.mkdir()
        made = getattr(importlib.import_module(module), kind)(*map(_read, arguments))
        try:
            trial = FaultInjector(made, place)
            # With little time, each step starts with other kinds, so that all kinds are tried.
            kinds = orders["kinds"]
            first = 2 * number % len(kinds)
            kinds = (*kinds[first:], *kinds[:first])
            # Time that a step takes beyond its share is taken from the next one.
            until = begin + orders["seconds"] * (number + 1) / len(orders["steps"])
            left = until - time.monotonic()
            for fault in trial.walk(kinds, orders["seed"] + number, left):
                _write(answers, {"tried": f"{made.name}, {fault}"})
            for record in trial.records.values():
                _write(answers, vars(record))
        finally:
            made.close()


def _read(argument: str) -> Any:
    return Path(argument) if argument.startswith("/") else argument


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
