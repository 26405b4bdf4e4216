"""Check properties that the applier cannot: descriptions, style, and unused files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv import home
from pyllamakv.errors import PatchFormatError, PatchLintError, UsageError
from pyllamakv.patching import foreign_series, series, shared_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pyllamakv.patching.definition import Definition, Port
    from pyllamakv.patching.series import Series

#: Where upstream keeps sources that a patch may add to.
PATCHABLE_PATHS = (
    "src/",
    "ggml/",
    "include/",
    "common/",
    "tests/",
    "tools/",
    "examples/",
    "cmake/",
)

STATES = ("not submitted", "submitted", "accepted", "rejected", "not applicable")

TITLE = 64
LINE = 80
DIFF_LIKE_LINE = re.compile(r"(---\s*$|diff |From |Index: )")


@dataclass(frozen=True)
class LintFinding:
    """Name one fault: the file, its line (0: the whole file), the rule and what to do."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.rule}: {self.message}"


def lint(
    folder: Path | str | None = None, *, scenarios: Collection[str] | None = None
) -> tuple[LintFinding, ...]:
    """Return every fault of a series folder; ``scenarios`` are the names that exist, if known.

    Of foreign patches (see `foreign_series.load`), only the changes are checked.
    """
    source = folder or home.data("patches")
    folder = Path(source)
    try:
        if not (folder / "series.toml").is_file():
            ports = [port for patch in foreign_series.load(source) for port in patch.ports]
            return tuple(fault for port in ports for fault in _port(port.id, port))
        found = series.load(folder).every
    except PatchFormatError as error:
        path = error.path or str(folder)
        return (LintFinding(_shown(path, folder), error.line, "format", str(error)),)
    except UsageError as error:
        return (LintFinding(str(folder), 0, "format", str(error)),)
    findings = [*_files(found, folder), *_shared(found, folder)]
    for definition in found:
        findings += _described(definition, scenarios)
        for port in definition.ports:
            findings += _port(f"{definition.id}/{port.base}.patch", port, definition.shared)
    return tuple(sorted(findings, key=lambda f: (f.path, f.line, f.rule)))


def check(folder: Path | None = None, *, scenarios: Collection[str] | None = None) -> None:
    """Raise PatchLintError with every fault, or return."""
    findings = [str(finding) for finding in lint(folder, scenarios=scenarios)]
    if findings:
        raise PatchLintError("\n".join([f"{len(findings)} fault(s):", *findings]), findings)


def _files(found: Series, folder: Path) -> Iterator[LintFinding]:
    named = {port.path for definition in found for port in definition.ports}
    for path in sorted(folder.iterdir()):
        # The repository of a series may have other directories, such as .git and .github.
        patch = (path / "patch.toml").is_file() or any(path.glob("*.patch"))
        if patch and path.name not in (*found.order, shared_files.FOLDER):
            yield LintFinding(
                path.name, 0, "series", "the directory is not in the order of series.toml"
            )
    for definition in found:
        for path in sorted((folder / definition.id).rglob("*")):
            if path.is_file() and path not in named and path.name != "patch.toml":
                shown = path.relative_to(folder).as_posix()
                yield LintFinding(shown, 0, "series", "no [[port]] of patch.toml names this file")


def _described(definition: Definition, scenarios: Collection[str] | None) -> Iterator[LintFinding]:
    path = f"{definition.id}/patch.toml"
    title = definition.title
    if not definition.author and (len(title) > TITLE or not title.isascii() or title.endswith(".")):
        yield LintFinding(
            path, 0, "title", f"expected at most {TITLE} ASCII characters, no full stop"
        )
    for line in definition.why.splitlines():
        if len(line) > LINE and not definition.author:
            yield LintFinding(path, 0, "why", f"a line is longer than {LINE}: {line[:40]}...")
        if DIFF_LIKE_LINE.match(line):
            yield LintFinding(path, 0, "why", f"git would cut the message at {line!r}")
        if line != line.rstrip():
            yield LintFinding(path, 0, "why", f"trailing blanks after {line.rstrip()!r}")
    for name in ("origin", "upstream"):
        if "\n" in getattr(definition, name):
            yield LintFinding(path, 0, name, "expected one line")
    if not definition.upstream.startswith(STATES):
        yield LintFinding(
            path, 0, "upstream", f"expected to begin with one of: {', '.join(STATES)}"
        )
    bases = [port.base for port in definition.ports]
    for base in sorted({base for base in bases if bases.count(base) > 1}):
        yield LintFinding(path, 0, "base", f"two ports for {base}")
    for name in definition.scenarios:
        if scenarios is not None and name not in scenarios:
            yield LintFinding(path, 0, "scenario", f"there is no scenario {name!r}")


def _port(path: str, port: Port, shared: Collection[str] = ()) -> Iterator[LintFinding]:
    for file in port.patch.files:
        if file.path in shared:
            continue  # `_shared` reads it once
        if b"\r" in file.data:
            at = file.line + file.data[: file.data.index(b"\r")].count(b"\n")
            yield LintFinding(path, at, "line-ends", "carriage return; expected line feeds alone")
        if file.old and file.new and file.old != file.new:
            yield LintFinding(path, file.line, "rename", "write a deletion and a new file instead")
        if file.old is None and not file.path.startswith(PATCHABLE_PATHS):
            places = ", ".join(PATCHABLE_PATHS)
            yield LintFinding(path, file.line, "path", f"{file.path} is not below {places}")
        for hunk in file.hunks:
            yield from _lines(path, hunk.line, hunk.lines)


def _lines(path: str, start: int, lines: tuple[bytes, ...]) -> Iterator[LintFinding]:
    for number, line in enumerate(lines, start + 1):
        if line[:1] == b"+" and line[1:].rstrip(b"\r\n") != line[1:].rstrip():
            yield LintFinding(path, number, "blanks", "an added line ends with blanks")
        if line[:1] == b"\\" and lines[number - start - 2][:1] == b"+":
            yield LintFinding(path, number, "last-line", "an added last line has no line feed")


def _shared(found: Series, folder: Path) -> Iterator[LintFinding]:
    """Check each shared file once, and that a patch lists it."""
    listed = {name for definition in found for name in definition.shared}
    root = folder / shared_files.FOLDER
    for path in sorted(file for file in root.rglob("*") if file.is_file()):
        name, shown = path.relative_to(root).as_posix(), path.relative_to(folder).as_posix()
        if name not in listed:
            yield LintFinding(shown, 0, "shared", "no patch.toml lists this file in `shared`")
        if not name.startswith(PATCHABLE_PATHS):
            yield LintFinding(shown, 0, "path", f"{name} is not below {', '.join(PATCHABLE_PATHS)}")
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if b"\r" in line:
                yield LintFinding(
                    shown, number, "line-ends", "carriage return; expected line feeds"
                )
            elif line != line.rstrip():
                yield LintFinding(shown, number, "blanks", "a line ends with blanks")


def _shown(path: str, folder: Path) -> str:
    try:
        return Path(path).relative_to(folder).as_posix()
    except ValueError:
        return path
