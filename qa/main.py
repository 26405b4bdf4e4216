"""The command line of quality assurance: `python -m qa COMMAND`, see `COMMANDS`.

Errors and exit codes are those of `pyllamakv`: 0 if all passed, 1 if a defect was found, 2 for
invalid usage, 4 for network errors.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NoReturn

from pyllamakv.cli import main as product
from pyllamakv.errors import UsageError

#: Command -> its module with the Typer app, and its help text.
COMMANDS = {
    "stress": ("qa.stress", "Stress-test the package; exits 1 if a defect is found."),
    "bench": ("qa.benchmarks", "Measure ratios side by side."),
    "load": ("qa.load.command", "Send many requests to llama-server, stock and patched."),
    "replay": ("qa.replay.command", "Compare eviction policies on real and generated traffic."),
    "summary": ("qa.summary", "Write BENCHMARKS.md and RELIABILITY.md from the results."),
    "upkeep": ("qa.upkeep.command", "Measure how many releases need no manual work."),
    "peer": ("qa.peer.command", "Run the tests of llama-cpp-python on stock and patched."),
}


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its status."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Measurements and stress tests name their threads; the default would depend on the machine.
    os.environ.setdefault("PYLLAMAKV_THREADS", "1")
    product.leave(lambda: _status(words))


def _status(words: list[str]) -> Any:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS)) + 2
        lines = [f"  {name:<{width}}{about}" for name, (_, about) in COMMANDS.items()]
        sys.stdout.write("\n".join(["Usage: python -m qa COMMAND [OPTIONS] …", "", *lines, ""]))
        return 0 if words else UsageError.exit_code
    if words[0] not in COMMANDS:
        msg = f"there is no command {words[0]!r}: choose from {', '.join(COMMANDS)}"
        raise UsageError(msg)
    app = importlib.import_module(COMMANDS[words[0]][0]).app
    return product.invoke(app, f"python -m qa {words[0]}", words[1:])
