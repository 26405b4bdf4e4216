"""Test the choice of a slot: known cases, known defects, and brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.cache.slot_choice import Candidate, Policy, SlotChoice, checked, choose, count_common
from pyllamakv.errors import UsageError

Slot = tuple[list[int], bool, int]


def chosen(slots: list[Slot], prompt: list[int], policy: Policy) -> SlotChoice | None:
    """Choose among slots of (tokens, in use, last used)."""
    candidates = [
        Candidate(len(tokens), count_common(tokens, prompt), in_use, used)
        for tokens, in_use, used in slots
    ]
    return choose(candidates, policy)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1], [1, 2, 3], 1),
        ([1, 2, 3], [1], 1),
        ([], [1, 2, 3], 0),
        ([], [], 0),
        ([1, 2, 3], [4, 5], 0),
        ([1, 2, 9], [1, 2, 3], 2),
        # Images are hashable items among the tokens, such as their digests.
        (["a", "b"], ["a", "b"], 2),
        (["a"], ["a", "b"], 1),
        ([1, "a", 2], [1, "a", 3], 2),
        ([1, "a", 2], [1, "b", 2], 1),
        ([("pixels", 7), 1], [("pixels", 7), 2], 1),
        ([], ["a"], 0),
        (["a"], [1], 0),
    ],
)
def test_count_common_agrees_with_the_cases_of_ollama(a: list, b: list, common: int) -> None:
    """Equal, prefix, empty, different and mixed items, as in ollama's fourteen cases."""
    assert count_common(a, b) == common


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_count_common_agrees_with_brute_force(head: list, a: list, b: list) -> None:
    """Compare with a count item by item."""
    one, other = head + a, head + b
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    assert count_common(one, other) == n


#: (slots of tokens, in use, last used; prompt; what each policy chooses: slot, common).
TABLE = {
    "empty": ([([], False, 0), ([], False, 0)], [1], (0, 0), (0, 0)),
    "extend": ([([1], False, 9), ([1, 2], False, 8)], [1, 2], (1, 2), (1, 2)),
    # Ollama's "longest" evicts slot 0's history here, while slot 1 is empty.
    "new": ([([1, 2], False, 9), ([], False, 0)], [2], (1, 0), (1, 0)),
    "fork": ([([1, 2], False, 9), ([], False, 0)], [1], (0, 1), (1, 1)),
    # Ollama's "longest" evicts the first one; this policy the least recently used one.
    "evict": ([([1, 2], False, 9), ([1, 2, 3], False, 8)], [2, 3], (1, 0), (1, 0)),
    "in use": ([([1, 2], True, 9), ([1], False, 8)], [1, 2], (1, 1), (1, 2)),
}


@pytest.mark.parametrize("case", TABLE)
def test_slot_choice_agrees_with_the_cases_of_ollama(case: str) -> None:
    """Check the six cases of ollama's tests for both policies."""
    slots, prompt, longest, best = TABLE[case]
    for policy, expected in (("longest", longest), ("best", best)):
        found = chosen(slots, prompt, checked(policy))
        assert found is not None
        assert (found.slot, found.common) == expected, policy


@pytest.mark.parametrize("policy", ["longest", "best"])
def test_no_slot_is_chosen_if_all_are_in_use(policy: Policy) -> None:
    """In ollama, "best" dereferenced a nil pointer when all slots were in use."""
    assert chosen([([1], True, 1), ([], True, 2)], [1, 2], policy) is None


def test_common_first_token_alone_does_not_select_a_slot() -> None:
    """Every prompt begins with the model's first token, which must not evict a history.

    Ollama's "longest" selects slot 0 for it, and evicts 4 tokens while slot 1 is empty.
    """
    slots: list[Slot] = [([1, 5, 6, 7, 8], False, 9), ([], False, 0)]
    assert chosen(slots, [1, 9, 9], "longest") == SlotChoice(1, 1, 0)
    assert chosen(slots, [1, 9, 9], "best") == SlotChoice(1, 1, 0)


def test_longer_common_prefix_is_chosen_over_a_short_history() -> None:
    """The missing part is copied from the slot that has it."""
    slots: list[Slot] = [([1, 2, 3, 9, 9, 9, 9, 9], False, 9), ([1], False, 1)]
    assert chosen(slots, [1, 2, 3, 4], "longest") == SlotChoice(1, 3, 0)
    assert chosen(slots, [1, 2, 3, 4], "best") == SlotChoice(1, 3, 0)


def test_best_fit_prefers_a_slot_whose_content_starts_the_prompt() -> None:
    """It is evicted before the least recently used one."""
    slots: list[Slot] = [([1, 2, 3], True, 3), ([1, 2], False, 2), ([7, 8], False, 1)]
    assert chosen(slots, [1, 2, 3, 4], "best") == SlotChoice(1, 3, 0)


def test_equal_prefixes_select_the_slot_with_the_shortest_history() -> None:
    """A longer history with the same beginning is another conversation."""
    slots: list[Slot] = [([1, 2, 9, 9], False, 1), ([1, 2], False, 5)]
    for policy in ("longest", "best"):
        assert chosen(slots, [1, 2, 3], checked(policy)) == SlotChoice(1, 2)


def test_an_unknown_policy_is_refused() -> None:
    """The error lists the known ones."""
    with pytest.raises(UsageError, match="longest, best"):
        checked("shortest")


tokens = st.lists(st.integers(0, 2), max_size=6)
some_slots = st.lists(st.tuples(tokens, st.booleans(), st.integers(0, 9)), min_size=1, max_size=5)


@given(some_slots, tokens, st.sampled_from(["longest", "best"]))
def test_slot_choice_agrees_with_brute_force(
    slots: list[Slot], prompt: list[int], policy: Policy
) -> None:
    """Check every rule by brute force over all slots."""
    found = chosen(slots, prompt, policy)
    free = [n for n, each in enumerate(slots) if not each[1]]
    if found is None:
        assert not free
        return
    common = [count_common(each[0], prompt) for each in slots]
    assert found.slot in free
    assert found.common == common[found.slot if found.source is None else found.source]
    lost = len(slots[found.slot][0]) - common[found.slot]
    assert found.evicts == (lost > 0)
    if policy == "best":
        # The maximum is reused, and no history is evicted while a slot is empty.
        assert found.common == max(common)
        assert not lost or all(len(slots[n][0]) > common[n] for n in free)
        if lost:
            assert slots[found.slot][2] == min(slots[n][2] for n in free)
    else:
        assert found.common == max(common[n] for n in free)
        if lost and 2 * common[found.slot] < len(slots[found.slot][0]):
            assert all(slots[n][0] for n in free)
