"""The logic of the patch mmap-kv by itself: no llama.cpp, one compiler, sanitizers, real files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyllamakv.patching import hunks

ROOT = Path(__file__).resolve().parent.parent
PATCH = ROOT / "patches" / "mmap-kv" / "0.3.9" / "mmap-kv.patch"
SOURCE = ROOT / "tests" / "native" / "kv_mmap.cpp"
HEADER = "llama-kv-mmap.h"
GROUPS = (
    "checksum",
    "copy",
    "damaged",
    "dirty",
    "foreign",
    "guard",
    "keep",
    "layout",
    "lazy",
    "options",
    "scratch",
    "space",
    "trim",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STRICT = ("-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files need Linux")


def header_text() -> str:
    """Return the header as the patch adds it."""
    (hunk,) = hunks.read(PATCH).file(f"src/{HEADER}").hunks
    return "".join(added.rstrip(b"\n").decode() + "\n" for added in hunk.added)


def compile_(folder: Path, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile a program against the header in ``folder``, or skip without a compiler."""
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            break
    else:
        pytest.skip("no C++ compiler here")
    command = [found, *flags, "-I", str(folder), str(source), "-o", str(folder / source.stem)]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run groups of the tests."""
    return subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header, under sanitizers where the toolchain has them."""
    folder = tmp_path_factory.mktemp("kv_mmap")
    (folder / HEADER).write_text(header_text(), encoding="utf-8")
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n", encoding="utf-8")
    built = compile_(folder, probe, *SANITIZE)
    flags = SANITIZE if not built.returncode and not run(folder / "probe").returncode else ()
    result = compile_(folder, SOURCE, "-std=c++17", "-g", "-O1", *flags)
    assert result.returncode == 0, result.stderr
    return folder / SOURCE.stem


def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_header(program: Path, group: str, tmp_path: Path) -> None:
    """A group holds, breaks no memory rule, and leaves no file behind."""
    result = run(program, group, str(tmp_path))
    if "Operation not supported" in result.stdout:
        pytest.skip("this file system cannot secure space")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [(), ("-DLLAMA_KV_NO_MMAP",)])
def test_header_compiles_without_a_warning(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The header is clean C++11, with and without the memory that it is about."""
    (tmp_path / HEADER).write_text(header_text(), encoding="utf-8")
    source = tmp_path / "use.cpp"
    source.write_text(
        f'#include "{HEADER}"\n'
        "int main() { return llama_kv_mmap::make({}, 32, 1) != nullptr; }\n",
        encoding="utf-8",
    )
    result = compile_(tmp_path, source, *STRICT, *flags)
    assert result.returncode == 0, result.stderr
    assert run(tmp_path / "use").returncode == 0  # the heap, which is everywhere


def test_platforms_without_it_refuse_by_name(tmp_path: Path) -> None:
    """What was compiled without mapped memory says so, and never falls back to the heap."""
    (tmp_path / HEADER).write_text(header_text(), encoding="utf-8")
    source = tmp_path / "refuse.cpp"
    source.write_text(
        f'#include "{HEADER}"\n#include <cstdio>\n'
        "int main() {\n"
        "    llama_kv_mmap::current().kind = llama_kv_mmap::KIND_ANON;\n"
        "    try {\n"
        "        llama_kv_mmap::make({}, 32, 1);\n"
        "    } catch (const llama_kv_mmap::error & e) {\n"
        "        std::puts(e.what());\n"
        "        return e.why == llama_kv_mmap::FAILURE_UNSUPPORTED ? 0 : 2;\n"
        "    }\n"
        "    return 1;\n"
        "}\n",
        encoding="utf-8",
    )
    result = compile_(tmp_path, source, "-std=c++17", "-DLLAMA_KV_NO_MMAP")
    assert result.returncode == 0, result.stderr
    answer = run(tmp_path / "refuse")
    assert answer.returncode == 0 and "no mapped memory" in answer.stdout


def test_tests_can_fail(tmp_path: Path) -> None:
    """Faults put into the header are found: the tests are not empty."""
    text = header_text()
    faults = {
        "lazy": ("MADV_DONTNEED) == 0", "MADV_NORMAL) == 0"),
        "trim": ("begin + n_used*n_one, (n_cells - n_used)", "begin, n_cells"),
        "copy": ("n_used = std::max(n_used, used_max(s))", "n_used = used_max(0)"),
        "keep": ("if (!is_made) {", "if (false) {"),
        "dirty": ("head()->state = STATE_DIRTY;", ""),
        "foreign": ("found.layout != want.layout", "false"),
        "damaged": ("head()->sum_data != sum_data()", "false"),
        "space": ("n > limit.rlim_cur", "false && n > limit.rlim_cur"),
        "scratch": ("f.is_new && !(", "false && !("),
        "options": ("if (!one.expired()) {", "{"),
        "checksum": ("mix(res, mix(sums[i], words[i]))", "mix(res, sums[i])"),
        "guard": ("PROT_NONE", "PROT_READ | PROT_WRITE"),
        "layout": ("round_up(n + page_size(), align)", "round_up(n, align)"),
    }
    for group, (right, wrong) in faults.items():
        assert text.count(right) >= 1, right
        folder = tmp_path / group
        folder.mkdir()
        (folder / HEADER).write_text(text.replace(right, wrong, 1), encoding="utf-8")
        built = compile_(folder, SOURCE, "-std=c++17", "-O0", "-w")
        assert built.returncode == 0, built.stderr
        found = run(folder / SOURCE.stem, group, str(folder))
        assert found.returncode != 0, f"{group} does not notice {wrong!r}"
