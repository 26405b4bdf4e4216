"""Write replies of the OpenAI API: whole ones, the events of streams, and errors."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from pyllamakv.errors import (
    BudgetTooSmall,
    Busy,
    Cancelled,
    Closed,
    KvError,
    NoKVSlot,
    NoSlotAvailable,
    NoTokenAllowed,
    PrefixStoreError,
    PromptTooLong,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import TokenLogprobs
    from pyllamakv.serve.engine import ActiveRequest, Choice

#: Error -> HTTP status and OpenAI's code; the first class that fits.
_STATUS: Final[tuple[tuple[type[KvError], int, str], ...]] = (
    (PromptTooLong, 400, "context_length_exceeded"),
    (BudgetTooSmall, 400, "context_length_exceeded"),
    (Unsupported, 400, "unsupported"),
    (NoTokenAllowed, 400, "no_token_allowed"),
    (UsageError, 400, "invalid_value"),
    (NoSlotAvailable, 429, "queue_full"),
    (NoKVSlot, 503, "cache_full"),
    (Cancelled, 503, "stopping"),
    (Closed, 503, "stopping"),
    (Busy, 503, "busy"),
    (PrefixStoreError, 507, "store"),
)
#: The type of an error by its status; OpenAI's clients retry 429 and 5xx.
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
#: Code of a defect.
INTERNAL_ERROR: Final = "internal_error"
#: Seconds after which a refused request should be sent again.
RETRY_AFTER: Final = "1"
#: Write JSON without spaces. `json.dumps` would create an encoder for each event.
_compact: Final = json.JSONEncoder(separators=(",", ":")).encode
#: OpenAI's number in place of an infinite log-probability, which JSON cannot express.
_LEAST: Final = -9999.0


def error_reply(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: KvError) -> tuple[int, str]:
    """Return the HTTP status and the code of an error; 500 for defects."""
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return status, code
    return 500, INTERNAL_ERROR


class TextFormat:
    """The replies of completions."""

    prefix = "cmpl"
    name = "text_completion"
    event_name = "text_completion"

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self._id, "created": int(time.time()), "model": name}

    def whole(self, completion: ActiveRequest, choices: list[str]) -> bytes:
        """Return the reply to a request without a stream, with its choices as JSON."""
        fields = {**self._head, "object": self.name, "usage": completion.usage}
        return f'{_compact(fields)[:-1]},"choices":[{",".join(choices)}]}}'.encode()

    def choice(self, choice: Choice) -> str:
        """Return a choice of a reply as JSON. Log-probabilities take time, up to seconds."""
        text = choice.generation.text
        fields = {
            "index": choice.index,
            **self._content(text),
            "finish_reason": choice.finish_reason,
        }
        found = choice.logprobs()
        if found is not None and choice.stopped:
            found = found[: self._begun(found, 0, len(text.encode()))[0]]
        logprobs = self._logprobs(found, 0)
        return f'{_compact(fields)[:-1]},"logprobs":{_in_steps(logprobs)}}}'

    async def events(
        self,
        completion: ActiveRequest,
        *,
        usage: bool,
        param_of: Callable[[KvError], str | None] = lambda _: None,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream, with the numbers of tokens before the end on request.

        ``param_of`` returns the field of the request that an error is about.
        """
        #: By choice: numbers of tokens and of their characters and bytes so far, and bytes of text.
        shown = {choice.index: 0 for choice in completion.choices}
        offsets, token_bytes, text_bytes = (dict.fromkeys(shown, 0) for _ in range(3))
        more = {"usage": None} if usage else {}
        head = _compact({**self._head, "object": self.event_name, **more})[:-1]

        def tokens(choice: Choice, text: str | None) -> list[TokenLogprobs]:
            """Return the log-probabilities of the tokens that begin in a text; None: of the rest.

            The generation may have more tokens than the text so far.
            """
            index, found = choice.index, choice.logprobs(shown[choice.index]) or []
            text_bytes[index] += len((text or "").encode())
            if text is None and not choice.stopped:
                n = len(found)
            else:
                n, token_bytes[index] = self._begun(found, token_bytes[index], text_bytes[index])
            shown[index] += n
            return found[:n]

        def event(
            choice: Choice, content: dict[str, Any], reason: str | None, text: str | None = ""
        ) -> bytes:
            index, logprobs = choice.index, None
            if completion.reports and (found := tokens(choice, text)):
                logprobs = self._logprobs(found, offsets[index])
                offsets[index] += sum(len(self._text(each.token)) for each in found)
            fields = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
            return f'data: {head},"choices":[{_compact(fields)}]}}\n\n'.encode()

        for choice in completion.choices:
            if (start := self._start()) is not None:
                yield event(choice, start, None)
        try:
            async for choice, text in completion.texts():
                if text is None:
                    yield event(choice, self._end(), choice.finish_reason, None)
                else:
                    yield event(choice, self._part(text), None, text)
            if usage:
                last = {**self._head, "object": self.event_name, "choices": []}
                yield f"data: {_compact({**last, 'usage': completion.usage})}\n\n".encode()
        except KvError as error:
            status, code = status_of(error)
            reply = error_reply(status, str(error), code, param_of(error))
            yield f"data: {_compact(reply)}\n\n".encode()
            return
        yield b"data: [DONE]\n\n"

    def _begun(self, found: list[TokenLogprobs], start: int, end: int) -> tuple[int, int]:
        """Return how many tokens begin before byte ``end`` of a text, and where the next begins.

        The first one begins at byte ``start``.
        """
        n = 0
        while n < len(found) and start < end:
            start += len(self._model.piece(found[n].token))
            n += 1
        return n, start

    def _text(self, token: int) -> str:
        return self._model.piece(token, special=True).decode(errors="replace")

    def _logprobs(self, found: list[TokenLogprobs] | None, offset: int) -> dict[str, Any] | None:
        if found is None:
            return None
        texts = [self._text(each.token) for each in found]
        offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in found],
            # OpenAI's lists also have the token of the text.
            "top_logprobs": [
                {
                    self._text(token): _finite(value)
                    for token, value in (*each.top, (each.token, each.logprob))
                }
                for each in found
            ],
            "text_offset": offsets,
        }

    def _start(self) -> dict[str, Any] | None:
        return None

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _end(self) -> dict[str, Any]:
        return {"text": ""}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatFormat(TextFormat):
    """The replies of chats."""

    prefix = "chatcmpl"
    name = "chat.completion"
    event_name = "chat.completion.chunk"

    def _logprobs(self, found: list[TokenLogprobs] | None, offset: int) -> dict[str, Any] | None:
        if found is None:
            return None
        entries = [
            {
                **self._entry(each.token, each.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in each.top],
            }
            for each in found
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._model.piece(token, special=True)
        text = piece.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(piece)}

    def _start(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _end(self) -> dict[str, Any]:
        return {"delta": {}}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _in_steps(found: dict[str, Any] | None) -> str:
    """Write an object whose lists are long. Other threads run between their items."""
    if found is None:
        return "null"
    texts = {
        name: f"[{','.join(map(_compact, value))}]" if isinstance(value, list) else _compact(value)
        for name, value in found.items()
    }
    return f"{{{','.join(f'{_compact(name)}:{text}' for name, text in texts.items())}}}"


def _finite(value: float) -> float:
    return max(value, _LEAST) if not math.isnan(value) else _LEAST


def openapi(
    routes: list[tuple[str, str, str, type[Any] | None]],
    version: str,
    without_key: Collection[str] | None,
) -> dict[str, Any]:
    """Return the description of the API; a route is a method, a path, a summary and a body.

    All paths but those ``without_key`` require an API key; None: no path does.
    """
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for method, path, summary, body in routes:
        operation: dict[str, Any] = {
            "summary": summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"\{(\w+)\}", path)
            ],
            "responses": {
                "200": {"description": "success"},
                "default": {"description": "an error object of the OpenAI API"},
            },
        }
        if without_key and path in without_key:
            operation["security"] = []
        if body is not None:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[body.__name__] = schema
            reference = {"$ref": f"#/components/schemas/{body.__name__}"}
            content = {"application/json": {"schema": reference}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pyllamakv serve", "version": version},
        "paths": paths,
        "components": components,
    }
    if without_key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found
