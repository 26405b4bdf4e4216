"""How mutants are compiled: a failing compiler or a hanging program gives no result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mutation_kit import some

from pyllamakv.verification.header_tests import HEADERS
from qa.mutation import (
    compile_commands,
    compiling,
    header_tests,
    mutant_results,
    resource_limits,
)
from qa.mutation.mutant_evaluation import MutantEvaluator


@pytest.mark.parametrize(
    ("said", "ending", "refused"),
    [
        ("src/llama-kv-cache.cpp:431:13: error: 'defrag' was not declared", "exit 1", True),
        ("src/llama-context.h:6:10: fatal error: llama-kv-mmap.h: No such file", "exit 1", True),
        ("a.cpp:(.text+0x1f): undefined reference to `llama_kv_counters_get'", "exit 1", True),
        ("c++: fatal error: Killed signal terminated program cc1plus", "exit 1", False),
        ("src/a.cpp:3:7: internal compiler error: Segmentation fault", "exit 1", False),
        ("ar: libllama.a: malformed archive", "exit 1", False),
        ("src/a.cpp:1:1: error: so far, and then", "kill -9 $$", False),
        ("", "exit 1", False),
    ],
)
def test_a_compiler_that_breaks_refuses_nothing(
    tmp_path: Path, said: str, ending: str, refused: bool
) -> None:
    """Only an error at a place in the text, or a missing name, is about the mutant."""
    words = ["sh", "-c", f'echo "$0" >&2; {ending}', said]
    with pytest.raises(compiling.CompileError if refused else compiling.CompilerCrash):
        compiling.run(words, tmp_path)


def test_a_compiler_that_hangs_refuses_nothing(tmp_path: Path, monkeypatch) -> None:
    """Nor does one that has too much beside it."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.2)
    with pytest.raises(compiling.CompilerCrash, match=r"sleep took more than 0\.2 seconds"):
        compiling.run(["sleep", "30"], tmp_path)


def test_a_broken_compiler_leaves_a_mutant_not_judged(tmp_path: Path, monkeypatch) -> None:
    """It is asked again by the next run, as is what an earlier one took for a refusal."""
    monkeypatch.setattr(mutant_results, "_folder", lambda: tmp_path)

    def build(*_: object, **__: object) -> None:
        raise compiling.CompilerCrash("c++ took more than 900 seconds")

    shop = SimpleNamespace(folder=tmp_path, build=build)
    built = SimpleNamespace(id="v", folder=tmp_path, manifest=None)
    judge = MutantEvaluator(built, shop, [], (), {})  # type: ignore[arg-type]
    found = judge.answer(some(), time.monotonic() + 60)
    assert (found.outcome, found.killed) == (mutant_results.NOT_EVALUATED, False)
    assert judge.recall(some()) is None
    for said, known in (("c++ took more than 900 seconds", False), ("a.h:1:2: error: no", True)):
        shop.build = lambda *_, said=said, **__: SimpleNamespace(error=said)
        found = judge.answer(some(), time.monotonic() + 60)
        assert judge.recall(some()) == (found if known else None)


def test_a_toolchain_without_sanitizers_is_told_from_a_broken_one(
    tmp_path: Path, monkeypatch
) -> None:
    """The first mutant is left out, and the second has no result."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    said = "/usr/bin/ld: cannot find -lasan: No such file or directory"

    def run(*_: object) -> None:
        raise compiling.CompilerCrash("c++ ended with 1", said)

    monkeypatch.setattr(compiling, "run", run)
    header = next(each for each in HEADERS if each.source is not None)
    assert header.source is not None
    driver = header_tests.HeaderTest(header, b"", header.source)
    assert driver._program(b"", header_tests._MODES[1]).error
    with pytest.raises(compiling.CompilerCrash):
        driver._program(b"", header_tests._MODES[0])


@pytest.mark.slow
@pytest.mark.parametrize(("times", "passed"), [(1, True), (2, False)])
def test_a_hang_of_a_group_is_believed_when_it_comes_twice(
    tmp_path: Path, monkeypatch, times: int, passed: bool
) -> None:
    """A machine that was stopped for half a minute catches nothing."""
    monkeypatch.setattr(header_tests, "_PATIENCE", 1.0)
    path = tmp_path / "driver"
    path.write_text(
        f'#!/bin/sh\ncd "{tmp_path}"; echo >> asked\n'
        f"[ $(wc -l < asked) -gt {times} ] || exec sleep 30\n"
    )
    path.chmod(0o755)
    program = header_tests.Program(path, with_folder=False, bounded=False)
    assert program.passes("group") is passed


def test_joined_sources_are_read_from_the_copy(tmp_path: Path, monkeypatch) -> None:
    """What CMake generates names files of the build's tree: a header read twice is an error."""
    root, objects, tree = (tmp_path / name for name in ("tree", "objects", "shop/tree"))
    joined = objects / "Unity" / "unity_0.cxx"
    joined.parent.mkdir(parents=True)
    joined.write_text(f'#include "{root}/src/a.cpp"\n#include "{root}/src/b.cpp"\n')
    files = {"joined.o": joined, "one.o": root / "src" / "one.cpp", "shim.o": tmp_path / "shim.cpp"}
    commands = [
        {"file": str(path), "command": f"/usr/bin/ccache c++ -I{root}/src -O3 -o {made} -c {path}"}
        for made, path in files.items()
    ]
    (objects / "compile_commands.json").write_text(json.dumps(commands))
    read = {"joined.o": frozenset({"src/a.cpp", "src/b.cpp", "src/all.h"})}
    monkeypatch.setattr(compile_commands, "_reads", lambda wanted: read)
    wanted = SimpleNamespace(tree=root, objects=objects)
    units = {each.output: each for each in compile_commands.units(wanted, tree)}  # type: ignore[arg-type]
    assert units["joined.o"].holds == {"src/a.cpp", "src/b.cpp"} and not units["joined.o"].ours
    assert units["one.o"].holds == {"src/one.cpp"} and units["shim.o"].ours
    own = Path(units["joined.o"].words[-1])
    assert str(root) not in own.read_text() + " ".join(units["joined.o"].words)
    assert f'"{tree}/src/a.cpp"' in own.read_text()
    assert units["shim.o"].words == ("c++", f"-I{tree}/src", "-O1", "-o", "{output}", "-c",
                                     str(tmp_path / "shim.cpp"))  # fmt: skip


def test_a_byte_too_many_is_noticed(tmp_path: Path) -> None:
    """Where the C library can check its heap, a block that was written beyond its end aborts."""
    compiler = shutil.which("cc")
    if compiler is None or not resource_limits.checked_heap():
        pytest.skip("no compiler, or no heap that is checked")
    source = tmp_path / "beyond.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int main(int n, char **v) { volatile char *p = malloc(256);\n"
        "p[255 + n - 1] = **v; free((void *)p); return 0; }\n"
    )
    program = str(tmp_path / "beyond")
    subprocess.run([compiler, "-O0", str(source), "-o", program], check=True)
    own = {**os.environ, **resource_limits.checked_heap()}
    ended = [
        subprocess.run([program, *more], env=own, capture_output=True).returncode
        for more in ([], ["one"])
    ]
    assert ended == [0, -signal.SIGABRT]
