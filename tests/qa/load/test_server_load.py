"""Test that all clients send requests, and that a server that ends is replaced."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from server_kit import serving

from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_process import RETRY, ServerProcess
from qa.load import server_load
from qa.load.request_schedule import LoadRequest

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = 'data: {"content": "a", "tokens_predicted": 2, "stop": true}\n\n'

#: The same response in OpenAI's API.
OPENAI = (
    'data: {"choices": [{"index": 0, "text": "a"}], "usage": null}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)

#: Aborts when a request wants 99 tokens.
_FRAGILE = "if b'\"n_predict\":99,' in self.rfile.read(size): os.abort()"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a server that responds to every request with two tokens."""
    pytest.importorskip("httpx")
    made = serving(
        tmp_path, {"/completion": (200, EVENTS), "/v1/completions": (200, OPENAI)}, log=RETRY
    )
    text = made.read_text("utf-8")
    made.write_text(text.replace("self.rfile.read(size)", _FRAGILE, 1), encoding="utf-8")
    return made


def request(n_predict: int = 2) -> LoadRequest:
    """Return a request that arrives immediately."""
    return LoadRequest(0.0, (40, 41), n_predict)


@pytest.mark.slow
def test_every_request_is_answered(program: Path) -> None:
    """Times and tokens are recorded in the order of arrival."""
    ticks: list[int] = []
    found = server_load.send(
        lambda: ServerProcess(program, ["--port", "0"]), [request()] * 9, 3, ticks.append
    )
    assert (len(found.timings), found.lost, found.deaths) == (9, 0, ())
    assert found.tokens == 18
    assert all(0 < each.first <= each.ended for each in found.timings)
    assert len(ticks) == 9
    assert max(ticks) == 9
    assert found.cpu_seconds > 0
    start = partial(ServerProcess, program, ["--port", "0"])
    found = server_load.send(start, [request()] * 3, 3, ticks.append, openai=True)
    assert (len(found.timings), found.lost, found.tokens) == (3, 0, 6)
    gaps = [gap for each in found.timings for gap in each.gaps]
    assert len(gaps) == 3  # between two events
    assert all(begin <= end for begin, end in gaps)


@pytest.mark.slow
def test_closed_loop_sends_one_request_per_client(program: Path) -> None:
    """A request arrives when a client is free, so none waits for another one."""
    requests = [LoadRequest(None, (40, 41), 2)] * 6
    found = server_load.send(
        lambda: ServerProcess(program, ["--port", "0"]), requests, 2, lambda _: None
    )
    arrived = [each.arrived for each in found.timings]
    assert arrived == sorted(arrived)
    assert found.timings[2].arrived >= min(each.ended for each in found.timings[:2])


@pytest.mark.slow
def test_a_server_that_ends_is_replaced(program: Path) -> None:
    """With one client, only the request that ended it is lost."""
    found = server_load.send(
        lambda: ServerProcess(program, ["--port", "0"]),
        [request(), request(99), request(), request(3)],
        1,
        lambda _done: None,
    )
    assert [bool(each.error) for each in found.timings] == [False, True, False, True]
    assert found.timings[1].error.startswith("ConnectionError")
    assert found.timings[3].error == "2 of 3 tokens"
    assert ["SIGABRT" in why for _, why in found.deaths] == [True]
    assert found.lost == 2
    # Each of the two servers logs one.
    assert found.retries == 2


@pytest.mark.slow
def test_a_server_that_hangs_is_replaced(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is recorded once; it would lose every later request."""
    text = program.read_text("utf-8")
    hanging = text.replace("os.abort()", "__import__('time').sleep(60)")
    program.write_text(hanging, encoding="utf-8")
    assert hanging != text
    monkeypatch.setattr(server_load, "ServerClient", partial(ServerClient, timeout=1.0))
    found = server_load.send(
        lambda: ServerProcess(program, ["--port", "0"]),
        [request(99), request(99), request()],
        2,
        lambda _done: None,
    )
    assert [bool(each.error) for each in found.timings] == [True, True, False]
    assert [why for _, why in found.deaths] == ["/completion: no answer for 1 s"]


@pytest.mark.slow
def test_a_server_that_ends_after_its_last_answer(program: Path) -> None:
    """It loses no request, but its end is recorded."""
    running: list[ServerProcess] = []

    def start() -> ServerProcess:
        running.append(ServerProcess(program, ["--port", "0"]))
        return running[-1]

    def end(_done: int) -> None:
        os.kill(running[-1].pid, signal.SIGSEGV)
        assert running[-1].ended()

    found = server_load.send(start, [request()], 1, end)
    assert (found.lost, ["SIGSEGV" in why for _, why in found.deaths]) == (0, [True])


def test_cpu_time_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of earlier servers is excluded."""
    pytest.importorskip("httpx")
    seconds = iter((100.0, 107.5))
    monkeypatch.setattr(server_load, "_cpu_seconds", lambda: next(seconds))
    server: Any = SimpleNamespace(url="here", ended=lambda _seconds: False, retries=0)
    found = server_load.send(lambda: nullcontext(server), [], 1, lambda _done: None)
    assert found.cpu_seconds == 7.5


@pytest.mark.slow
def test_ctrl_c_ends_a_load_test(program: Path) -> None:
    """No later request is sent."""
    ended: list[int] = []

    def interrupt(done: int) -> None:
        ended.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server_load.send(
            lambda: ServerProcess(program, ["--port", "0"]),
            [request(), LoadRequest(15.0, (40, 41), 2)],
            2,
            interrupt,
        )
    assert ended == [1]


def test_a_closed_connection_stops_no_other_client() -> None:
    """While one client waits for the end of the server, the others get the new address."""
    order: list[str] = []
    asked, released = threading.Event(), threading.Event()

    def ended(seconds: float) -> bool:
        if seconds == 0:
            return False
        asked.set()
        released.wait(10)
        order.append("ended")
        return False

    server: Any = SimpleNamespace(url="here", ended=ended, retries=0)
    with server_load.RestartedServer(lambda: nullcontext(server)) as restarted:
        waiting = threading.Thread(target=restarted.replace, args=("here", ConnectionError()))
        waiting.start()
        assert asked.wait(10)
        order.append(restarted.url)
        released.set()
        waiting.join()
    assert order == ["here", "ended"]
    assert restarted.deaths == []
