"""Build a variant with sanitizers, and small programs for it.

The ordinary build gets `native/sanitize.cmake` and its variables as options, so that the variant
has an id of its own and is built once.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import build
from pyllamakv.errors import CommandFailed, Untestable

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

#: Flags of small programs for each kind of build; address and undefined behaviour share one.
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    "thread": ("-fsanitize=thread",),
}
#: Runs `planted.h` when the library is loaded, to check that it is instrumented.
PLANTED = "llama-kv-cache.cpp"

_SECONDS = 1800


def runtimes(kind: str) -> tuple[Path, ...]:
    """Return the libraries that a program must preload. Raises Untestable if they are missing.

    libstdc++ is included because a runtime looks up the functions that it wraps at its start, and
    Python is no C++ program.
    """
    found = shutil.which("g++")
    if found is None:
        msg = "found no g++: install g++ with its sanitizers"
        raise Untestable(msg)
    names = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}[kind]
    paths = []
    for name in (*names, "libstdc++.so.6"):
        done = _ran([found, f"-print-file-name={name}"])
        path = Path(done.stdout.strip())
        if not path.is_absolute() or not path.exists():
            msg = f"expected {name} beside {found}, found none: install libgcc-dev of this gcc"
            raise Untestable(msg)
        paths.append(path.resolve())
    return tuple(paths)


def instrumented(
    spec: str, kind: str, scope: str, *, tell: Callable[[str], None] = lambda _: None
) -> Variant:
    """Return the variant of a spec with sanitizers; it is built if it does not exist.

    ``scope`` is core (the shim and libllama) or whole (ggml too). Raises Untestable if it cannot be
    built.
    """
    files = (native("sanitize.cmake"), native("planted.h"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    options = {"PLK_SANITIZE": kind, "PLK_SCOPE": scope, "PLK_SANITIZE_FILES": digest}
    paths = {
        "CMAKE_PROJECT_plk_INCLUDE": str(files[0]),
        "PLK_PLANTED": PLANTED,
        "PLK_PLANTED_HEADER": str(files[1]),
    }
    try:
        return build.build(spec, options=options, paths=paths, progress=lambda what, *_: tell(what))
    except CommandFailed as error:
        raise Untestable(f"{spec} does not build with the {kind} sanitizer: {error}") from error


def native(name: str) -> Path:
    """Return the path of one of this package's C++ files."""
    return Path(__file__).parent / "native" / name


def program(source: Path, output: Path, kind: str, *words: str) -> None:
    """Compile a small C or C++ program with the flags of a kind.

    Raises Untestable if that fails.
    """
    tool, standard = ("gcc", "-std=c11") if source.suffix == ".c" else ("g++", "-std=c++17")
    command = [tool, standard, *FLAGS[kind], "-O1", "-g1", "-w", "-pthread", str(source)]
    done = _ran([*command, *words, "-lm", "-o", str(output)])
    if done.returncode:
        msg = f"{source.name} does not compile with the {kind} sanitizer: {done.stderr[-600:]}"
        raise Untestable(msg)


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False,
    )  # fmt: skip
