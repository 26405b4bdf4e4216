"""Test the benchmark of several clients: prompts, check of tokens, arithmetic, but no times."""

from __future__ import annotations

import dataclasses
import re
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import pyllamakv
from pyllamakv.errors import HarnessError, Untestable
from pyllamakv.scenarios import synthetic_models
from qa.bench import generation, peer_child
from qa.bench.generation import ClientWorkload
from qa.bench.measure import Pairs
from qa.bench.workload import Round

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant
    from qa.bench.workload import Runner


@contextmanager
def one_by_one(
    variant: Variant, model: Path, work: ClientWorkload, api: str, wrong: int = 0
) -> Iterator[Runner]:
    """Serve the clients like llama-cpp-python; ``wrong`` is added to the last token."""
    assert api == "clients"
    rounds = iter(work.prompts)
    with (
        pyllamakv.open(variant.folder) as library,
        library.load_model(model) as loaded,
        loaded.context(n_ctx=work.n_ctx, n_batch=128, n_ubatch=128, n_threads=1) as context,
        loaded.sampler() as sampler,
    ):
        one = context.sequence()

        def run() -> Round:
            tokens = []
            for prompt in next(rounds):
                one.remove()
                one.prefill(prompt)
                for _ in range(work.steps):
                    tokens.append(sampler.sample(context))
                    one.step(tokens[-1])
            tokens[-1] += wrong
            return Round(2.0, tokens, 4.0)

        yield run


@pytest.mark.slow
@pytest.mark.native
def test_every_token_is_compared(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of all rounds must be equal; without llama-cpp-python, the figure has a reason."""
    model = synthetic_models.model("bytes")
    whole = generation.workload
    monkeypatch.setattr(generation, "TEXT", "A fox. ")
    monkeypatch.setattr(
        generation,
        "workload",
        lambda *them: dataclasses.replace(whole(*them), steps=5, n_ctx=32, n_batch=64),
    )
    monkeypatch.setattr(generation, "peer", one_by_one)
    found = generation.measure(patched, model, 2, 2, lambda: None)
    assert found.name == "2 clients"
    assert re.search(r"in one batch costs \d+\.\d\d \[.*\] times as much per token", found.limit)
    assert found.data["cpu"]["llama-cpp-python"] == [2.0, 2.0]
    assert found.data["wall"]["llama-cpp-python"] == [4.0, 4.0]
    assert all(0 < each < 4 for each in found.data["wall"]["ours"])
    monkeypatch.setattr(generation, "peer", lambda *them: one_by_one(*them, wrong=1))
    with pytest.raises(HarnessError, match="2 clients: the loops did different work"):
        generation.measure(patched, model, 2, 1, lambda: None)

    @contextmanager
    def absent(*_: object) -> Iterator[Runner]:
        raise Untestable("pyllamakv dropin setup 0.3.9")
        yield

    monkeypatch.setattr(generation, "peer", absent)
    found = generation.measure(patched, model, 1, 1, lambda: None)
    assert (found.name, found.value, found.met) == ("1 client", "not measured", None)
    assert found.how == "pyllamakv dropin setup 0.3.9"


@pytest.mark.native
def test_no_prompt_starts_like_another(patched: Variant) -> None:
    """Neither side can reuse cells of an earlier prompt."""
    work = generation.workload(patched, synthetic_models.model("bytes"), 4, 3)
    assert (len(work.prompts), work.clients) == (3, 4)
    assert len({prompt[0] for those in work.prompts for prompt in those}) == 12
    assert len({tuple(prompt[1:]) for those in work.prompts for prompt in those}) == 1


def test_throughputs_are_compared_by_cpu_time() -> None:
    """Tokens per second and CPU per token of both sides; the wall-clock time is shown."""
    work, model = ClientWorkload([[[1, 2]] * 4], steps=25), Path("m.gguf")
    wall, cpu = Pairs([3.0] * 9, [1.0] * 9), Pairs([1.0] * 9, [0.5] * 9)
    cost = Pairs([3.0] * 9, [2.0] * 9)
    found = generation.figure(work, model, wall, cpu, cost)
    assert found.value.startswith("2.00 [2.00, 2.00] times the tokens per CPU second")
    assert found.value.endswith(", 3.00 [3.00, 3.00] times by the wall clock")
    assert found.limit == (
        "CPU per token 5.00 and 10.00 ms; 100 and 33 tokens/s; a decode of all clients in one "
        "batch costs 1.50 [1.50, 1.50] times as much per token as of one client alone"
    )
    assert found.met
    assert generation.figure(work, model, wall, Pairs([1.0] * 9, [2.0] * 9), cost).met is False


def test_llama_cpp_python_serves_one_client_after_the_other() -> None:
    """Each call of the child's loop is one round, with the given number of greedy tokens."""
    asked = []

    class Llama:
        def __init__(self, model: str, **options: object) -> None:
            assert (model, options["n_ctx"], options["n_threads"]) == ("m.gguf", 128, 1)

        def generate(self, prompt: list[int], **options: object) -> Iterator[int]:
            asked.append((prompt, options))
            while True:
                yield prompt[0] + len(asked)

    work = ClientWorkload([[[10], [20]], [[30], [40]]], steps=2)
    run = peer_child.clients(SimpleNamespace(Llama=Llama), {**work.to_json(), "model": "m.gguf"})
    begin = time.thread_time()
    seconds, tokens = run()
    assert 0 <= seconds <= time.thread_time() - begin
    assert tokens == [11, 11, 22, 22]
    assert run()[1] == [33, 33, 44, 44]
    assert asked[0] == ([10], {"temp": 0.0, "repeat_penalty": 1.0})
