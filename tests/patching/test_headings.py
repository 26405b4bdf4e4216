"""The heading of a hunk, as git writes it, and the function that encloses a place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patching_kit import diff

from pyllamakv.patching import headings, hunk_locator, hunks

CODE = b"""\
#include "a.h"

struct other;

class cache : public memory {
public:
    int size = 0;

private:
    int used = 0;
};

int declared(
        int a,
        int b);

static int one_line(int a) { return a; }

template <typename T>
static std::vector<T> cache::find(const T & what,
        int count) const {
    int n = 0;

cleanup:
    n++;
    return {};
}

// after it
#define X 1

"""
LINES = CODE.splitlines(keepends=True)

#: Lines of C, with some that git might use as a heading.
LINE = st.sampled_from(
    ["int f(int a) {", "    f(1);", "}", "", "public:", "#if X", "\tx", "$m: a", "_y();  ", "é",
     "class c;", "// note", "x" * 90, "a" * 79 + "é" + "b" * 9, "z\r", " ", "9 a"]
)  # fmt: skip


def at(text: bytes) -> int:
    """Return the index of the only line that contains a text."""
    (found,) = [number for number, line in enumerate(LINES) if text in line]
    return found


def hunk(head: bytes, *lines: bytes) -> hunks.Hunk:
    marked = tuple(line + b"\n" for line in lines)
    return hunks.Hunk(9, 3, 9, 3, b"@@ -9,3 +9,3 @@ " + head + b"\n", marked)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=40), st.data())
def test_heading_equals_that_of_git(lines: list[str], choice: st.DataObject) -> None:
    """The heading is computed from the lines before the change."""
    place = choice.draw(st.integers(0, len(lines) - 1))
    old = "\n".join(lines).encode() + b"\n"
    new = "\n".join([*lines[:place], "changed", *lines[place + 1 :]]).encode() + b"\n"
    data = diff({"f.cpp": old}, {"f.cpp": new})
    if data:
        found = headings.Headings(hunk_locator.lines_of(old))
        for one in hunks.parse(data).files[0].hunks:
            assert found.git(hunk_locator.start_of(one)) == headings.written(one)


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        (b"static int f(int a) {", "f"),
        (b"bool a::b::find(const std::vector<int (*)()> & x, in", "a::b::find"),
        (b"llama_kv_cache::~llama_kv_cache() {", "llama_kv_cache::~llama_kv_cache"),
        (b"bool a::operator==(const a & b) const {", "a::operator=="),
        (b"GGML_API DEPRECATED(int f(int a),", "f"),
        (b"static __global__ void __launch_bounds__(32, 1) f(", "f"),
        (b"static const std::map<int, char *> NAMES = {", "NAMES"),
        (b"class cache : public memory {", "cache"),
        (b"enum class kind : int {", "kind"),
        (b"struct params llama_default_params() {", "llama_default_params"),
        (b"namespace a::b {", "a::b"),
        (b'extern  "C" {', 'extern "" {'),
    ],
)
def test_function_name_precedes_its_parentheses(heading: bytes, name: str) -> None:
    """Macros and attributes are not function names."""
    assert headings.name(heading) == name


@pytest.mark.parametrize(
    ("text", "enclosing"),
    [
        (b"#include", b""),
        (b"size = 0", b"class cache : public memory {"),
        (b"used = 0", b"class cache : public memory {"),
        (b"int b);", b"int declared("),
        (b"static int one_line", b""),
        (b"template", b""),
        (b"int n = 0", b"static std::vector<T> cache::find(const T & what,"),
        (b"n++", b"static std::vector<T> cache::find(const T & what,"),
        (b"#define", b""),
    ],
)
def test_enclosing_function_excludes_labels_and_declarations(text: bytes, enclosing: bytes) -> None:
    """Labels, declarations and ended functions do not enclose a line."""
    assert headings.Headings(LINES).enclosing(at(text)) == enclosing


def test_heading_names_the_changed_function() -> None:
    """It is used if the change is in that function, in C and C++ only."""
    inside = hunk(b"int f(int a) {", b" \tx();", b"-\ty();", b" }")
    assert headings.expected(inside, "src/a.cpp") == b"int f(int a) {"
    assert headings.expected(inside, "a.py") == b""
    for head in (b"", b"public:", b"class other;", b"static int f() { return 1; }"):
        assert headings.expected(hunk(head, b" \tx();", b"-\ty();"), "a.h") == b""
    for line in (b" }", b" int g() {", b"+int g() {", b"-static int x;"):
        assert headings.expected(hunk(b"int f(int a) {", line, b"-\ty();"), "a.h") == b""
    label = hunk(b"int f(int a) {", b" cleanup:", b"-\ty();")
    assert headings.expected(label, "a.c") == b"int f(int a) {"


def test_function_with_another_signature_is_the_same() -> None:
    """Functions are equal by name; lines outside of functions are not compared."""
    found = headings.Headings(LINES)
    inside = at(b"n++")
    for head in (
        b"int cache::find(",
        b"cleanup:",
        b"static std::vector<T> cache::find(const T & w",
    ):
        assert found.same(head, inside)
        assert found.differs(head, inside) == b""
    assert found.differs(b"int other::find(", inside) == LINES[at(b"cache::find")][:-1]
    assert found.differs(b"int cache::seek(", inside)
    assert found.differs(b"int cache::seek(", at(b"#define")) == b""


@pytest.mark.parametrize(
    "line", [b"a" * 1_000_000, b'"\\' * 500_000, b"a::" * 300_000, b"<" * 10**6]
)
def test_very_long_lines_are_read(line: bytes) -> None:
    """A line of a megabyte takes no more time than a short one."""
    found = headings.Headings([line + b"\n", b"\tx\n"])
    found.differs(headings.expected(hunk(line, b" \tx", b"-\ty"), "a.c"), 1)
