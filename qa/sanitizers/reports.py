"""Parse the output of sanitizers, deduplicate reports, and separate upstream's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ERROR = re.compile(r"(?:ERROR|WARNING): (Address|Thread)Sanitizer: (?P<what>[^\n(]+)")
_RUNTIME = re.compile(r"^(?P<file>\S+?):\d+(?::\d+)?: runtime error: (?P<what>.+)$")
_FRAME = re.compile(r"^\s*#\d+ (?:0x[0-9a-f]+ in )?(?P<where>.+)$")
_PLACE = re.compile(r" (?P<file>\S+?):(?P<line>\d+)(?::\d+)?(?: \(|$)")
_ASSERTION = re.compile(r"^(?P<file>\S+?):\d+: (?P<where>.+): Assertion '(?P<what>.+)' failed")
_NUMBERS = re.compile(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?")
#: Directories of one machine, which are removed.
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s()]+/)+")
#: Frames of memory functions, not of the code that called them.
_RUNTIME_FILES = ("libsanitizer", "/usr/include/", "/usr/lib/", "/lib/")


@dataclass(frozen=True)
class Report:
    """One report: its kind, and the first function and file of this package or upstream."""

    what: str
    function: str
    file: str
    text: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of a report, without addresses and numbers."""
        return _NUMBERS.sub("N", self.what), self.function, self.file

    def __str__(self) -> str:
        file = Path(self.file).name or "?"
        return f"{self.what} in {self.function or 'an unknown function'} ({file})"


@dataclass(frozen=True)
class KnownReport:
    """A report of upstream's own code, in a function that no patch changes, and the reason."""

    what: str
    function: str
    file: str
    why: str

    def covers(self, report: Report) -> bool:
        """Return whether the entry describes a report."""
        return (
            self.what in report.what
            and self.function in report.function
            and report.file.endswith(self.file)
        )


_BUILDERS = (
    "llm_graph_context has no virtual destructor, and the builders of some models, which are "
    "larger, are deleted as one"
)
#: Reports of upstream's own code in every build, stock as well; each was analysed.
UPSTREAM: tuple[KnownReport, ...] = (
    KnownReport(
        "new-delete-type-mismatch", "llama_model::build_graph", "llama-model.cpp", _BUILDERS
    ),
    # If the models' file is not instrumented, the first known frame is its caller.
    KnownReport(
        "new-delete-type-mismatch", "llama_context::graph_build", "llama-context.cpp", _BUILDERS
    ),
    KnownReport(
        "data race",
        "gemm_bloc",
        "llamafile/sgemm.cpp",
        "between 0.3.6 and b5640, the contexts of a process count the pieces of a product together "
        "(llama.cpp #14035), so that one is computed twice, or not at all",
    ),
)


def collect(folder: Path) -> list[Report]:
    """Return the distinct reports of every log in a folder."""
    found: dict[tuple[str, str, str], Report] = {}
    for path in sorted(folder.glob("*.log.*")):
        for report in parse(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(report.key, report)
    return list(found.values())


def parse(text: str) -> list[Report]:
    """Return all reports in the output of a sanitizer, or of a checked library."""
    found: list[Report] = []
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if error := _ERROR.search(line):
            found.append(_report(error["what"], lines[at + 1 :], ""))
        elif error := _RUNTIME.match(line):
            found.append(_report(error["what"], lines[at + 1 :], error["file"]))
        elif error := _ASSERTION.match(line):
            found.append(_report(f"assertion {error['what']}", lines[at + 1 :], ""))
    return found


def split(reports: Iterable[Report]) -> tuple[list[Report], list[Report]]:
    """Return the reports that count as defects, and upstream's own."""
    ours: list[Report] = []
    theirs: list[Report] = []
    for report in reports:
        (theirs if any(known.covers(report) for known in UPSTREAM) else ours).append(report)
    return ours, theirs


def _report(what: str, after: list[str], file: str) -> Report:
    stack: list[str] = []
    for line in after:
        frame = _FRAME.match(line)
        if frame:
            stack.append(frame["where"])
        elif stack:
            break
    function = ""
    for where in stack:
        place = _PLACE.search(where)
        if place and not any(mark in place["file"] for mark in _RUNTIME_FILES):
            function, file = where[: place.start()], place["file"]
            break
    what = re.sub(r" on (?:address|unknown address|0x).*", "", what).strip()
    return Report(
        what, function.split("(")[0].strip(), file, _FOLDERS.sub("", "\n".join(stack[:8]))
    )
