"""The benchmark of reuse: its workload, its ideal cache and its verdicts; never a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.scenarios import synthetic_models
from qa.bench import cache_reuse
from qa.bench.cache_reuse import Chats, Ideal

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_an_ideal_cache_has_all_that_attention_has() -> None:
    """Every prefix of a sequence, without the last token of its text."""
    ideal = Ideal(whole=True)
    prompt = [*range(1, 31)]
    assert (ideal.possible(prompt), ideal.longest(prompt)) == (0, 0)
    ideal.add(prompt, [50, 51, 52])
    assert ideal.possible([*prompt[:17], 60, 60]) == 17
    assert ideal.possible([*prompt, 50, 51, 52, 53]) == 32
    assert ideal.possible(prompt) == 29


def test_an_ideal_cache_of_states_has_ends_and_divergences() -> None:
    """A divergence is reused from the second prompt that has it on."""
    ideal = Ideal(whole=False)
    prompt = [*range(1, 31)]
    ideal.add(prompt, [50, 51, 52])
    assert ideal.possible([*prompt[:20], 60]) == 0
    assert ideal.longest([*prompt[:20], 60]) == 20
    assert ideal.possible(prompt) == 29
    assert ideal.possible([*prompt, 50, 51, 52]) == 32
    ideal.add([*prompt[:20], 60], [5])
    assert ideal.possible([*prompt[:20], 61]) == 20
    ideal.add([*prompt[:5], 60], [5])  # shorter than the shortest state
    assert ideal.possible([*prompt[:5], 61]) == 0


def test_chats_are_the_same_every_time() -> None:
    """Each turn sends the chat again, with its answer."""
    runs = []
    for _ in range(2):
        prompts: list[list[int]] = []
        cache_reuse.run_chats(
            Chats(chats=4, turns=3), lambda p, seen=prompts: seen.append(p) or [7]
        )
        runs.append(prompts)
    assert runs[0] == runs[1]
    assert len(runs[0]) >= 12
    assert any(a != b and b[: len(a)] == a for a in runs[0] for b in runs[0])


@pytest.fixture
def model() -> Iterator[kv.Model]:
    """Load a model with states in a late release."""
    with (
        kv.open(built("0.3.36+patched").folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as loaded,
    ):
        yield loaded


@pytest.mark.native
@pytest.mark.slow
def test_reuse_and_overcommit_are_measured(
    model: kv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache with states reuses what is possible; one without them misses the target."""
    work = Chats(chats=9, turns=2, system=40)
    assert cache_reuse.reuse(model, "recurrent", work, lambda: None).met
    found = cache_reuse.overcommit(model, "recurrent", PrefixCache, 4, lambda: None)
    assert found.met
    assert found.data["parks"] > 0
    assert found.data["decoded"] == found.data["needed"]
    monkeypatch.setattr("pyllamakv.cache.eviction.keep_state", lambda *_: None)
    assert not cache_reuse.reuse(model, "recurrent", work, lambda: None).met
