"""Test the suggested decision for a conflict, from the lines of its three sides."""

from __future__ import annotations

import pytest

from pyllamakv.patching.conflict_help import decision


@pytest.mark.parametrize(
    ("upstream", "base", "patch", "expected"),
    [
        (["call(a, b);"], ["call(a);"], ["call( a ); // note"], "take upstream's lines: the patch"),
        (["call(a);  // new"], ["call(a);"], ["call(a, fix);"], "take the patch's lines: upstream"),
        (["call(a, fix);"], ["call(a);"], ["call(a,  fix);"], "drop the hunk"),
        ([], ["call(a);"], ["call(b);"], "rewrite the hunk: upstream removed"),
        (
            ["first(a);", "third(c);"],
            ["none();"],
            ["first(a);", "second(b);"],
            "take upstream's lines, and add a line of the patch that they lack",
        ),
        (
            ["fill(cells);"],
            ["n_used = 1;"],
            ["n_used = 1;", "total += n_used;"],
            "rewrite the hunk: it uses `n_used`",
        ),
        (
            ["one();", "more();"],
            ["one();"],
            ["one();", "mine();", "other();"],
            "take upstream's lines, and add 2 lines of the patch",
        ),
        (
            ["call(a, b);"],
            ["call(a);"],
            ["call(a, fix);"],
            "rewrite the hunk: upstream changed a line that it replaces",
        ),
        (
            ["one();", "two();"],
            ["one();"],
            ["call();"],
            "make the change of the patch in upstream's lines",
        ),
        (
            ["b();", "a();"],
            ["a();", "b();"],
            ["a();", "b();", "fix();"],
            "take upstream's lines, and add a line of the patch",
        ),
        (
            ["a(n);", "b();"],
            ["a();", "b();"],
            ["b();", "a();"],
            "make the change of the patch in upstream's lines",
        ),
        (
            ["a();", "defrag(x, true);"],
            ["a();", "defrag(x);"],
            ["a();"],
            "rewrite the hunk: upstream changed a line that it removes",
        ),
        (
            ["fix();", "defrag(x, true);"],
            ["defrag(x);"],
            ["fix();"],
            "rewrite the hunk: upstream changed a line that it replaces",
        ),
        (["a();", "other();"], ["a();", "defrag(x);"], ["a();"], "drop the hunk"),
        (
            ["second();", "first();"],
            ["none();"],
            ["first();", "second();"],
            "take upstream's lines, if their order does not matter",
        ),
        (
            ["first();", "old();", "third();"],
            ["old();"],
            ["first();", "second();"],
            "make the change of the patch in upstream's lines",
        ),
        (
            ["a(n);", "b();"],
            ["a();", "b();"],
            ["{", "a();", "b();", "}"],
            "take upstream's lines, and add 2 lines of the patch",
        ),
        (["if (n) a();"], ["if (n)", "a();"], ["if (n)", "a(m);"], "take the patch's lines"),
    ],
)
def test_conflict_decision_is_the_first_matching_rule(
    upstream: list[str], base: list[str], patch: list[str], expected: str
) -> None:
    """Blanks and comments do not count; the first rule that fits decides."""
    assert decision(upstream, base, patch).startswith(expected)
