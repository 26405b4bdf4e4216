"""Run llama-cpp-python's decode loops in a child process, round by round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from pyllamakv.building import dropin
from pyllamakv.building import llama_cpp_python_env as install
from pyllamakv.building.variant import Variant
from pyllamakv.errors import Untestable
from qa.bench.workload import Round, Runner

CHILD = Path(__file__).with_name("peer_child.py")
#: Environment variable with the Python that has llama-cpp-python, if it is another one.
VARIABLE = "PYLLAMAKV_PEER"


class ChildWorkload(Protocol):
    """A workload for the child process."""

    def to_json(self) -> dict[str, Any]:
        """Return what the loop in the child process needs, with ``n_ctx`` and ``n_batch``."""


@contextmanager
def peer(variant: Variant, model: Path, work: ChildWorkload, api: str) -> Iterator[Runner]:
    """Run a workload with llama-cpp-python on the ordinary libraries of a variant.

    ``api`` is ``generate``, ``eval``, ``llama_decode`` or ``clients``. Raises Untestable with the
    install command if the matching release is not installed; no library is compiled for it.
    """
    described = dropin.describe(variant)
    set_up = install.installed(variant.manifest.release)
    python = os.environ.get(VARIABLE) or os.fspath(set_up.python if set_up else sys.executable)
    environment = {**os.environ, described.variable: described.value}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                [python, "-P", str(CHILD)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        except OSError as error:
            msg = f"{python}, which {VARIABLE} names, does not run: {error}"
            raise Untestable(msg) from error
        with process:
            try:
                ask = partial(_ask, process, errors, described.package)
                version = ask({**work.to_json(), "model": str(model), "api": api})["version"]
                if f"llama-cpp-python=={version}" != described.package:
                    msg = f"{python} has llama-cpp-python {version}: {_fix(described.package)}"
                    raise Untestable(msg)

                def run() -> Round:
                    answer = ask({})
                    return Round(answer["seconds"], answer["result"], answer["wall"])

                yield run
            finally:
                # The child ends with its input, unless it is in the middle of a round.
                process.kill()


def _ask(
    child: subprocess.Popen[str], errors: IO[str], package: str, request: Mapping[str, Any]
) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        line = ""
        # Unsent data remains in the buffer, and would raise again at the end of the block.
        with suppress(BrokenPipeError):
            child.stdin.close()
    if line:
        answer: dict[str, Any] = json.loads(line)
        return answer
    child.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    last = lines[-1] if lines else f"it ended with {child.returncode}"
    if "No module named" in last:
        msg = f"llama-cpp-python is not there ({last}): {_fix(package)}"
    else:
        msg = f"llama-cpp-python failed: {last}"
    raise Untestable(msg)


def _fix(package: str) -> str:
    return (
        f"`pyllamakv dropin setup {package.rpartition('==')[2]}` installs {package} and compiles "
        f"nothing; {VARIABLE} may name another Python that has it"
    )
