"""Test processes of `pyllamakv serve` with clients and signals."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn")

import httpx
import serve_kit as kit
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kit import built

from pyllamakv.errors import AddressInUse, UsageError
from pyllamakv.scenarios import synthetic_models
from pyllamakv.serve import service
from pyllamakv.serve.api_requests import ChatRequest, TextRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from serve_kit import ServeProcess

    from pyllamakv.building.variant import Variant

SCHEMA = {
    "type": "object",
    "properties": {"happy": {"type": "boolean"}, "name": {"enum": ["Lily", "Tim"]}},
    "required": ["happy", "name"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Tell me about Lily."}]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a chat template, which the model does not have."""
    path = tmp_path_factory.mktemp("serve") / "template.jinja"
    path.write_text(kit.TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def served(patched: Variant, trained_model: Path, template: Path) -> Iterator[ServeProcess]:
    """Return a server of the trained model, for the tests of this module."""
    options = ("--release", patched.folder, "--chat-template", template, "--ctx", 512)
    with kit.process(trained_model, *options) as running:
        yield running


@pytest.mark.slow
@pytest.mark.native
def test_openai_clients_chat_stream_and_use_schemas(served: ServeProcess) -> None:
    """The types of OpenAI's package check the replies."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    asked: dict[str, Any] = {"model": model.id, "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=3)
    texts = [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    for choice in whole.choices:
        assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **options)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == texts[0]
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1
    response = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked |= {"response_format": response, "max_tokens": 100}
    reply = client.chat.completions.create(**asked)
    assert set(json.loads(reply.choices[0].message.content)) == {"happy", "name"}
    assert reply.choices[0].finish_reason == "stop"
    text = client.completions.create(model=model.id, prompt="Once", stop=" ", temperature=0)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("", "stop")
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        client.chat.completions.create(**asked, tools=[{"type": "function"}])


@pytest.mark.slow
@pytest.mark.native
def test_langchain_chats_streams_and_uses_schemas(served: ServeProcess) -> None:
    """It uses langchain-openai, which is not a dependency of the tests."""
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=served.url, api_key="none", model="stories260K", max_tokens=60, seed=3
    )
    whole = chat.invoke("Tell me about Lily.")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.text for part in chat.stream("Tell me about Lily.")) == whole.text
    shaped = chat.with_structured_output(SCHEMA | {"title": "Person"}, method="json_schema")
    assert set(shaped.invoke("Who?")) == {"happy", "name"}


@pytest.mark.slow
@pytest.mark.native
def test_litellm_chats_streams_and_uses_schemas(
    served: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses LiteLLM, which is not a dependency of the tests."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": "openai/stories260K", "api_base": served.url, "api_key": "none",
        "messages": MESSAGES, "max_tokens": 60, "seed": 3,
    }  # fmt: skip
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    parts = [
        each.choices[0].delta.content or "" for each in litellm.completion(**asked, stream=True)
    ]
    assert "".join(parts) == text
    response = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    shaped = litellm.completion(**asked, response_format=response)
    assert set(json.loads(shaped.choices[0].message.content)) == {"happy", "name"}


@pytest.mark.slow
@pytest.mark.native
def test_samplers_have_the_names_of_openai_and_llama_server(served: ServeProcess) -> None:
    """Each sampler is accepted; -1 and false have the same meaning as there."""
    base = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    plain = served.post("/v1/completions", **base, logprobs=0)["choices"][0]
    first = plain["logprobs"]["tokens"][0]
    tokens = served.post("/v1/completions", **base)["choices"][0]["text"]
    assert tokens == plain["text"]
    assert tokens.startswith(first)
    options: list[dict[str, Any]] = [
        {"repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": 0.5},
        {"frequency_penalty": 0.5, "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"]},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "seed": -1},
        {"temperature": 1, "samplers": ["top_k", "typ_p", "temperature"], "top_k": 5},
        {"temperature": 1, "mirostat": 2, "mirostat_tau": 4.0, "seed": 2**40},
        {"temperature": 1, "xtc_probability": 0.5, "dynatemp_range": 0.2, "top_n_sigma": -1},
        {"grammar": 'root ::= "yes" | "no"'},
        {"json_schema": {"enum": ["yes", "no"]}, "max_tokens": 20},
        {"logit_bias": [[5, False], [7, 1.5]], "ignore_eos": True},
    ]
    texts = [
        served.post("/v1/completions", **{**base, **each})["choices"][0]["text"] for each in options
    ]
    assert (
        served.post("/v1/completions", prompt="</s>", max_tokens=0)["usage"]["prompt_tokens"] == 2
    )
    bad = served.client.post("/v1/completions", json={**base, "grammar": "root"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "grammar")
    assert texts[6] in ("yes", "no")
    assert texts[7] in ('"yes"', '"no"')


@pytest.mark.slow
@pytest.mark.native
def test_concurrent_clients_get_the_same_text_as_alone(served: ServeProcess) -> None:
    """Four times as many as decode at once; none is lost, and a prompt is evaluated once."""
    prompts = [f"Once upon a time there was {i}" for i in range(16)]
    body = {"max_tokens": 12, "temperature": 0}
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        reply = served.post("/v1/completions", prompt=prompt, **body)
        texts[prompt] = reply["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(texts)
    for prompt in prompts:
        ask(prompt)
    assert together == texts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.model_fields, *TextRequest.model_fields, "tools", "other"})
numbers = st.integers(-2, 70) | st.floats(-2, 2)


@pytest.mark.slow
@pytest.mark.native
@settings(max_examples=60)
@given(
    path=st.sampled_from(["completions", "chat/completions", "cache/pin", "cache/unpin"]),
    changes=st.dictionaries(st.sampled_from(FIELDS), json_values | numbers, max_size=3),
    raw=st.none() | st.binary(max_size=20),
)
def test_no_request_is_answered_with_500(
    served: ServeProcess, path: str, changes: dict[str, Any], raw: bytes | None
) -> None:
    """Any JSON values, fields and bytes are sent; errors have one format."""
    body: dict[str, Any] = {"completions": {"prompt": "a"}, "chat/completions": kit.CHAT}.get(
        path, {"name": "a", "prompt": "b"}
    )
    content = raw if raw is not None else json.dumps({"max_tokens": 2, **body, **changes}).encode()
    answer = served.client.post(f"/v1/{path}", content=content)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert kit.events(answer.text)[-1] == "[DONE]"
    elif answer.status_code != 200:
        assert answer.status_code in (400, 404, 429, 503), (content, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.slow
@pytest.mark.native
def test_no_request_of_the_description_is_answered_with_500(served: ServeProcess) -> None:
    """It uses schemathesis, which is not a dependency of the tests."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(served.client.get("/openapi.json").json())
    schema.config.update(base_url=served.first["url"])
    answers: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            if isinstance(case.body, dict):
                for name in ("n_predict", "max_completion_tokens"):
                    case.body.pop(name, None)
                case.body |= {"max_tokens": 2} if "completions" in case.path else {}
            answer = case.call()
            answers[case.path, answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 429, 503), (case.body, answer.text)

        send()
    assert answers["/v1/completions", 200] + answers["/v1/chat/completions", 200]
    assert served.post("/v1/completions", prompt="Once", max_tokens=2)["choices"]


@pytest.mark.slow
@pytest.mark.native
def test_a_thousand_connections_are_answered(served: ServeProcess) -> None:
    """All are open before the first request; those beyond the queue get 429."""
    n = 1000
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2 * n:
        pytest.skip(f"the system allows {limits[1]} files")
    address = httpx.URL(served.first["url"])
    body = b'{"prompt": "Once", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def answer(pair: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> int:
        reader, writer = pair
        writer.write(data)
        found = await reader.read()
        writer.close()
        return int(found.split()[1])

    async def main() -> Counter[int]:
        open_one = asyncio.open_connection
        async with asyncio.timeout(120):
            pairs = [await open_one(address.host, address.port) for _ in range(n)]
            return Counter(await asyncio.gather(*map(answer, pairs)))

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * n), limits[1]))
    try:
        statuses = asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert statuses.keys() <= {200, 429}
    assert statuses[200] >= 4
    assert statuses.total() == n
    assert served.post("/v1/completions", prompt="Once", max_tokens=2)["choices"]


@pytest.mark.slow
@pytest.mark.native
def test_connections_closed_at_any_byte_do_not_affect_others(served: ServeProcess) -> None:
    """Requests and streams are closed, the latter by no longer reading."""
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    data = (head + body).encode()
    port = int(served.first["url"].rpartition(":")[2])
    choose = random.Random(1)
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", port)) as client:
            n = choose.choice([len(data), choose.randrange(len(data))])
            client.sendall(data[:n])
            if n == len(data):
                client.recv(choose.choice([1, 100, 2000]))
    text = served.post("/v1/completions", prompt="Once", max_tokens=4)["choices"][0]["text"]
    assert text
    deadline = time.monotonic() + 60
    while served.client.get("/v1/cache").json()["batcher"]["active"]:
        assert time.monotonic() < deadline
    assert "pyllamakv_serve_pending_generations 0" in served.client.get("/metrics").text


@pytest.mark.slow
@pytest.mark.native
def test_killed_server_continues_with_flushed_prefixes(
    tmp_path: Path, patched: Variant, trained_model: Path, template: Path
) -> None:
    """The second turn of a chat reports the first as cached; SIGTERM flushes, with status 143."""
    options = ("--release", patched.folder, "--chat-template", template, "--store", tmp_path / "s")
    first = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}

    def turn(running: ServeProcess, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        reply = running.post("/v1/chat/completions", **body)
        return reply["choices"][0]["message"]["content"], reply["usage"]

    once = ("--flush-every", 3600, "--flush-bytes", 1, "--parallel", 1)
    with kit.process(trained_model, *options, *once) as running:
        text, usage = turn(running, first)
        # The prompt in between takes the only sequence: the first branch waits in memory.
        running.post("/v1/completions", prompt="One day", max_tokens=4)
        _, repeated = turn(running, first)
        assert repeated["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        stats = running.client.get("/v1/cache").json()["prefix_cache"]
        assert (stats["paged_in"], stats["loaded_tokens"]) == (1, 0)
        deadline = time.monotonic() + 60
        while running.client.get("/v1/cache").json()["prefix_cache"]["stored_tokens"] < (
            usage["total_tokens"] - 1
        ):
            assert time.monotonic() < deadline, "nothing was flushed in the background"
            time.sleep(0.05)
        second = kit.ServeProcess(trained_model, *options, ready=False)
        status, output = second.end()
        assert status == 2
        assert "PrefixStoreBusy" in output
        assert "select another --store" in output
        assert "store_read_only" not in output
        running.child.kill()
        assert running.end()[0] == -signal.SIGKILL
    more = [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    with kit.process(trained_model, *options, "--flush-every", 3600) as running:
        _, again = turn(running, first | {"messages": [*MESSAGES, *more]})
        cached = again["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"]
        # Within the grace period, a stream ends as without the signal.
        assert end_during_stream(running, 300)[-1] == "[DONE]"
    with kit.process(trained_model, *options) as running:
        _, last = turn(running, first | {"messages": [*MESSAGES, *more]})
        assert last["prompt_tokens_details"]["cached_tokens"] == last["prompt_tokens"] - 1


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize(
    ("spec", "shape"),
    [("0.3.9+patched", "recurrent"), ("0.3.9+patched", "sliding"), ("b11549+patched", "hybrid")],
)
def test_a_memory_that_cannot_trim_reuses_turns_and_changed_tails(
    spec: str, shape: str, tmp_path: Path
) -> None:
    """Also after kill -9; the text is that of a server that reuses nothing."""
    named = replace(synthetic_models.SHAPES[shape], vocab="bytes", n_vocab=320)
    model = synthetic_models.generate(named, tmp_path)
    options = ("--release", built(spec).folder, "--ctx", 1024, "--store", tmp_path / "store")
    question = [5 + i % 97 for i in range(200)]

    def turn(running: ServeProcess, prompt: list[int], salt: str = "one") -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = running.post("/v1/completions", **body, cache_salt=salt)
        usage = reply["usage"]["prompt_tokens_details"]
        return reply["choices"][0]["text"], usage["cached_tokens"]

    with kit.process(model, *options, "--flush-every", 3600) as running:
        assert turn(running, question)[1] == 0
        assert turn(running, [*question, 9, 9, 9])[1] >= 199
        changed = turn(running, [*question, 8, 8, 8])
        assert changed[1] >= 199
        assert turn(running, [*question, 8, 8, 8], salt="other") == (changed[0], 0)
        running.post("/v1/cache/flush")
        running.child.kill()
    with kit.process(model, *options) as running:
        assert turn(running, [*question, 8, 8, 8]) == (changed[0], 202)


@pytest.mark.slow
@pytest.mark.native
def test_a_stream_that_exceeds_the_grace_period_ends_with_an_error(
    patched: Variant, trained_model: Path
) -> None:
    """It is cancelled, and the client gets the reason."""
    options = ("--release", patched.folder, "--grace", 0, "--ctx", 4096)
    with kit.process(trained_model, *options) as running:
        assert end_during_stream(running, 4000)[-1]["error"]["code"] == "stopping"


@pytest.mark.slow
@pytest.mark.native
def test_a_last_flush_that_fails_is_reported(
    tmp_path: Path, patched: Variant, trained_model: Path
) -> None:
    """The status is not that of SIGTERM, because tokens are lost."""
    options = ("--release", patched.folder, "--store", tmp_path / "s", "--flush-every", 3600)
    with kit.process(trained_model, *options) as running:
        running.post("/v1/completions", prompt="Once upon a time", max_tokens=4)
        shutil.rmtree(tmp_path / "s")
        running.child.send_signal(signal.SIGTERM)
        status, output = running.end()
    assert (status, "PrefixStoreError" in output) == (2, True)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_grace_period(
    patched: Variant, trained_model: Path, number: signal.Signals
) -> None:
    """The stream ends with an error, and nothing logs a traceback."""
    options = ("--release", patched.folder, "--grace", 3600, "--ctx", 4096)
    with kit.process(trained_model, *options) as running:
        found = end_during_stream(running, 4000, number, number)
    assert found[-1]["error"]["code"] == "stopping"


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("option", [("--ctx", 10**9), ("--budget", 1)])
def test_size_that_cannot_be_served_is_named_as_an_option(
    patched: Variant, trained_model: Path, option: tuple[str, int]
) -> None:
    """The errors name the arguments of `Model.context` and `PrefixCache`."""
    options = ("--release", patched.folder, *option)
    status, output = kit.ServeProcess(trained_model, *options, ready=False).end()
    assert status == 2
    assert option[0] in output.partition('"hint"')[2]


@pytest.mark.slow
@pytest.mark.native
def test_an_endless_grace_period_is_refused(patched: Variant, trained_model: Path) -> None:
    """It would be an error of uvicorn, which counts whole seconds."""
    options = ("--release", patched.folder, "--grace", "inf")
    status, output = kit.ServeProcess(trained_model, *options, ready=False).end()
    assert (status, "UsageError" in output) == (2, True)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("shares", [False, True])
def test_process_reads_keys_and_separates_their_prefixes(
    tmp_path: Path, patched: Variant, trained_model: Path, shares: bool
) -> None:
    """A key of the file is required; with ``--share-prefixes``, keys share cached prefixes."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n", encoding="utf-8")
    more = ("--share-prefixes",) if shares else ()
    options = ("--release", patched.folder, "--api-key-file", keys, "--ctx", 512, *more)
    with kit.process(trained_model, *options) as running:
        assert running.client.get("/v1/models").status_code == 401
        cached = []
        for key in ("one", "two", "two"):
            running.client.headers["authorization"] = f"Bearer {key}"
            reply = running.post("/v1/completions", prompt="Once upon a time", max_tokens=1)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, shares, True]


def end_during_stream(running: ServeProcess, tokens: int, *numbers: signal.Signals) -> list[Any]:
    """Send signals, by default SIGTERM, in a stream; return its events until the server ends."""
    numbers = numbers or (signal.SIGTERM,)
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with running.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for number in numbers:
            running.child.send_signal(number)
            # The server closes its port when it has noticed the first signal.
            while accepts(running):
                time.sleep(0.01)
        found = kit.events("\n".join(lines))
    status, output = running.end()
    assert (status, "Traceback" in output) == (128 + numbers[0], False)
    return found


def accepts(running: ServeProcess) -> bool:
    """Return whether a server accepts connections."""
    address = running.client.base_url
    try:
        socket.create_connection((address.host, address.port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_keys_are_the_lines_of_a_file(tmp_path: Path, encoding: str, end: str) -> None:
    """Comments and empty lines are ignored, and so is what editors of Windows add."""
    path = tmp_path / "keys"
    lines = ("one", "# ours", "", " two ", "")
    path.write_bytes(end.join(lines).encode(encoding))
    assert service.read_keys(path) == ("one", "two")


def test_a_file_without_usable_keys_is_refused(tmp_path: Path) -> None:
    """A key must fit into a header; else the server would refuse all its requests."""
    path = tmp_path / "keys"
    bad = ("schlüssel", "a\ufeff", "a\tb", "a\x00")
    for content in (b"", b"# one\n", b"\xff\xfe", *(f"one\n{key}\n".encode() for key in bad)):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="API key"):
            service.read_keys(path)
    with pytest.raises(UsageError, match="cannot read"):
        service.read_keys(tmp_path / "missing")


def test_an_address_in_use_is_refused() -> None:
    """It is before a model is loaded; so is an unknown host."""
    with service.bound("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with (
            pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"),
            service.bound("127.0.0.1", port),
        ):
            pass
    for host in ("no.such.host.invalid", "x" * 300):
        with pytest.raises(AddressInUse, match="cannot listen"), service.bound(host, 0):
            pass
    # An address of no machine, which another port would not help.
    with pytest.raises(AddressInUse, match="another --host"), service.bound("192.0.2.1", 0):
        pass


CHUNKED = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "more", "limited"),
    [
        (b"", b"", False),
        (b"GET / HTTP/1.1\r\na: b", b"", False),
        (b"GET /", b"x" * 3000, True),
        (CHUNKED + b"1\r\na\r\n0\r\nt: a", b"x" * 3000, True),
        (CHUNKED, b"bb8\r\n" + b"x" * 3000 + b"\r\n0\r\n\r\n", False),
    ],
)
def test_headers_are_limited_in_size_and_time(
    monkeypatch: pytest.MonkeyPatch, data: bytes, more: bytes, limited: bool
) -> None:
    """Each request of a connection is; a request within the limits may take any time."""
    monkeypatch.setattr(service, "_HEAD_BYTES", 2000)
    monkeypatch.setattr(service, "_HEAD_SECONDS", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.1)
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: service.LimitedConnection(config, state, {}), "127.0.0.1", 0
        )
        async with server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            if data:
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                writer.write(data)
                await asyncio.sleep(0.01)
                writer.write(more)
            try:
                rest = await reader.read()
            except ConnectionError:
                rest = b""
            assert rest.startswith(b"HTTP/1.1 400") == limited
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("path", ["/stream", "/short"])
def test_client_that_stops_reading_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, loop: str, path: str
) -> None:
    """A stream ends then, and a short answer has no rest; a stream may wait for its text."""
    monkeypatch.setattr(service, "_READ_SECONDS", 0.05)
    module = pytest.importorskip(loop)
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/wait":
            await asyncio.sleep(0.2)
            await send({"type": "http.response.body", "body": b"waited"})
            return
        part = {"type": "http.response.body", "body": b"x" * 30_000}
        if scope["path"] == "/short":
            ended.append(path)
            await send(part)
            return
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({**part, "more_body": True})
            await asyncio.sleep(0)
        ended.append(path)

    async def main() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: service.LimitedConnection(config, state, {}), "127.0.0.1", 0
        )
        async with server, asyncio.timeout(60):
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"waited")
            writer.close()
            server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(address)
                client.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                while state.connections or not ended:
                    await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=module.new_event_loop) as runner:
        runner.run(main())
    assert ended == [path]


@pytest.mark.parametrize(("unsent", "closed"), [(100, True), (99, False)])
def test_client_that_reads_slowly_keeps_its_connection(unsent: int, closed: bool) -> None:
    """It has the same time again if fewer bytes wait than before."""
    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
    timers: list[Any] = []
    loop: Any = SimpleNamespace(call_later=lambda *each: timers.append(each))
    connection = service.LimitedConnection(config, uvicorn.server.ServerState(), {}, loop)
    aborts: list[int] = []
    connection.transport = SimpleNamespace(
        get_write_buffer_size=lambda: unsent, abort=lambda: aborts.append(1)
    )
    connection._check_reading(100)
    assert (bool(aborts), [each[-1] for each in timers]) == (closed, [] if closed else [unsent])
