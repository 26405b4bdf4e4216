"""Test that a patch is not carried if it uses names that the release lacks."""

from __future__ import annotations

import pytest
from patching_kit import diff

from pyllamakv.patching import hunks
from pyllamakv.patching.used_names import Sources, folders, is_source, lost

STOCK = {"src/a.cpp": b"int first() {\n    return 0;\n}\n"}
BASE = {
    "src/a.cpp": "int first() { return old_name + find_slot(1, 2) + run(3); }",
    "src/b.h": "// gone_word\nint find_slot(int a, int b); int run(int c);",
}


def reason(line: bytes, after: dict[str, str]) -> str:
    """Return what is lost for a patch that adds a line."""
    new = {"src/a.cpp": STOCK["src/a.cpp"].replace(b"    return", line + b"\n    return")}
    return lost(hunks.parse(diff(STOCK, new)), Sources(BASE), Sources(after))


@pytest.mark.parametrize(
    ("line", "old", "new", "wanted"),
    [
        (b"    old_name = 1;", "old_name", "new_name", "`old_name`"),
        (b"    find_slot(n, 1);", "find_slot(1, 2)", "find_slot(1, 2, 3)", ""),
        (b"    find_slot(n, (1, 2));", "find_slot", "found_slot", "`find_slot`"),
        (b"    word; gone_word(); run(1, 2);", "run", "runs", ""),
        (b"    my_name(old_names);", "old_name", "new_name", ""),
        (b"    const int old_name = 1; use(old_name);", "old_name", "new_name", ""),
        (b"    return find_slot(n, 1);", "find_slot", "found_slot", "`find_slot`"),
        (b"    if (ok && find_slot(n, 1))", "find_slot", "found_slot", "`find_slot`"),
        (b"    x = a * old_name;", "old_name", "new_name", "`old_name`"),
        (b"    x =\n    a * old_name;", "old_name", "new_name", "`old_name`"),
        (b"    run(a * old_name, b & old_name);", "old_name", "new_name", "`old_name`"),
        (b"    if (i > old_name) {", "old_name", "new_name", "`old_name`"),
        (b"    case 1: find_slot(n, 1);", "find_slot", "found_slot", "`find_slot`"),
        (b"    void f(word & old_name);", "old_name", "new_name", "`old_name`"),
        (b"    struct word;\n    void f(word & old_name);", "old_name", "new_name", ""),
        (b"    for (const auto * old_name = a;;)", "old_name", "new_name", ""),
        (b"    std::map<a, list<b>> old_name;", "old_name", "new_name", ""),
        (b"#endif\n    int old_name[3];", "old_name", "new_name", ""),
        (b"    f(); // word\n    int old_name = 1;", "old_name", "new_name", ""),
        (b"    public:\n    int old_name = 1;", "old_name", "new_name", ""),
    ],
    ids=[
        "name",
        "declared",
        "function",
        "comment",
        "other",
        "own",
        "returned",
        "and",
        "product",
        "lines",
        "operators",
        "greater",
        "case",
        "value",
        "type",
        "loop",
        "template",
        "preprocessor",
        "after-a-comment",
        "label",
    ],
)
def test_missing_multiword_names_are_reported(line: bytes, old: str, new: str, wanted: str) -> None:
    """Only names of several words that the code of the base has are searched."""
    after = {**BASE, "src/a.cpp": BASE["src/a.cpp"].replace(old, new)}
    if wanted:
        after["src/b.h"] = BASE["src/b.h"].replace(old, new)
    assert reason(line, after) == wanted


def test_call_with_a_changed_argument_count_is_reported() -> None:
    """A call matches if any call or declaration has the same number of arguments."""
    after = {path: text.replace("2)", "2, 3)").replace("int b", "int b, int c")
             for path, text in BASE.items()}  # fmt: skip
    assert reason(b"    find_slot(f(1, 2), {3, 4});", after) == "`find_slot` with 2 arguments"
    assert not reason(b"    find_slot(1, 2, 3);", after)
    assert not reason(b"    // find_slot(1, 2)", after)


def test_a_call_after_a_condition_is_no_declaration() -> None:
    """The number of its arguments is compared."""
    after = {path: text.replace("2)", "2, 3)").replace("int b", "int b, int c")
             for path, text in BASE.items()}  # fmt: skip
    assert reason(b"    if (ok && find_slot(n, 1)) {", after) == "`find_slot` with 2 arguments"


def test_missing_included_file_is_reported() -> None:
    """The file is in the directory of the including file."""
    assert reason(b'#include "b.h"', {"src/a.cpp": BASE["src/a.cpp"] + BASE["src/b.h"]}) == (
        "`src/b.h`"
    )
    assert not reason(b'#include "own.h"', BASE)


def test_source_directories_include_public_headers() -> None:
    """They are those of the changed files, and of the public headers."""
    new = {"src/a.cpp": STOCK["src/a.cpp"] + b"int b;\n"}
    found = folders(hunks.parse(diff(STOCK, new)))
    assert found == {"src", "include", "ggml/include"}
    assert is_source("src/b.h", found)
    assert not is_source("src/models/b.h", found)
    assert not is_source("src/CMakeLists.txt", found)
