"""Requests are sent from all clients; a server that ends loses what it held, and is replaced."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from server_kit import serving

from pyllamakv.server.server_process import ServerProcess
from qa.load import server_load
from qa.load.request_schedule import LoadRequest

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = 'data: {"content": "a", "tokens_predicted": 2, "stop": true}\n\n'

#: Aborts when a request wants 99 tokens.
_FRAGILE = "if b'\"n_predict\":99,' in self.rfile.read(size): os.abort()"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a server that answers every request with two tokens."""
    pytest.importorskip("httpx")
    made = serving(tmp_path, {"/completion": (200, EVENTS)})
    text = made.read_text("utf-8")
    made.write_text(text.replace("self.rfile.read(size)", _FRAGILE, 1), encoding="utf-8")
    return made


def request(n_predict: int = 2) -> LoadRequest:
    """Return a request that arrives at once."""
    return LoadRequest(0.0, (40, 41), n_predict)


@pytest.mark.long
def test_every_request_is_answered(program: Path) -> None:
    """Their times and tokens are noted in the order of arrival."""
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


@pytest.mark.long
def test_a_server_that_ends_is_replaced(program: Path) -> None:
    """Only the request that ended it is lost, if there is one client."""
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


@pytest.mark.long
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


def test_a_refused_request_stops_no_other_client() -> None:
    """While one client waits whether the server ends, the others get its address."""
    order: list[str] = []
    asked, released = threading.Event(), threading.Event()

    def ended(_seconds: float) -> bool:
        asked.set()
        released.wait(10)
        order.append("ended")
        return False

    server: Any = SimpleNamespace(url="here", ended=ended, retries=0)
    with server_load.RestartedServer(lambda: nullcontext(server)) as restarted:
        waiting = threading.Thread(target=restarted.replace, args=("here",))
        waiting.start()
        assert asked.wait(10)
        order.append(restarted.url)
        released.set()
        waiting.join()
    assert order == ["here", "ended"]
    assert restarted.deaths == []
