"""Test the comparison of prompt caches: workloads, systems and results, but no times."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import NotBuilt
from pyllamakv.scenarios import synthetic_models
from qa.bench import cache_peers
from qa.bench.cache_peers import OURS, SERVE, SERVER, Ours, PeerAnswer, Serve, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SMALL = Sizes(rounds=2, prefix=40)
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


def test_each_workload_reuses_the_prefix() -> None:
    """Without a cache on disk, a restart loses it."""
    systems = {OURS: Ideal(1.0, keeps=True), SERVER: Ideal(2.0, keeps=False)}
    found = cache_peers.run(systems, WORDS, SMALL, lambda: None)
    ours, theirs = found[OURS], found[SERVER]
    assert ours[cache_peers.FRESH].evaluated == pytest.approx([41, 41], abs=2)
    assert ours[cache_peers.KNOWN].evaluated == [1, 1]
    assert ours[cache_peers.RESTART].evaluated == [1, 1]
    assert theirs[cache_peers.RESTART].evaluated == [41, 41]


def test_targets_are_those_of_the_whole_interval() -> None:
    """Each of the six figures is met or missed."""
    systems = {
        OURS: Ideal(1.0, keeps=True),
        SERVE: Ideal(3.0, keeps=True),
        SERVER: Ideal(2.0, keeps=False),
    }
    found = cache_peers.run(systems, WORDS, SMALL, lambda: None)
    figures = cache_peers.report(found, SMALL, "how")
    known, server, restart, file, *served = figures
    assert [each.met for each in served] == [False, True]
    assert (known.target, known.met, restart.met) == ("<= 0.05 x", True, True)
    assert known.value.startswith("0.0244 [")
    assert (server.target, server.met, file.met) == (cache_peers.NOT_SLOWER, True, True)
    assert server.value == "0.50 [0.50, 0.50] x, 1000.0 and 2000.0 ms"
    assert server.limit == "500.0 ms by the server's own clock"
    found[OURS][cache_peers.KNOWN].first[1] = 5000.0
    slow = [each.met for each in cache_peers.report(found, SMALL, "how")]
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
    """With a generated model, the caches of both packages find a prefix, also after a restart."""
    pytest.importorskip("httpx")
    model = synthetic_models.model("bytes")
    try:
        figures = cache_peers.figures(lambda: None, path=model, sizes=SMALL)
    except NotBuilt as error:
        pytest.skip(str(error))
    assert [each.data["evaluated"] for each in figures] == [[1, 1]] * 6
