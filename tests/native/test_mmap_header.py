"""Test the shared files of mmap-kv without llama.cpp: one compiler, sanitizers, real files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cpp_kit import ROOT, STRICT, Header, run

HEADER = Header(
    "llama-kv-mmap.h", "mmap-kv", ROOT / "tests" / "native" / "kv_mmap.cpp", places=True
)
GROUPS = (
    "answers",
    "checksum",
    "contract",
    "copy",
    "counting",
    "damaged",
    "dirty",
    "empty",
    "foreign",
    "keep",
    "layout",
    "lazy",
    "numbers",
    "options",
    "owners",
    "power",
    "scratch",
    "space",
    "trim",
    "zero",
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files need Linux")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tests of the header."""
    return HEADER.program(tmp_path_factory.mktemp("kv_mmap"))


@pytest.mark.slow
def test_every_group_is_listed(program: Path) -> None:
    """The program knows the groups that are run below, and no others."""
    assert tuple(run(program).stdout.split()) == GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.regression(
    "one lost bit in the header of a kept cache made it one that was never kept, and it was "
    "begun anew",
    by="fuzzing",
    of="patches",
)
def test_mmap_header_groups_pass(program: Path, group: str, tmp_path: Path) -> None:
    """A group holds, breaks no memory rule, and leaves no file behind."""
    result = HEADER.run(program, group, tmp_path)
    if "Operation not supported" in result.stdout:
        pytest.skip("this file system cannot secure space")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DLLAMA_KV_NO_MMAP",)])
def test_header_compiles_without_a_warning(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The header is clean C++11, with and without the memory that it is about."""
    source = tmp_path / "use.cpp"
    source.write_text(
        f'#include "{HEADER.name}"\n'
        "int main() { return llama_kv_mmap::make({}, 32, 1) != nullptr; }\n",
        encoding="utf-8",
    )
    result = HEADER.compile(tmp_path, *STRICT, *flags, source=source)
    assert result.returncode == 0, result.stderr
    assert run(tmp_path / "use").returncode == 0  # the heap, which is everywhere


def test_platforms_without_it_refuse_by_name(tmp_path: Path) -> None:
    """A build without mapped memory reports that, and never uses the heap instead."""
    source = tmp_path / "refuse.cpp"
    source.write_text(
        f'#include "{HEADER.name}"\n#include <cstdio>\n'
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
    result = HEADER.compile(tmp_path, "-std=c++17", "-DLLAMA_KV_NO_MMAP", source=source)
    assert result.returncode == 0, result.stderr
    answer = run(tmp_path / "refuse")
    assert answer.returncode == 0 and "no mapped memory" in answer.stdout


@pytest.mark.slow
def test_tests_can_fail(tmp_path: Path) -> None:
    """Faults put into the header are found: the tests are not empty."""
    faults = {
        "lazy": ("MADV_DONTNEED) == 0", "MADV_NORMAL) == 0"),
        "trim": ("begin + n_used*n_one, (n_cells - n_used)", "begin, n_cells"),
        "copy": ("n_used = std::max(n_used, used_max(s))", "n_used = used_max(0)"),
        "counting": ("!is_zero(begin + i*page_size())", "false"),
        "keep": ("if (!is_made) {", "if (false) {"),
        "dirty": ("head()->state = STATE_DIRTY;", ""),
        "owners": ("errno == EEXIST", "false"),
        "foreign": ("found.layout != want.layout", "false"),
        "damaged": ("head()->sum_data != sum_data()", "false"),
        "power": ("if (h->state != STATE_DIRTY) {", "if (false) {"),
        "space": ("n > limit.rlim_cur", "false && n > limit.rlim_cur"),
        "scratch": ("f.is_new && !(", "false && !("),
        "options": ("if (!one.expired()) {", "{"),
        "checksum": ("mix(res, mix(sums[i], words[i]))", "mix(res, sums[i])"),
        "contract": ("const { return data() + n_head; }", "const { return data(); }"),
        "zero": ("std::memset(base + offset, 0, begin - offset);", ""),
        "layout": ("round_up(std::max<size_t>(t.n_bytes, 1), unit)", "t.n_bytes + 64"),
    }
    HEADER.check_faults(tmp_path, faults)
