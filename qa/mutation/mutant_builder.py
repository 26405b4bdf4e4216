"""Build a mutant in seconds: compile what it affects, and link with the patched build's objects.

Each builder has its own directory: a copy of the patched tree, in which a file is replaced and
restored, and the objects and archives of one build, which nothing else writes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import build
from pyllamakv.errors import BuildError, HarnessError
from pyllamakv.source.store import open_store
from qa.mutation import compile_commands, compiling, mutant_schemata
from qa.mutation.compiling import CompileError, CompilerCrash

if TYPE_CHECKING:
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.source.progress import Progress
    from qa.mutation.compile_commands import Unit
    from qa.mutation.mutant_schemata import MutantSchemata

log = logging.getLogger(__name__)

#: How many times lines are left out that do not compile with all mutants.
_ATTEMPTS = 6

#: Locations of a compile error, and of the code that led to it.
_PLACE = re.compile(r"^(?:.*/tree/)?(src/[\w./-]+):(\d+):\d+:\s+(?:error|required from)", re.M)


@dataclass(frozen=True)
class Built:
    """The result for a mutant: a library, the first error, or code equal to the original."""

    library: Path | None = None
    error: str = ""

    @property
    def same(self) -> bool:
        """Return whether the compiler produced the same code as for the original."""
        return self.library is None and not self.error


class MutantBuilder:
    """The patched tree of a release with its objects; builds libraries of mutants."""

    def __init__(
        self,
        folder: Path,
        spec: str,
        patched: PatchedRelease,
        *,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        self.base = folder / "base"
        self._same: dict[str, str] = {}
        shutil.rmtree(folder, ignore_errors=True)
        self.base.mkdir(parents=True)
        with build.prepared_build_folder(spec, jobs=jobs, progress=progress) as (wanted, _):
            self.objects = wanted.objects
            self.units = compile_commands.units(wanted, self.tree)
            self.link = self._take(compile_commands.linking(wanted))
        open_store().export(patched.tree, self.tree)
        self._touched = {path for port in patched.ports for path in port.patch.paths}

    def build(self, files: Mapping[str, bytes | None], place: Path, *, all_of_it: bool) -> Built:
        """Build a library of the tree with other contents of some files.

        ``all_of_it`` compiles all readers of these files; otherwise only callers of the patches'
        code: the sources that they change, and the shim. For a change within a function, which no
        other source sees, the result is the same in a tenth of the time. Raises CompilerCrash if a
        tool fails for another reason than its input.
        """
        units = [
            unit
            for unit in self.units
            if (unit.holds | unit.reads) & files.keys()
            and (all_of_it or self._patched(unit))
            and files.get(unit.source, b"") is not None
        ]
        # Compile errors show in callers, which are compiled before mere readers.
        units.sort(key=self._patched, reverse=True)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        before = {path: self._write(path, data) for path, data in files.items()}
        try:
            made = {unit: self._compiled(unit, place) for unit in units}
        except CompileError as error:
            return Built(error=str(error))
        finally:
            for path, data in before.items():
                self._write(path, data)
        changed = {
            unit.output: path for unit, path in made.items() if _sum(path) != self._unchanged(unit)
        }
        try:
            return Built(self._linked(changed, place)) if changed else Built()
        except CompileError as error:
            return Built(error=str(error))

    def switched(
        self, make: Callable[[set[tuple[str, int]]], MutantSchemata], place: Path
    ) -> tuple[Path, MutantSchemata] | None:
        """Build one library of many mutants; lines that do not compile are left out.

        ``make`` receives these lines and returns the files. None if it is impossible.
        """
        refused: set[tuple[str, int]] = set()
        place.mkdir(parents=True, exist_ok=True)
        prelude = place / "prelude.h"
        prelude.write_text(mutant_schemata.PRELUDE, encoding="utf-8")
        for _ in range(_ATTEMPTS):
            made = make(refused)
            units = [
                unit
                for unit in self.units
                if (unit.holds | unit.reads) & made.files.keys()
                and self._patched(unit)
                and not unit.source.endswith(".c")
            ]
            before = {path: self._write(path, data) for path, data in made.files.items()}
            try:
                more = ("-include", str(prelude))
                changed = {unit.output: self._compiled(unit, place, more) for unit in units}
                return self._linked(changed, place), made
            except CompileError as error:
                lines = {(m[1], int(m[2])) for m in _PLACE.finditer(error.output)} - refused
                if not lines:
                    log.info("mutants cannot be switched: %s", error)
                    return None
                refused |= lines
            except CompilerCrash as error:
                log.info("mutants cannot be switched: %s", error)
                return None
            finally:
                for path, data in before.items():
                    self._write(path, data)
        return None

    def _write(self, path: str, data: bytes | None) -> bytes | None:
        """Replace the content of a file; return the old content, None if it was absent."""
        file = self.tree / path
        before = file.read_bytes() if file.is_file() else None
        if data is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(data)
        return before

    def _unchanged(self, unit: Unit) -> str:
        """Return the digest of a unit's output for the original tree."""
        if unit.output not in self._same:
            try:
                self._same[unit.output] = _sum(self._compiled(unit, self.folder / "same"))
            except CompileError as error:
                msg = f"{unit.source} does not compile as its build did: {error}"
                raise HarnessError(msg) from error
        return self._same[unit.output]

    def _patched(self, unit: Unit) -> bool:
        """Return whether a unit belongs to the shim, or has a source that a patch changes."""
        return unit.ours or not unit.holds.isdisjoint(self._touched)

    def _compiled(self, unit: Unit, place: Path, more: Sequence[str] = ()) -> Path:
        made = place / hashlib.sha256(unit.output.encode()).hexdigest()[:8] / Path(unit.output).name
        made.parent.mkdir(parents=True, exist_ok=True)
        words = [str(made) if word == "{output}" else word for word in unit.words]
        compiling.run([*words, *more], self.objects)
        return made

    def _linked(self, changed: Mapping[str, Path], place: Path) -> Path:
        words = [changed[word].as_posix() if word in changed else word for word in self.link]
        archives: dict[str, list[Path]] = {}
        for output, made in changed.items():
            if output not in self.link:
                archives.setdefault(self._archive_of(output), []).append(made)
        for archive, members in archives.items():
            own = place / Path(archive).name
            shutil.copy2(archive, own)
            compiling.run([_archiver(), "r", str(own), *map(str, members)], place)
            words = [str(own) if word == archive else word for word in words]
        library = place / "libplk.so"
        compiling.run([str(library) if word == "{output}" else word for word in words], self.base)
        return library

    def _archive_of(self, output: str) -> str:
        """Return the archive that contains an object: that of the nearest parent directory."""
        found = [word for word in self.link if word.endswith(".a")]
        for folder in (self.base / output).parents:
            here = [word for word in found if Path(word).parent == folder]
            if len(here) == 1:
                return here[0]
            if here:
                name = next(p.removesuffix(".dir") for p in Path(output).parts if ".dir" in p)
                return next(word for word in here if Path(word).stem in (name, f"lib{name}"))
        msg = f"expected {output} in one of {', '.join(found)}"
        raise HarnessError(msg)

    def _take(self, words: list[str]) -> tuple[str, ...]:
        """Copy the linker's inputs, and return its arguments for these copies."""
        taken = []
        for word in words:
            path = self.objects / word
            if word.endswith((".o", ".a")) and path.is_file():
                place = path.relative_to(self.objects)
                own = self.base / place
                if not own.exists():
                    own.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, own)
                word = place.as_posix() if word.endswith(".o") else str(own)
            taken.append(word)
        return tuple(taken)


def _archiver() -> str:
    found = shutil.which("ar")
    if found is None:
        msg = "expected the program `ar` beside the compiler: install binutils"
        raise BuildError(msg)
    return found


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
