"""Documents whose popularity shifts: skewed in each phase, in another order in the next one."""

from __future__ import annotations

from collections import Counter

from qa.replay.shifting_workload import ShiftingTraffic, generate

SMALL = ShiftingTraffic(requests=600, phases=3, documents=40)


def test_a_seed_defines_the_prompts() -> None:
    """The same seed, the same requests; another seed, others."""
    assert generate(SMALL) == generate(SMALL)
    assert generate(SMALL) != generate(ShiftingTraffic(requests=600, phases=3, seed=2))


def test_each_phase_has_other_popular_documents() -> None:
    """The most popular document of a phase is rare in the others, and questions never repeat."""
    firsts = [each.prompt[0] for each in generate(SMALL)]
    phases = [Counter(firsts[i : i + 200]) for i in (0, 200, 400)]
    tops = [phase.most_common(1)[0] for phase in phases]
    assert len({document for document, _ in tops}) == 3
    for number, (document, uses) in enumerate(tops):
        assert uses > 20
        assert all(phase[document] < uses for i, phase in enumerate(phases) if i != number)
    assert len({each.prompt for each in generate(SMALL)}) == SMALL.requests
    lengths = {len(each.prompt) for each in generate(SMALL)}
    assert min(lengths) >= 5
    assert max(lengths) <= 27
