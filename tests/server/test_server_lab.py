"""Test that a lab compares responses except for ties, and reports failed servers or requests."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from server_kit import ending, serving

from pyllamakv.errors import (
    AddressInUse,
    LoadError,
    ModelError,
    PromptTooLong,
    RequestFailed,
    ScenarioFailed,
    ServerDied,
    Untestable,
)
from pyllamakv.server import server_lab
from pyllamakv.server.server_client import ServerCompletion
from pyllamakv.server.server_lab import (
    ServerLab,
    answers,
    first_difference,
    in_parallel,
    largest_change,
)
from pyllamakv.server.server_process import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.server.server_client import ServerClient

SLOTS = {"/slots": (200, [{"n_ctx": server_lab.SLOT}] * server_lab.CLIENTS)}
ONE = ServerCompletion("abc", (1, 2, 3), (math.inf, 4.0, 2.0), 8, 0, False)


def lab(program: Path, backend: str = "cpu") -> ServerLab:
    """Return the lab of a fake server."""
    variant = SimpleNamespace(manifest=SimpleNamespace(backend=backend))
    built: Any = SimpleNamespace(program=program, check_program=lambda: program, variant=variant)
    made = ServerLab(built)
    made.flags = frozenset({"--slots"})
    made.architectures = {"llama", "jamba"}
    return made


def test_equal_answers_have_no_difference() -> None:
    """Nor have responses that diverge at a tie, whatever follows."""
    assert first_difference(ONE, ONE) is None
    other = replace(ONE, tokens=(1, 9, 8), margins=(math.inf, 0.01, 3.0))
    assert first_difference(ONE, other) is None
    assert first_difference(other, ONE) is None
    assert (
        first_difference(ONE, replace(ONE, tokens=(1, 2, 9), margins=(1.0, 4.0, 2.0)), 2.0) is None
    )


def test_first_difference_is_the_first_unexplained_token() -> None:
    """It is the first token without a tie, or the end of one response."""
    assert first_difference(ONE, replace(ONE, tokens=(1, 9, 3))) == 1
    assert first_difference(ONE, replace(ONE, tokens=(1, 2), margins=(math.inf, 4.0))) == 2


def test_changes_of_probabilities_are_found_before_texts_differ() -> None:
    """Not after another token, and not if no other token is possible."""
    assert largest_change(ONE, ONE) == 0
    assert largest_change(ONE, replace(ONE, margins=(9.0, 4.25, 1.875))) == 0.25
    assert largest_change(ONE, replace(ONE, tokens=(1, 9, 3), margins=(math.inf, 1.0, 1.0))) == 0


def test_two_labs_generate_the_same_prompts() -> None:
    """The prompts are equal, so stock and patched do the same work."""
    one, other = lab(server_lab.Path("x")), lab(server_lab.Path("x"))
    assert one.words(20) == other.words(20) != one.words(20)


@pytest.mark.slow
def test_an_interrupt_sends_no_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests end first; Ctrl-C does not wait for the others."""
    pytest.importorskip("httpx")
    begun, interrupted, seen = threading.Event(), threading.Event(), []

    class Stop(threading.Event):
        def set(self) -> None:
            super().set()
            interrupted.set()

    def act(_client: ServerClient, item: int) -> None:
        seen.append(item)
        if item == 0:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(60)

    monkeypatch.setattr(server_lab, "Event", Stop)
    with pytest.raises(KeyboardInterrupt):
        in_parallel("http://127.0.0.1:9", range(10), 2, act)
    assert sorted(seen) == [0, 1]


@pytest.mark.slow
def test_a_server_that_hangs_gets_no_more_requests() -> None:
    """Each would take minutes."""
    pytest.importorskip("httpx")
    seen: list[int] = []

    def act(_client: ServerClient, item: int) -> None:
        seen.append(item)
        raise TimeoutError("no answer for 120 s")

    with pytest.raises(TimeoutError, match="120 s"):
        in_parallel("http://127.0.0.1:9", range(10), 1, act)
    assert seen == [0]


def test_nan_probability_has_the_failure_class_data() -> None:
    """It is not a refusal, even if other requests were refused."""
    client: Any = SimpleNamespace(
        complete=lambda *_words, **_options: replace(ONE, margins=(1.0, math.nan, 1.0))
    )
    with pytest.raises(ScenarioFailed, match="not a number") as caught:
        server_lab.complete(client, (1,), 3)
    damage = caught.value
    assert damage.failure == "data"
    with pytest.raises(ScenarioFailed, match="not a number") as caught:
        server_lab.answered([ONE, RequestFailed("no"), damage])
    assert caught.value.failure == "data"


def test_flags_are_read_from_the_help(tmp_path: Path) -> None:
    """A program that cannot run is a LoadError."""
    made = lab(ending(tmp_path, "-c,    --ctx-size N   size", status=0))
    del made.flags
    assert {"-c", "--ctx-size"} <= made.flags
    made = lab(ending(tmp_path, "no library", status=127))
    del made.flags
    with pytest.raises(LoadError, match="127"):
        _ = made.flags
    made = lab(tmp_path / "missing")
    del made.flags
    with pytest.raises(LoadError, match=r"cannot be run: .*missing"):
        _ = made.flags


#: Logs its settings, then responds like the fake server below; ``--help`` has its variables.
_TELLTALE = """
import json, os, sys
names = sorted(name for name in os.environ if name.startswith("LLAMA_"))
if "--help" in sys.argv:
    sys.exit(print("--slots", *(f"--{name}" for name in names)))
print(json.dumps([sys.argv[1:], names, os.environ["XDG_CONFIG_HOME"]]), flush=True)
"""


@pytest.mark.slow
def test_settings_of_the_user_do_not_reach_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would change the verdict, or let a server listen on all networks."""
    pytest.importorskip("httpx")
    found = lab(serving(tmp_path, SLOTS))
    text = found.built.program.read_text("utf-8")
    found.built.program.write_text(text.replace("\n", f"\n{_TELLTALE}", 1), encoding="utf-8")
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with found.server() as server:
        assert server.url.startswith("http://127.0.0.1:")
        arguments, names, config = json.loads(server.log[0])
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert names == []
    assert config == os.devnull
    del found.flags
    assert found.flags == {"--slots"}


@pytest.mark.slow
def test_unified_cache_slots_may_use_the_whole_cache(tmp_path: Path) -> None:
    """Releases such as 0.3.35 have no share per slot; otherwise each slot has its own cache."""
    pytest.importorskip("httpx")
    whole = server_lab.SLOT * server_lab.CLIENTS
    found = lab(serving(tmp_path, {"/slots": (200, [{"n_ctx": whole}] * server_lab.CLIENTS)}))
    found.flags = frozenset({"--slots", "--kv-unified"})
    text = found.built.program.read_text("utf-8")
    found.built.program.write_text(text.replace("\n", f"\n{_TELLTALE}", 1), encoding="utf-8")
    assert found.sharing == ()
    with found.server(one_cache=True) as server:
        assert "--kv-unified" in json.loads(server.log[0])[0]
    with pytest.raises(Untestable, match=f"found .{whole}"), found.server():
        pass


@pytest.mark.slow
def test_gpu_server_has_its_cache_on_the_device(tmp_path: Path) -> None:
    """Servers of a GPU have their layers and wide rows there; the log decides."""
    pytest.importorskip("httpx")
    found = lab(serving(tmp_path, SLOTS, log="x:      CUDA0 KV buffer size =   1.25 MiB"), "cuda")
    text = found.built.program.read_text("utf-8")
    found.built.program.write_text(text.replace("\n", f"\n{_TELLTALE}", 1), encoding="utf-8")
    with found.server() as server:
        arguments = json.loads(server.log[0])[0]
    assert arguments[arguments.index("-ngl") + 1] == "999"
    assert "-v" not in arguments
    assert arguments[arguments.index("-m") + 1].rpartition("/")[2].startswith("bytes-wide")
    assert found.tie > server_lab.TIE == lab(found.built.program).tie
    for line in ("x:        CPU KV buffer size =   1.25 MiB", "ready"):
        found = lab(serving(tmp_path, SLOTS, log=line), "cuda")
        with pytest.raises(Untestable, match="host memory, not on a cuda device"), found.server():
            pass
    with lab(found.built.program).server():
        pass


@pytest.mark.slow
def test_server_death_is_reported_instead_of_broken_connections(tmp_path: Path) -> None:
    """The end of the server is reported instead."""
    pytest.importorskip("httpx")
    found = lab(serving(tmp_path, SLOTS, log="GGML_ASSERT(x) failed"))

    def die(client: ServerClient, _item: int) -> None:
        client.post("/die", {})

    with pytest.raises(ServerDied, match=r"SIGABRT: GGML_ASSERT"), found.server() as server:
        failed = in_parallel(server.url, [1, 2, 3], 2, die)
        assert all(isinstance(each, ConnectionError) for each in failed)
        raise ScenarioFailed("3 of 3 requests were not answered")


@pytest.mark.slow
def test_refused_or_hanging_request_has_its_failure_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused request fails the claim; one without a response in time is a hang."""
    pytest.importorskip("httpx")
    monkeypatch.setattr(server_lab, "ENDING", 0.0)
    found = lab(serving(tmp_path, SLOTS))
    with found.server() as server:
        requests = [server_lab.CompletionRequest((1,), 1)] * 3
        with pytest.raises(ScenarioFailed, match=r"3 of 3 requests .*404") as refused:
            answers(server, requests, 2)
        assert refused.value.failure == "claim"
    for error, failure in (
        (TimeoutError("late"), "hang"),
        (RequestFailed("no"), "claim"),
        (PromptTooLong("too long"), "claim"),
    ):
        with pytest.raises(ScenarioFailed) as caught, found.server():
            raise error
        assert caught.value.failure == failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "failure"), [(ConnectionError("closed"), "claim"), (TimeoutError("late"), "hang")]
)
def test_failed_first_request_fails_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, failure: str
) -> None:
    """It does like any later request."""
    pytest.importorskip("httpx")

    def refuse(_server: object) -> None:
        raise error

    monkeypatch.setattr(server_lab, "ENDING", 0.0)
    monkeypatch.setattr(server_lab, "_parts", refuse)
    found = lab(serving(tmp_path, SLOTS))
    with pytest.raises(ScenarioFailed) as caught, found.server():
        pass
    assert caught.value.failure == failure
    found = lab(found.built.program)
    found.flags = frozenset({"--kv-unified"})
    with pytest.raises(ScenarioFailed, match=str(error)):
        _ = found.sharing


@pytest.mark.slow
def test_a_start_is_repeated_once_if_its_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port was free when it was chosen."""
    pytest.importorskip("httpx")
    found, starts = lab(serving(tmp_path, SLOTS)), []

    def taken(*args: Any, **options: Any) -> ServerProcess:
        starts.append(args)
        if len(starts) in refused:
            raise AddressInUse("cannot listen")
        return ServerProcess(*args, **options)

    monkeypatch.setattr(server_lab, "ServerProcess", taken)
    refused = {1}
    with found.server() as server:
        assert server.port > 0
    assert len(starts) == 2
    starts.clear()
    refused = {1, 2}
    with pytest.raises(AddressInUse), found.server():
        pass
    assert len(starts) == 2


@pytest.mark.slow
def test_unsupported_model_skips_the_scenario(tmp_path: Path) -> None:
    """They are skipped before a start; a model that fails to load is an error."""
    pytest.importorskip("httpx")
    made = lab(ending(tmp_path, "tensor 'x' data is not within the file bounds"))
    with pytest.raises(ModelError), made.server(model="hybrid"):
        pass
    made.architectures = set()  # of a release whose sources have another form
    with pytest.raises(ModelError), made.server(model="hybrid"):
        pass
    made.architectures = {"llama"}
    with pytest.raises(Untestable, match="does not support jamba"), made.server(model="hybrid"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("trained", [1024, 512])
def test_slots_are_limited_by_the_training_of_the_model(tmp_path: Path, trained: int) -> None:
    """Slots of 512 cells share 2,048 if the model was trained with 512; else they are too small."""
    pytest.importorskip("httpx")
    models = {"data": [{"meta": {"n_ctx_train": trained}}]}
    found = lab(serving(tmp_path, {**SLOTS, "/v1/models": (200, models)}))
    found.flags = frozenset({"--kv-unified"})
    with (
        nullcontext() if trained == 512 else pytest.raises(Untestable, match=r"found \[512\]"),
        found.server(cells=2048) as server,
    ):
        assert server.url


@pytest.mark.slow
def test_server_with_separate_slot_caches_is_untestable(tmp_path: Path) -> None:
    """With separate caches nothing can be verified, and the run is skipped."""
    pytest.importorskip("httpx")
    found = lab(serving(tmp_path, {"/slots": (200, [{"n_ctx": server_lab.CELLS}])}))
    assert found.sharing == ()
    message = r"expected slots of 512 cells, found \[2048\]"
    with pytest.raises(Untestable, match=message), found.server():
        pass
    for known, sizes, flags in (
        ({"--kv-unified"}, [server_lab.CELLS], ()),
        ({"--kv-unified"}, [server_lab.SLOT] * 4, ("--kv-unified",)),
        (
            {"--kv-unified", "--kv-unified-per-slot"},
            [],
            ("--kv-unified", "--kv-unified-per-slot", "512"),
        ),
    ):
        found = lab(serving(tmp_path, {"/slots": (200, [{"n_ctx": size} for size in sizes])}))
        found.flags = frozenset(known)
        assert found.sharing == flags
