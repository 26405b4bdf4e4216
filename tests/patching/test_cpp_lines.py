"""Lines of C++ are classified by their effect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllamakv.patching import cpp_lines


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"    return 1;\n", "return"),
        (b"  if (x) return 1;\n", "return"),
        (b"} else if (x) {\n", "condition"),
        (b"for (auto & c : cells) {", "loop"),
        (b'LLAMA_LOG_WARN("%s", x);', "log"),
        (b"GGML_ASSERT(n > 0);", "assert"),
        (b"#include <vector>", "preprocessor"),
        (b"cache->update(lctx);", "call"),
        (b"x = y + 1;", "statement"),
        (b'throw std::runtime_error("x");', "throw"),
        (b"  }\n", ""),
        (b"// only words", ""),
    ],
)
def test_line_kinds_are_classified(line: bytes, kind: str) -> None:
    """Each class has examples."""
    assert cpp_lines.kind(line) == kind
    assert cpp_lines.is_significant(line) is bool(kind)


def test_calls_exclude_keywords_strings_and_comments() -> None:
    """Keywords, strings and comments are not calls; templates and methods are."""
    lines = [
        b'if (a->find_slot(x) && min<int>(1, 2)) { log("f(x)"); } // g(x)\n',
        b"#define h(x)\n",
    ]
    assert cpp_lines.calls(lines) == {"find_slot": 1, "min": 1, "log": 1}
    assert set(cpp_lines.names([b"auto cell = cells[i].delta; // words\n"])) == {
        "cell", "cells", "delta",
    }  # fmt: skip


@settings(deadline=None)
@given(st.binary())
def test_random_bytes_are_classified_without_error(line: bytes) -> None:
    """Any bytes are classified."""
    cpp_lines.kind(line)
    cpp_lines.calls([line])
    assert cpp_lines.is_significant(line) == bool(cpp_lines.kind(line))
