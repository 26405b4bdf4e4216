"""Test that the sides of a conflict are merged by tokens only if their changes are separate."""

from __future__ import annotations

import pytest

from pyllamakv.patching.token_merge import edits, join, merge, split

CALL = "    buf = alloc(ctx, buft);\n"
PATCHED = "    buf = mapped::alloc(map, ctx, buft, size);\n"


def test_the_parts_of_a_text_are_joined_again() -> None:
    """Blank lines, comments at the end, and an empty text are kept as well."""
    for text in (
        "",
        "a = b;\n",
        "\n\n  a(  1 ); // x\n/* y\n */ b;\n\n// end\n",
        '#include "x.h"\n',
    ):
        assert join(split(text)) == text


def test_blanks_and_comments_are_no_changes() -> None:
    """Tokens are compared by their text."""
    assert not edits(split("a = b(1);\n"), split("a   = b(\n  1); // one\n"))
    (edit,) = edits(split("a = b(1);\n"), split("a = c(1);\n"))
    assert (edit.first, edit.last, edit.tokens[0].text) == (2, 3, "c")


@pytest.mark.parametrize(
    ("upstream", "base", "patch", "wanted"),
    [
        ("    buf = alloc(ctx.get(), buft); // real\n", CALL, PATCHED,
         "    buf = mapped::alloc(map, ctx.get(), buft, size); // real\n"),
        ("    a(p, 0);\n    c(2);\n", "    a(p, 0);\n    b(2);\n", "    x(m, p);\n    b(2);\n",
         "    x(m, p);\n    c(2);\n"),
        ("    a(1);\n", "    a(1);\n    b(2);\n", "    a(1);\n    x(1);\n    b(2);\n",
         "    a(1);\n    x(1);\n"),
        ("        a(1);\n        b(3);\n", "    a(1);\n    b(2);\n",
         "    a(1);\n    x();\n    b(2);\n",
         "        a(1);\n    x();\n        b(3);\n"),
        ("    f(a, b, c);\n", "    f(a, b);\n", "    int s = f(a, b);\n    if (s) {\n    }\n",
         "    int s = f(a, b, c);\n    if (s) {\n    }\n"),
        ("    const k = find(batch);\n", "    const k = find(ubatch);\n",
         "    k = find(ubatch);\n    k = again(ubatch);\n",
         "    k = find(batch);\n    k = again(batch);\n"),
        ("    if (ok(!c) && b) {\n", "    if (ok(c) && b) {\n", "    if (ok(c) && b && x()) {\n",
         "    if (ok(!c) && b && x()) {\n"),
    ],
    ids=["argument", "next line", "deleted line", "indented", "statement", "renamed", "term"],
)  # fmt: skip
def test_changes_that_are_apart_are_merged(
    upstream: str, base: str, patch: str, wanted: str
) -> None:
    """The result has upstream's tokens with the changes of the patch."""
    found = merge(upstream, base, patch)
    assert found is not None
    assert found.text == wanted


@pytest.mark.parametrize(
    ("upstream", "base", "patch"),
    [
        ("    buf = other(ctx, buft);\n", CALL, PATCHED),
        ("    a(1);\n    y(1);\n    b(2);\n", "    a(1);\n    b(2);\n",
         "    a(1);\n    x(1);\n    b(2);\n"),
        ("    z(9);\n", "    a(1);\n    b(2);\n", "    a(1);\n    x(1);\n    b(2);\n"),
        ("    s = f(a, b);\n", "    s = f(a, b, il);\n",
         "    g(f(c, d, il));\n    s = f(a, b, il);\n"),
        ("    s = f(a, b, il);\n", "    s = f(a, b);\n", "    g(f(c, d));\n    s = f(a, b);\n"),
        ("    }\n    p(1);\n    }\n", "    }\n    q(2);\n    }\n",
         "    }\n    }\n    q(2);\n    x();\n    }\n"),
        ("    f(a, x, b);\n", "    f(a, b);\n", "    f();\n"),
        ("    p(7);\n    };\n", "    q(8);\n    };\n", "    q(8);\n    }\n"),
        ("    drop(b);\n", "    keep(b);\n", "    keep(c);\n"),
        ("    if (!a) {\n", "    if (a) {\n", "    if (a && x()) {\n"),
        ("    if (n >= m) {\n", "    if (n > m) {\n", "    if (n > m && x()) {\n"),
        ("", "", "    x();\n" * 3000),
    ],
    ids=["replaced", "insertions", "no-line", "removed-name", "changed-call", "braces",
         "within", "brackets", "function", "negated", "compared", "huge"],
)  # fmt: skip
def test_doubtful_changes_are_refused(upstream: str, base: str, patch: str) -> None:
    """The conflict is then reported as in git."""
    assert merge(upstream, base, patch) is None


def test_renamed_names_are_named() -> None:
    """Only names that the patch uses are listed."""
    found = merge(
        "    y(batch, q);\n", "    y(ubatch, p);\n", "    w(ubatch);\n    y(ubatch, p);\n"
    )
    assert found is not None
    assert found.renamed == {"ubatch": "batch"}
