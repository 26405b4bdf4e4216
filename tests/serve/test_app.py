"""Test requests to the API: responses, and refusals with their status."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("starlette")

import serve_kit as kit
from batching_kit import alone
from pydantic import ValidationError
from starlette.datastructures import URL
from starlette.requests import Request

from pyllamakv.binding.codes import Code
from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.errors import NativeError, NoTokenAllowed, PrefixStoreError
from pyllamakv.serve.api_replies import ChatFormat, TextFormat
from pyllamakv.serve.api_requests import ChatRequest, TextRequest
from pyllamakv.serve.app import Api
from pyllamakv.serve.engine import Choice, Engine, GenerationOptions

if TYPE_CHECKING:
    import httpx

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"prompt": "Hi", "max_tokens": 8, "temperature": 0}


def test_a_completion_is_the_greedy_text(tmp_path: Path) -> None:
    """It has the token counts; a repetition reuses the prompt without its last token."""

    async def main(client: httpx.AsyncClient) -> list[Any]:
        return [(await client.post(COMPLETE, json=HI)).json() for _ in range(2)]

    first, again = kit.run(kit.engine(tmp_path), main)
    text = alone(tmp_path, "Hi", 8)
    for reply in (first, again):
        assert reply["object"] == "text_completion"
        (choice,) = reply["choices"]
        assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        assert reply["usage"]["completion_tokens"] == 8
    prompt = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt - 1}


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_a_stream_has_the_text_of_the_reply(tmp_path: Path, path: str) -> None:
    """Its events are the text, the reason of the end, the token counts, and [DONE]."""
    body = {**(HI if path == COMPLETE else kit.CHAT), "n": 2, "temperature": 1, "seed": 3}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def main(client: httpx.AsyncClient) -> list[Any]:
        return [await client.post(path, json=each) for each in (body, streamed)]

    whole, stream = kit.run(kit.engine(tmp_path), main)
    choices = whole.json()["choices"]
    *parts, usage, done = kit.events(stream.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    assert len({each["id"] for each in parts}) == 1
    for choice in choices:
        own = [
            each["choices"][0] for each in parts if each["choices"][0]["index"] == choice["index"]
        ]
        assert [each["finish_reason"] for each in own[-2:]] == [None, choice["finish_reason"]]
        if path == COMPLETE:
            assert "".join(each["text"] for each in own) == choice["text"]
        else:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(each["delta"].get("content", "") for each in own)
            assert text == choice["message"]["content"]


def test_last_event_of_a_choice_is_sent_when_the_choice_ends(tmp_path: Path) -> None:
    """Its reason is not held until the other choices end, as in OpenAI's streams."""
    served = kit.engine(tmp_path)
    native: Any = served.context.native
    seen = threading.Event()

    class Gate:
        decodes = 0

        def wait(self, seconds: float) -> None:
            self.decodes += 1
            # The first choice has ended after fewer decodes.
            assert self.decodes <= 20 or seen.wait(20), "the end of the first choice is held"

    native.gate = Gate()
    stop = alone(tmp_path, "Hi", 8)[2:4]
    options = GenerationOptions(1, 60, (stop,), False, SamplerParams(), None, None)

    async def main(_: httpx.AsyncClient) -> list[tuple[int, str]]:
        tokens = [served.model.tokenize(prompt) for prompt in ("Hi", "Hello")]
        completion = await served.complete(2, lambda: tokens, options)
        found = []
        async for event in TextFormat(served.model, "tiny").events(completion, usage=False):
            for each in kit.events(event.decode()):
                if each != "[DONE]" and (reason := each["choices"][0]["finish_reason"]):
                    seen.set()
                    found.append((each["choices"][0]["index"], reason))
        completion.close()
        return found

    assert kit.run(served, main) == [(0, "stop"), (1, "length")]
    assert native.gate.decodes > 20


class Refusing:
    """Sample tokens until none is allowed."""

    def __init__(self, n: int) -> None:
        self._left = n

    def sample(self, context: Any, index: int = -1) -> int:
        """Return a token, or raise."""
        context.logits(index)
        self._left -= 1
        if self._left < 0:
            raise NoTokenAllowed("no token is allowed; relax the logit biases")
        return 70


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_sampled", [0, 3])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logit_bias": {"5": -100}, "grammar": "root ::= 'a'"}, "logit_bias"),
        ({"grammar": "root ::= 'a'"}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_field_that_allows_no_token_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    n_sampled: int,
    more: dict[str, Any],
    param: str,
) -> None:
    """It is before a stream, and in the last event of a stream that has begun."""
    monkeypatch.setattr(Engine, "_samplers", lambda *_: [Refusing(n_sampled)])
    answer = kit.post(kit.engine(tmp_path), COMPLETE, {**HI, **more, "stream": stream})
    begun = stream and n_sampled
    assert answer.status_code == (200 if begun else 400)
    error = kit.events(answer.text)[-1]["error"] if begun else answer.json()["error"]
    assert (error["code"], error["param"]) == ("no_token_allowed", param)


@pytest.mark.parametrize(
    ("path", "more"),
    [(COMPLETE, {**HI, "logprobs": 2}), (CHAT, {**kit.CHAT, "logprobs": True, "top_logprobs": 2})],
)
def test_log_probabilities_are_written_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, more: Any
) -> None:
    """Others are answered meanwhile; the reply has an entry for each token of each choice."""
    served = kit.engine(tmp_path)
    begun, goes = threading.Event(), threading.Event()
    logprobs = Choice.logprobs

    def slow(choice: Choice, start: int = 0) -> Any:
        begun.set()
        assert goes.wait(20), "the event loop was blocked"
        return logprobs(choice, start)

    monkeypatch.setattr(Choice, "logprobs", slow)

    async def main(client: httpx.AsyncClient) -> Any:
        task = asyncio.create_task(client.post(path, json={**more, "n": 2}))
        await asyncio.to_thread(begun.wait, 60)
        assert (await client.get("/health")).status_code == 200
        goes.set()
        return (await task).json()

    reply = kit.run(served, main)
    n = reply["usage"]["completion_tokens"] // 2
    for choice in reply["choices"]:
        found = choice["logprobs"]
        if path == CHAT:
            assert [len(each["top_logprobs"]) for each in found["content"]] == [2] * n
            assert found["refusal"] is None
        else:
            assert [len(found[name]) for name in sorted(found)] == [n] * 4


@pytest.mark.parametrize("kind", [TextFormat, ChatFormat])
def test_log_probabilities_of_an_event_are_those_of_its_text(tmp_path: Path, kind: Any) -> None:
    """They are also if the generation has ended before its first event is written."""
    served = kit.engine(tmp_path)
    options = GenerationOptions(2, 8, (), False, SamplerParams(), None, 1)

    async def main(_: httpx.AsyncClient) -> list[Any]:
        completion = await served.complete(1, lambda: [[70, 71]], options)
        while completion.pending:
            await asyncio.sleep(0)
        events = kind(served.model, "tiny").events(completion, usage=False)
        found = kit.events("".join([event.decode() async for event in events]))
        completion.close()
        return found

    tokens = 0
    for each in kit.run(served, main)[:-1]:
        (choice,) = each["choices"]
        logprobs = choice["logprobs"] or {"tokens": [], "content": []}
        if kind is TextFormat:
            text, found = choice["text"], logprobs["tokens"]
        else:
            text = choice["delta"].get("content", "")
            found = [entry["token"] for entry in logprobs["content"]]
        assert "".join(found) == text
        tokens += len(found)
    assert tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_tokens_of_a_stop_string_have_no_log_probabilities(
    tmp_path: Path, path: str, stream: bool
) -> None:
    """Those of the reply and of all events are the tokens that begin in the text."""
    body = {**HI, "logprobs": 0} if path == COMPLETE else {**kit.CHAT, "logprobs": True}
    (choice,) = kit.post(kit.engine(tmp_path), path, body).json()["choices"]
    text = choice["text"] if path == COMPLETE else choice["message"]["content"]
    body |= {"stop": text[2:4], "stream": stream}
    answer = kit.post(kit.engine(tmp_path), path, body)
    replies = kit.events(answer.text)[:-1] if stream else [answer.json()]
    found = [each["choices"][0]["logprobs"] or {} for each in replies]
    if path == COMPLETE:
        tokens = [token for each in found for token in each.get("tokens", [])]
    else:
        tokens = [entry["token"] for each in found for entry in each.get("content", [])]
    assert "".join(tokens) == text[:2]


def test_most_likely_tokens_of_a_completion_include_that_of_the_text(tmp_path: Path) -> None:
    """With 0, they are this one alone, as in OpenAI's completions."""
    body = {**HI, "temperature": 2.0, "seed": 1, "logprobs": 0}
    for n in (0, 1):
        reply = kit.post(kit.engine(tmp_path), COMPLETE, {**body, "logprobs": n}).json()
        found = reply["choices"][0]["logprobs"]
        for token, value, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert top[token] == value
            assert 1 <= len(top) <= n + 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_request_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Without a limit of tokens, those up to the end of the context count."""
    monkeypatch.setattr("pyllamakv.serve.engine._MAX_LOGPROBS", 2 * 8 * 3)

    async def main(client: httpx.AsyncClient) -> None:
        for more, status in (
            ({"n": 2, "logprobs": 2}, 200),
            ({"n": 3, "logprobs": 2}, 400),
            ({"prompt": ["Hi"] * 3, "logprobs": 2}, 400),
            ({"n": 2, "logprobs": 3}, 400),
            ({"max_tokens": 2**31 - 1, "logprobs": 0}, 400),
            ({"n": 4}, 200),
        ):
            answer = await client.post(COMPLETE, json={**HI, "stream": stream, **more})
            assert answer.status_code == status, (more, answer.text)
            assert status == 200 or "max_tokens" in answer.json()["error"]["message"]
        unlimited = {"messages": [MESSAGE], "logprobs": True}
        assert (await client.post(CHAT, json=unlimited)).status_code == 400

    kit.run(kit.engine(tmp_path), main)


def test_several_prompts_and_choices_keep_their_order(tmp_path: Path) -> None:
    """Choice 0 of each prompt is the text that the prompt generates alone."""
    body = {**HI, "prompt": ["Hi", "Hello"], "n": 2}
    reply = kit.post(kit.engine(tmp_path), COMPLETE, body).json()
    texts = [each["text"] for each in reply["choices"]]
    hi, hello = (alone(tmp_path, prompt, 8) for prompt in ("Hi", "Hello"))
    assert texts == [hi, hi, hello, hello]
    assert [each["index"] for each in reply["choices"]] == [0, 1, 2, 3]


def test_a_generation_ends_with_the_context(tmp_path: Path) -> None:
    """Without a limit, and with one that exceeds it; the last token is not decoded."""
    for limit in ({}, {"max_completion_tokens": 5000}):
        body = {"messages": kit.CHAT["messages"], "temperature": 0, "ignore_eos": True, **limit}
        reply = kit.post(kit.engine(tmp_path, n_ctx=64), CHAT, body).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["total_tokens"] == 65


def test_a_burst_evaluates_its_common_prefix_once(tmp_path: Path) -> None:
    """Of 8 users with one system prompt of 400 tokens, each but the first reuses it."""
    served = kit.engine(tmp_path, capacity=8, n_ctx=4096, n_seq_max=8)
    prompts = ["s" * 400 + f" {user}: hello" for user in range(8)]

    async def main(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{**HI, "prompt": each, "max_tokens": 2} for each in prompts]
        return await asyncio.gather(*(client.post(COMPLETE, json=each) for each in bodies))

    used = [reply.json()["usage"] for reply in kit.run(served, main)]
    reused = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    assert reused >= 0.95 * 7 * 400


def test_tokens_can_be_the_prompt(tmp_path: Path) -> None:
    """One prompt, or several."""
    one = kit.post(kit.engine(tmp_path), COMPLETE, {**HI, "prompt": [70, 71]}).json()
    many = kit.post(kit.engine(tmp_path), COMPLETE, {**HI, "prompt": [[70, 71], [70, 71]]}).json()
    texts = [each["text"] for each in (*one["choices"], *many["choices"])]
    assert texts == [alone(tmp_path, [70, 71], 8)] * 3
    assert many["usage"]["prompt_tokens"] == 4


MESSAGE = {"role": "user", "content": "Hi"}
TOO_LONG = "context_length_exceeded"
VARIABLES = "chat_template_kwargs"
INVALID_JSON, VALUE, TYPE = "invalid_json", "invalid_value", "invalid_type"
MISSING = "missing_required_parameter"
OBFUSCATION = "include_obfuscation"
NO_OBFUSCATION = "unsupported", f"stream_options.{OBFUSCATION}", "support"
TOOL_ROLE = "unsupported", "messages.0.role", "not support the role"


@pytest.mark.parametrize(
    ("path", "body", "code", "param", "text"),
    [
        (COMPLETE, b'{"prompt"', INVALID_JSON, None, "Invalid JSON"),
        (COMPLETE, b"\xff{}", INVALID_JSON, None, "Invalid JSON"),
        (COMPLETE, b"[1]", TYPE, None, "should be an object"),
        (COMPLETE, b'{"prompt":"\\ud800"}', INVALID_JSON, None, "Invalid JSON"),
        (COMPLETE, {}, MISSING, "prompt", "required"),
        (COMPLETE, {"prompt": []}, VALUE, "prompt", "empty list"),
        (COMPLETE, {"prompt": [[]]}, VALUE, "prompt", "prompt is empty"),
        (COMPLETE, {"prompt": [10**6]}, VALUE, "prompt", "token 1000000 is out of range"),
        (COMPLETE, {"prompt": [-(10**30)]}, VALUE, "prompt", "prompt"),
        (COMPLETE, {"prompt": "Hi", "max_tokens": -2}, VALUE, "max_tokens", "greater than"),
        (COMPLETE, {"prompt": "Hi", "max_tokens": "5"}, TYPE, "max_tokens", "valid integer"),
        (COMPLETE, {"prompt": "Hi", "max_tokens": 5, "n_predict": 6}, VALUE, "max_tokens", "send"),
        (COMPLETE, {"prompt": "Hi", "temperature": True}, TYPE, "temperature", "valid number"),
        (COMPLETE, b'{"prompt":"Hi","temperature":NaN}', VALUE, "temperature", "finite"),
        (COMPLETE, {"prompt": "Hi", "temperature": -1}, VALUE, "temperature", "temperature must"),
        (COMPLETE, {"prompt": "Hi", "mirostat": 3}, VALUE, "mirostat", "mirostat must be"),
        (CHAT, {**kit.CHAT, "mirostat": 1}, VALUE, "mirostat", "no effect at temperature 0"),
        (CHAT, {**kit.CHAT, "frequency_penalty": 1e9}, VALUE, *["frequency_penalty"] * 2),
        (CHAT, {**kit.CHAT, "repeat_penalty": -1}, VALUE, *["repeat_penalty"] * 2),
        (COMPLETE, {"prompt": "Hi", "top_p": 1.5}, VALUE, "top_p", "top_p must be"),
        (COMPLETE, {"prompt": "Hi", "n": 0}, VALUE, "n", "greater than"),
        (COMPLETE, {"prompt": "Hi", "n": 5}, VALUE, "n", "5 texts, and the server takes 4"),
        (COMPLETE, {"prompt": ["Hi"] * 4000}, VALUE, "prompt", "4000 texts"),
        (COMPLETE, {"prompt": ["Hi"] * 5000}, VALUE, "prompt", "at most 4096 items"),
        (COMPLETE, b'{"prompt":' + b"[" * 200_000, "too_many_brackets", None, "200000 brackets"),
        (COMPLETE, {"prompt": "Hi", "stop": ["x" * 2000]}, VALUE, "stop.0", "1024 characters"),
        (COMPLETE, {"prompt": "Hi", "logit_bias": [[1, 10**400]]}, VALUE, "logit_bias", "large"),
        (COMPLETE, {"prompt": "Hi", "logit_bias": {"1": 10**400}}, TYPE, "logit_bias.1", "number"),
        (COMPLETE, {"prompt": "Hi", "stop": [""]}, VALUE, "stop.0", "at least 1 character"),
        (COMPLETE, {"prompt": "Hi", "stop": ""}, VALUE, "stop", "at least 1 character"),
        (COMPLETE, {"prompt": "Hi", "logit_bias": {"x": 1}}, VALUE, "logit_bias", "token numbers"),
        (COMPLETE, {"prompt": "Hi", "logit_bias": {"900": 1}}, VALUE, "logit_bias", "token 900"),
        (COMPLETE, {"prompt": "Hi", "samplers": ["best"]}, VALUE, "samplers", "samplers"),
        (COMPLETE, {"prompt": "Hi", "stream_options": {}}, VALUE, "stream_options", "requires"),
        (COMPLETE, {"prompt": "Hi", "echo": True}, "unsupported", "echo", "support echo"),
        (CHAT, {**kit.CHAT, "stream_options": {OBFUSCATION: True}}, *NO_OBFUSCATION),
        (COMPLETE, {"prompt": "Hi", "best_of": 2}, "unsupported", "best_of", "support best_of"),
        (COMPLETE, {"prompt": "Hi", "cache_salt": ""}, VALUE, "cache_salt", "1 character"),
        (CHAT, {**kit.CHAT, "cache_salt": 1}, TYPE, "cache_salt", "string"),
        (COMPLETE, {"prompt": "Hi", "foo": 1}, "unknown_field", "foo", "unknown"),
        (COMPLETE, {"prompt": "x" * 257}, TOO_LONG, "prompt", "the context 256"),
        (COMPLETE, {"prompt": "x" * 300, "stream": True}, TOO_LONG, "prompt", "256"),
        (CHAT, {"messages": [{**MESSAGE, "content": "x" * 300}]}, TOO_LONG, "messages", "256"),
        (CHAT, {**kit.CHAT, "messages": []}, VALUE, "messages", "at least 1 item"),
        (CHAT, {**kit.CHAT, "tools": [{}]}, "unsupported", "tools", "support tools"),
        (CHAT, {**kit.CHAT, "top_logprobs": 2}, VALUE, "top_logprobs", "requires logprobs"),
        (CHAT, {"messages": [{"role": "tool", "content": ""}]}, *TOOL_ROLE),
        (CHAT, {"messages": [{"role": "function", "name": "f"}]}, *TOOL_ROLE),
        (CHAT, {"messages": [{"role": "bot", "content": ""}]}, VALUE, "messages.0.role", "'user'"),
        (CHAT, {"messages": [{"role": "user"}]}, MISSING, "messages.0.content", "required"),
        (CHAT, {**kit.CHAT, VARIABLES: {"tools": 1}}, VALUE, VARIABLES, "cannot set tools"),
        (CHAT, {**kit.CHAT, VARIABLES: {"self": 1}}, VALUE, VARIABLES, "cannot set self"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported",
            "messages.0.content.0.image_url",
            "support image_url",
        ),
        (
            CHAT,
            {**kit.CHAT, "response_format": {"type": "json_schema"}},
            VALUE,
            "response_format",
            "no json_schema.schema",
        ),
        (
            CHAT,
            {**kit.CHAT, "response_format": {"type": "json_object", "schema": {"type": 5}}},
            VALUE,
            "response_format",
            "schema",
        ),
        (CHAT, {**kit.CHAT, "json_schema": {"type": 5}}, VALUE, "json_schema", "schema"),
        (CHAT, {**kit.CHAT, "grammar": "root", "json_schema": {}}, VALUE, "grammar", "both"),
        ("/v1/cache/pin", {"name": "a"}, VALUE, "prompt", "either a prompt or messages"),
        ("/v1/cache/unpin", {"name": "a"}, VALUE, "name", "nothing is pinned"),
        ("/v1/cache/flush", {}, "no_store", None, "no store"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused(
    tmp_path: Path, path: str, body: Any, code: str | None, param: str | None, text: str
) -> None:
    """It has status 400 and OpenAI's format, also before a stream."""
    answer = kit.post(kit.engine(tmp_path), path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code), error
    assert error["param"] == param, error
    assert text in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["", 1] * 1000},
        {"prompt": [[], ""] * 1000},
        {"prompt": [[1], [""]] * 1000},
        {"messages": [{}] * 1000},
        {"messages": [MESSAGE] * 5000},
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 2000}]},
        {"prompt": "Hi", **{f"field{i}": 1 for i in range(1000)}},
        {"prompt": "Hi", "stop": ["x", 1] * 30},
        {"prompt": "Hi", "logit_bias": {str(i): "x" for i in range(5000)}},
        {"prompt": "Hi", "logit_bias": [["x"] * 1000]},
        {"prompt": "Hi", "logit_bias": [[1, 1.0]] * 5000},
        {"prompt": "Hi", "dry_sequence_breakers": ["x"] * 17},
        {"prompt": "Hi", "dry_sequence_breakers": ["x" * 65]},
        {"prompt": "Hi", "samplers": ["top_k"] * 21},
        {"prompt": "Hi", "grammar": "x" * (256 * 1024 + 1)},
        {"prompt": "Hi", "json_schema": {"enum": [1] * 20_000}},
        {"prompt": "Hi", "response_format": {"type": "json_object", "schema": {"a": [1] * 20_000}}},
        {"messages": [MESSAGE], "chat_template_kwargs": {str(i): i for i in range(20_000)}},
        {"prompt": "Hi", "user": "x" * 5000},
    ],
)  # fmt: skip
def test_every_list_and_object_of_a_body_is_limited(body: Any) -> None:
    """The report has only the first errors, even if every item of a list is wrong."""
    kind = ChatRequest if "messages" in body else TextRequest
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    "more",
    [
        {"dry_multiplier": 0.5},
        {"samplers": ["top_k"], "top_k": 4},
        {"logit_bias": {"1": 1}},
        {"grammar": "root ::= 'a'"},
    ],
)
def test_sampler_that_is_slow_to_create_is_not_created_by_the_batcher(more: Any) -> None:
    """The batcher would create it in the thread that decodes for all others."""
    for fields, needed in (({}, False), ({"top_p": 0.9, "seed": 1}, False), (more, True)):
        body = TextRequest.model_validate_json(json.dumps({"prompt": "Hi", **fields}))
        params = body.sampler_params(64)
        assert GenerationOptions(1, 1, (), True, params, None, None).needs_sampler == needed


def test_fields_that_request_nothing_are_accepted(tmp_path: Path) -> None:
    """They are null, and neutral values of fields that are not supported."""
    more = {"tools": [], "tool_choice": "none", "stop": None, "store": False, "user": "me"}
    for fields in ({"logit_bias": None}, {"n": 2, "best_of": 2}):
        answer = kit.post(kit.engine(tmp_path), CHAT, {**kit.CHAT, **more, **fields})
        assert answer.status_code == 200, answer.text


def test_an_unknown_model_or_path_is_not_found(tmp_path: Path) -> None:
    """The served model is listed by its name."""

    async def main(client: httpx.AsyncClient) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "tiny"
        assert (await client.get("/v1/models/tiny")).json() == model
        for answer, code in (
            (await client.get("/v1/models/other"), "model_not_found"),
            (await client.post(COMPLETE, json={**HI, "model": "x" * 500}), "model_not_found"),
            (await client.get("/v1/nothing"), "unknown_url"),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == code
        answer = await client.get(COMPLETE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert (await client.post(COMPLETE, json={**HI, "model": "tiny"})).status_code == 200

    kit.run(kit.engine(tmp_path), main)


def test_a_key_is_required(tmp_path: Path) -> None:
    """Except for the health of the server."""

    async def main(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        for key in (None, "Bearer", "Bearer wrong", "Basic one", "Bearer one two", b"Bearer \xff"):
            headers = {} if key is None else {"authorization": key}
            for path in ("/v1/models", "/metrics", "/v1/cache", "/openapi.json"):
                answer = await client.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )
        for key in ("Bearer one", "bearer two"):
            assert (await client.get("/v1/models", headers={"authorization": key})).is_success

    kit.run(kit.engine(tmp_path), main, keys=("one", "two"))


def test_path_with_a_slash_at_its_end_is_unknown(tmp_path: Path) -> None:
    """A redirection would name the path to clients without a key."""

    async def main(client: httpx.AsyncClient) -> None:
        for path in (f"{COMPLETE}/", "/v1/cache/", "/health/"):
            assert (await client.get(path)).status_code == 404

    kit.run(kit.engine(tmp_path), main, keys=("one",))


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_description_has_the_scheme_of_keys(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """It has if keys are required; the health needs none."""

    async def main(client: httpx.AsyncClient) -> Any:
        headers = {"authorization": "Bearer one"}
        return (await client.get("/openapi.json", headers=headers)).json()

    found = kit.run(kit.engine(tmp_path), main, keys=keys)
    schemes = found["components"].get("securitySchemes", {})
    assert [each["scheme"] for each in schemes.values()] == ["bearer"] * len(keys)
    assert found.get("security", []) == [{name: []} for name in schemes]
    assert found["paths"]["/health"]["get"].get("security") == ([] if keys else None)
    assert "security" not in found["paths"]["/v1/models"]["get"]


def test_url_of_a_request_opens_no_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Starlette 0.46, the path of a URL is that of a Host header like x/health?."""
    monkeypatch.setattr(Request, "url", URL("http://x/health?/v1/models"))

    async def main(client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/models", headers={"host": "x/health?"})
        assert answer.status_code == 401
        assert (await client.get("/health")).status_code == 200

    kit.run(kit.engine(tmp_path), main, keys=("one",))


def test_a_large_body_is_refused(tmp_path: Path) -> None:
    """Its declared length and the received bytes are limited."""

    async def chunks() -> Any:
        for _ in range(200):
            yield b" " * 100

    async def main(client: httpx.AsyncClient) -> None:
        for content in (b" " * 2000, chunks()):
            answer = await client.post(COMPLETE, content=content)
            assert (answer.status_code, answer.headers["connection"]) == (413, "close")

    kit.run(kit.engine(tmp_path), main, max_body=1000)


def test_a_slow_body_is_refused(tmp_path: Path) -> None:
    """The whole body has a time limit."""

    async def chunks() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async def main(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETE, content=chunks())
        assert answer.json()["error"]["code"] == "body_too_slow"
        assert answer.status_code == 408

    kit.run(kit.engine(tmp_path), main, body_seconds=0.01)


def test_a_full_queue_is_reported(tmp_path: Path) -> None:
    """It has status 429 and the time after which to retry."""
    served = kit.engine(tmp_path, capacity=1)
    native: Any = served.context.native

    async def main(client: httpx.AsyncClient) -> None:
        native.gate.clear()
        first = asyncio.create_task(client.post(COMPLETE, json=HI))
        await asyncio.to_thread(native.entered.wait, 60)
        answer = await client.post(COMPLETE, json=HI)
        native.gate.set()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await first).status_code == 200
        assert (await client.post(COMPLETE, json=HI)).status_code == 200

    kit.run(served, main)


def test_prompt_that_is_tokenized_counts_and_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as waiting; a disconnect drops waiting prompts, and others do not wait for it."""
    served = kit.engine(tmp_path, capacity=2)
    begun, goes = threading.Event(), threading.Event()
    prompts: list[Any] = []

    def tokenize(prompt: Any) -> list[int]:
        prompts.append(prompt)
        begun.set()
        assert goes.wait(60)
        return [70]

    monkeypatch.setattr(served, "tokenize_text", tokenize)

    async def main(client: httpx.AsyncClient) -> None:
        first, other = (asyncio.create_task(client.post(COMPLETE, json=HI)) for _ in range(2))
        await asyncio.to_thread(begun.wait, 60)
        while served.pending < 2:
            await asyncio.sleep(0)
        pin = {"name": "a", "prompt": "Hi"}
        for path, body in ((COMPLETE, HI), ("/v1/cache/pin", pin)):
            assert (await client.post(path, json=body)).status_code == 429
        for task in (first, other):
            task.cancel()
        await asyncio.wait((first, other))
        assert served.pending == 0
        await served.aclose()
        goes.set()

    try:
        kit.run(served, main)
    finally:
        goes.set()
    assert prompts == ["Hi"]


@pytest.mark.parametrize("path", [COMPLETE, CHAT, "/v1/cache/pin"])
def test_prompt_of_too_many_bytes_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The time may be quadratic in the length."""
    served = kit.engine(tmp_path, n_ctx=64)
    calls: list[Any] = []
    monkeypatch.setattr(served.context.native, "tokenize", lambda *given: calls.append(given))
    text = "x" * (64 * 16 + 1)
    messages = {"messages": [{"role": "user", "content": text}]}
    body = {COMPLETE: {"prompt": text}, CHAT: messages}.get(path, {"name": "a", **messages})
    answer = kit.post(served, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least 6" in answer.json()["error"]["message"]
    assert calls == []


def test_bodies_of_all_requests_are_limited_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are until their requests are answered, also with an error."""
    monkeypatch.setattr("pyllamakv.serve.app._BODIES", 2)

    async def main(client: httpx.AsyncClient) -> None:
        sent, ends = asyncio.Event(), asyncio.Event()

        async def chunks() -> Any:
            yield b" " * 999
            sent.set()
            await ends.wait()

        for _ in range(2):
            task = asyncio.create_task(client.post(COMPLETE, content=chunks()))
            await sent.wait()
            sent.clear()
            waiting.append(task)
        answer = await client.post(COMPLETE, content=b" " * 10)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        ends.set()
        assert [(await task).status_code for task in waiting] == [400, 400]
        assert (await client.post(COMPLETE, json=HI)).status_code == 200

    waiting: list[Any] = []
    kit.run(kit.engine(tmp_path), main, max_body=1000)


def test_client_that_stops_reading_frees_its_slot(tmp_path: Path) -> None:
    """Its text is generated to the end; others are served, and it may continue to read.

    Its body counts until then.
    """
    served = kit.engine(tmp_path, capacity=1)
    sent: list[Any] = []
    api = Api(served, "tiny")

    async def main(client: httpx.AsyncClient) -> None:
        reads = asyncio.Event()
        body = json.dumps({**HI, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await reads.wait()

        scope = {"type": "http", "method": "POST", "path": COMPLETE, "headers": []}
        task = asyncio.create_task(api(scope, receive, send))
        while not (sent and served.pending == 0):
            await asyncio.sleep(0)
        assert (await client.post(COMPLETE, json=HI)).status_code == 200
        assert api._held == len(body)
        reads.set()
        await task
        assert api._held == 0

    kit.run(served, main)
    text = b"".join(each.get("body", b"") for each in sent).decode()
    assert kit.events(text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_decode(tmp_path: Path, stream: bool) -> None:
    """It does during its first batch; its slot is free at once, and others continue."""
    served = kit.engine(tmp_path)
    native: Any = served.context.native

    async def main(client: httpx.AsyncClient) -> None:
        native.gate.clear()
        native.entered.clear()
        task = asyncio.create_task(client.post(COMPLETE, json={**HI, "stream": stream}))
        await asyncio.to_thread(native.entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert served.pending == 0
        native.gate.set()
        other = await client.post(COMPLETE, json=HI)
        assert other.json()["choices"][0]["text"] == alone(tmp_path, "Hi", 8)
        stats = await served.statistics()
        assert stats["batcher"]["cancelled"] == 1

    kit.run(served, main)


def test_pinned_prefixes_are_kept_until_they_are_released(tmp_path: Path) -> None:
    """They are evaluated if necessary; a chat is pinned without the start of a reply."""
    served = kit.engine(tmp_path)

    async def main(client: httpx.AsyncClient) -> None:
        chat = {"name": "chat", "messages": kit.CHAT["messages"]}
        pinned = (await client.post("/v1/cache/pin", json=chat)).json()
        again = {"name": "text", "prompt": "Once upon a time"}
        assert (await client.post("/v1/cache/pin", json=again)).status_code == 200
        assert (await client.get("/v1/cache")).json()["pins"] == ["chat", "text"]
        served.cache.clear()
        reply = (await client.post(CHAT, json=kit.CHAT)).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == pinned["tokens"]
        assert (await client.post("/v1/cache/unpin", json={"name": "text"})).status_code == 200
        assert (await client.get("/v1/cache")).json()["prefix_cache"]["pinned"] == 1

    kit.run(served, main)


@pytest.mark.parametrize("shares", [False, True])
def test_requests_share_prefixes_of_their_key_and_salt_only(tmp_path: Path, shares: bool) -> None:
    """With ``--share-prefixes``, those of their salt; a salt of one key is not that of another."""
    served = kit.engine(tmp_path, n_seq_max=8)

    async def main(client: httpx.AsyncClient) -> None:
        async def cached(key: str, salt: str | None) -> int:
            body = {**HI, "prompt": "Once upon a time", "max_tokens": 1, "cache_salt": salt}
            headers = {"authorization": f"Bearer {key}"}
            reply = (await client.post(COMPLETE, json=body, headers=headers)).json()
            n: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            return n

        pairs = [(key, salt) for key in ("one", "two") for salt in (None, "a", "b")]
        first = [await cached(*pair) for pair in pairs]
        again = [await cached(*pair) for pair in pairs]
        known = again[0]
        assert known > 0
        assert first == [0, 0, 0, *([known] * 3 if shares else [0] * 3)]
        assert again == [known] * 6

    kit.run(served, main, keys=("one", "two"), shares_prefixes=shares)


@pytest.mark.parametrize("shares", [False, True])
def test_pinned_names_are_those_of_a_key(tmp_path: Path, shares: bool) -> None:
    """Another key neither sees, moves nor releases them; a pin is found with its salt."""
    served = kit.engine(tmp_path)

    async def main(client: httpx.AsyncClient) -> None:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        pin = {"name": "system", "prompt": "Once upon a time", "cache_salt": "a"}
        for headers in (one, two):
            assert (await client.post("/v1/cache/pin", json=pin, headers=headers)).is_success
        assert (await client.get("/v1/cache", headers=one)).json()["pins"] == ["system"]
        name = {"name": "system"}
        assert (await client.post("/v1/cache/unpin", json=name, headers=two)).is_success
        again = await client.post("/v1/cache/unpin", json=name, headers=two)
        assert again.status_code == 400
        assert again.json()["error"]["message"].endswith("pinned are: none")
        assert (await client.get("/v1/cache", headers=one)).json()["pins"] == ["system"]
        served.cache.clear()
        for salt, expected in (("a", 15), ("b", 0)):
            body = {**HI, "prompt": "Once upon a time", "cache_salt": salt}
            reply = (await client.post(COMPLETE, json=body, headers=one)).json()
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= expected
            assert (reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (expected > 0)

    kit.run(served, main, keys=("one", "two"), shares_prefixes=shares)


def test_a_text_ends_where_pinned_prefixes_leave_no_cells(tmp_path: Path) -> None:
    """The reason is a limit; a prompt without cells is refused before a stream."""

    async def main(client: httpx.AsyncClient) -> None:
        pin = {"name": "a", "prompt": "x" * 50}
        assert (await client.post("/v1/cache/pin", json=pin)).status_code == 200
        body = {**HI, "max_tokens": 60, "ignore_eos": True}
        whole = (await client.post(COMPLETE, json=body)).json()
        assert whole["choices"][0]["finish_reason"] == "length"
        assert 0 < whole["usage"]["completion_tokens"] < 20
        streamed = await client.post(COMPLETE, json={**body, "stream": True})
        assert kit.events(streamed.text)[-2]["choices"][0]["finish_reason"] == "length"
        for stream in (False, True):
            long = {**HI, "prompt": "y" * 30, "stream": stream}
            answer = await client.post(COMPLETE, json=long)
            assert answer.status_code == 400
            assert "release some of 'a'" in answer.json()["error"]["message"]
        other = {"name": "b", "prompt": "y" * 30}
        assert (await client.post("/v1/cache/pin", json=other)).status_code == 400

    kit.run(kit.engine(tmp_path, n_ctx=64, paging=0), main)


def test_prompt_without_cells_can_be_sent_again_while_others_run(tmp_path: Path) -> None:
    """Others may free cells, unlike pinned prefixes."""
    served = kit.engine(tmp_path, n_ctx=64, paging=0)

    async def main(client: httpx.AsyncClient) -> None:
        assert (
            await client.post("/v1/cache/pin", json={"name": "a", "prompt": "x" * 50})
        ).is_success
        with served._reserve(1):
            answer = await client.post(COMPLETE, json={**HI, "prompt": "y" * 30})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "cache_full"

    kit.run(served, main)


def test_pins_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are several names of one prefix; a name can be used again."""
    monkeypatch.setattr("pyllamakv.serve.engine._MAX_PINS", 2)

    async def main(client: httpx.AsyncClient) -> list[int]:
        return [
            (await client.post("/v1/cache/pin", json={"name": name, "prompt": "Hi"})).status_code
            for name in "abbc"
        ]

    assert kit.run(kit.engine(tmp_path), main) == [200, 200, 200, 400]


def test_pinned_bytes_of_all_keys_are_limited(tmp_path: Path) -> None:
    """They may take half of the budget; a name that moves counts once, a released one not."""
    served = kit.engine(tmp_path)
    bytes_of = served.cache.branches.bytes_of
    served.cache.budget = bytes_of(40)

    async def main(client: httpx.AsyncClient) -> None:
        async def pin(key: str, name: str, length: int) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"name": name, "prompt": [ord(name)] * length}
            answer = await client.post("/v1/cache/pin", json=body, headers=headers)
            if not answer.is_success:
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert "release others" in error["message"]
            return answer.status_code

        assert await pin("one", "a", 21) == 400
        assert [await pin("one", "a", n) for n in (12, 13)] == [200, 200]
        assert [await pin("two", "b", n) for n in (8, 7)] == [400, 200]
        assert await pin("one", "c", 1) == 400
        name = {"name": "a"}
        headers = {"authorization": "Bearer one"}
        assert (await client.post("/v1/cache/unpin", json=name, headers=headers)).is_success
        assert await pin("two", "c", 13) == 200

    kit.run(served, main, keys=("one", "two"))


def test_stream_begins_while_its_other_choices_wait(tmp_path: Path) -> None:
    """They wait for a sequence; each decode takes long until the request has started."""
    served = kit.engine(tmp_path, n_seq_max=1)
    native: Any = served.context.native
    started = threading.Event()

    class Gate:
        def wait(self, seconds: float) -> None:
            started.wait(0.05)

    native.gate = Gate()
    options = GenerationOptions(3, 60, (), False, SamplerParams(), None, None)

    async def main(_: httpx.AsyncClient) -> None:
        try:
            completion = await served.complete(1, lambda: [[70, 71]], options)
            assert completion.pending == 3
        finally:
            started.set()
        await completion.finish()
        completion.close()
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert len({choice.generation.text for choice in completion.choices}) == 1

    kit.run(served, main)


def test_metrics_are_those_of_cache_batcher_and_server(tmp_path: Path) -> None:
    """They are in the format of Prometheus, with the number of responses by status."""

    async def main(client: httpx.AsyncClient) -> str:
        await client.post(COMPLETE, json=HI)
        await client.post(COMPLETE, json={})
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.text

    text = kit.run(kit.engine(tmp_path, budget=1_000_000), main)
    for line in (
        'pyllamakv_serve_answers_total{status="200"} 1',
        'pyllamakv_serve_answers_total{status="400"} 1',
        'pyllamakv_cache_finished_total{manager="batcher"} 1',
        'pyllamakv_cache_misses_total{manager="prefix"} 1',
        'pyllamakv_cache_budget_bytes{manager="prefix"} 1000000',
        "pyllamakv_serve_pending_generations 0",
        "pyllamakv_serve_capacity 4",
    ):
        assert line in text.splitlines()
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    for name in re.findall("^# TYPE (pyllamakv_serve_\\w+)", text, re.MULTILINE):
        assert f"`{name}" in page


def test_the_description_has_every_route_and_body(tmp_path: Path) -> None:
    """It is OpenAPI 3.1, and its references resolve to schemas."""

    async def main(client: httpx.AsyncClient) -> Any:
        return (await client.get("/openapi.json")).json()

    found = kit.run(kit.engine(tmp_path), main)
    assert {COMPLETE, CHAT, "/v1/models", "/health", "/metrics"} <= set(found["paths"])
    schemas = found["components"]["schemas"]
    text = json.dumps(found)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in schemas
    assert schemas["ChatRequest"]["additionalProperties"] is False
    (parameter,) = found["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("model", "path")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, HI),
        ("/v1/cache/pin", {"name": "a", "prompt": "Hi"}),
        ("/v1/cache/flush", {}),
        ("/metrics", None),
    ],
)
def test_a_dead_context_makes_the_server_unhealthy(tmp_path: Path, path: str, body: Any) -> None:
    """The request that detects it gets an error, and /health reports it."""
    served = kit.engine(tmp_path, store=tmp_path / "store")

    async def main(client: httpx.AsyncClient) -> None:
        served.context.close()
        work = client.get(path) if body is None else client.post(path, json=body)
        assert (await work).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert served.failure is not None

    kit.run(served, main)


@pytest.mark.parametrize("assertion", [True, False])
def test_decode_that_fails_makes_the_server_unhealthy_if_the_context_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assertion: bool
) -> None:
    """After an assertion, the context refuses every call; after another exception, none."""
    served = kit.engine(tmp_path)
    native: Any = served.context.native

    async def main(client: httpx.AsyncClient) -> None:
        error = NativeError("an assertion of llama.cpp failed: x", code=Code.EEXCEPTION)

        def refuse(*_: Any) -> int:
            raise error

        native.fail_next.append(error)
        if assertion:
            monkeypatch.setattr(native, "seq_pos_max", refuse)
        assert (await client.post(COMPLETE, json=HI)).status_code == 500
        assert (await client.get("/health")).status_code == (503 if assertion else 200)

    kit.run(served, main)


def test_failed_flushes_are_counted_and_repeated_after_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for any error, also if more bytes are new than are flushed at once."""
    served = kit.engine(tmp_path, store=tmp_path / "store")
    waits: list[float] = []
    errors: list[Exception] = [MemoryError(), OSError("full"), PrefixStoreError("full")]
    flush = served.cache.flush

    def fail() -> int:
        if errors:
            raise errors.pop()
        return flush()

    async def main(client: httpx.AsyncClient) -> None:
        sleep = asyncio.sleep

        async def short(seconds: float) -> None:
            waits.append(seconds)
            await sleep(0)

        await client.post(COMPLETE, json=HI)
        monkeypatch.setattr(served.cache, "flush", fail)
        monkeypatch.setattr(asyncio, "sleep", short)
        flushing = asyncio.create_task(served.keep_flushed(7.0, 1))
        while not served.flushes:
            assert not flushing.done(), flushing.exception()
            await sleep(0)
        flushing.cancel()

    kit.run(served, main)
    assert served.flush_failures == 3
    assert waits.count(7.0) == 3


def test_new_tokens_are_flushed_after_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not before, if they have fewer bytes than are flushed at once."""
    served = kit.engine(tmp_path, store=tmp_path / "store")

    async def main(client: httpx.AsyncClient) -> None:
        loop, sleep = asyncio.get_running_loop(), asyncio.sleep
        now, passed, looks = loop.time, [0.0], [0]

        async def short(_seconds: float) -> None:
            looks[0] += 1
            await sleep(0)

        async def look(n: int) -> int:
            until = looks[0] + n
            while looks[0] < until:
                await sleep(0)
            return served.flushes

        monkeypatch.setattr(loop, "time", lambda: now() + passed[0])
        monkeypatch.setattr(asyncio, "sleep", short)
        flushing = asyncio.create_task(served.keep_flushed(40.0, 1 << 40))
        await client.post(COMPLETE, json=HI)
        assert await look(5) == 0
        passed[0] += 40.0
        assert await look(5) == 1
        passed[0] += 40.0
        assert await look(5) == 1
        flushing.cancel()

    kit.run(served, main)
    assert served.cache.stats().stored_tokens > 0
