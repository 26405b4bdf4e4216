"""Test each row of the table of verdicts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.scenarios.outcome import FAILURES, HARM, Outcome
from pyllamakv.verification.verdict import (
    GOOD,
    SEVERITY,
    Pair,
    Verdict,
    decide,
    decide_scenario,
    is_harmful,
    worst,
)

PASS = Outcome("pass")
SKIP = Outcome("skip", "", "no such cache here")
ABSENT = Outcome("absent", "", "lacks counters")


def fail(kind: str = "claim") -> Outcome:
    return Outcome("fail", kind, f"a {kind}")


def pair(stock, patched, kind="fix", scenario="one", setting="plain f16", claimed=True) -> Pair:
    return Pair(scenario, kind, setting, stock, patched, claimed=claimed)


def unclaimed(stock, patched, *rest) -> Pair:
    """Return a pair of a patch without a list of scenarios."""
    return pair(stock, patched, *rest, claimed=False)


def test_needed_when_stock_fails_and_patched_passes() -> None:
    """The reason is the line that check prints."""
    pairs = [pair(fail(), PASS), pair(PASS, PASS, setting="flash f16")]
    found = decide(pairs)
    assert found.verdict is Verdict.NEEDED
    assert str(found) == "needed: stock fails 1 of 2 runs, patched passes all"
    assert found.exit_code == 0


def test_redundant_when_stock_passes_every_fix() -> None:
    """Upstream includes the fix, and the patch does no harm."""
    found = decide([pair(PASS, PASS)])
    assert found.verdict is Verdict.REDUNDANT
    assert found.exit_code == 0


def test_ineffective_when_patched_still_fails_a_fix() -> None:
    """One setting that fails is enough."""
    found = decide([pair(fail(), fail()), pair(fail(), PASS, setting="flash f16")])
    assert found.verdict is Verdict.INEFFECTIVE
    assert found.exit_code == 1
    assert "a claim" in found.reason


def test_the_reason_names_a_fix_first() -> None:
    """A claimed scenario is named before a guard."""
    pairs = [pair(fail(), fail(), "guard", "abort"), pair(fail(), fail(), "fix", "fragmented")]
    assert decide(pairs).reason.endswith(
        ": fragmented [no flash attention, K and V f16] (and abort): claim: a claim"
    )


@pytest.mark.parametrize("kind", HARM)
@pytest.mark.parametrize("stock", [PASS, fail("claim")], ids=["passes", "fails"])
def test_harmful_when_patched_shows_a_class_that_stock_does_not(kind: str, stock: Outcome) -> None:
    """Wrong data, crash, hang and lost tokens are worse than a failed claim."""
    found = decide([pair(stock, fail(kind))])
    assert found.verdict is Verdict.HARMFUL
    assert found.exit_code == 1


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(HARM, 2)))
def test_another_class_of_harm_is_harm(one: str, other: str) -> None:
    """A hang in the place of a crash is a new class."""
    assert is_harmful(pair(fail(one), fail(other)))


@pytest.mark.parametrize("kind", FAILURES)
def test_the_same_class_is_no_new_harm(kind: str) -> None:
    """A class that stock shares was not introduced by the patch, but is not fixed either."""
    assert decide_scenario([pair(fail(kind), fail(kind))]) is Verdict.INEFFECTIVE


def test_a_guard_that_breaks_only_on_patched_is_harmful() -> None:
    """A failed claim that passes on stock is attributed to the patch."""
    assert decide_scenario([pair(PASS, fail("claim"), "guard")]) is Verdict.HARMFUL


def test_guard_that_only_stock_fails_is_harmless() -> None:
    """Only fixes decide whether a patch is needed."""
    assert decide_scenario([pair(fail(), PASS, "guard")]) is Verdict.HARMLESS


def test_guard_that_fails_on_both_sides_is_ineffective() -> None:
    """A guard that fails on both sides is not good enough to ship."""
    assert decide_scenario([pair(fail("lost"), fail("lost"), "guard")]) is Verdict.INEFFECTIVE


def test_a_feature_that_patched_lacks_is_ineffective() -> None:
    """The patched side must have the capability."""
    assert decide_scenario([pair(ABSENT, ABSENT, "feature")]) is Verdict.INEFFECTIVE


def test_a_feature_that_only_patched_has_works() -> None:
    """It is redundant if stock has it too."""
    assert decide_scenario([pair(ABSENT, PASS, "feature")]) is Verdict.WORKS
    assert decide_scenario([pair(PASS, PASS, "feature")]) is Verdict.REDUNDANT
    found = decide([pair(ABSENT, PASS, "feature"), pair(PASS, PASS, "guard", "two")])
    assert str(found) == "works: adds one, and breaks none of 2 runs"
    assert found.exit_code == 0


def test_a_patch_that_changes_no_outcome_is_harmless() -> None:
    """Failures that stock shares do not count against a patch that does not claim to fix them."""
    pairs = [
        unclaimed(fail(), fail()),
        unclaimed(PASS, PASS, "fix", "two"),
        unclaimed(fail("lost"), fail("lost"), "guard", "three"),
        unclaimed(ABSENT, ABSENT, "feature", "four"),
    ]
    found = decide(pairs)
    assert (found.verdict, found.exit_code, found.shared) == (Verdict.HARMLESS, 0, 2)
    assert set(found.scenarios.values()) <= {Verdict.HARMLESS, Verdict.UNTESTABLE}


@pytest.mark.parametrize(
    ("pairs", "verdict", "reason"),
    [
        (
            [pair(PASS, PASS), unclaimed(fail(), fail(), "fix", "two")],
            Verdict.REDUNDANT,
            "stock passes one, and patched breaks none of 2 runs",
        ),
        (
            [unclaimed(fail("crash"), fail("claim"))],
            Verdict.HARMLESS,
            "no outcome of 1 runs of one is worse than on stock",
        ),
        (
            [unclaimed(fail(), PASS, "guard"), unclaimed(fail(), fail(), "fix", "two")],
            Verdict.HARMLESS,
            "no outcome of 2 runs of one, two is worse than on stock",
        ),
    ],
)
def test_shared_failures_are_in_no_headline(
    pairs: list[Pair], verdict: Verdict, reason: str
) -> None:
    """A good headline states neither that failed runs pass, nor that different runs are equal."""
    found = decide(pairs)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_a_patch_without_claims_that_does_not_apply_is_native_only_if_contained() -> None:
    """Scenarios that pass on stock do not show that upstream includes an unknown patch."""
    pairs = [unclaimed(PASS, None), unclaimed(fail(), None, "fix", "two")]
    for mine in (pairs, pairs[:1], []):
        found = decide(mine, conflict="src/a.cpp hunk 3")
        assert str(found) == "broken-apply: src/a.cpp hunk 3"
        found = decide(mine, conflict="already applied", contained=True)
        assert str(found) == "native: already applied"
    assert decide([pair(PASS, None)], conflict="x").verdict is Verdict.NATIVE


def test_passing_guards_alone_are_harmless() -> None:
    """The reason does not state that both sides have the same results."""
    found = decide([pair(fail(), PASS, "guard"), pair(PASS, PASS, "guard", "two")])
    assert str(found) == "harmless: stock fails 1 of 2 guard runs, patched 0"


def test_patch_without_claims_is_needed_if_it_fixes_a_run() -> None:
    """The reason lists it, even if other runs still fail as on stock."""
    pairs = [
        unclaimed(fail(), PASS, "fix", "two"),
        unclaimed(fail(), fail()),
        unclaimed(fail(), PASS, "fix", "two", "flash q8_0"),
    ]
    found = decide(pairs)
    assert found.verdict is Verdict.NEEDED
    assert found.reason == "fixes two (2 runs), and breaks none of 3 runs"
    assert found.fixes == {"two": ("plain f16", "flash q8_0")}


def test_a_claimed_fix_that_still_fails_is_ineffective() -> None:
    """Other fixes of the patch do not matter."""
    found = decide([pair(fail(), fail()), unclaimed(fail(), PASS, "fix", "two")])
    assert found.verdict is Verdict.INEFFECTIVE


@pytest.mark.parametrize(
    ("worse", "better"), list(itertools.pairwise(("data", "lost", "crash", "hang", "claim")))
)
def test_worst_failure_class_is_the_reason(worse: str, better: str) -> None:
    """Wrong data is worse than a crash, and a crash worse than a hang."""
    pairs = [pair(PASS, fail(better), "fix", "two"), pair(PASS, fail(worse))]
    assert f": one [no flash attention, K and V f16]: a {worse}; breaks" in decide(pairs).reason


def test_the_headline_names_layout_types_and_whose_defect_it_is() -> None:
    """A defect of stock that the patch only exposes is not reported as introduced."""
    reached = unclaimed(fail(), fail("data"), "fix", "one", "flash q8_0/f16")
    known = unclaimed(fail("data"), fail("data"), "fix", "copy", "flash q8_0/f16")
    fixed = unclaimed(fail(), PASS, "fix", "one", "plain f16")
    where = "one [flash attention, K q8_0, V f16]: a data; breaks one (1 run); fixes one (1 run)"
    found = decide([reached, known, fixed])
    assert found.verdict is Verdict.HARMFUL
    assert found.reason == f"reaches wrong data that stock has as well (see copy): {where}"
    assert found.breaks == {"one": ("flash q8_0/f16",)}
    elsewhere = unclaimed(fail("data"), fail("data"), "fix", "copy", "plain f16")
    doubt = decide([reached, elsewhere, fixed]).reason
    assert doubt == f"introduces or reaches wrong data: {where}"
    clean = unclaimed(fail(), fail(), "fix", "copy", "flash q8_0/f16")
    assert decide([reached, clean, fixed]).reason == f"introduces wrong data: {where}"


def test_a_defect_in_settings_that_stock_passes_is_introduced() -> None:
    """One of its settings may fail on stock too; the others show that the patch introduced it."""
    swapped = [
        unclaimed(fail(), fail("data"), "fix", "one", s) for s in ("plain q8_0", "flash f16")
    ]
    copy = [
        unclaimed(fail("data"), fail("data"), "fix", "copy", "plain q8_0"),
        unclaimed(PASS, PASS, "fix", "copy", "flash f16"),
    ]
    assert decide([*swapped, *copy]).reason.startswith("introduces wrong data: one [flash")


def test_a_variable_of_the_environment_is_no_setting_of_stock() -> None:
    """It selects the code of the patch; stock has the defect in the same layout and types."""
    harmful = unclaimed(
        fail(), fail("data"), "fix", "one", "plain q8_0 LLAMA_KV_DEFRAG_MOVER=staged"
    )
    known = unclaimed(fail("data"), fail("data"), "fix", "copy", "plain q8_0")
    assert decide([harmful, known]).reason.startswith("reaches wrong data that stock has as well")


def test_failing_header_tests_are_harm() -> None:
    """They are, unless the release has a worse verdict."""
    found = decide([pair(fail(), PASS)], headers=["src/a.h: its tests fail: plan"])
    assert str(found) == "harmful: src/a.h: its tests fail: plan"
    worse = decide([pair(fail(), None)], conflict="hunk 3", headers=["src/a.h: its tests fail"])
    assert worse.verdict is Verdict.BROKEN_APPLY


def test_a_missing_capability_fails_a_fix() -> None:
    """A feature scenario that is verified alone is a fix of its patch."""
    assert decide_scenario([pair(ABSENT, PASS)]) is Verdict.NEEDED


def test_untestable_without_pairs_exits_with_125() -> None:
    """If nothing can run, only that is reported, and git bisect skips."""
    found = decide([], untestable="no compiler")
    assert (found.verdict, found.exit_code) == (Verdict.UNTESTABLE, 125)
    assert "no compiler" in str(found)


def test_untestable_when_every_run_is_skipped() -> None:
    """The reason is that of the first skip."""
    found = decide([pair(SKIP, SKIP)])
    assert found.verdict is Verdict.UNTESTABLE
    assert "no such cache" in found.reason


def test_skipped_settings_do_not_count() -> None:
    """A setting that cannot run here does not affect the others."""
    found = decide([pair(fail(), PASS), pair(SKIP, SKIP, setting="flash q8_0")])
    assert found.verdict is Verdict.NEEDED
    assert found.runs == 1


@pytest.mark.parametrize(
    ("stock", "verdict"), [(PASS, Verdict.HARMFUL), (fail(), Verdict.INEFFECTIVE)]
)
def test_run_that_only_patched_cannot_do_is_harmful(stock: Outcome, verdict: Verdict) -> None:
    """A patch that prevents a model from loading is harmful, whatever other models do."""
    found = decide([pair(stock, SKIP), pair(fail(), PASS, scenario="other")])
    assert found.verdict is verdict
    assert "cannot run a setting that stock can: no such cache here" in found.reason


def test_broken_apply_when_nothing_applies_and_stock_fails() -> None:
    """A port is required."""
    found = decide([pair(fail(), None)], conflict="src/a.cpp hunk 3")
    assert (found.verdict, found.exit_code) == (Verdict.BROKEN_APPLY, 1)
    assert "hunk 3" in found.reason
    assert "one" in found.reason


def test_native_when_nothing_applies_and_stock_passes() -> None:
    """Upstream includes the fix, whatever the guards report."""
    pairs = [pair(PASS, None), pair(fail(), None, "guard", "other")]
    found = decide(pairs, conflict="src/a.cpp hunk 3")
    assert (found.verdict, found.exit_code) == (Verdict.NATIVE, 0)
    assert "all 1 runs" in found.reason
    assert "hunk 3" in found.reason


def test_untestable_when_nothing_applies_and_no_fix_runs() -> None:
    """Without a fix that runs, there is no result."""
    assert decide([pair(SKIP, None)], conflict="x").verdict is Verdict.UNTESTABLE


def test_broken_build_keeps_the_first_error() -> None:
    """The compile error of a patched tree is attributed to the patch."""
    found = decide([pair(fail(), None)], build_error="error: no member named head")
    assert (found.verdict, found.exit_code) == (Verdict.BROKEN_BUILD, 1)
    assert "no member" in found.reason


def test_a_carried_patch_that_fails_is_a_broken_carry() -> None:
    """Harm, a failed claim and a failed build are broken; a good verdict is unchanged."""
    carried = ["compaction from 0.3.30"]
    bad = [pair(PASS, fail()), pair(fail(), fail())]
    for one in bad:
        found = decide([one], carried=carried)
        assert (found.verdict, found.exit_code) == (Verdict.BROKEN_CARRY, 1)
        assert found.reason.startswith("carried compaction from 0.3.30: ")
        assert decide([one]).verdict in (Verdict.HARMFUL, Verdict.INEFFECTIVE)
    built = decide([pair(fail(), None)], build_error="error: no member", carried=carried)
    assert built.verdict is Verdict.BROKEN_CARRY
    assert decide([pair(fail(), PASS)], carried=carried).verdict is Verdict.NEEDED


def test_unapplied_part_of_the_series_is_broken_apply() -> None:
    """Applied parts do not hide the others."""
    pairs = [pair(PASS, PASS, "guard", "applied"), pair(fail(), None, "fix", "left out")]
    assert decide(pairs, conflict="a hunk").verdict is Verdict.BROKEN_APPLY


def test_needed_beats_redundant() -> None:
    """A release has the verdict of its worst scenario; needed ranks above redundant."""
    pairs = [pair(PASS, PASS, scenario="a"), pair(fail(), PASS, scenario="b")]
    found = decide(pairs)
    assert found.verdict is Verdict.NEEDED
    assert found.scenarios == {"a": Verdict.REDUNDANT, "b": Verdict.NEEDED}


@given(st.lists(st.sampled_from(SEVERITY), min_size=1))
def test_worst_takes_the_first_of_the_order(verdicts: list[Verdict]) -> None:
    """The order is total and contains every verdict."""
    assert set(SEVERITY) == set(Verdict)
    found = worst(verdicts)
    assert all(SEVERITY.index(found) <= SEVERITY.index(each) for each in verdicts)


OUTCOMES = st.sampled_from([PASS, SKIP, ABSENT, *map(fail, FAILURES)])


@given(
    st.lists(
        st.builds(
            pair,
            OUTCOMES,
            OUTCOMES,
            st.sampled_from(["fix", "guard", "feature"]),
            st.sampled_from(["a", "b"]),
        ),
        max_size=6,
    )
)
def test_a_good_verdict_means_that_patched_failed_nothing(pairs: list[Pair]) -> None:
    """For any mix of results, a good verdict has no failure on patched."""
    found = decide(pairs)
    failed = any(each.patched.failed for each in pairs)
    assert not (found.verdict in GOOD and failed)
    assert not (found.verdict is Verdict.NEEDED and found.stock_failed == 0)
    assert found.exit_code in (0, 1, 125)


@given(
    st.lists(
        st.builds(
            pair,
            OUTCOMES,
            OUTCOMES,
            st.sampled_from(["fix", "guard", "feature"]),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["plain f16", "flash f16"]),
            st.booleans(),
        ),
        max_size=3,
    )
)
def test_the_headline_contradicts_no_pair(pairs: list[Pair]) -> None:
    """Each statement of the headline is true for every run that counts."""
    found = decide(pairs)
    counted = [each for each in pairs if each.stock.status not in ("skip", "fault")]
    if "differs from stock" in found.reason:
        assert all(
            (each.stock.status, each.stock.failure) == (each.patched.status, each.patched.failure)
            for each in counted
        )
    if "stock passes every fix" in found.reason:
        assert not any(each.kind == "fix" and each.stock.failed for each in pairs)
    if "patched passes all" in found.reason:
        assert not any(each.broken for each in pairs)
    if "breaks none" in found.reason:
        assert not any(map(is_harmful, pairs))


def test_a_capability_that_only_stock_has_is_harm() -> None:
    """A patch without claims must not remove one either."""
    for kind in ("fix", "guard", "feature"):
        found = decide([unclaimed(PASS, ABSENT, kind)])
        assert found.verdict is Verdict.HARMFUL, kind
        assert "lacks a capability that stock has: lacks counters" in found.reason
    assert decide([unclaimed(fail(), ABSENT)]).verdict is Verdict.HARMLESS


def test_feature_absent_on_both_sides_is_ignored() -> None:
    """A scenario that needs a defragmentation that no side has does not affect the verdict."""
    none = Outcome("absent", "", "no defragmentation here")
    good = Outcome("pass")
    both = Pair("many-moves", "fix", "plain", none, none)
    stock_alone = Pair("many-moves", "fix", "plain", none, None)
    fine = Pair("fragmented", "fix", "plain", good, good)
    assert decide([both, fine]).verdict is Verdict.REDUNDANT
    assert decide([both, fine]).runs == 1
    assert decide([stock_alone, Pair("fragmented", "fix", "plain", good)]).verdict is Verdict.NATIVE
    fixed = Pair("many-moves", "fix", "plain", none, good)
    assert decide([fixed, fine]).verdict is Verdict.NEEDED


def test_feature_untestable_on_both_sides_is_no_harm() -> None:
    """A feature that stock lacks and this device does not need does not affect the verdict."""
    absent = Outcome("absent", "", "no such option")
    skipped = Outcome("skip", "", "the cache is on a device")
    found = decide([Pair("lazy", "feature", "plain f16", absent, skipped)])
    assert found.verdict == Verdict.UNTESTABLE
    assert found.patched_failed == 0


def test_a_partly_patched_release_is_never_native() -> None:
    """Even if stock passes everything: the series does not apply completely."""
    found = decide([pair(PASS, None)], conflict="hunk 1 is already applied", partly=True)
    assert str(found) == "broken-apply: hunk 1 is already applied"
    assert decide([pair(PASS, None)], conflict="hunk 1").verdict is Verdict.NATIVE
