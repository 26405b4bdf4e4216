"""Test that the page counts states by mode and patch, and lists the verified sample."""

from __future__ import annotations

from dataclasses import replace

from qa.upkeep.measurement import CARRY_FIRST, FORWARD, LEAVE_ONE_OUT, TODAY, Hook, Measured
from qa.upkeep.page import page
from qa.upkeep.sample import Verified

STATES = {
    "0.3.1": ("2026-07-01", "manual"),
    "0.3.2": ("2026-07-02", "carried 0.3.1"),
    "0.3.3": ("2026-08-03", "manual"),
    "0.3.4": ("2026-08-04", "strict"),
}
REASON = (
    "skipped port 0.3.0: x; cannot be carried from 0.3.1: a.cpp:3: upstream changed the lines that "
    "the patch changes; a.cpp:9: upstream changed the lines that the patch changes; b.h: the "
    "target has no such file, or adds one; cannot be carried from 0.3.0: requires more"
)
FOUND = [
    Measured(name, "rows", date, mode, {"fix": state, "more": "strict"}, {"fix": REASON})
    for name, (date, state) in STATES.items()
    for mode in (TODAY, LEAVE_ONE_OUT, FORWARD, CARRY_FIRST)
]


def test_state_with_one_manual_patch_is_manual() -> None:
    """A state is manual if one patch is; the oldest state is not measured forward."""
    text = page(FOUND)
    assert "| all | leave one out | 4 | 1 | 1 | 2 | 50.0 % | 98 % |" in text
    assert "| all | forward | 3 | 1 | 1 | 1 | 66.7 % | 95 % |" in text
    assert "| after July 2026 | forward | 2 | 1 | 0 | 1 | 50.0 % | 90 % |" in text
    assert "| after July 2026 | forward, carry first | 2 | 1 | 0 | 1 | 50.0 % |  |" in text
    assert "| fix | forward | 1 | 1 | 1 |\n" in text
    assert "| more | forward | 3 | 0 | 0 |\n" in text
    assert (
        "| 0.3.3 | 2026-08-03 | forward | fix | 0.3.1: conflicts in `a.cpp` (2), `b.h` (1) |  |"
        in text
    )
    assert "| 0.3.1 | 2026-07-01 | forward" not in text


def test_manual_state_names_the_nearest_port() -> None:
    """Without a port, the patch is new."""
    for reason, cause in (
        ("x; cannot be carried from 0.3.1: requires fix", "0.3.1: requires fix"),
        ("has no port", "no such port"),
    ):
        one = Measured("b9", "rows", "2026-01-01", TODAY, {"fix": "manual"}, {"fix": reason})
        assert f"| b9 | 2026-01-01 | all ports | fix | {cause} |  |" in page([one])


def test_miss_is_counted_once_by_its_first_patch() -> None:
    """It counts for its first patch; a rewritten function is one with few lines left."""
    facts = ("rows", "2026-01-01", TODAY, {"fix": "manual", "more": "manual"})
    conflict = {"fix": "cannot be carried from 0.3.1: a.cpp:3: upstream changed the lines that x"}
    found = [
        Measured("b1", *facts, {"fix": "has no port"}),
        Measured("b2", *facts, {"fix": "cannot be carried from 0.3.1: requires more"}),
        Measured("b3", *facts, conflict, kept={"fix": {"f": 90, "g": 49}}),
        Measured("b4", *facts, conflict, kept={"fix": {"f": 50}}),
        Measured("b5", *facts, conflict, kept={"fix": {"f": 0}}),
    ]
    text = page(found)
    assert (
        "- all ports: upstream kept less than 50 % of a function that the patch changes: 2; "
        "no older port of the patch: 1; a file, name or patch that the port uses is missing: 1; "
        "upstream changed the same or neighbouring lines of a function: 1.\n"
    ) in text
    assert "(1) | `f` 90 %, `g` 49 % |" in text


def test_only_hooks_changed_upstream_are_listed() -> None:
    """Hooks that upstream did not change are not listed."""
    hooks = [Hook("fix", "src/a.cpp", n, "first", 4 - n, 4, n) for n in (0, 1)]
    text = page(FOUND, hooks)
    assert "have 2 hooks. All 4 states of its era\nhave the lines of 1 of them" in text
    assert "| fix | `src/a.cpp` | `first` | 3 of 4 | 1 |" in text
    assert "4 of 4" not in text


def test_page_lists_the_verdicts_of_the_sample() -> None:
    """They have mode, ports and date; without one, the page has the command."""
    assert "No carried state has been built" in page(FOUND)
    facts = ("0.3.2", "2026-07-02", FORWARD, {"fix": "0.3.1"}, "0" * 40)
    one = Verified(*facts, verdict="needed", reason="", verified="2026-11-26")
    row = "| 0.3.2 | 2026-07-02 | forward | fix from 0.3.1 | needed | 2026-11-26 |  |  |  |  |"
    assert row in page(FOUND, verified=[one])
    timed = replace(one, seconds={"carry": 1.6, "build": 300.0, "verify": 60.0})
    assert "| 2026-11-26 |  | 2 s | 300 s | 60 s |" in page(FOUND, verified=[timed])
    assert "From the fetch" not in page(FOUND, verified=[timed])
    whole = replace(timed, seconds={**timed.seconds, "fetch": 4.4})
    took = "states with all four steps (1) took\n6.1 to 6.1 minutes"
    assert took in page(FOUND, verified=[timed, whole])


def test_page_shows_the_reason_of_a_broken_sample_tree() -> None:
    """It is below the table, with the present ports of the state."""
    facts = ("0.3.2", "2026-07-02", CARRY_FIRST, {"fix": "0.3.1"}, "0" * 40)
    one = Verified(*facts, verdict="broken-carry", reason="x fails", verified="2026-11-26")
    text = page(FOUND, verified=[one])
    assert " |\n\n- 0.3.2, forward, carry first: x fails.\n\n## Time of a watch\n" in text
    one = replace(one, lacks={"fix": ["first", "src/b.cpp"], "other": ["f"]})
    more = "The ports of today for this state have more: fix in `first`, `src/b.cpp`; other in `f`."
    assert f": x fails. {more}\n\n" in page(FOUND, verified=[one])
