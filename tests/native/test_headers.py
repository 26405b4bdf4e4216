"""Unit test the headers that patches add, without llama.cpp, with sanitizers and real files.

`qa/slips` shows that each group of their tests can fail.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cpp_kit import ROOT, SHARED, STRICT, compiled, run, sanitizers

from pyllamakv.verification.header_tests import HEADERS, Header, HeaderResult, run_header_tests

STUBS = f"-I{ROOT / 'tests' / 'native' / 'stubs'}"
INCLUDES = (f"-I{SHARED / 'src'}", STUBS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeaderResult]:
    """Run the tests of all headers, under sanitizers where the toolchain has them."""
    files = {path.relative_to(SHARED).as_posix(): path.read_bytes() for path in SHARED.rglob("*.h")}
    sanitize = bool(sanitizers(tmp_path_factory.mktemp("probe")))
    return {each.path: each for each in run_header_tests(files, sanitize=sanitize)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="files need Linux")
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: Path(header.path).stem)
@pytest.mark.regression(
    "a flipped bit in the header of a kept cache made it look never flushed, and the file was "
    "recreated",
    by="fuzzing",
    of="patches",
)
def test_header_groups_pass(results: dict[str, HeaderResult], header: Header) -> None:
    """Every group passes without a sanitizer error and leaves no file."""
    result = results[header.path]
    if any("Operation not supported" in message for _, message in result.failed):
        pytest.skip("this file system does not support fallocate")
    assert not result.problem
    assert result.groups > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama-kv-defrag.h", ()),
        ("llama-kv-settings.h", ()),
        ("llama-kv-mmap.h", ()),
        ("llama-kv-mmap.h", ("-DLLAMA_KV_NO_MMAP",)),
    ],
)
def test_header_is_clean_cpp11(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    """The header compiles without warnings as C++11, the standard of the oldest release."""
    source = tmp_path / "use.cpp"
    source.write_text(f'#include "{name}"\nint main() {{ return 0; }}\n', encoding="utf-8")
    result = compiled(source, tmp_path, "-O0", *STRICT, *flags, *INCLUDES)
    assert result.returncode == 0, result.stderr


def test_platforms_without_mapped_memory_refuse_by_name(tmp_path: Path) -> None:
    """A build without mapped memory reports an error and does not use the heap instead."""
    source = tmp_path / "refuse.cpp"
    source.write_text(
        '#include "llama-kv-mmap.h"\n#include <cstdio>\n'
        "int main() {\n"
        "    if (llama_kv_mmap::make({}, 32, 1) != nullptr) { return 3; }\n"
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
    result = compiled(source, tmp_path, "-std=c++17", "-DLLAMA_KV_NO_MMAP", *INCLUDES)
    assert result.returncode == 0, result.stderr
    ran = run(tmp_path / "refuse")
    assert ran.returncode == 0 and "no mapped memory" in ran.stdout


def test_the_page_lists_every_metric() -> None:
    """The tables of docs/server.md list the metrics of the headers, in the same order."""
    page = (ROOT / "docs" / "server.md").read_text("utf-8")
    counters, parks = (
        re.findall(
            r'\{ "(\w+)", +"(?:counter|gauge)"',
            (SHARED / "tools" / "server" / name).read_text("utf-8"),
        )
        for name in ("server-kv-metrics.h", "server-park.h")
    )
    assert (len(counters), len(parks)) == (11, 5)
    assert re.findall(r"^\| `llamacpp:kv_(\w+)` \|", page, re.MULTILINE) == counters
    assert re.findall(r"^\| `llamacpp:(park\w+|resumes_total)` \|", page, re.MULTILINE) == parks
