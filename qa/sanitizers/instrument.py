"""Build a variant's library a second time, with sanitizers in some or all of its objects.

The commands of the ordinary build are run again with more flags, and the link takes the new object
where there is one. An object is named by its command and by everything it includes, so that stock
and patched share theirs, and a second run compiles nothing.
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

#: What each kind of build is asked to notice; address and undefined behaviour share one.
FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    "thread": ("-fsanitize=thread",),
}
_ALWAYS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", "-w")
#: Runs at load, from inside this object, what `planted.h` holds: is the object instrumented?
PLANTED = "llama-kv-cache.cpp"
#: What the patches touch; the shim is always taken as well.
_CORE = ("llama-kv", "llama-context", "llama-batch", "llama-io", "llama-memory")
#: The one file of llama.cpp that the thread driver has to see beside the shim.
_THREADS = (PLANTED, "llama-context.cpp")

_SECONDS = 1800


@dataclass(frozen=True)
class Command:
    """How one object is made: its source, its place in the build folder, and the words."""

    words: tuple[str, ...]
    source: Path
    output: str

    def chosen(self, scope: str) -> bool:
        """Return whether the object belongs to what is instrumented: whole, core or threads."""
        name = self.source.name
        if scope == "whole" or "/llama.cpp/" not in f"/{self.output}":
            return True
        return name.startswith(_CORE) if scope == "core" else name in _THREADS


@dataclass(frozen=True)
class Sanitized:
    """An instrumented library, and the folder that is its variant."""

    kind: str
    folder: Path
    library: Path


def runtimes(kind: str) -> tuple[Path, ...]:
    """Return the libraries that a program must load first; raise Untestable where they lack.

    libstdc++ is among them because a runtime looks for the functions it wraps when it starts, and
    Python itself is no C++ program.
    """
    found = shutil.which("g++")
    if found is None:
        msg = "expected gcc with its sanitizers, found no g++: install g++"
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
    """Return the instrumented library of a variant, built where it is not yet there."""
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
    """Return one of the C++ files that are this part's own."""
    return Path(__file__).parent / "native" / name


def program(source: Path, output: Path, kind: str, *words: str) -> None:
    """Compile a small C or C++ program with the flags of a kind; raise Untestable if it cannot."""
    tool, standard = ("gcc", "-std=c11") if source.suffix == ".c" else ("g++", "-std=c++17")
    command = [tool, standard, *FLAGS[kind], "-O1", "-g1", "-w", "-pthread", str(source)]
    done = _ran([*command, *words, "-lm", "-o", str(output)])
    if done.returncode:
        msg = f"{source.name} does not compile with the {kind} sanitizer: {done.stderr[-600:]}"
        raise Untestable(msg)


def _named(variant: Variant, kind: str, scope: str) -> Sanitized:
    """Return where the instrumented library of a variant lies: under all that it is made of."""
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
    # What the system brings stays as it is.
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
    """Return the C++ compiler of a build; its runtimes have to be gcc's."""
    words = next(each.words for each in commands if each.source.suffix == ".cpp")
    found = next(word for word in words if Path(word).name not in ("ccache", "sccache"))
    if "clang" in Path(found).name:
        msg = f"expected gcc, this build is {found}'s: set CC=gcc CXX=g++ and build again"
        raise Untestable(msg)
    return found


def _link(
    compiler: str, objects: list[str], output: Path, kind: str, job: cmake.BuildSession
) -> None:
    # The map says which names a library exports.
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
