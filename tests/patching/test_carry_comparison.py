"""Test that a merge has exactly the changes of the port, in each function."""

from __future__ import annotations

import pytest
from patching_kit import Files, code, diff

from pyllamakv.patching import hunks
from pyllamakv.patching.carry_comparison import Reader, difference

STOCK = {"src/a.cpp": code("first") + code("second"), "src/h.h": b"int size;\n" * 9}
FIXED = STOCK | {
    "src/a.cpp": code("first", "fix(a);") + code("second"),
    "src/new.h": b"void fix(int);\n",
}


def merged(old: Files, new: Files) -> tuple[hunks.Patch, Reader]:
    """Return a patch and a reader of the patched files."""
    return hunks.parse(diff(old, new)), lambda path: new.get(path, b"")


def test_other_changes_than_the_port_are_refused() -> None:
    """A lost line, an added line and a line in another function are found; spacing is ignored."""
    port = merged(STOCK, FIXED)
    assert not difference(*port, *port)
    spaced = FIXED | {"src/a.cpp": code("first", "    fix(a);  // why") + code("second")}
    assert not difference(*port, *merged(STOCK, spaced))
    lost = STOCK | {"src/new.h": FIXED["src/new.h"]}
    lost["src/h.h"] = b"long size;\n" + STOCK["src/h.h"]
    assert "loses lines in `first`" in difference(*port, *merged(STOCK, lost))
    moved = FIXED | {"src/a.cpp": code("first") + code("second", "fix(a);")}
    wanted = "moves lines in `first` of src/a.cpp to `second` of src/a.cpp: +fix(a);"
    assert wanted in difference(*port, *merged(STOCK, moved))
    twice = FIXED | {"src/a.cpp": code("first", "fix(a);") + code("second", "fix(a);")}
    assert "adds lines in `second`" in difference(*port, *merged(STOCK, twice))
    other = FIXED | {"src/new.h": b"void fix(long);\n"}
    assert "changes the added file src/new.h" in difference(*port, *merged(STOCK, other))


def test_a_renamed_function_is_the_same() -> None:
    """Each of its names exists on one side only. With other lines it is another function."""
    port = merged(STOCK, FIXED)
    stock = STOCK | {"src/a.cpp": STOCK["src/a.cpp"].replace(b" first(", b" renamed(")}
    fixed = FIXED | {"src/a.cpp": FIXED["src/a.cpp"].replace(b" first(", b" renamed(")}
    for tokens in (None, {}):
        assert not difference(*port, *merged(stock, fixed), tokens=tokens)
    more = fixed | {"src/a.cpp": fixed["src/a.cpp"].replace(b"fix(a);", b"fix(b);")}
    assert "in `first`" in difference(*port, *merged(stock, more))
    other = {"src/a.cpp": code("other") + code("second")}
    fixed = FIXED | {"src/a.cpp": code("other", "fix(a);") + code("second")}
    assert "moves lines in `first` of src/a.cpp to `other` of" in difference(
        *port, *merged(STOCK | other, fixed)
    )


def test_same_function_name_in_another_file_is_different() -> None:
    """It is another function, unless the file was renamed: one name exists on each side."""
    sibling = {"src/b.cpp": code("first") + code("third")}
    stock = {"src/a.cpp": code("first") + code("second")} | sibling
    fixed = stock | {"src/a.cpp": code("first", "fix(a);") + code("second")}
    port = merged(stock, fixed)
    wrong = stock | {"src/b.cpp": code("first", "fix(a);") + code("third")}
    wanted = "moves lines in `first` of src/a.cpp to `first` of src/b.cpp"
    for tokens, reason in ((None, wanted), ({}, "other tokens in `first` of src/a.cpp")):
        assert reason in difference(*port, *merged(stock, wrong), tokens=tokens)
        renamed = [sibling | {"src/c.cpp": side["src/a.cpp"]} for side in (stock, fixed)]
        assert not difference(*port, *merged(*renamed), tokens=tokens)


def test_a_new_file_with_the_most_common_lines_is_the_renamed_one() -> None:
    """Each change is in the file with the lines of the former one."""
    stock = {"a.cpp": code("first"), "b.cpp": code("second")}
    fixed = {"a.cpp": code("first", "fix(a);"), "b.cpp": code("second", "fix(b);")}
    names = {"a.cpp": "y.cpp", "b.cpp": "x.cpp"}
    new = [{names[path]: data for path, data in side.items()} for side in (stock, fixed)]
    assert not difference(*merged(stock, fixed), *merged(*new))
    one = {"x.cpp": stock["a.cpp"]}, {"x.cpp": fixed["a.cpp"]}
    assert difference(*merged(stock, fixed), *merged(*one)), "one of two files is lost"


def test_renamed_parameter_is_followed() -> None:
    """The lines of the merge may have the new name if it is given."""
    use = "use(b);"
    port = merged(STOCK, STOCK | {"src/a.cpp": code("first", use) + code("second")})
    sides = [
        {"src/a.cpp": side["src/a.cpp"].replace(b"first(int a, int b)", b"first(int a, int n)")}
        for side in (STOCK, {"src/a.cpp": code("first", use) + code("second")})
    ]
    sides[1]["src/a.cpp"] = sides[1]["src/a.cpp"].replace(b"use(b);", b"use(n);")
    assert difference(*port, *merged(*sides), tokens={})
    assert not difference(*port, *merged(*sides), tokens={"b": "n"})


def members(*classes: str) -> bytes:
    """Return the function `find` of several classes; one with ``+`` has a fix."""
    return b"".join(
        code(f"{each.strip('+')}::find", *(["fix(a);"] if each.endswith("+") else []))
        for each in classes
    )


@pytest.mark.slow
def test_members_of_two_classes_are_different() -> None:
    """A class may be renamed. A function of the same name in a sibling is another function."""
    port = merged({"a.cpp": members("full", "window")}, {"a.cpp": members("full+", "window")})
    tokens: dict[str, str] | None
    for tokens in (None, {}):
        for old, new, wanted in (
            (("cache", "window"), ("cache+", "window"), ""),
            (("full", "window"), ("full", "window+"), "in `full::find`"),
            (("window",), ("window+",), "in `full::find`"),
            (("one", "two"), ("one+", "two+"), "in `full::find`"),
        ):
            found = difference(
                *port, *merged({"a.cpp": members(*old)}, {"a.cpp": members(*new)}), tokens=tokens
            )
            assert wanted in found and bool(wanted) == bool(found), (old, new, found)
    both = merged({"a.cpp": members("full", "window")}, {"a.cpp": members("full+", "window+")})
    one = merged({"a.cpp": members("cache")}, {"a.cpp": members("cache+")})
    assert "in `full::find`" in difference(*both, *one), "one of two equal changes is lost"


def test_tokens_are_compared_in_order() -> None:
    """Other tokens of the line may differ, the changed ones may not."""
    old = {"src/a.cpp": code("first", "go(a);")}
    new = {"src/a.cpp": code("first", "go(a, 1, 2);")}
    port = merged(old, new)
    further = {"src/a.cpp": code("first", "go(a.x);")}
    same = {"src/a.cpp": code("first", "go(a.x, 1, 2);")}
    assert "lines in `first`" in difference(*port, *merged(further, same))
    assert not difference(*port, *merged(further, same), tokens={})
    for wrong in ("go(a.x, 2, 1);", "go(a.x, 1);", "go(a.x, 1, 2, 3);", "to(a.x, 1, 2);"):
        other = {"src/a.cpp": code("first", wrong)}
        assert "other tokens in `first`" in difference(*port, *merged(further, other), tokens={})
    named = {"src/a.cpp": code("first", "go(a.x, 1, n);")}
    tokens = {"2": "n"}
    assert not difference(*port, *merged(further, named), tokens=tokens)
