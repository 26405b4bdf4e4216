"""Test the benchmarks of cache managers: work and results, but no times."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

from pyllamakv.errors import HarnessError
from qa.bench import manager_overhead
from qa.bench.measure import Pairs
from qa.bench.workload import Round

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant


def test_prompts_of_all_rounds_differ_in_the_first_token() -> None:
    """If a manager could reuse cells, the work would differ."""
    for work in (manager_overhead.ONE, manager_overhead.EIGHT):
        firsts = [p[0] for n in range(1, 32) for p in work.prompts(n)]
        assert len(set(firsts)) == len(firsts)
        assert all(len(p) == work.prompt and max(p) < 512 for p in work.prompts(7))
        assert work.n_ctx >= work.n_batch


def test_manager_and_manual_loop_generate_the_same_tokens(tmp_path: Path) -> None:
    """By hand, on a lease and batched: the last tokens are equal in each round."""
    model = kit.model(tmp_path)
    for work in (
        manager_overhead.ManagerWorkload("one", 1, 5, 6),
        manager_overhead.ManagerWorkload("three", 3, 5, 6),
    ):
        with ExitStack() as sides:
            plain = sides.enter_context(manager_overhead.by_hand(model, work))
            others = []
            for make in manager_overhead.MANAGERS.values():
                others.append(sides.enter_context(manager_overhead.batched(model, work, make)))
                if work.sequences == 1:
                    others.append(sides.enter_context(manager_overhead.leased(model, work, make)))
            for number in (1, 2, 3):
                expected = plain(number).result
                assert [each(number).result for each in others] == [expected] * len(others)


def test_overhead_figure_requires_the_interval_below_the_limit() -> None:
    """The whole interval must meet the limit; different work is refused."""
    good = manager_overhead.figure("x", manager_overhead.ONE, Pairs([1.04] * 30, [1.0] * 30), "m")
    assert good.met
    assert good.value.startswith("1.040 [1.040, 1.040]")
    assert not manager_overhead.figure(
        "x", manager_overhead.ONE, Pairs([1.06] * 30, [1.0] * 30), "m"
    ).met
    rounds: Any = (lambda n: Round(1.0, [1.0]), lambda n: Round(2.0, [float(n)]))
    with pytest.raises(HarnessError, match="different work"):
        manager_overhead.compare("x", *rounds, 3, lambda: None)
    assert set(manager_overhead.MANAGERS) == {"SlotCache", "PrefixCache"}


@pytest.mark.slow
@pytest.mark.native
def test_managers_are_measured(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures are measured, with shortened rounds of the real library."""
    monkeypatch.delenv("PYLLAMAKV_TEST_MODEL", raising=False)
    monkeypatch.setattr(
        manager_overhead, "ONE", manager_overhead.ManagerWorkload("1 sequence", 1, 8, 6)
    )
    monkeypatch.setattr(
        manager_overhead, "EIGHT", manager_overhead.ManagerWorkload("8 sequences", 8, 4, 6)
    )
    found = manager_overhead.figures(lambda: None, pairs=2)
    assert [figure.name for figure in found[:3]] == [
        "`SlotCache`, 1 sequence",
        "`Batcher` over `SlotCache`, 1 sequence",
        "`Batcher` over `SlotCache`, 8 sequences",
    ]
