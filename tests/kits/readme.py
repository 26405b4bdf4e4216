"""Run the code blocks of the documents, compare their output, and refresh it.

Every ``python`` block is run. The ``pyllamakv`` commands of a ``sh`` block are run in the README,
and in other documents if a ``text`` block with their output follows. Digests, times, estimates and
the data directory differ between machines and are not compared. The documents show the newest
verified release: where it is not built, other numbers are not compared either.
``python tests/kits/readme.py --write`` replaces the output in the documents.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pyllamakv import home

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "docs/api.md",
    "docs/backends.md",
    "docs/cache.md",
    "docs/chat.md",
    "docs/compare.md",
    "docs/contributing.md",
    "docs/drop-in.md",
    "docs/from-llama-cpp-python.md",
    "docs/patches.md",
    "docs/pictures.md",
    "docs/plugin.md",
    "docs/prefix-cache.md",
    "docs/prefix-store.md",
    "docs/quickstart-patches.md",
    "docs/quickstart-scripts.md",
    "docs/scripts.md",
    "docs/slot-cache.md",
    "docs/stress-testing.md",
    "docs/traces.md",
    "docs/tutorial.md",
    "docs/verification.md",
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\b[0-9a-f]{16,64}\b|\d+(?:\.\d+)?")
#: What differs between machines: digests, times, and sums of estimates.
VOLATILE = re.compile(
    r"\b[0-9a-f]{16,64}\b|\d+(?:\.\d+)?(?= ?(?:ms|s|seconds)\b)"
    r"|[\d,]+(?=  estimated: )|(?<=^total) +[\d,]+$",
    re.MULTILINE,
)
#: The release in the id of a build; the documents show the newest verified one.
BUILD = re.compile(r"\S+(?=-(?:stock|patched)-\w+-[0-9a-f]{16}\b)")
#: What the documents show for the data directory.
HOME = "~/.cache/pyllamakv"


@dataclass(frozen=True)
class Example:
    """A code block of a document, its line, and the span of its expected output."""

    document: str
    line: int
    language: str
    code: str
    output: str | None
    span: tuple[int, int] | None


def examples(document: str) -> list[Example]:
    """Return the blocks of a document that can be run."""
    path = ROOT / document
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for index, fence in enumerate(fences):
        language, code = fence.groups()
        if language == "sh":
            code = "".join(
                line + "\n" for line in code.splitlines() if line.startswith("pyllamakv ")
            )
        if language not in {"python", "sh"} or not code:
            continue
        if "import llama_cpp\n" in code:
            continue  # tests/qa/peer runs it, in an environment with that package
        output = span = None
        if index + 1 < len(fences):
            after = fences[index + 1]
            between = text[fence.end() : after.start()].strip()
            if after[1] == "text" and not between:
                output, span = after[2], after.span(2)
        if language == "sh" and span is None and document != "README.md":
            continue  # a reference of verbs, some of which take hours
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Example(document, line, language, code, output, span))
    return found


def run(example: Example) -> str:
    """Run a block from the root of the repository and return what it prints on stdout."""
    environment = dict(os.environ, COLUMNS="100", NO_COLOR="1", PYTHONPATH=str(ROOT))
    environment.pop("FORCE_COLOR", None)
    if example.language == "python":
        commands = [[sys.executable, "-c", example.code]]
    else:
        commands = [
            [sys.executable, "-m", *shlex.split(line, comments=True)]
            for line in example.code.splitlines()
        ]
    printed = ""
    for command in commands:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=800,
            check=False,
        )
        if done.returncode:
            message = f"{command[-1]!r} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            raise RuntimeError(message)
        printed += done.stdout
    return printed.replace(str(home.home()), HOME)


def shape(text: str, *, numbers: bool = False) -> str:
    """Return a text without machine-dependent parts, and with single spaces.

    ``numbers`` keeps the other numbers, which depend on the release alone.
    """
    text = (VOLATILE if numbers else NUMBER).sub("#", BUILD.sub("#", text))
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def write() -> None:
    """Put the present output of every block into its document."""
    for document in DOCUMENTS:
        path = ROOT / document
        for example in reversed(examples(document)):
            if example.span is None:
                continue
            text = path.read_text(encoding="utf-8")
            start, end = example.span
            printed = "".join(
                line.rstrip() + "\n" for line in run(example).strip("\n").splitlines()
            )
            path.write_text(text[:start] + printed + text[end:], encoding="utf-8")
            sys.stderr.write(f"{document}:{example.line}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    write()
