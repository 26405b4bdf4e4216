"""Run the native tests of the headers that patches add, without llama.cpp.

The test programs are in ``tests/native`` of a checkout; an installed package has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import compiler
from pyllamakv.home import checkout, home
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from pyllamakv.source.progress import Progress

#: Timeout of one group of tests in seconds; a group takes less than two.
_GROUP_TIMEOUT = 60.0
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: Timeout of a compiler in seconds.
_COMPILE_TIMEOUT = 300.0


@dataclass(frozen=True)
class Header:
    """The path of a patch's header, and the name of the program that tests it.

    The program's first argument is the name of a test group. With ``needs_directory``, the second
    is a directory, which a group leaves empty. ``needs`` are other headers of the patch that it
    includes; stubs of llama.cpp's headers are in ``tests/native/stubs``.
    """

    patch: str
    path: str
    program: str
    needs_directory: bool = False
    needs: tuple[str, ...] = ()

    @property
    def source(self) -> Path | None:
        """Return the program's source, None outside a checkout."""
        return native(f"{self.program}.cpp")


def stubs() -> Path | None:
    """Return the include directory of the programs, None outside a checkout."""
    root = checkout()
    found = root / "tests" / "native" / "stubs" if root else None
    return found if found is not None and found.is_dir() else None


def native(name: str) -> Path | None:
    """Return a source of the native tests, None outside a checkout."""
    root = checkout()
    found = root / "tests" / "native" / name if root else None
    return found if found is not None and found.is_file() else None


_DEFRAG = "src/llama-kv-defrag.h"
_DEFRAG_GGML = "src/llama-kv-defrag-ggml.h"
_SETTINGS = "src/llama-kv-settings.h"
_MMAP = "src/llama-kv-mmap.h"

HEADERS = (
    Header("full-defrag", _DEFRAG, "kv_defrag"),
    Header(
        "full-defrag",
        _DEFRAG_GGML,
        "kv_defrag_ggml",
        needs_directory=True,
        needs=(_DEFRAG, _SETTINGS),
    ),
    Header("full-defrag", _SETTINGS, "kv_settings", needs=(_DEFRAG,)),
    Header(
        "kv-counters",
        "src/llama-kv-counters-impl.h",
        "kv_counters",
        needs_directory=True,
        needs=("src/llama-kv-counters.h",),
    ),
    Header("mmap-kv", _MMAP, "kv_mmap", needs_directory=True),
    Header(
        "mmap-kv", "src/llama-kv-mmap-ggml.h", "kv_mmap_ggml", needs_directory=True, needs=(_MMAP,)
    ),
    Header(
        "mmap-kv",
        "src/llama-kv-mmap-api-impl.h",
        "kv_mmap_api",
        needs_directory=True,
        needs=(_MMAP, "src/llama-kv-mmap-api.h"),
    ),
    Header(
        "compaction",
        "src/llama-kv-compact-impl.h",
        "kv_compact",
        needs_directory=True,
        needs=(
            "src/llama-kv-compact.h",
            "src/llama-kv-compact-cells.h",
            _DEFRAG,
            _DEFRAG_GGML,
            _SETTINGS,
        ),
    ),
    Header("server-park", "tools/server/server-park.h", "server_park"),
    Header("server-safety", "tools/server/server-safety.h", "server_safety", needs_directory=True),
    Header(
        "server-metrics",
        "tools/server/server-kv-metrics.h",
        "server_kv_metrics",
        needs_directory=True,
        needs=("src/llama-kv-counters.h",),
    ),
)


@dataclass(frozen=True)
class HeaderResult:
    """The result of a header's tests: ``failed`` contains the output of each failing group.

    ``error`` is the compiler's first error if the program does not compile with the header.
    """

    path: str
    groups: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    error: str = ""

    @property
    def problem(self) -> str:
        """Return the failure in one line, or an empty text."""
        if self.error:
            return f"{self.path}: its tests do not compile: {self.error}"
        if self.failed:
            names = ", ".join(group for group, _ in self.failed)
            return f"{self.path}: its tests fail: {names}: {self.failed[0][1]}"
        return ""


def run_header_tests(
    files: Mapping[str, bytes], *, sanitize: bool = False, progress: Progress | None = None
) -> list[HeaderResult]:
    """Run the tests of each known header in ``files`` (path -> content of a patched tree).

    ``sanitize`` compiles them with the address and undefined-behaviour sanitizers. Results are
    cached by the contents of headers, test program and stubs, and by the compiler. Without a
    checkout, or without a compiler, nothing runs.
    """
    found = []
    for header in HEADERS:
        source, folder = header.source, stubs()
        wanted = (header.path, *header.needs)
        if source is None or folder is None or any(path not in files for path in wanted):
            continue
        if progress:
            progress(f"test {Path(header.path).name}", 0, None)
        texts = {path: files[path] for path in wanted}
        found.append(_cached(header, texts, source, folder, _SANITIZERS if sanitize else ()))
    return found


def _cached(
    header: Header, texts: dict[str, bytes], source: Path, stubs: Path, flags: tuple[str, ...]
) -> HeaderResult:
    command = (compiler.find().cxx, *flags)
    words = f"{header.path} {' '.join(command)}\0"
    digest = hashlib.sha256(words.encode() + source.read_bytes())
    for name, data in sorted(texts.items()):
        digest.update(name.encode() + b"\0" + data)
    for path in sorted(stubs.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    file = home() / "results" / "headers" / f"{digest.hexdigest()[:32]}.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return HeaderResult(
            raw["path"], raw["groups"], tuple(map(tuple, raw["failed"])), raw["error"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    result = _run(header, texts, source, stubs, command)
    write_text_atomic(file, json.dumps(asdict(result)))
    return result


def _run(
    header: Header, texts: dict[str, bytes], source: Path, stubs: Path, cxx: tuple[str, ...]
) -> HeaderResult:
    with tempfile.TemporaryDirectory(prefix="pyllamakv-header-") as name:
        folder = Path(name)
        for file, data in texts.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data)
        program = folder / "program"
        includes = [*sorted({(folder / file).parent for file in texts}), stubs]
        command = [*cxx, "-std=c++17", "-O1", "-w", "-pthread"]
        command += [f"-I{path}" for path in includes] + [str(source), "-o", str(program)]
        built = _output(command, _COMPILE_TIMEOUT)
        if built.returncode:
            lines = [line for line in built.stdout.splitlines() if "error" in line]
            first = next(iter(lines or built.stdout.splitlines()), "the compiler failed")
            return HeaderResult(header.path, error=first.replace(f"{folder}{os.sep}", ""))
        listed = _output([str(program)], _GROUP_TIMEOUT)
        groups = listed.stdout.split()
        if listed.returncode or not groups:
            return HeaderResult(header.path, failed=(("the list of groups", listed.stdout[-200:]),))
        failed = []
        for group in groups:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                words = [group, work] if header.needs_directory else [group]
                done = _output([str(program), *words], _GROUP_TIMEOUT)
                left = [path.name for path in Path(work).iterdir()]
            if left and not done.returncode:
                failed.append((group, f"leaves {', '.join(left)}"))
            if done.returncode:
                lines = done.stdout.strip().splitlines()
                failed.append((group, lines[-1] if lines else f"status {done.returncode}"))
        return HeaderResult(header.path, len(groups), tuple(failed))


def _output(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program; a timeout kills it and its children."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return subprocess.CompletedProcess(command, -signal.SIGKILL, "timeout")
    return subprocess.CompletedProcess(command, process.returncode, output)
