"""Measure `check --quick` for patches of others: one that only logs, and one that hangs."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyllamakv.source import spec_resolver
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.source.store import open_store
from pyllamakv.verification.verdict import Verdict
from qa.bench.commands import command
from qa.bench.figure import Figure

GROUP = "Patches of others"
Tick = Callable[[], None]

FILE = "src/llama-context.cpp"
#: The line after which each patch adds its own.
ANCHOR = "int llama_context::decode(llama_batch & inp_batch) {\n"
#: What each patch adds, its verdict, and the maximum seconds of its check.
PATCHES = (
    ("a patch that logs", '    LLAMA_LOG_DEBUG("decode\\n");\n', Verdict.HARMLESS, 300),
    ("a patch that hangs", "    while (true) {}\n", Verdict.HARMFUL, 300),
)


def figures(tick: Tick, release: str = TEST_RELEASE) -> list[Figure]:
    """Check each patch in a data directory that has the stock build, with its patched build."""
    before = open_store().read_text(spec_resolver.resolve(release), FILE)
    found = []
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        home = Path(folder)
        command(home, "build", release, "--stock")
        tick()
        for name, added, wanted, most in PATCHES:
            file = home / "foreign.patch"
            file.write_text(_diff(before, added), encoding="utf-8")
            wall, cpu = command(
                home, "check", release, "--quick", "--patch", str(file),
                good=(0 if wanted is Verdict.HARMLESS else 1,),
            )  # fmt: skip
            tick()
            found.append(
                Figure(
                    GROUP,
                    f"`pyllamakv check {release} --quick --patch` of {name}",
                    f"{wall:.0f} s",
                    f"<= {most} s",
                    wall <= most,
                    f"verdict {wanted.value}; {cpu:.0f} s of CPU",
                    "the stock build exists; the patched build is included",
                    {"seconds": wall, "cpu": cpu},
                )
            )
    return found


def _diff(before: str, added: str) -> str:
    """Return a patch that adds a line to `llama_context::decode`."""
    assert before.count(ANCHOR) == 1
    after = before.replace(ANCHOR, ANCHOR + added)
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{FILE}", f"b/{FILE}"
    )
    return "".join(lines)
