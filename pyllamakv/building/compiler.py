"""Find the C and C++ compiler, and the meaning of `-march=native` on this machine.

Running a compiler takes tenths of a second, so the result is cached by its path, size and
modification time, together with the features of the processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.building.manifest import machine_flags
from pyllamakv.errors import KvError, ToolMissing
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

_HINT = (
    "install one: Debian or Ubuntu `apt-get install g++ make`, Fedora `dnf install gcc-c++ make`, "
    "macOS `xcode-select --install`; or name it in CC and CXX"
)

#: The C++ standard of the shim and of later releases, and its minimum `__cplusplus`.
_STANDARD, _YEAR = "c++17", 201703

#: Programs that may precede the compiler in CC or CXX; the launcher is chosen separately.
_LAUNCHERS = {"ccache", "sccache", "distcc", "icecc"}

#: Macro of a compiler for an instruction set, and its name in /proc/cpuinfo.
_MACROS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE4A__": "sse4a",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__LZCNT__": "abm",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__FMA4__": "fma4",
    "__XOP__": "xop",
    "__F16C__": "f16c",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__GFNI__": "gfni",
    "__VAES__": "vaes",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
    "__ARM_FEATURE_SME": "sme",
}

#: The instruction sets that need a tile configuration, and the options that leave them out.
_TILES = {
    "amx_tile": "-mno-amx-tile",
    "amx_int8": "-mno-amx-int8",
    "amx_bf16": "-mno-amx-bf16",
}

#: Load a tile configuration from a local variable, as ggml does, and compare it with what the
#: processor holds. The header of GCC 12 names 8 of the 64 bytes as read, so that the optimizer
#: drops the stores to the rest (llama.cpp pull request 26954 describes the crash that follows).
_TILE_PROGRAM = """
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
struct config { uint8_t palette, start, pad[14]; uint16_t bytes[16]; uint8_t rows[16]; };
static void load() {
    alignas(64) config c = {};
    c.palette = 1;
    c.rows[0] = 8;  c.bytes[0] = 64;
    c.rows[7] = 16; c.bytes[7] = 64;
    _tile_loadconfig(&c);
}
int main() {
    load();
    alignas(64) config c;
    memset(&c, 0, sizeof(c));
    _tile_storeconfig(&c);
    bool first = c.palette == 1 && c.rows[0] == 8 && c.bytes[0] == 64;
    bool last  = c.rows[7] == 16 && c.bytes[7] == 64;
    return first && last ? 0 : 1;
}
"""


@dataclass(frozen=True)
class Compiler:
    """A pair of compilers: paths, version line, target, and the CPU flags of `native`.

    ``native_options`` leave out what this compiler cannot compile correctly. ``untested`` is the
    reason why that could not be tested: they then leave out what is in doubt.
    """

    c: str
    cxx: str
    version: str
    target: str
    native_flags: tuple[str, ...]
    native_options: tuple[str, ...] = ()
    untested: str = ""

    @property
    def identity(self) -> str:
        """Return the part of a compiler in a variant's id: version and target, never a path."""
        return f"{self.version} for {self.target}"


def find(cache: Path | None = None, environ: Mapping[str, str] | None = None) -> Compiler:
    """Return the compilers in CC and CXX, else gcc, clang or cc on PATH.

    ``cache`` is a file for results; one without a test of AMX is not cached. Raises ToolMissing
    with the package to install.
    """
    env = os.environ if environ is None else environ
    c, cxx = _paths(env)
    stamp = _stamp(c, cxx)
    known = _read(cache)
    if kept := _kept(known, stamp):
        return kept
    found = _ask(c, cxx)
    if found.untested:
        log.warning("AMX is not used: its test failed: %s", found.untested)
    elif cache is not None:
        known[stamp] = dataclasses.asdict(found)
        _write(cache, known)
    return found


def find_cached(cache: Path, environ: Mapping[str, str] | None = None) -> Compiler | None:
    """Return the result of `find` from ``cache``, or None if it is not cached. Runs no program."""
    env = os.environ if environ is None else environ
    try:
        stamp = _stamp(*_paths(env))
    except (ToolMissing, OSError, ValueError):
        return None
    return _kept(_read(cache), stamp)


def launcher(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the path of ccache or sccache, or None.

    ``PYLLAMAKV_COMPILER_LAUNCHER=none`` disables it.
    """
    env = os.environ if environ is None else environ
    wanted = env.get("PYLLAMAKV_COMPILER_LAUNCHER", "")
    if wanted == "none":
        return None
    names = (wanted,) if wanted else ("ccache", "sccache")
    return next((path for name in names if (path := _which(name, env))), None)


def _which(name: str, env: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=env.get("PATH", os.defpath))


def _paths(env: Mapping[str, str]) -> tuple[str, str]:
    pairs = [("gcc", "g++"), ("clang", "clang++"), ("cc", "c++")]
    if sys.platform == "darwin":
        pairs.insert(0, pairs.pop(1))
    named_c, named_cxx = _named("CC", env), _named("CXX", env)
    if named_c and named_cxx:
        return named_c, named_cxx
    for c_name, cxx_name in pairs:
        c, cxx = named_c or _which(c_name, env), named_cxx or _which(cxx_name, env)
        if c and cxx and _same_family(c, cxx):
            return c, cxx
    wanted = "C and C++" if not _any(pairs, env) else "C++"
    raise ToolMissing(f"expected a {wanted} compiler on PATH, found none; {_HINT}", "c++", _HINT)


def _any(pairs: list[tuple[str, str]], env: Mapping[str, str]) -> bool:
    return any(_which(c, env) for c, _ in pairs)


def _same_family(c: str, cxx: str) -> bool:
    return ("clang" in Path(c).name) == ("clang" in Path(cxx).name)


def _named(variable: str, env: Mapping[str, str]) -> str | None:
    words = shlex.split(env.get(variable, ""))
    while words and Path(words[0]).name in _LAUNCHERS:
        words.pop(0)
    if not words:
        return None
    if len(words) > 1:
        message = (
            f"{variable} must name a compiler without arguments, found {env[variable]!r}; "
            "flags are chosen by the build's own options"
        )
        raise ToolMissing(message, words[0], f"unset {variable}")
    path = _which(words[0], env)
    if path is None:
        message = f"{variable} names {words[0]!r}, which is not on PATH; {_HINT}"
        raise ToolMissing(message, words[0], _HINT)
    return path


def _stamp(c: str, cxx: str) -> str:
    facts: list[object] = [sorted(machine_flags()), _TILE_PROGRAM]
    for path in (c, cxx):
        real = Path(path).resolve()
        status = real.stat()
        facts += [path, str(real), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kept(known: Mapping[str, Any], stamp: str) -> Compiler | None:
    entry = known.get(stamp)
    if isinstance(entry, dict):
        with contextlib.suppress(TypeError, KeyError):
            lists = {name: tuple(entry[name]) for name in ("native_flags", "native_options")}
            return Compiler(**{**entry, **lists})
    return None


def _read(cache: Path | None) -> dict[str, Any]:
    try:
        known = json.loads(cache.read_text(encoding="utf-8")) if cache else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(cache: Path, known: Mapping[str, Any]) -> None:
    # Without a writable cache, only time is lost.
    with contextlib.suppress(OSError, KvError):
        write_text_atomic(cache, json.dumps(known, indent=1))


def _ask(c: str, cxx: str) -> Compiler:
    version = _run(cxx, "--version").splitlines()[:1]
    target = _run(cxx, "-dumpmachine").strip()
    if not version or not target:
        message = f"expected {cxx} to report its version and target, as gcc and clang do; {_HINT}"
        raise ToolMissing(message, cxx, _HINT)
    _prove_standard(cxx, version[0])
    # The program's own name differs between c++ and g++; the version does not.
    line = re.sub(r"^\S+(?= \()", "gcc", version[0])
    native = "-mcpu=native" if target.startswith(("aarch64", "arm")) else "-march=native"
    defined = set(re.findall(r"#define (\w+) ", _run(cxx, native, "-dM", "-E", "-x", "c++", "-")))
    flags = tuple(sorted(flag for macro, flag in _MACROS.items() if macro in defined))
    options: tuple[str, ...] = ()
    untested, works = "", True
    if "amx_tile" in flags:
        try:
            works = _loads_tiles(cxx, native)
        except (OSError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()
            untested, works = f"{error} {output}".strip().replace("\n", "; "), False
    if not works:
        options = tuple(option for flag, option in _TILES.items() if flag in flags)
        flags = tuple(flag for flag in flags if flag not in _TILES)
    return Compiler(c, cxx, line, target, flags, options, untested)


def _loads_tiles(cxx: str, native: str) -> bool:
    """Return whether an optimized program loads the tile configuration that it has stored.

    Raises OSError or SubprocessError if that cannot be tested, as in a full temporary directory, or
    in one where programs cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tiles"
        command = [cxx, native, "-O3", "-x", "c++", "-", "-o", str(program)]
        subprocess.run(
            command, input=_TILE_PROGRAM.encode(), capture_output=True, check=True, timeout=120
        )
        done = subprocess.run([str(program)], capture_output=True, check=False, timeout=20)
    if done.returncode not in (0, 1, -signal.SIGILL):
        done.check_returncode()
    return done.returncode == 0


def _prove_standard(cxx: str, version: str) -> None:
    """Raise ToolMissing if a compiler lacks the C++ standard that llama.cpp requires."""
    output = _run(cxx, f"-std={_STANDARD}", "-dM", "-E", "-x", "c++", "-")
    has = re.search(r"^#define __cplusplus (\d+)", output, re.M)
    if has is None or int(has[1]) < _YEAR:
        hint = f"use GCC 9, Clang 9 or later, named in CC and CXX; {_HINT}"
        msg = f"llama.cpp needs {_STANDARD}, for which {version} ({cxx}) is too old: {hint}"
        raise ToolMissing(msg, cxx, hint)


def _run(program: str, *args: str) -> str:
    env = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [program, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            env=env,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{program} cannot be run: {error}; {_HINT}", program, _HINT) from error
    if done.returncode != 0 and args[0] == "--version":
        output = (done.stderr or done.stdout).strip()
        raise ToolMissing(
            f"`{program} --version` exited with {done.returncode}: {output}; {_HINT}",
            program,
            _HINT,
        )
    if done.returncode != 0 and "native" in args[0] and "native" not in done.stderr:
        # A compiler without this option reports it. Any other error must not be cached as an
        # answer.
        output = done.stderr.strip() or f"status {done.returncode}"
        raise ToolMissing(
            f"`{program} {args[0]}` did not report the features of this processor: {output}; "
            f"{_HINT}",
            program,
            _HINT,
        )
    return done.stdout if done.returncode == 0 else ""
