"""Data members and member functions are found by their text."""

from __future__ import annotations

from pyllamakv.patching.class_members import classes

SOURCE = """
#include "a.h"
struct plain { int x = 0; };
enum class kind { one, two };
class other;
class cells final : public base {
public:
    using pair = std::pair<int, int>;
    cells() : n(0) {}
    void mv(int a,
            int b) { if (a) { pos[b] = pos[a]; } }
    cells & operator=(const cells & other);
    bool operator==(const cells & other) const { return true; }
    int size(int from = 0) const; // int comment;
    /* int hidden; */
private:
    const char * text = "int quoted; {";
    std::vector<int> pos;
    std::map<int, int> index[8]{};
    static int count;
    struct inner { int y; } one;
};
"""


def test_members_and_functions() -> None:
    """Values, comments, static members and nested types are omitted."""
    found = classes(SOURCE)
    assert list(found) == ["plain", "cells", "inner"]
    assert found["plain"].members == {"int x"}
    assert found["cells"].members == {
        "const char * text",
        "std::vector<int> pos",
        "std::map<int, int> index[8]",
    }
    assert found["cells"].functions.keys() == {
        "cells() : n(0)",
        "bool operator==(const cells & other) const",
        "void mv(int a, int b)",
    }
    assert found["cells"].used("void mv(int a, int b)") == 1
    assert found["cells"].used("cells() : n(0)") == 0


def test_a_source_that_ends_in_a_class() -> None:
    """What is complete is found."""
    assert classes("struct a { int b; void c() {")["a"].members == {"int b"}
