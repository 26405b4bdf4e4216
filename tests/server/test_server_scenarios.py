"""Test the scenarios on real servers of the default release: stock fails, patched passes."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import adapter_kit
import pytest
import readme
from cpp_kit import compiler
from native_kit import TEST_RELEASE
from server_kit import serving

from pyllamakv.errors import NotBuilt, RequestFailed, ScenarioFailed, Unsupported, Untestable
from pyllamakv.server import server_lab, server_scenarios
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_check import run_scenario
from pyllamakv.server.server_client import ServerClient, ServerCompletion
from pyllamakv.server.server_lab import ServerLab
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.server.server_scenarios import SCENARIOS
from pyllamakv.source import verified

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.server.server_artifact import BuiltServer
    from pyllamakv.server.server_scenarios import ServerScenario

pytestmark = [pytest.mark.native, pytest.mark.slow]

BY_ID = {each.id: each for each in SCENARIOS}


#: Scenarios that the test release skips, with a count that is positive on the newest one.
ONLY_NEWER = {
    "server-hybrid": "reused",
    "server-overcommit": "parked",
    "server-park-limit": "parked",
    "server-reuse": "reused",
    "server-mixed-chats": "reused",
    "server-other-end": "reused",
    "server-swa-full": "reused",
    "server-schema": "requests",
    "server-slot-damage": "requests",
}

VARIANT = SimpleNamespace(manifest=SimpleNamespace(backend="cpu"))


def server(side: str, release: str = TEST_RELEASE) -> BuiltServer:
    """Return a built server, or skip."""
    pytest.importorskip("httpx")
    pytest.importorskip("openai")
    try:
        return find_server(f"{release}+{side}")
    except NotBuilt as error:
        pytest.skip(str(error))


#: Refuses a request whose answer may not be UTF-8, as servers between 0.3.33 and b10566 do.
_PARSER = """
        if size and b"logit_bias" not in self.rfile.read(size):
            return self.send_error(500)
"""


def lab_with_chats(folder: Path, n_generated: int) -> ServerLab:
    """Return the lab of a fake server whose chats report the given number of tokens."""
    for package in ("httpx", "openai"):
        pytest.importorskip(package)
    message = {"role": "assistant", "content": "yes"}
    usage = {"prompt_tokens": 1, "completion_tokens": n_generated, "total_tokens": 1 + n_generated}
    chat: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "model"}
    chat["choices"] = [{"index": 0, "finish_reason": "length", "message": message}]
    chat["usage"] = usage
    slots = [{"n_ctx": server_lab.SLOT}] * server_lab.CLIENTS
    program = serving(folder, {"/slots": (200, slots), "/v1/chat/completions": (200, chat)})
    text = program.read_text("utf-8")
    assert "\n        self.rfile.read(size)\n" in text
    program.write_text(text.replace("\n        self.rfile.read(size)\n", _PARSER), "utf-8")
    built: Any = SimpleNamespace(program=program, check_program=lambda: program, variant=VARIANT)
    lab = ServerLab(built)
    lab.flags = frozenset()
    lab.architectures = set()
    return lab


def test_chats_use_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would respond in place of the server."""
    lab = lab_with_chats(tmp_path, server_lab.SLOT)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    BY_ID["server-openai"].run(lab)
    assert lab.notes["requests"] == 32


def test_incomplete_chats_are_lost(tmp_path: Path) -> None:
    """A response must have as many tokens as were requested."""
    lab = lab_with_chats(tmp_path, server_lab.SLOT - 1)
    with pytest.raises(ScenarioFailed, match=r"32 of 32 .* expected 512 .*, found 511") as caught:
        BY_ID["server-openai"].run(lab)
    assert caught.value.failure == "lost"


@pytest.mark.parametrize(("counted", "lost"), [(8, False), (7, True)])
def test_metrics_are_compared_with_answers(tmp_path: Path, counted: int, lost: bool) -> None:
    """Reused tokens of prompts are not counted."""
    pytest.importorskip("httpx")
    text = f"llamacpp:prompt_tokens_total {counted}\nllamacpp:tokens_predicted_total 2\n"
    answer = ServerCompletion("a", (1,), (1.0,), n_prompt=6, reused=2, truncated=False)
    program = serving(tmp_path, {"/metrics": (200, text)})
    expected = pytest.raises(ScenarioFailed, match=r"prompt_tokens_total is 7.0, expected 8")
    with ServerProcess(program, ["--port", "0"]) as server, expected if lost else nullcontext():
        server_scenarios._compare_metrics(server, [answer, answer])


@pytest.mark.parametrize(
    ("counts", "retries", "message"),
    [
        ((9, 2, 2), 0, ""),
        ((9, 3, 2), 1, ""),
        ((0, 0, 0), 0, "kv_slot_searches_total is 0.0 after answers"),
        ((9, 3, 2), 0, "kv_slot_failures_total is 3.0, expected the sum"),
        ((9, 0, 0), 1, "kv_slot_failures_total is 0.0, expected the sum"),
    ],
)
def test_searches_are_compared_with_retries(
    tmp_path: Path, counts: tuple[int, int, int], retries: int, message: str
) -> None:
    """A failed search was repeated after a defragmentation, or its batch was split."""
    pytest.importorskip("httpx")
    names = ("slot_searches", "slot_failures", "decode_retries")
    rows = (
        f"llamacpp:kv_{name}_total {count}\n" for name, count in zip(names, counts, strict=True)
    )
    program = serving(tmp_path, {"/metrics": (200, "".join(rows))})
    expected = pytest.raises(ScenarioFailed, match=message) if message else nullcontext()
    with ServerProcess(program, ["--port", "0"]) as server, expected:
        server.retries = retries
        server_scenarios._compare_searches(server)


def test_a_patched_server_counts_its_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario that fills the cache compares them."""
    monkeypatch.setattr(server_scenarios, "_SEARCHES", "llamacpp:x")
    outcome, _ = run_scenario(BY_ID["server-parallel"], server("patched"))
    assert (outcome.status, outcome.message) == ("fail", "llamacpp:x is None after answers")


def test_a_server_without_metrics_does_not_decide_on_thresholds() -> None:
    """Stock lacks the feature. A patched server without a required metric claims nothing."""
    for patches, server_patches, known, error, reason in (
        ((), (), False, Unsupported, "no option"),
        (("full-defrag",), (), True, Untestable, "the patch server-metrics"),
        (("full-defrag",), ("server-metrics",), False, Untestable, "no option"),
        (("kv-counters",), ("server-metrics",), True, Untestable, "no patch that moves cells"),
    ):
        manifest = SimpleNamespace(patches=patches, server_patches=server_patches)
        built: Any = SimpleNamespace(manifest=manifest)
        lab = ServerLab(built)
        lab.flags = frozenset({"--defrag-thold"} if known else ())
        with pytest.raises(error, match=reason):
            BY_ID["server-defrag-thold"].run(lab)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, 0, 0, 0), (1, 2, 3, 4), ""),
        ((0, 0, 0, 0), (0, 0, 0, 0), "thold 0.2: llamacpp:kv_defragmentations_total is 0"),
        ((0, 0, 0, 0), (1, 2, 3, 0), "thold 0.2: llamacpp:kv_defragmentation_bytes_total is 0"),
        ((0, 0, 3, 0), (1, 2, 3, 4), "thold 0: llamacpp:kv_defragmentation_cells_total is 3"),
    ],
)
def test_contradicting_move_metrics_fail_the_scenario(
    monkeypatch: pytest.MonkeyPatch, first: tuple[int, ...], second: tuple[int, ...], message: str
) -> None:
    """A metric that contradicts another one fails the scenario."""
    names = ("s", "_moves", "_cells", "_bytes")
    counts = iter(
        [
            {
                f"llamacpp:kv_defragmentation{name}_total": float(count)
                for name, count in zip(names, each, strict=True)
            }
            for each in (first, second)
        ]
    )
    client = SimpleNamespace(metrics=lambda: next(counts))
    manifest = SimpleNamespace(patches=("full-defrag",), server_patches=("server-metrics",))
    lab: Any = ServerLab(SimpleNamespace(manifest=manifest))
    lab.flags = frozenset({"--defrag-thold"})
    lab.server = lambda *_words, **_options: nullcontext(SimpleNamespace(retries=0, url=""))
    monkeypatch.setattr(server_scenarios, "ServerClient", lambda _url: nullcontext(client))
    monkeypatch.setattr(server_scenarios, "_leave_sparse", lambda *_: [])
    monkeypatch.setattr(server_scenarios, "_compare_with_uncached", lambda *_: [])
    with pytest.raises(ScenarioFailed, match=message) if message else nullcontext():
        BY_ID["server-defrag-thold"].run(lab)


def test_answers_to_clients_that_left_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If clients read whole responses, the server ignores their disconnects."""

    def cancel(client: ServerClient, prompt: Any, n_predict: int, **_options: int) -> None:
        client.complete(prompt, n_predict)

    monkeypatch.setattr(ServerClient, "cancel", cancel)
    outcome, _ = run_scenario(BY_ID["server-cancelled"], server("patched"))
    assert outcome.status == "fail"
    assert "8200 of 8200 tokens were generated for cancelled requests" in outcome.message


def test_batches_of_a_sliding_window_may_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries are counted, but only other responses fail: 0.3.14 splits batches with any patch."""
    turns: list[Any] = []
    lab: Any = ServerLab(SimpleNamespace(program=None, variant=VARIANT))
    lab.server = lambda *_words, **_options: nullcontext(SimpleNamespace(retries=5))
    monkeypatch.setattr(server_scenarios, "_conversations", lambda *_: turns)
    monkeypatch.setattr(server_scenarios, "_compare_with_uncached", lambda *_: turns)
    monkeypatch.setattr(server_scenarios, "largest_change", lambda *_: 9.0)
    BY_ID["server-sliding-window"].run(lab)
    assert lab.notes["retries"] == 5
    turns.append((None, None))
    with pytest.raises(ScenarioFailed, match="in 1 of 1 answers"):
        BY_ID["server-sliding-window"].run(lab)


def test_a_gpu_has_wider_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margins in a sliding window are wider, too."""
    change = (server_lab.TIE + server_lab.GPU_TIE) / 2
    turns = [(None, None)]
    monkeypatch.setattr(server_scenarios, "_conversations", lambda *_: turns)
    monkeypatch.setattr(server_scenarios, "_compare_with_uncached", lambda *_: [None])
    monkeypatch.setattr(server_scenarios, "largest_change", lambda *_: change)
    for backend, failed in (("cpu", True), ("cuda", False)):
        variant = SimpleNamespace(manifest=SimpleNamespace(backend=backend))
        lab: Any = ServerLab(SimpleNamespace(program=None, variant=variant))
        lab.server = lambda *_words, **_options: nullcontext(SimpleNamespace(retries=0))
        with pytest.raises(ScenarioFailed) if failed else nullcontext():
            BY_ID["server-sliding-window"].run(lab)


def test_reference_server_with_reused_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores cache_prompt would be compared with itself."""
    one = ServerCompletion("a", (1,), (1.0,), n_prompt=6, reused=2, truncated=False)
    lab: Any = ServerLab(SimpleNamespace(variant=VARIANT))
    turns: Any = [(None, one)]
    for reused, failed in ((2, True), (0, False)):
        alone = [replace(one, reused=reused)]
        monkeypatch.setattr(server_scenarios, "answers", lambda *_, alone=alone, **__: alone)
        with pytest.raises(ScenarioFailed, match="2 tokens") if failed else nullcontext():
            server_scenarios._compare_with_uncached(lab, SimpleNamespace(), turns)


def test_hanging_chat_has_the_failure_class_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a refusal."""
    lab = lab_with_chats(tmp_path, server_lab.SLOT)
    text = lab.built.program.read_text("utf-8")
    slow = 'if "chat" in self.path: __import__("time").sleep(2)\n        self.send_response('
    lab.built.program.write_text(text.replace("self.send_response(", slow, 1), "utf-8")
    monkeypatch.setattr(server_scenarios, "_CHAT", 0.1)
    with pytest.raises(ScenarioFailed, match=r"not answered for 0\.1 s") as caught:
        BY_ID["server-openai"].run(lab)
    assert caught.value.failure == "hang"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.id)
def test_server_scenario_passes_on_patched(scenario: ServerScenario) -> None:
    """Every request is answered without a retry."""
    outcome, notes = run_scenario(scenario, server("patched"))
    if scenario.id in ONLY_NEWER and outcome.status == "skip":
        pytest.skip(outcome.message)
    assert outcome.status == "pass", outcome.message
    assert notes["requests"] > 0
    assert not notes.get("retries")


def test_stock_server_crashes_in_a_context_shift() -> None:
    """The defect is an assertion of ggml that ends the server."""
    outcome, _ = run_scenario(BY_ID["server-context-shift"], server("stock"))
    assert (outcome.status, outcome.failure) == ("fail", "crash")
    assert "SIGABRT" in outcome.message


def test_stock_server_splits_batches_in_a_sparse_cache() -> None:
    """Its own defragmentation does not free enough cells."""
    outcome, notes = run_scenario(BY_ID["server-sparse"], server("stock"))
    assert outcome.status == "fail"
    assert notes["retries"] > 0


def test_stock_server_loses_window_cells() -> None:
    """On the default release its text rarely differs, but its probabilities do."""
    release = verified.newest().name
    outcome, _ = run_scenario(BY_ID["server-sliding-window"], server("stock", release))
    assert (outcome.status, outcome.failure) == ("fail", "data"), outcome.message
    outcome, notes = run_scenario(BY_ID["server-sliding-window"], server("patched", release))
    assert outcome.status == "pass", outcome.message
    assert notes["reused"] > 0


@pytest.mark.real_model
def test_the_quick_start_prints_what_the_page_shows(real_model: Path) -> None:
    """The client of docs/server.md runs with a server of the default release and another port."""
    page = (readme.ROOT / "docs" / "server.md").read_text("utf-8")
    found = re.search(r"```python\n(import openai\n.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found
    program = server("patched", verified.newest().name).program
    with ServerProcess(program, ["-m", str(real_model), "-c", "512", "--port", "0"]) as running:
        code = found[1].replace("http://127.0.0.1:8080", running.url)
        assert code != found[1]
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
        )
    assert done.stdout == found[2]


@pytest.mark.parametrize(("name", "count"), ONLY_NEWER.items())
def test_newest_release_passes_what_older_ones_skip(name: str, count: str) -> None:
    """0.3.9 does not support the model of one scenario, and its slots never share all cells."""
    outcome, notes = run_scenario(BY_ID[name], server("patched", verified.newest().name))
    assert outcome.status == "pass", outcome.message
    assert notes[count] > 0


#: Replace functions of llama.cpp, for a model whose states cannot be saved, or not restored.
_NO_STATES = """
#include <stddef.h>
#include <stdint.h>
extern "C" size_t llama_state_seq_{}{{ return 0; }}
"""
_SAVE = "get_size_ext(void *, int32_t, uint32_t) "
_RESTORE = "set_data_ext(void *, const uint8_t *, size_t, int32_t, uint32_t) "


@pytest.mark.parametrize(
    ("function", "message", "code"),
    [(_SAVE, "its state cannot be saved", 503), (_RESTORE, "cannot be restored", 500)],
    ids=["save", "restore"],
)
def test_request_whose_state_is_lost_fails_alone(
    tmp_path: Path, function: str, message: str, code: int
) -> None:
    """With a status of its own; the other one is answered, and nothing remains parked."""
    library, source = tmp_path / "no_states.so", tmp_path / "no_states.cpp"
    lab = ServerLab(server("patched", verified.newest().name))
    source.write_text(_NO_STATES.format(function), encoding="utf-8")
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)

    with (
        lab.server(
            "--metrics", model="sliding", slots=2, cells=2048, env={"LD_PRELOAD": str(library)}
        ) as running,
        ServerClient(running.url) as first,
        ServerClient(running.url) as client,
    ):
        one, other = (lab.prompt(client, 960) for _ in range(2))
        with closing(first.stream(one, 256, n_probs=0)) as events:
            next(events)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.complete, other, 256)
                (*_, last) = events
                with pytest.raises(RequestFailed, match=message) as refused:
                    waiting.result()
        metrics = client.metrics()
    assert (refused.value.code, last["tokens_predicted"]) == (code, 256)
    assert metrics["llamacpp:park_failures_total"] == 1
    assert metrics["llamacpp:parks_total"] == (code == 500)
    assert metrics["llamacpp:parked_slots"] == metrics["llamacpp:parked_bytes"] == 0


def test_prompt_is_continued_only_with_its_adapters(tmp_path: Path) -> None:
    """Requests with one of two LoRA adapters, or none, get the answers of uncached prompts."""
    lab = ServerLab(server("patched", verified.newest().name))
    words = ["--lora-init-without-apply"]
    for seed in (1, 2):
        file = adapter_kit.AdapterFile(seed=seed).write(tmp_path / f"{seed}.gguf")
        words += ["--lora", str(file)]
    with (
        lab.server(*words, slots=2, model=adapter_kit.base(tmp_path)) as running,
        ServerClient(running.url) as client,
    ):

        def ask(prompt: tuple[int, ...], adapter: int, **options: Any) -> ServerCompletion:
            if adapter:
                options["lora"] = [{"id": adapter - 1, "scale": 1.0}]
            return server_lab.complete(client, prompt, 4, **options)

        first, second, third = (lab.prompt(client, 200) for _ in range(3))
        prompts = [first, second, third, first[:150] + second[:40], second[:100] + third[:90]]
        every = [(prompt, adapter) for prompt in prompts for adapter in range(3)]
        drawn = lab.random.choices(every, k=40)
        found = [ask(*each, id_slot=lab.random.randrange(2)) for each in drawn]
        alone = {each: ask(*each, cache_prompt=False) for each in every}
    pairs = [(alone[each], one) for each, one in zip(drawn, found, strict=True)]
    assert [server_lab.first_difference(*pair, lab.tie) for pair in pairs] == [None] * len(pairs)
    assert max(server_lab.largest_change(*pair) for pair in pairs) <= lab.tie
    assert len({alone[first, adapter].tokens for adapter in range(3)}) == 3
    assert sum(each.reused for each in found) > 2000


@pytest.mark.parametrize("name", [each.id for each in SCENARIOS if each.kind == "guard"])
def test_stock_server_passes_guards(name: str) -> None:
    """A guard that stock fails would prove nothing about patches."""
    outcome, _ = run_scenario(BY_ID[name], server("stock"))
    if name in ONLY_NEWER and outcome.status == "skip":
        pytest.skip(outcome.message)
    assert outcome.status == "pass", outcome.message
