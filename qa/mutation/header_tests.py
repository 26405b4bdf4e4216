"""Run the tests of a header on its mutants: one compiler, no library, seconds.

An installed package has none, and only scenarios run.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyllamakv.building import compiler
from pyllamakv.home import home
from pyllamakv.verification.header_tests import Header, stubs
from qa.mutation import compiling, mutant_schemata, resource_limits
from qa.mutation.compiling import CompileError, CompilerCrash

#: First the fast builds, then those with sanitizers.
_MODES = ((), ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"))

#: Output of a toolchain without sanitizers.
_LACKING = re.compile(r"cannot find .*san|-fsanitize")

#: Timeout of one group in seconds; a group takes less than two.
_PATIENCE = 30.0
#: Status of a program that was ended by a timeout or its CPU limit.
_HUNG = -signal.SIGKILL


@dataclass(frozen=True)
class GroupResult:
    """The failed group of a driver, or the compile error; both empty: it passed."""

    group: str = ""
    error: str = ""


@dataclass
class Program:
    """A driver compiled with one version of its header, or the compiler's error."""

    path: Path
    with_folder: bool
    #: Sanitizers reserve far more address space than the machine has memory.
    bounded: bool
    error: str = ""
    _met: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        """Return the names of its test groups."""
        return [] if self.error else self._run({}).stdout.split()

    def passes(self, group: str, chosen: int = 0, met: Path | None = None) -> bool:
        """Return whether a group passes with a mutant; ``met`` receives the reached ones.

        A hang must happen twice: a loaded or suspended machine looks the same.
        """
        environment = {mutant_schemata.CHOSEN: str(chosen)}
        if met is not None:
            environment[mutant_schemata.MET] = str(met)
        passed = False
        for _ in range(2):
            with tempfile.TemporaryDirectory(prefix="pyllamakv-driver-") as name:
                words = [group, name] if self.with_folder else [group]
                done = self._run(environment, *words)
                passed = done.returncode == 0 and not list(Path(name).iterdir())
            if done.returncode != _HUNG:
                break
        return passed

    def met(self, group: str) -> frozenset[int]:
        """Return the mutants that a group reaches, none if it fails without any."""
        if group not in self._met:
            with tempfile.TemporaryDirectory(prefix="pyllamakv-met-") as name:
                file = Path(name) / "met"
                passed = self.passes(group, met=file)
                self._met[group] = mutant_schemata.read_covered(file) if passed else frozenset()
        return self._met[group]

    def _run(self, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        """Run with limits of time and memory; a hang ends with `_HUNG`."""
        with subprocess.Popen(
            [str(self.path), *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
            env={**os.environ, **environment},
        ) as process:  # fmt: skip
            memory = resource_limits.MEMORY if self.bounded else None
            resource_limits.bound(process.pid, memory=memory, seconds=int(_PATIENCE))
            try:
                output, _ = process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                # Groups that are killed on purpose have children.
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                return subprocess.CompletedProcess(words, _HUNG, output)
        return subprocess.CompletedProcess(words, process.returncode, output)


class HeaderTest:
    """Test versions of one header with the groups that its original passes.

    ``beside`` are the patch's files that it includes, by name.
    """

    def __init__(
        self, header: Header, text: bytes, source: Path, beside: Mapping[str, bytes] | None = None
    ) -> None:
        self.header = header
        self.text = text
        self.source = source
        self.beside = dict(beside or {})
        #: What a result depends on besides the header's text.
        self.digest = self._digest()
        self._switched: bytes | None = None
        self._programs: dict[tuple[bytes, tuple[str, ...]], Program] = {}

    def switch(self, text: bytes) -> None:
        """Set the text that contains all mutants, for `choose`."""
        self._switched = text

    def choose(self, number: int) -> GroupResult | None:
        """Run the groups that reach one mutant of the switched text; None if that is impossible."""
        for mode in _MODES:
            program = self._program(self._switched, mode) if self._switched else None
            if program is None or program.error:
                return None if mode == () else GroupResult()
            for group in program.groups:
                if number in program.met(group) and not program.passes(group, number):
                    return GroupResult(f"{self.source.stem} {group}")
        return GroupResult()

    def judge(self, text: bytes) -> GroupResult:
        """Run all groups on a version; return the first that only the original passes."""
        for mode in _MODES:
            own = self._program(self.text, mode)
            if own.error:
                continue  # a toolchain without sanitizers
            program = self._program(text, mode)
            if program.error:
                return GroupResult(error=program.error)
            for group in program.groups:
                if not program.passes(group) and own.passes(group):
                    return GroupResult(f"{self.source.stem} {group}")
        return GroupResult()

    def _digest(self) -> str:
        found = hashlib.sha256(self.source.read_bytes())
        for name, data in sorted(self.beside.items()):
            found.update(name.encode() + b"\0" + data)
        folder = stubs()
        for path in sorted(folder.iterdir()) if folder else ():
            found.update(path.name.encode() + b"\0" + path.read_bytes())
        return found.hexdigest()

    def _program(self, text: bytes, mode: tuple[str, ...]) -> Program:
        """Compile the driver with a version of the header; cached for the header's own versions."""
        known = self._programs.get((text, mode))
        if known is not None:
            return known
        facts = [
            text,
            self.digest.encode(),
            " ".join(mode).encode(),
            mutant_schemata.PRELUDE.encode(),
        ]
        name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:20]
        folder = home() / "results" / "mutants" / "drivers" / name
        program = Program(folder / "driver", self.header.needs_directory, not mode)
        if not program.path.is_file():
            program.error = self._compile(text, mode, program.path)
        if text in (self.text, self._switched):
            self._programs[text, mode] = program
        return program

    def _compile(self, text: bytes, mode: tuple[str, ...], made: Path) -> str:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as name:
            folder = Path(name)
            for file, data in {**self.beside, Path(self.header.path).name: text}.items():
                (folder / file).write_bytes(data)
            (folder / "prelude.h").write_text(mutant_schemata.PRELUDE, encoding="utf-8")
            words = [compiler.find(home() / "objects" / "compilers.json").cxx, "-std=c++17", "-O0"]
            words += ["-w", "-pthread", *mode, "-include", str(folder / "prelude.h"), "-I", name]
            words += [f"-I{stubs()}"] if stubs() else []
            try:
                compiling.run([*words, str(self.source), "-o", str(folder / "made")], folder)
            except CompileError as error:
                return str(error)
            except CompilerCrash as error:
                if mode and _LACKING.search(error.output):
                    return str(error)
                raise
            (folder / "made").replace(made)
            return ""
