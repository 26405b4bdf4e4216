"""Test that the prefix benchmarks measure what they say, at a fraction of their size."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest

from qa.bench import prefix_cache_cost

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant


def test_prompts_have_just_so_many_tokens_in_common() -> None:
    """Check length, the common beginning, and that no two prompts agree any further."""
    made = list(islice(prefix_cache_cost._prompts(10), 40))
    assert {len(prompt) for prompt in made} == {prefix_cache_cost.PROMPT}
    assert {tuple(prompt[:10]) for prompt in made} == {(7,) * 10}
    assert len({tuple(prompt[10:14]) for prompt in made}) == 40
    assert len({prompt[10] for prompt in made}) > 1


@pytest.mark.slow
@pytest.mark.native
def test_every_figure_is_there(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a little of everything: what is counted is met, what is timed has a target."""
    monkeypatch.setattr(prefix_cache_cost, "ENTRIES", 40)
    monkeypatch.setattr(prefix_cache_cost, "LENGTH", 400)
    monkeypatch.setattr(prefix_cache_cost, "ANSWER", 4)
    found = prefix_cache_cost.figures(lambda: None, pairs=2)
    assert {figure.group for figure in found} == {prefix_cache_cost.GROUP}
    assert len({figure.name for figure in found}) == len(found) == 8
    assert all(figure.target for figure in found)
    (cells,) = [figure for figure in found if "chats" in figure.name]
    assert (cells.value, cells.met) == ("1050 cells", True)
