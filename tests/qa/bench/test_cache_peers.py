"""Test the comparison of prompt caches: workloads, systems and results, but no times."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import NotBuilt, Untestable
from pyllamakv.scenarios import synthetic_models
from qa.bench import cache_peers
from qa.bench.cache_peers import OURS, PEER, SERVE, SERVER, Ours, PeerAnswer, Serve, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SMALL = Sizes(rounds=2, chat=20, system=30, chats=3, question=5, answer=4, prefix=40)
WORDS = [*range(40, 90)]


def longest(seen: Sequence[Sequence[int]], prompt: Sequence[int]) -> int:
    """Return the length of the longest common prefix with one of some sequences."""
    found = 0
    for each in seen:
        same = 0
        while same < min(len(each), len(prompt)) and each[same] == prompt[same]:
            same += 1
        found = max(found, same)
    return found


class Ideal:
    """A system that reuses every prefix, with a constant time per evaluated token."""

    def __init__(self, speed: float, *, keeps: bool) -> None:
        self.speed, self.keeps = speed, keeps
        self.seen: list[list[int]] = []

    def answer(self, prompt: list[int], n: int) -> PeerAnswer:
        """Return generated tokens."""
        evaluated = len(prompt) - min(longest(self.seen, prompt), len(prompt) - 1)
        tokens = [7] * n
        self.seen.append([*prompt, *tokens[:-1]])
        return PeerAnswer(self.speed * evaluated, evaluated, tokens, 0.5)

    def restart(self) -> None:
        """Forget all prompts, unless they are kept."""
        if not self.keeps:
            self.seen.clear()

    resume = answer

    def close(self) -> None:
        """Do nothing."""


def test_each_workload_reuses_earlier_prompts() -> None:
    """Chats share a system prompt; without a cache on disk, a restart loses the prefix."""
    systems = {OURS: Ideal(1.0, keeps=True), SERVER: Ideal(2.0, keeps=False)}
    found = cache_peers.run(systems, WORDS, SMALL, lambda: None)
    ours, theirs = found[OURS], found[SERVER]
    assert ours[cache_peers.FRESH].evaluated == pytest.approx([41, 41], abs=2)
    assert ours[cache_peers.KNOWN].evaluated == [1, 1]
    # The last token of the answer, and the question.
    assert ours[cache_peers.TURN].evaluated == [1 + 5, 1 + 5]
    assert ours[cache_peers.TURN].prompts == 20 + 4 + 5
    assert ours[cache_peers.CHATS].evaluated == pytest.approx([30 + 3 * 5] * 2, abs=5)
    assert ours[cache_peers.RESTART].evaluated == [1, 1]
    assert theirs[cache_peers.RESTART].evaluated == [41, 41]


def test_targets_are_those_of_the_whole_interval() -> None:
    """A row per system and workload, and six figures with a target."""
    systems = {
        OURS: Ideal(1.0, keeps=True),
        SERVE: Ideal(3.0, keeps=True),
        SERVER: Ideal(2.0, keeps=False),
    }
    found = cache_peers.run(systems, WORDS, SMALL, lambda: None)
    figures = cache_peers.report(found, SMALL, "how")
    known, server, restart, file, *served = (each for each in figures if each.target)
    assert [each.met for each in served] == [False, True]
    assert (known.target, known.met, restart.met) == ("<= 0.05 x", True, True)
    assert known.value.startswith("0.0244 [")
    assert (server.target, server.met, file.met) == (cache_peers.NOT_SLOWER, True, True)
    assert server.value == "0.50 [0.50, 0.50] x, 1000.0 and 2000.0 ms"
    assert server.limit == "500.0 ms by the server's own clock"
    rows = [each for each in figures if each.row]
    assert len(rows) == 5 * 3
    assert rows[-1].row["evaluated"] == "41 of 41"
    found[OURS][cache_peers.KNOWN].first[1] = 5000.0
    slow = [each.met for each in cache_peers.report(found, SMALL, "how") if each.target]
    assert slow == [False, False, True, True, False, True]


@pytest.mark.native
@pytest.mark.slow
def test_stored_prefixes_are_reused_after_a_restart(tmp_path: Path) -> None:
    """Only one token is evaluated again."""
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        Ours(model, tmp_path) as ours,
    ):
        first = ours.answer([*range(3, 40)], 4)
        assert (first.evaluated, len(first.tokens)) == (37, 4)
        ours.restart()
        again = ours.resume([*range(3, 40)], 4)
        assert (again.evaluated, again.tokens) == (1, first.tokens)


@pytest.mark.native
@pytest.mark.slow
def test_a_killed_serve_continues_with_what_it_flushed(tmp_path: Path) -> None:
    """Only one token is evaluated again; the next turn of a chat continues with the answer."""
    pytest.importorskip("uvicorn")
    variant, path = built("0.3.9+patched"), synthetic_models.model("bytes")
    with (
        kv.open(variant.folder) as library,
        library.load_model(path) as model,
        closing(Serve(variant, path, tmp_path / "store", model.tokenize)) as served,
    ):
        prompt = [*range(40, 90)]
        first = served.answer(prompt, 4)
        assert first.evaluated == 50
        served.restart()
        assert served.resume(prompt, 4) == replace(first, first=ANY, evaluated=1)


@pytest.mark.native
@pytest.mark.slow
def test_every_system_runs(tmp_path: Path) -> None:
    """With a generated model, the caches of all systems find a prefix."""
    pytest.importorskip("httpx")
    model = synthetic_models.model("bytes")
    try:
        figures = cache_peers.figures(lambda: None, path=model, sizes=SMALL)
    except (NotBuilt, Untestable) as error:
        pytest.skip(str(error))
    rows = {(each.row["workload"], each.row["system"]): each for each in figures if each.row}
    systems = (OURS, SERVE, SERVER, f"{PEER}, `LlamaRAMCache`", f"{PEER}, `LlamaDiskCache`")
    assert {system for _, system in rows} == {*systems}
    for system in systems:
        assert rows["the same 40 tokens and another one", system].row["evaluated"] == "1 of 41"
        lost = system.endswith("`LlamaRAMCache`")
        after = rows["the 40 tokens after a restart", system].row["evaluated"]
        assert after == ("41 of 41" if lost else "1 of 41")
