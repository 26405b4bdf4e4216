"""Build a variant's library again, with sanitizers in some or all of its objects.

The commands of the ordinary build run with additional flags, and the linker uses the new objects.
An object is named by its command and all its includes, so that stock and patched share objects, and
a second run compiles nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import build
from pyllamakv.errors import Untestable
from pyllamakv.home import home, shim
from qa import ninja

if TYPE_CHECKING:
    from pyllamakv.building import cmake
    from pyllamakv.building.variant import Variant

#: Flags of each kind of build; address and undefined behaviour share one.
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    "thread": ("-fsanitize=thread",),
}
_ALWAYS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", "-w")
#: Runs `planted.h` when the object is loaded, to check that it is instrumented.
PLANTED = "llama-kv-cache.cpp"
#: Sources that the patches change; the shim is always included.
_CORE = ("llama-kv", "llama-context", "llama-batch", "llama-io", "llama-memory")
#: The only file of llama.cpp that the thread driver needs instrumented besides the shim.
_THREADS = (PLANTED, "llama-context.cpp")

_SECONDS = 1800


@dataclass(frozen=True)
class Command:
    """A compile command: its source, its object in the build directory, and its arguments."""

    words: tuple[str, ...]
    source: Path
    output: str

    def chosen(self, scope: str) -> bool:
        """Return whether the object is instrumented in a scope: whole, core or threads."""
        name = self.source.name
        if scope == "whole" or "/llama.cpp/" not in f"/{self.output}":
            return True
        return name.startswith(_CORE) if scope == "core" else name in _THREADS


@dataclass(frozen=True)
class Sanitized:
    """An instrumented library, and the directory of its variant."""

    kind: str
    folder: Path
    library: Path


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
) -> Sanitized:
    """Return the instrumented library of a variant; it is built if it does not exist."""
    variant = build.build(spec, progress=lambda what, *_: tell(what))
    made = _named(variant, kind, scope)
    if (made.folder / "manifest.json").is_file():
        return made
    with build.prepared_build_folder(spec, progress=lambda what, *_: tell(what)) as (_, job):
        commands = _commands(job)
        compiler = _compiler(commands)
        deps = ninja.reads(job.folder)
        chosen = [each for each in commands if each.chosen(scope)]
        keys = {each.output: _key(each, deps, kind) for each in chosen}
        store = home() / "sanitized" / "objects"
        store.mkdir(parents=True, exist_ok=True)
        left = [each for each in chosen if not (store / f"{keys[each.output]}.o").is_file()]

        def compile_(each: Command) -> None:
            tell(f"compiling {each.source.name} with the {kind} sanitizer")
            _compile(each, store / f"{keys[each.output]}.o", kind, job)

        with ThreadPoolExecutor(build.default_jobs()) as pool:
            list(pool.map(compile_, left))
        stage = made.folder.with_name(f".{made.folder.name}.{os.getpid()}")
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        objects = [
            str(store / f"{keys[each.output]}.o") if each.output in keys else each.output
            for each in commands
        ]
        _link(compiler, objects, stage / made.library.name, kind, job)
        digest = hashlib.sha256((stage / made.library.name).read_bytes()).hexdigest()
        dataclasses.replace(variant.manifest, library_sha256=digest, dropin=()).save(stage)
        shutil.rmtree(made.folder, ignore_errors=True)
        stage.rename(made.folder)
    return made


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


def _named(variant: Variant, kind: str, scope: str) -> Sanitized:
    """Return the directory of a variant's instrumented library, named by a digest of its inputs."""
    planted = native("planted.h").read_text(encoding="utf-8")
    facts = repr((FLAGS[kind], _ALWAYS, _CORE, _THREADS, planted))
    name = f"{variant.id}-{kind}-{scope}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    folder = home() / "sanitized" / name
    return Sanitized(kind, folder, folder / variant.library.name)


def _commands(job: cmake.BuildSession) -> list[Command]:
    found = []
    for line in ninja.commands(job.folder):
        words = tuple(shlex.split(line))
        if "-c" in words and "-o" in words:
            source = Path(words[words.index("-c") + 1])
            found.append(Command(words, source, words[words.index("-o") + 1]))
    return found


def _key(each: Command, deps: Mapping[str, Sequence[Path]], kind: str) -> str:
    whole = hashlib.sha256(repr((each.words, FLAGS[kind], _ALWAYS)).encode())
    # System headers are not copied.
    own = (path for path in deps.get(each.output, ()) if not path.is_relative_to("/usr"))
    paths = [each.source, *own]
    if each.source.name == PLANTED:
        paths.append(native("planted.h"))
    for path in paths:
        whole.update(path.read_bytes() if path.is_file() else b"")
    return whole.hexdigest()[:24]


def _compile(each: Command, output: Path, kind: str, job: cmake.BuildSession) -> None:
    words, part = list(each.words), output.with_suffix(f".{os.getpid()}.part.o")
    for flag in ("-MT", "-MF"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    words = [word for word in words if word != "-MD"]
    words[words.index("-o") + 1] = str(part)
    more = [*_ALWAYS, *FLAGS[kind]]
    if each.source.name == PLANTED:
        more += ["-include", str(native("planted.h"))]
    done = _ran([*words, *more], job)
    if done.returncode:
        part.unlink(missing_ok=True)
        msg = f"{each.source.name} does not compile with the {kind} sanitizer: {done.stderr[-600:]}"
        raise Untestable(msg)
    part.replace(output)


def _compiler(commands: list[Command]) -> str:
    """Return the C++ compiler of a build; it must be gcc, whose runtimes are used."""
    words = next(each.words for each in commands if each.source.suffix == ".cpp")
    found = next(word for word in words if Path(word).name not in ("ccache", "sccache"))
    if "clang" in Path(found).name:
        msg = f"the build was compiled by {found}, expected gcc: set CC=gcc CXX=g++ and build again"
        raise Untestable(msg)
    return found


def _link(
    compiler: str, objects: list[str], output: Path, kind: str, job: cmake.BuildSession
) -> None:
    # The linker map lists the exported names.
    exported = shim() / "shim" / "plk.map"
    command = [compiler, "-shared", "-fPIC", *FLAGS[kind], f"-Wl,--version-script={exported}"]
    command += ["-Wl,-Bsymbolic", f"-Wl,-soname,{output.name}", "-o", str(output), *objects]
    done = _ran([*command, "-ldl", "-lm", "-pthread"], job)
    if done.returncode:
        msg = f"the {kind} library does not link: {done.stderr[-600:]}"
        raise Untestable(msg)


def _ran(
    command: list[str], job: cmake.BuildSession | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=job.folder if job else None,
        env=dict(job.env) if job else None,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_SECONDS,
        check=False,
    )
