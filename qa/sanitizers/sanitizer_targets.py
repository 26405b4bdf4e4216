"""The programs that run under sanitizers: native tests, a C program, threads, and scenarios."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import UsageError
from pyllamakv.home import data, shim
from pyllamakv.scenarios import runner, synthetic_models
from pyllamakv.verification import discovery
from pyllamakv.verification.header_tests import HEADERS, native, stubs
from qa.sanitizers import instrument, reports, sanitized_process

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from pyllamakv.scenarios.outcome import Outcome
    from qa.sanitizers.reports import Report
    from qa.sanitizers.sanitized_process import ProcessResult

Tell = Callable[[str], None]
Played = tuple[str, str, "Outcome", "list[Report]"]

#: Flash attention, types of K and V: one layout of V, then the other.
_SETTINGS = ("0 1 1", "1 8 8", "1 2 8", "1 1 1")


def headers(tell: Tell) -> Iterator[tuple[str, str, ProcessResult]]:
    """Run every group of the tests of the patches' headers; yield program, group and outcome.

    The list of groups that a program prints comes first, as the group "". Raises UsageError if the
    tests do not exist, as in an installed package.
    """
    with tempfile.TemporaryDirectory(prefix="pyllamakv-drivers-") as name:
        folder = Path(name)
        for header in HEADERS:
            program = header.program
            tell(f"compiling {program}")
            made = folder / program
            shared = data("patches") / "shared"
            folders = (shared / "src", shared / "tools" / "server", stubs())
            words = [f"-I{each}" for each in folders if each]
            instrument.program(_test(f"{program}.cpp"), made, "address", *words)
            with sanitized_process.logs() as logs:
                listed = sanitized_process.run([str(made)], "address", logs)
            yield program, "", listed
            for group in listed.out.split():
                tell(f"{program} {group}")
                scratch = folder / f"{program}-{group}"
                scratch.mkdir()
                command = [str(made), group, *([str(scratch)] if header.needs_directory else [])]
                with sanitized_process.logs() as logs:
                    yield program, group, sanitized_process.run(command, "address", logs)


def smoke(made: Variant, tell: Tell) -> Iterator[tuple[str, ProcessResult]]:
    """Run the C program with a library in each setting. Raises UsageError like `headers`."""
    with _linked(_test("smoke.c"), made, "address") as program:
        for settings in _SETTINGS:
            tell(f"smoke {settings}")
            command = [str(program), str(synthetic_models.tiny()), *settings.split()]
            with sanitized_process.logs() as logs:
                yield settings, sanitized_process.run(command, "address", logs)


def threads(made: Variant, n_threads: int, rounds: int, tell: Tell) -> ProcessResult:
    """Run the thread driver with a library; ``n_threads`` are llama.cpp's own in a context."""
    tell("threads")
    with (
        _linked(instrument.native("threads.cpp"), made, "thread") as program,
        sanitized_process.logs() as logs,
    ):
        command = [str(program), str(synthetic_models.tiny()), str(n_threads), str(rounds)]
        return sanitized_process.run(command, "thread", logs)


def scenarios(made: Variant, first: Sequence[str], tell: Tell, *, whole: bool) -> Iterator[Played]:
    """Run scenarios in a worker: those of ``first``, then the others; all settings if ``whole``."""
    known = discovery.discover()
    order = [*first, *(name for name in known if name not in first)]
    with (
        sanitized_process.logs() as logs,
        runner.ScenarioRunner(sanitized_process.opener("address", logs)) as bench,
    ):
        for name in order:
            chosen = known[name]
            for setting in chosen.settings if whole else chosen.few:
                tell(f"{name} [{setting.name}]")
                run = bench.run(made.folder, chosen, setting)
                yield name, setting.name, run.outcome, reports.collect(logs)


def _test(name: str) -> Path:
    found = native(name)
    if found is None:
        msg = f"expected tests/native/{name}: run this in a checkout"
        raise UsageError(msg)
    return found


@contextmanager
def _linked(source: Path, made: Variant, kind: str) -> Iterator[Path]:
    """Compile a program against a library for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-drivers-") as name:
        program = Path(name) / source.stem
        words = [f"-I{path}" for path in (shim(), shim() / "shim")]
        words += [str(made.library), f"-Wl,-rpath,{made.library.parent}"]
        instrument.program(source, program, kind, *words)
        yield program
