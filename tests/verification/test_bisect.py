"""Test that bisect verifies few releases, skips untestable ones and reports contradictions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.errors import Untestable, UsageError
from pyllamakv.verification.bisect import BisectStep, bisect

CHAIN = [f"r{n}" for n in range(16)]


def world(verdicts: dict[str, str] | list[str]):
    """Return a verifier that counts its calls."""
    known = dict(zip(CHAIN, verdicts, strict=True)) if isinstance(verdicts, list) else verdicts
    asked: list[str] = []

    def judge(name: str) -> BisectStep:
        asked.append(name)
        return BisectStep(name, known[name], f"why {name}")

    return judge, asked


def test_bisect_finds_one_change_in_logarithmic_steps() -> None:
    """The ends are verified first."""
    judge, asked = world(["needed"] * 11 + ["native"] * 5)
    found = bisect("r0", "r15", CHAIN, judge)
    assert (found.last.release, found.first.release) == ("r10", "r11")
    assert asked[:2] == ["r0", "r15"]
    assert len(asked) <= 6
    assert not found.suspects and not found.untestable
    assert "r11 is the first release that is native; r10 is needed." in str(found)
    assert found.to_json()["first"]["release"] == "r11"


def test_bisect_finds_a_change_from_newer_to_older() -> None:
    """The older end may be the bad one."""
    judge, _ = world(["broken-apply"] * 3 + ["needed"] * 13)
    found = bisect("r15", "r0", CHAIN, judge)
    assert (found.last.release, found.first.release) == ("r3", "r2")


def test_bisect_skips_untestable_releases() -> None:
    """Untestable releases at the change are reported as candidates."""
    verdicts = ["needed"] * 6 + ["untestable"] * 4 + ["native"] * 6
    judge, _ = world(verdicts)
    found = bisect("r0", "r15", CHAIN, judge)
    assert (found.last.release, found.first.release) == ("r5", "r10")
    assert found.suspects == ("r6", "r7", "r8", "r9")
    assert "r6, r7, r8, r9 already, which cannot be verified" in str(found)


def test_contradictory_stored_verdicts_are_reported() -> None:
    """A stored verdict that contradicts the result is named, without a new run."""
    verdicts = ["needed"] * 4 + ["native"] * 8 + ["ineffective"] * 4
    verdicts[13] = "needed"
    judge, asked = world(verdicts)
    memory = {"r13": BisectStep("r13", "needed")}
    found = bisect("r0", "r15", CHAIN, judge, memory.get)
    assert found.first.release == "r4"
    assert found.untestable == (BisectStep("r13", "needed"),)
    assert "more than one change: r13 is needed" in str(found)
    assert "r13" not in asked


@pytest.mark.parametrize(
    ("good", "bad", "error", "says"),
    [
        ("r0", "r1", UsageError, "both needed"),
        ("r0", "r0", UsageError, "no release is between"),
        ("r0", "r99", UsageError, "not in the release chain"),
        ("r0", "r15", Untestable, "r15 cannot be verified here"),
    ],
)
def test_bisect_refuses_ends_without_a_change(good: str, bad: str, error: type, says: str) -> None:
    """Ends that have the same verdict are refused."""
    judge, _ = world(["needed"] * 15 + ["untestable"])
    with pytest.raises(error, match=says):
        bisect(good, bad, CHAIN, judge)


@given(st.lists(st.sampled_from(["needed", "native", "untestable"]), min_size=16, max_size=16))
def test_bisected_releases_differ_in_their_verdict(verdicts: list[str]) -> None:
    """For any verdicts, the two releases differ, and only untestable ones are between them."""
    verdicts[0], verdicts[15] = "needed", "native"
    judge, asked = world(verdicts)
    found = bisect("r0", "r15", CHAIN, judge)
    last, first = CHAIN.index(found.last.release), CHAIN.index(found.first.release)
    assert (verdicts[last], verdicts[first]) == ("needed", "native")
    assert last < first
    assert set(verdicts[last + 1 : first]) <= {"untestable"}
    assert len(asked) == len(set(asked))
    assert all(CHAIN.index(a.release) < CHAIN.index(b.release) for a, b in pairwise(found.steps))
