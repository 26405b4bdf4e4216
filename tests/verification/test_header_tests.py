"""`check` runs the tests of the headers that patches add, and caches the results."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpp_kit import SHARED, compiler

from pyllamakv.verification import header_tests
from pyllamakv.verification.header_tests import HEADERS, run_header_tests

DEFRAG = "src/llama-kv-defrag.h"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler()
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def shipped() -> bytes:
    return (SHARED / DEFRAG).read_bytes()


def test_every_header_with_tests_is_a_shared_file() -> None:
    """A renamed header would otherwise lose its tests."""
    for header in HEADERS:
        assert header.source is not None, header.program
        for path in (header.path, *header.needs):
            assert (SHARED / path).is_file(), path


@pytest.mark.slow
def test_the_shipped_header_passes_and_a_slip_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip in the plan is reported with the failing groups; results are cached."""
    (found,) = run_header_tests({DEFRAG: shipped()})
    assert found.problem == ""
    assert found.groups >= 10
    right = b"std::min(gap, m.len - k)"
    assert right in shipped()
    (slip,) = run_header_tests({DEFRAG: shipped().replace(right, b"gap", 1)})
    assert slip.failed
    assert slip.problem.startswith(f"{DEFRAG}: its tests fail: ")
    monkeypatch.setattr(header_tests, "_run", None)
    assert run_header_tests({DEFRAG: shipped()}) == [found]


@pytest.mark.slow
def test_a_header_that_does_not_compile_is_reported() -> None:
    """The reason has the first compiler error, without a temporary path."""
    (found,) = run_header_tests({DEFRAG: b"#error no\n"})
    assert found.groups == 0
    assert found.problem.startswith(f"{DEFRAG}: its tests do not compile: {DEFRAG}:1:")


def test_tree_without_the_headers_runs_no_header_tests() -> None:
    """A tree without the patches has none of the headers."""
    assert run_header_tests({"src/llama.cpp": b""}) == []
