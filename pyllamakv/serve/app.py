"""Answer HTTP requests: routes, keys, bodies, streams and errors.

`Api` is an ASGI application over an `Engine`, with Starlette's routing. Bodies are read and checked
here, so that their size and duration are limited, and every error has the shape of OpenAI's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import pyllamakv
from pyllamakv.errors import KvError, NoTokenAllowed, UsageError
from pyllamakv.runtime import metrics
from pyllamakv.serve.api_replies import (
    INTERNAL_ERROR,
    RETRY_AFTER,
    ChatFormat,
    TextFormat,
    error_reply,
    openapi,
    status_of,
)
from pyllamakv.serve.api_requests import (
    ChatRequest,
    FieldUnsupported,
    GenerationFields,
    PinRequest,
    TextRequest,
    UnpinRequest,
)
from pyllamakv.serve.engine import GenerationOptions, InvalidField, Tenant

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterator,
        MutableMapping,
    )

    from pyllamakv.serve.engine import ActiveRequest, Choice, Engine

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

#: Maximum bytes of a body, of which each cell of the context allows some, so that an escaped prompt
#: of all cells fits; and seconds in which a body must arrive.
_BODY_BASE: Final = 1 << 20
_BODY_PER_CELL: Final = 32
_MAX_BODY: Final = 32 << 20
BODY_SECONDS: Final = 30.0
#: Number of bodies of the maximum size that are held at once.
_BODIES: Final = 16
#: Bytes of a body that is checked outside of the event loop.
_LARGE_BODY: Final = 64 << 10
#: Number of tokens of a completion without a limit, as OpenAI's.
_COMPLETION_TOKENS: Final = 16
#: Maximum number of lists and objects of a body: each takes more time and memory than its bytes.
_MAX_CONTAINERS: Final = 200_000
#: Names of types in the place of an error, besides those with brackets.
_TYPES_TRIED: Final = ("str", "constrained-str", "int", "float", "bool")
#: Errors that name the reason best, if a value has several.
_LIMIT_ERRORS: Final = ("too_long", "string_too_long", "string_too_short", "value_error")
#: Type of an error of pydantic -> code; other types have names that end with `_type`, or values.
_CODES: Final = {
    "extra_forbidden": "unknown_field",
    "json_invalid": "invalid_json",
    "missing": "missing_required_parameter",
}
#: Routes that need no key.
_OPEN: Final = ("/health",)


class Api:
    """The HTTP API of an engine whose model has a name.

    ``keys`` are accepted API keys; without keys, every request is accepted. Unless
    ``shares_prefixes``, requests of different keys share no cached prefix. ``lifespan`` is the
    context manager that Starlette runs around all requests.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        keys: tuple[str, ...] = (),
        shares_prefixes: bool = False,
        lifespan: Any = None,
        max_body: int | None = None,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._engine = engine
        self._name = name
        # Digests, so that the time of a comparison reveals nothing about a key.
        self._keys = frozenset(_digest(key) for key in keys)
        self._shares_prefixes = shares_prefixes
        n_ctx = engine.context.info.n_ctx
        self._max_body = max_body or min(_MAX_BODY, _BODY_BASE + _BODY_PER_CELL * n_ctx)
        #: Number of bytes of all bodies whose answers, also streams, have not ended.
        self._held = 0
        self._body_seconds = body_seconds
        #: Number of answers by status.
        self._answers: Counter[int] = Counter()
        table: list[tuple[str, str, str, Any, type[BaseModel] | None]] = [
            ("GET", "/health", "Report whether requests can succeed.", self._health, None),
            ("GET", "/metrics", "Return metrics for Prometheus.", self._metrics, None),
            ("GET", "/openapi.json", "Describe this API.", self._describe, None),
            ("GET", "/v1/models", "List the model.", self._models, None),
            ("GET", "/v1/models/{model:path}", "Describe the model.", self._model, None),
            ("POST", "/v1/completions", "Continue prompts.", self._complete, TextRequest),
            ("POST", "/v1/chat/completions", "Answer a chat.", self._chat, ChatRequest),
            ("GET", "/v1/cache", "Return the statistics of the cache.", self._statistics, None),
            ("POST", "/v1/cache/pin", "Evaluate and keep a prefix.", self._pin, PinRequest),
            ("POST", "/v1/cache/unpin", "Release a kept prefix.", self._unpin, UnpinRequest),
            ("POST", "/v1/cache/flush", "Write the cache to the store.", self._flush, None),
        ]
        described = [
            (method, path.replace(":path", ""), summary, body)
            for method, path, summary, _, body in table
        ]
        self._description = openapi(described, pyllamakv.__version__, _OPEN if keys else None)
        self._app = Starlette(
            routes=[
                Route(path, self._endpoint(handler, body, path in _OPEN), methods=[method])
                for method, path, _, handler, body in table
            ],
            exception_handlers={
                KvError: _kv_error,
                ValidationError: _invalid,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _defect,
            },
            lifespan=lifespan,
        )
        # A redirection would be answered before the key is checked.
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a connection as ASGI defines it, and count the answers."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[message["status"]] += 1
            await send(message)

        scope["body_bytes"] = 0
        try:
            await self._app(scope, receive, counted)
        finally:
            self._held -= scope["body_bytes"]

    def _endpoint(self, handler: Any, body: type[BaseModel] | None, is_open: bool) -> Any:
        """Return the endpoint of a handler: check the key, read the body, call it."""

        async def endpoint(request: Request) -> Any:
            # By route: the URL of a request has the Host header, which a client selects.
            if not is_open:
                self._check_key(request)
            if body is None:
                return await handler(request)
            content = await self._read(request)
            check = partial(body.model_validate_json, content)
            large = len(content) > _LARGE_BODY
            found = await self._engine.in_thread(check) if large else check()
            if isinstance(found, GenerationFields):
                self._check_model(found.model)
            return await handler(request, found)

        return endpoint

    def _check_key(self, request: Request) -> str:
        """Return the digest of the key of a request, empty without keys; refuse another key."""
        if not self._keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        if scheme.lower() != "bearer" or digest not in self._keys:
            message = "the API key is missing or unknown; send Authorization: Bearer KEY"
            raise refused(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest.hex()

    def _tenant(self, request: Request, cache_salt: str | None = None) -> Tenant:
        """Return whose prefixes a request shares, those of its key and its salt, and its key."""
        owner = self._check_key(request)
        key = "" if self._shares_prefixes else owner
        # A digest has no colon, so that no salt of one key is that of another one.
        salt = f"{key}:{cache_salt or ''}" if key or cache_salt else None
        return Tenant(salt, f"{owner}:" if owner else "")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._name:
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            message = f"the model {shown!r} is not served here; served is {self._name!r}"
            raise refused(404, message, "model_not_found", "model")

    async def _read(self, request: Request) -> bytearray:
        """Return the body of a request; refuse one that is too large or too slow.

        Its bytes are held until `__call__` returns.
        """
        content = bytearray()
        close = {"Connection": "close"}
        message = f"the body exceeds {self._max_body} bytes"
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body:
            raise refused(413, message, "body_too_large", headers=close)
        try:
            async with asyncio.timeout(self._body_seconds):
                async for chunk in request.stream():
                    content += chunk
                    self._held += len(chunk)
                    request.scope["body_bytes"] += len(chunk)
                    if len(content) > self._max_body:
                        raise refused(413, message, "body_too_large", headers=close)
                    if self._held > _BODIES * self._max_body:
                        message = f"the bodies of all requests have {self._held} bytes"
                        headers = {**close, "Retry-After": RETRY_AFTER}
                        raise refused(429, message, "queue_full", headers=headers)
        except TimeoutError:
            message = f"the body did not arrive within {self._body_seconds:g} seconds"
            raise refused(408, message, "body_too_slow", headers=close) from None
        if content.count(b"[") + content.count(b"{") > _MAX_CONTAINERS:
            message = f"the body has more than {_MAX_CONTAINERS} brackets"
            raise refused(400, message, "too_many_brackets")
        return content

    # What does not generate...

    async def _health(self, _request: Request) -> Any:
        failure = self._engine.failure
        if failure is not None:
            return JSONResponse(error_reply(503, str(failure), "failed"), 503)
        return JSONResponse({"status": "ok"})

    async def _describe(self, _request: Request) -> Any:
        return JSONResponse(self._description)

    async def _models(self, _request: Request) -> Any:
        return JSONResponse({"object": "list", "data": [self._facts()]})

    async def _model(self, request: Request) -> Any:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._facts())

    def _facts(self) -> dict[str, Any]:
        info, context = self._engine.model.info, self._engine.context.info
        sizes = {
            "n_ctx": context.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_params": info.n_params,
            "size": info.n_bytes,
        }
        return {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "pyllamakv",
            "meta": sizes,
        }

    async def _metrics(self, _request: Request) -> Any:
        engine = self._engine
        answers = tuple(({"status": str(status)}, n) for status, n in self._answers.items())
        more = (
            ("gauge", "serve_pending_generations", "Generations that run or wait.", engine.pending),
            ("gauge", "serve_capacity", "Most generations that run or wait.", engine.capacity),
            ("counter", "serve_flushes_total", "Flushes in the background.", engine.flushes),
            ("counter", "serve_flush_failures_total", "Those that failed.", engine.flush_failures),
        )
        found = [
            *await engine.measure(),
            *(
                metrics.Metric(f"{metrics.PREFIX}_{name}", kind, text, (({}, value),))  # type: ignore[arg-type]
                for kind, name, text, value in more
            ),
        ]
        if answers:
            name = f"{metrics.PREFIX}_serve_answers_total"
            found.append(metrics.Metric(name, "counter", "HTTP answers by status.", answers))
        return PlainTextResponse(metrics.expose(found), media_type=metrics.CONTENT_TYPE)

    async def _statistics(self, request: Request) -> Any:
        return JSONResponse(await self._engine.statistics(self._tenant(request)))

    async def _pin(self, request: Request, body: PinRequest) -> Any:
        engine = self._engine
        if (body.prompt is None) == (body.messages is None):
            raise InvalidField("send either a prompt or messages", "prompt")

        def tokenize() -> list[int]:
            if body.messages is None:
                return engine.tokenize_text(body.prompt or "")
            messages = [each.to_template() for each in body.messages]
            return engine.tokenize_chat(messages, add_generation_prompt=False)

        pinning = engine.pin(body.name, tokenize, self._tenant(request, body.cache_salt))
        with _naming(body.param_of):
            pinned = await _unless_gone(request, pinning)
        return JSONResponse({"name": body.name, "tokens": pinned})

    async def _unpin(self, request: Request, body: UnpinRequest) -> Any:
        await self._engine.unpin(body.name, self._tenant(request))
        return JSONResponse({"name": body.name})

    async def _flush(self, _request: Request) -> Any:
        try:
            stored = await self._engine.flush()
        except UsageError as error:
            message = "this server has no store; start it with --store"
            raise refused(400, message, "no_store") from error
        return JSONResponse({"stored_tokens": stored})

    # What generates...

    async def _complete(self, request: Request, body: TextRequest) -> Any:
        engine, prompts = self._engine, body.prompts
        options = self._options(request, body, _COMPLETION_TOKENS, body.logprobs)

        def tokenize() -> list[list[int]]:
            return [engine.tokenize_text(each) for each in prompts]

        work = engine.complete(len(prompts), tokenize, options)
        return await self._answer(request, body, work, TextFormat(engine.model, self._name))

    async def _chat(self, request: Request, body: ChatRequest) -> Any:
        engine = self._engine
        options = self._options(request, body, None, body.n_logprobs)
        messages = [each.to_template() for each in body.messages]

        def tokenize() -> list[list[int]]:
            return [engine.tokenize_chat(messages, body.chat_template_kwargs)]

        work = engine.complete(1, tokenize, options)
        return await self._answer(request, body, work, ChatFormat(engine.model, self._name))

    def _options(
        self,
        request: Request,
        body: GenerationFields,
        default: int | None,
        top_logprobs: int | None,
    ) -> GenerationOptions:
        if body.stream_options is not None and not body.stream:
            raise InvalidField("stream_options requires stream: true", "stream_options")
        return GenerationOptions(
            n=body.n,
            max_tokens=body.limit(default),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            stop_at_end=not body.ignore_eos,
            params=body.sampler_params(self._engine.context.info.n_ctx),
            json_schema=body.reply_schema(),
            top_logprobs=top_logprobs,
            tenant=self._tenant(request, body.cache_salt),
        )

    async def _answer(
        self,
        request: Request,
        body: GenerationFields,
        work: Coroutine[Any, Any, ActiveRequest],
        reply: TextFormat,
    ) -> Any:
        """Return the stream of a completion when it has text, or the reply when it has ended."""
        with _naming(body.param_of):
            completion = await _unless_gone(request, work, lambda unread: unread.close())
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = reply.events(completion, usage=usage, param_of=body.param_of)
            return EventStream(events, completion.close)
        try:
            with _naming(body.param_of):
                await _unless_gone(request, completion.finish())
            choices = await _unless_gone(request, self._written(completion, reply.choice))
            return Response(reply.whole(completion, choices), media_type="application/json")
        finally:
            completion.close()

    async def _written(
        self, completion: ActiveRequest, write: Callable[[Choice], str]
    ) -> list[str]:
        """Return the choices of a reply; those with log-probabilities are written in threads."""
        if not completion.reports:
            return [write(choice) for choice in completion.choices]
        return [
            await self._engine.in_thread(partial(write, choice)) for choice in completion.choices
        ]


class EventStream:
    """Send server-sent events, until they end or the client has gone; then call ``close``."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events = events
        self._close = close

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the response as ASGI defines it."""
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            self._close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would delay the events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(
    request: Request,
    work: Coroutine[Any, Any, Any],
    discard: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Return the result of ``work``; cancel it and raise if the client disconnects before.

    ``discard`` is called with a result that this task does not return, because it is cancelled.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except asyncio.CancelledError:
        if working.done() and not working.cancelled() and working.exception() is None:
            discard(working.result())
        raise
    finally:
        working.cancel()
        gone.cancel()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def refused(
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Exception:
    """Return the exception that a handler raises to answer with an error."""
    error: Exception = HTTPException(status, error_reply(status, message, code, param), headers)
    return error


@contextmanager
def _naming(param_of: Callable[[Any], str | None]) -> Iterator[None]:
    """Answer an error that is about a field of the request with the name of that field."""
    try:
        yield
    except (UsageError, NoTokenAllowed) as error:
        status, code = status_of(error)
        raise refused(status, str(error), code, param_of(error)) from error


async def _kv_error(_request: Request, error: Exception) -> Any:
    assert isinstance(error, KvError)
    status, code = status_of(error)
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    param = error.param if isinstance(error, InvalidField) else None
    return JSONResponse(error_reply(status, str(error), code, param), status, headers)


async def _invalid(_request: Request, error: Exception) -> Any:
    """Answer a body that is no JSON, or not the object that the route expects."""
    assert isinstance(error, ValidationError)
    errors = error.errors(include_url=False, include_input=False)
    errors.sort(key=lambda each: each["type"] not in _LIMIT_ERRORS)
    first = next((each for each in errors if _unsupported(each) is not None), errors[0])
    message, refused_field = first["msg"], _unsupported(first)
    code = _CODES.get(first["type"], "invalid_value")
    if first["type"].endswith("_type"):
        code = "invalid_type"
    # Without the types that pydantic tried, such as "str" and "list[TextPart]".
    places = [
        str(each) for each in first["loc"] if each not in _TYPES_TRIED and "[" not in str(each)
    ]
    if refused_field is not None:
        places.append(refused_field.field)
        message, code = str(refused_field), "unsupported"
    elif first["type"] == "extra_forbidden":
        message = "this field is unknown"
    param = ".".join(places)[:200] or None
    text = f"{param}: {message}" if param else message
    return JSONResponse(error_reply(400, text[:1000], code, param), 400)


def _unsupported(error: Any) -> FieldUnsupported | None:
    """Return what one error of a validation is about, if that is not supported."""
    cause = error.get("ctx", {}).get("error")
    return cause if isinstance(cause, FieldUnsupported) else None


async def _http_error(_request: Request, error: Exception) -> Any:
    detail, status = error.detail, error.status_code  # type: ignore[attr-defined]
    if not isinstance(detail, dict):  # of Starlette itself: an unknown path or method
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(status, "invalid_request")
        detail = error_reply(status, f"{detail}; see GET /openapi.json", code)
    return JSONResponse(detail, status, error.headers)  # type: ignore[attr-defined]


async def _gone(_request: Request, _error: Exception) -> Any:
    # The client has disconnected. The status is that of nginx for this case.
    return Response(status_code=499)


async def _defect(_request: Request, error: Exception) -> Any:
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(error_reply(500, message, INTERNAL_ERROR), 500)
