"""Generate the requests of agents: tool calls, branches, retries, and sub-agents.

Agents of a few kinds run at the same time. Each kind has one system prompt with its tools. A turn
sends everything again and adds the last tool's result; the text is the next call. Now and then, a
request is repeated, a turn starts again from an earlier one, or a sub-agent with the system prompt
of all sub-agents does a task, whose result the agent continues with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from qa.replay.replayed_request import ReplayedRequest

#: Tokens of a cell.
CELL: Final = 64


@dataclass(frozen=True)
class AgentTraffic:
    """A workload of ``agents``, of which up to ``parallel`` run at the same time.

    The shares are those of turns that are retried, that start again from an earlier turn, and that
    start a sub-agent. Lengths are in cells.
    """

    agents: int = 160
    parallel: int = 80
    kinds: int = 4
    system: tuple[int, int] = (24, 96)
    turns: tuple[int, int] = (2, 12)
    result: tuple[int, int] = (1, 24)
    text: tuple[int, int] = (1, 4)
    retries: float = 0.08
    branches: float = 0.08
    helpers: float = 0.06
    seed: int = 1


def generate(traffic: AgentTraffic) -> list[ReplayedRequest]:
    """Return the requests in the order of their arrival."""
    draw = random.Random(traffic.seed)
    numbers = count(1)

    def some(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(draw.randint(*bounds)))

    systems = [some(traffic.system) for _ in range(traffic.kinds)]
    helper = some(traffic.system)

    def agent(system: tuple[int, ...], most: int, *, helps: bool) -> Iterator[ReplayedRequest]:
        history = system + some(traffic.result)
        earlier = [history]
        for _ in range(draw.randint(traffic.turns[0], most)):
            request = ReplayedRequest(history, some(traffic.text))
            yield request
            if draw.random() < traffic.retries:
                request = ReplayedRequest(history, some(traffic.text))
                yield request
            if helps and draw.random() < traffic.helpers:
                yield from agent(helper, max(traffic.turns[0], most // 3), helps=False)
            if draw.random() < traffic.branches:
                history = draw.choice(earlier) + some(traffic.result)
            else:
                history = request.cells + some(traffic.result)
            earlier.append(history)

    waiting = [
        agent(draw.choice(systems), traffic.turns[1], helps=True) for _ in range(traffic.agents)
    ]
    running: list[Iterator[ReplayedRequest]] = []
    found = []
    while waiting or running:
        while waiting and len(running) < traffic.parallel:
            running.append(waiting.pop())
        # Some agents answer faster than others.
        one = running[min(draw.randrange(len(running)), draw.randrange(len(running)))]
        request = next(one, None)
        if request is None:
            running.remove(one)
        else:
            found.append(request)
    return found
