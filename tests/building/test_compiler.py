"""Test that compilers are found, queried once, and reported with a hint if missing."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from building_kit import script

from pyllamakv.building import compiler, doctor
from pyllamakv.errors import ToolMissing

if TYPE_CHECKING:
    from pathlib import Path

BODY = """
echo called >>"$(dirname "$0")/calls"
case "$*" in
--version) echo 'g++ (Stand-in 1.2.3-4) 1.2.3'; echo 'Copyright' ;;
-dumpmachine) echo x86_64-standin ;;
*c++17*) echo '#define __cplusplus 201703L' ;;
*native*) echo '#define __AVX2__ 1'; echo '#define __SSE3__ 1'; echo '#define __OTHER__ 1' ;;
esac
"""


def programs(folder: Path, *names: str, body: str = BODY) -> dict[str, str]:
    """Write fake compilers and return an environment without other ones."""
    for name in names:
        script(folder / name, body)
    return {"PATH": str(folder)}


def calls(folder: Path) -> int:
    """Return how often the fake compilers were run."""
    path = folder / "calls"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def test_compiler_reports_version_target_and_cpu_flags(tmp_path: Path) -> None:
    """Version, target and the native CPU flags come from the compiler itself."""
    found = compiler.find(environ=programs(tmp_path, "gcc", "g++"))
    assert found.cxx == str(tmp_path / "g++")
    assert found.identity == "gcc (Stand-in 1.2.3-4) 1.2.3 for x86_64-standin"
    assert found.native_flags == ("avx2", "pni")


#: Compile the test of AMX into a script, and define AMX.
AMX = """*-O3*)
    for output; do :; done
    printf '#!/bin/sh\\n{program}\\n' >"$output"; /bin/chmod {mode} "$output"; exit {status} ;;
*native*) echo '#define __AMX_TILE__ 1'; echo '#define __AMX_INT8__ 1';"""


@pytest.mark.parametrize("status", ["exit 0", "exit 1", "kill -ILL $$"])
def test_amx_is_used_only_if_the_loaded_tile_configuration_is_the_stored_one(
    tmp_path: Path, status: str
) -> None:
    """GCC 12 removes stores to the configuration, so ggml's AMX code ends with SIGILL."""
    words = AMX.format(program=status, mode="+x", status=0)
    body = BODY.replace("*native*)", words)
    cache = tmp_path / "cache.json"
    found = compiler.find(cache, programs(tmp_path, "gcc", "g++", body=body))
    works = status == "exit 0"
    assert ("amx_int8" in found.native_flags) == works
    assert found.native_options == (() if works else ("-mno-amx-tile", "-mno-amx-int8"))
    assert {"avx2", "pni"} <= set(found.native_flags)
    assert not found.untested
    assert cache.exists()


@pytest.mark.parametrize(
    ("program", "mode", "status", "reason"),
    [
        ("exit 2", "+x", 0, "non-zero exit status 2"),
        ("exit 0", "-x", 0, "Permission denied"),
        ("exit 0", "+x", 1, "g++"),
    ],
    ids=["another status", "no execution", "no compilation"],
)
def test_amx_test_that_cannot_run_is_not_cached(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    mode: str,
    status: int,
    reason: str,
) -> None:
    """AMX is disabled with the reason, and the next call tests again."""
    words = AMX.format(program=program, mode=mode, status=status)
    env = programs(tmp_path, "gcc", "g++", body=BODY.replace("*native*)", words))
    cache = tmp_path / "cache.json"
    found = compiler.find(cache, env)
    assert reason in found.untested
    assert found.native_options == ("-mno-amx-tile", "-mno-amx-int8")
    assert "amx_int8" not in found.native_flags
    assert not cache.exists()
    monkeypatch.setattr(compiler, "find", lambda: found)
    probe = doctor.cpu()
    assert f"its test failed: {found.untested}" in probe.found
    assert "TMPDIR" in probe.hint


def test_native_options_of_this_compiler_disable_what_the_flags_lack() -> None:
    """The macros that ggml tests are those of the flags, also if AMX is disabled."""
    found = compiler.find()
    words = [found.cxx, "-march=native", *found.native_options, "-dM", "-E", "-x", "c++", "-"]
    if not found.target.startswith("x86_64"):
        pytest.skip("AMX is an instruction set of x86-64")
    done = subprocess.run(words, input="", capture_output=True, check=True, text=True)
    assert ("__AMX_INT8__" in done.stdout) == ("amx_int8" in found.native_flags)


def test_cached_compiler_facts_run_no_compiler(tmp_path: Path) -> None:
    """With a cache, the compiler is run again only after its file changes."""
    env = programs(tmp_path / "bin", "gcc", "g++")
    cache = tmp_path / "some" / "cache.json"
    first = compiler.find(cache, env)
    count = calls(tmp_path / "bin")
    assert compiler.find(cache, env) == first
    assert calls(tmp_path / "bin") == count
    os.utime(tmp_path / "bin" / "g++", (1, 1))
    assert compiler.find(cache, env) == first
    assert calls(tmp_path / "bin") > count


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_damaged_cache_is_replaced_by_a_compiler_query(tmp_path: Path, text: str) -> None:
    """An unreadable cache is replaced."""
    cache = tmp_path / "cache.json"
    cache.write_text(text, encoding="utf-8")
    env = programs(tmp_path, "gcc", "g++")
    assert compiler.find(cache, env).native_flags == ("avx2", "pni")


def test_damaged_cache_entry_is_replaced_by_a_compiler_query(tmp_path: Path) -> None:
    """An entry of another structure is replaced."""
    cache = tmp_path / "cache.json"
    env = programs(tmp_path, "gcc", "g++")
    found = compiler.find(cache, env)
    cache.write_text(cache.read_text("utf-8").replace('"target"', '"aim"'), encoding="utf-8")
    assert compiler.find(cache, env) == found


def test_cc_and_cxx_select_the_compilers(tmp_path: Path) -> None:
    """CC and CXX override the search; a launcher in front of the compiler is removed."""
    env = programs(tmp_path, "gcc", "g++", "mycc", "myc++")
    env |= {"CC": "ccache mycc", "CXX": str(tmp_path / "myc++")}
    found = compiler.find(environ=env)
    assert (found.c, found.cxx) == (str(tmp_path / "mycc"), str(tmp_path / "myc++"))


def test_c_and_cxx_compilers_are_of_one_family(tmp_path: Path) -> None:
    """A lone gcc is not combined with clang++."""
    found = compiler.find(environ=programs(tmp_path, "gcc", "clang", "clang++"))
    assert (found.c, found.cxx) == (str(tmp_path / "clang"), str(tmp_path / "clang++"))


@pytest.mark.regression(
    'the result of a compiler that ran out of memory was cached as "no flags for this processor"',
    by="faults",
    of="Python",
)
def test_failed_compiler_query_is_not_cached(tmp_path: Path) -> None:
    """If the compiler fails, for example without memory, no flags are stored."""
    dying = BODY.replace(
        "*native*) echo", "*native*) echo 'cc1plus: out of memory' >&2; exit 1 ; echo"
    )
    env = programs(tmp_path / "bin", "gcc", "g++", body=dying)
    cache = tmp_path / "cache.json"
    with pytest.raises(ToolMissing, match="out of memory"):
        compiler.find(cache, env)
    programs(tmp_path / "bin", "gcc", "g++")
    assert compiler.find(cache, env).native_flags == ("avx2", "pni")


def test_compiler_without_native_uses_no_tuning_flags(tmp_path: Path) -> None:
    """A compiler that does not support `native` is reported, and no tuning flag is used."""
    plain = BODY.replace(
        "*native*) echo", '*native*) echo "unknown argument: $1" >&2; exit 1 ; echo'
    )
    env = programs(tmp_path, "gcc", "g++", body=plain)
    assert compiler.find(environ=env).native_flags == ()


@pytest.mark.parametrize(
    "answer",
    ["echo 'unrecognized command line option -std=c++17' >&2; exit 1", "echo '{} 201500L'", ":"],
)
def test_compiler_without_the_required_standard_is_refused(tmp_path: Path, answer: str) -> None:
    """A compiler without the required standard is refused with a remedy, and is not stored."""
    answer = answer.format("#define __cplusplus")
    old = BODY.replace("echo '#define __cplusplus 201703L'", answer)
    cache = tmp_path / "cache.json"
    env = programs(tmp_path / "bin", "gcc", "g++", body=old)
    with pytest.raises(ToolMissing, match=r"c\+\+17.*1\.2\.3.*too old.*GCC 9"):
        compiler.find(cache, env)
    programs(tmp_path / "bin", "gcc", "g++")
    assert compiler.find(cache, env).native_flags == ("avx2", "pni")


def test_missing_compiler_error_names_the_package(tmp_path: Path) -> None:
    """Without a compiler, the error names the package to install."""
    with pytest.raises(ToolMissing, match=r"C and C\+\+ compiler.*apt-get install g\+\+"):
        compiler.find(environ={"PATH": str(tmp_path)})
    with pytest.raises(ToolMissing, match=r"a C\+\+ compiler"):
        compiler.find(environ=programs(tmp_path, "gcc"))


@pytest.mark.parametrize(
    ("value", "words"), [("absent-compiler", "not on PATH"), ("gcc -m32", "without arguments")]
)
def test_invalid_cxx_is_refused(tmp_path: Path, value: str, words: str) -> None:
    """A CXX that names no program, or more than a compiler, is refused."""
    env = {**programs(tmp_path, "gcc", "g++"), "CXX": value}
    with pytest.raises(ToolMissing, match=words):
        compiler.find(environ=env)


def test_failing_compiler_is_not_accepted(tmp_path: Path) -> None:
    """A compiler that always fails is not used."""
    env = programs(tmp_path, "gcc", "g++", body="echo no licence >&2; exit 3\n")
    with pytest.raises(ToolMissing, match="no licence"):
        compiler.find(environ=env)


def test_compiler_launcher_prefers_ccache_and_can_be_disabled(tmp_path: Path) -> None:
    """Ccache is preferred, and can be disabled."""
    env = programs(tmp_path, "sccache")
    assert compiler.launcher(env) == str(tmp_path / "sccache")
    env = programs(tmp_path, "ccache")
    assert compiler.launcher(env) == str(tmp_path / "ccache")
    assert compiler.launcher({**env, "PYLLAMAKV_COMPILER_LAUNCHER": "none"}) is None
    assert compiler.launcher({"PATH": str(tmp_path / "empty")}) is None
