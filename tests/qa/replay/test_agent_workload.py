"""Test generated agents, which send their history again, retry, branch and delegate."""

from __future__ import annotations

from itertools import pairwise

from qa.replay.agent_workload import AgentTraffic, generate

SMALL = AgentTraffic(agents=30, parallel=10)


def test_a_seed_defines_the_requests() -> None:
    """The same seed has the same requests; another seed has others."""
    assert generate(SMALL) == generate(SMALL)
    assert generate(SMALL) != generate(AgentTraffic(agents=30, parallel=10, seed=2))


def test_turns_continue_retry_branch_and_delegate() -> None:
    """Every kind of turn occurs; prompts start with few system prompts."""
    found = generate(SMALL)
    ends = {each.cells for each in found}
    prompts = [each.prompt for each in found]
    assert sum(any(p[:n] in ends for n in range(1, len(p))) for p in prompts) > len(found) / 2
    assert len(set(prompts)) < len(prompts)  # retries
    starts = {p[0] for p in prompts}
    assert len(starts) <= SMALL.kinds + 1
    assert len(starts) == len({p[: SMALL.system[0]] for p in prompts}) > 2
    without = [
        generate(AgentTraffic(agents=30, parallel=10, **{kind: 0.0}))
        for kind in ("retries", "branches", "helpers")
    ]
    assert all(each != found for each in without)
    assert len({p.prompt for p in without[0]}) == len(without[0])
    assert len({p.prompt[0] for p in without[2]}) <= SMALL.kinds


def test_agents_run_at_the_same_time() -> None:
    """Consecutive requests are usually those of different agents."""
    prompts = [each.prompt for each in generate(SMALL)]
    pairs = pairwise(prompts)
    assert sum(b[: len(a)] == a for a, b in pairs) < len(prompts) / 2
    alone = [each.prompt for each in generate(AgentTraffic(agents=30, parallel=1))]
    pairs = pairwise(alone)
    assert sum(b[: len(a)] == a for a, b in pairs) > len(alone) / 2
