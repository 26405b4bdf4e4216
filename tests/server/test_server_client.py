"""Test that a client uses llama-server's API, and refusals become typed errors."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from server_kit import serving

from pyllamakv.errors import PromptTooLong, RequestFailed, ToolMissing
from pyllamakv.server.server_client import ServerClient, refusal
from pyllamakv.server.server_process import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [
    {
        "id": 7,
        "logprob": -0.5,
        "top_logprobs": [
            {"id": 9, "logprob": -0.1},
            {"id": 7, "logprob": -0.5},
            {"id": 8, "logprob": -2.0},
        ],
    },
    {"id": 8, "logprob": -1.0, "top_logprobs": [{"id": 8, "logprob": -1.0}]},
]
ANSWER = {
    "content": "ab",
    "tokens_evaluated": 10,
    "timings": {"prompt_n": 3},
    "truncated": True,
    "completion_probabilities": ROWS,
}
#: How 0.3.36 and 0.3.9 refuse a long request.
NEW = '{"error":{"code":400,"message":"request (600 tokens)","type":"exceed_context_size_error"}}'
OLD = (
    '{"error":{"code":400,"message":"the request exceeds the available context size. try '
    'increasing the context size or enable context shift","type":"invalid_request_error"}}'
)


@pytest.mark.slow
def test_client_parses_completions_and_refusals(tmp_path: Path) -> None:
    """Tokens with margins, counts, refusals, and a broken connection."""
    pytest.importorskip("httpx")
    program = serving(
        tmp_path,
        {
            "/completion": (200, ANSWER),
            "/tokenize": (200, {"tokens": [1, 2]}),
            "/slots": (200, [{"is_processing": True}]),
            "/metrics": (200, '# TYPE a counter\na 3\nb{model="x y"} 0.5\n'),
            "/slots/0?action=save": (501, {"error": "not supported"}),
        },
    )
    with (
        ServerProcess(program, ["--port", "0"]) as server,
        ServerClient(server.url) as client,
    ):
        found = client.complete([1, 2], 2, logit_bias=[[9, False]])
        assert (found.text, found.tokens, found.truncated) == ("ab", (7, 8), True)
        # Token 9 is banned, so 8 is the next one.
        assert found.margins == (1.5, math.inf)
        assert client.complete("text", 2).margins[0] == pytest.approx(-0.4)
        assert (found.n_prompt, found.reused) == (10, 7)
        assert client.tokenize("ab") == [1, 2]
        assert not client.wait_idle(0.0)
        assert client.metrics() == {"a": 3.0, 'b{model="x y"}': 0.5}
        with pytest.raises(RequestFailed, match=r"501.*not supported") as caught:
            client.post("/slots/0?action=save", {})
        assert caught.value.code == 501
        with pytest.raises(ConnectionError, match="/die"):
            client.post("/die", {})
        assert server.ended()
        with pytest.raises(ConnectionError):
            client.cancel("text", 8, after=1)


def answered(monkeypatch: pytest.MonkeyPatch, text: str) -> ServerClient:
    """Return a client that gets a text as every response."""
    pytest.importorskip("httpx")
    reply = SimpleNamespace(text=text)
    monkeypatch.setattr(ServerClient, "_request", lambda *_words: reply)
    return ServerClient("http://127.0.0.1:1")


def test_null_probability_becomes_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sends NaN as null: of the token or of another one."""
    for row in (
        {"id": 7, "logprob": None, "top_logprobs": [{"id": 8, "logprob": -1.0}]},
        {"id": 7, "logprob": -1.0, "top_logprobs": [{"id": 8, "logprob": None}]},
    ):
        text = json.dumps({**ANSWER, "completion_probabilities": [*ROWS, row]})
        with answered(monkeypatch, text) as client:
            margins = client.complete("text", 3).margins
        assert [math.isnan(each) for each in margins] == [False, False, True]


@pytest.mark.parametrize(
    "text", ["<html>", "[]", "{}", '{"content": "a"}', json.dumps({**ANSWER, "timings": None})]
)
def test_malformed_answer_raises_request_failed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It is an error of the server."""
    with (
        answered(monkeypatch, text) as client,
        pytest.raises(RequestFailed, match=r"/completion: .*(no JSON|another form)"),
    ):
        client.complete("text", 2)
    with answered(monkeypatch, "<html>") as client:
        for ask in (client.slots, lambda: client.tokenize("a")):
            with pytest.raises(RequestFailed, match="no JSON"):
                ask()


def test_connections_are_not_reused() -> None:
    """A server closes an idle connection at a time that the client does not know."""
    httpx = pytest.importorskip("httpx")
    with ServerClient("http://127.0.0.1:1") as client:
        transport = client._client._transport
        assert isinstance(transport, httpx.HTTPTransport)
        assert transport._pool._max_keepalive_connections == 0


@pytest.mark.slow
def test_client_parses_streamed_events_and_errors(tmp_path: Path) -> None:
    """Each event, an error in place of one, and a refusal before the first."""
    pytest.importorskip("httpx")
    events = 'data: {"content": "\u2028"}\n\ndata: {"content": "", "stop": true}\n\n'
    late = 'data: {"content": "a"}\n\nerror: {"code": 500, "message": "no cells"}\n\n'
    found: list[dict[str, object]] = []
    broken = 'data: {"content": "a\n\n'
    for status, text in ((200, events), (200, late), (200, broken), (400, OLD)):
        program = serving(tmp_path, {"/completion": (status, text)})
        with (
            ServerProcess(program, ["--port", "0"]) as server,
            ServerClient(server.url) as client,
        ):
            if text == events:
                found = list(client.stream([1], 1))
                client.cancel([1], 1, after=1)
                continue
            error = PromptTooLong if text == OLD else RequestFailed
            raises = pytest.raises(error, match=r"no cells|no JSON|exceeds the available")
            with raises as caught:
                list(client.stream([1], 1))
            if text == late:
                assert caught.value.code == 500
    assert found == [{"content": "\u2028"}, {"content": "", "stop": True}]


@pytest.mark.parametrize("text", [NEW, OLD, "input is larger than the max context size. skipping"])
def test_too_long_request_raises_prompt_too_long(text: str) -> None:
    """Releases refuse it with different texts."""
    error = refusal("/completion", 400, text)
    assert isinstance(error, PromptTooLong)
    assert "larger -c" in str(error)


def test_refused_request_has_status_and_message() -> None:
    """Both are attributes of the error."""
    error = refusal("/slots", 501, "")
    assert isinstance(error, RequestFailed)
    assert str(error) == "/slots: the server answers 501: no message"


def test_missing_httpx_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ToolMissing, match=r"pip install 'pyllamakv\[server\]'"):
        ServerClient("http://127.0.0.1:1")
