"""A client of llama-server over HTTP, with httpx. Needs the extra ``server``."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import PromptTooLong, RequestFailed, ToolMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from types import ModuleType

_HINT = "pip install 'pyllamakv[server]'"

#: How many probabilities an answer has per token. Some belong to tokens that a bias bans: of 16,
#: all do for some tokens, whose margin is unknown then, and a tie looks like a wrong token.
_PROBABILITIES = 32

#: How releases refuse a request that is longer than its slot; since b6500 with a type of its own.
_TOO_LONG = re.compile(
    r"exceed_context_size|exceeds the available context size|larger than the max"
)


@dataclass(frozen=True)
class ServerCompletion:
    """The answer to a request.

    ``tokens`` and ``margins`` have an entry per generated token: its id, and by how much it is more
    probable than the next allowed one (difference of log-probabilities; NaN if the server reports a
    probability as null). ``reused`` is the number of prompt tokens that the server did not evaluate
    again. ``truncated``: the server dropped tokens of the prompt or of the answer, because they do
    not fit into the slot.
    """

    text: str
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    n_prompt: int
    reused: int
    truncated: bool


class ServerClient(ClosedOnExit):
    """A connection to a server. Use one per thread."""

    def __init__(self, url: str, *, timeout: float = 120.0) -> None:
        """Connect to ``url``.

        A request raises TimeoutError if the server sends nothing for ``timeout`` seconds.
        """
        self._httpx: Any = package("httpx")
        self._timeout = timeout
        # A connection per request: a server closes idle ones after seconds, also while the next
        # request is on its way, which then looks like a server that ended.
        limits = self._httpx.Limits(max_keepalive_connections=0)
        self._client = self._httpx.Client(
            base_url=url, timeout=timeout, limits=limits, trust_env=False
        )

    def complete(
        self, prompt: Sequence[int] | str, n_predict: int, **options: Any
    ) -> ServerCompletion:
        """Complete a prompt greedily; ``options`` are fields of llama-server's /completion.

        Raises PromptTooLong, RequestFailed (also for an answer of another form), ConnectionError if
        the server ended, or TimeoutError.
        """
        return _completion(self.post("/completion", _request(prompt, n_predict, options)), options)

    def complete_stream(
        self,
        prompt: Sequence[int] | str,
        n_predict: int,
        *,
        begun: Callable[[], object] | None = None,
        **options: Any,
    ) -> ServerCompletion:
        """Complete a prompt as `complete` does, from the events of `stream`.

        ``begun`` is called at the first event, when the server still generates the others.
        """
        events: list[dict[str, Any]] = []
        for event in self.stream(prompt, n_predict, **options):
            if begun is not None and not events:
                begun()
            events.append(event)
        rows = [row for each in events for row in each.get("completion_probabilities") or []]
        text = "".join(str(each.get("content", "")) for each in events)
        last = events[-1] if events else {}
        return _completion({**last, "content": text, "completion_probabilities": rows}, options)

    def stream(
        self, prompt: Sequence[int] | str, n_predict: int, **options: Any
    ) -> Generator[dict[str, Any], None, None]:
        """Complete a prompt as `complete` does, and yield each event of the answer.

        An event has the ``content`` of one or more tokens; the last one has ``stop``. Raises what
        `complete` raises. Closing the iterator disconnects.
        """
        body = {**_request(prompt, n_predict, options), "stream": True}
        yield from self._events("/completion", body)

    def stream_openai(
        self, prompt: Sequence[int] | str, n_predict: int
    ) -> Generator[dict[str, Any], None, None]:
        """Complete a prompt greedily with the API of OpenAI, and yield each event of the answer.

        The last event has the numbers of tokens (``usage``). Raises what `complete` raises.
        """
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": n_predict,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield from self._events("/v1/completions", body)

    def _events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        try:
            with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = answer.read().decode("utf-8", "replace")
                    raise refusal(path, answer.status_code, text)
                for line in _lines(answer.iter_bytes()):
                    field, _, text = line.partition(": ")
                    if field not in ("data", "error") or text == "[DONE]":
                        continue
                    event = _parse(path, text)
                    if field == "error" or "error" in event:
                        reason = event.get("error", event)
                        code = reason.get("code") if isinstance(reason, dict) else None
                        raise refusal(path, code or answer.status_code, text)
                    yield event
        except self._httpx.TimeoutException as error:
            raise TimeoutError(self._late(path)) from error
        except self._httpx.TransportError as error:
            raise ConnectionError(f"{path}: {error or type(error).__name__}") from error

    def complete_family(
        self, prompt: Sequence[int] | str, n_predict: int, count: int, **options: Any
    ) -> list[ServerCompletion]:
        """Complete a prompt ``count`` times with one request. Raises what `complete` raises."""
        body = {**_request(prompt, n_predict, options), "n_cmpl": count}
        found: Any = self.post("/completion", body)
        rows = found if isinstance(found, list) else [found]
        return [_completion(each, options) for each in rows]

    def cancel(
        self, prompt: Sequence[int] | str, n_predict: int, after: int, **options: Any
    ) -> None:
        """Start a streamed completion, and disconnect after ``after`` events."""
        with contextlib.closing(self.stream(prompt, n_predict, **options)) as events:
            for _ in itertools.islice(events, after):
                pass

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in self.post("/tokenize", {"content": text})["tokens"]]

    def slots(self) -> list[dict[str, Any]]:
        """Return the state of each slot."""
        found: list[dict[str, Any]] = _parse("/slots", self._request("GET", "/slots", None).text)
        return found

    def trained_context(self) -> int:
        """Return the context size that the model was trained with."""
        found = _parse("/v1/models", self._request("GET", "/v1/models", None).text)
        return int(found["data"][0]["meta"]["n_ctx_train"])

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric of a server with ``--metrics``, by its name."""
        lines = self._request("GET", "/metrics", None).text.splitlines()
        rows = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    def wait_idle(self, patience: float) -> bool:
        """Return whether every slot becomes idle within ``patience`` seconds."""
        until = time.monotonic() + patience
        while any(slot["is_processing"] for slot in self.slots()):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post JSON and return the answer. Raises what `complete` raises."""
        found: dict[str, Any] = _parse(path, self._request("POST", path, body).text)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._client.request(method, path, json=body)
        except self._httpx.TimeoutException as error:
            raise TimeoutError(self._late(path)) from error
        except self._httpx.TransportError as error:
            raise ConnectionError(f"{path}: {error or type(error).__name__}") from error
        if answer.status_code == 200:
            return answer
        raise refusal(path, answer.status_code, answer.text)

    def _late(self, path: str) -> str:
        return f"{path}: no answer for {self._timeout:g} s"


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the lines of an event stream, which end with ``\n`` alone.

    The text of a token can contain other separators of lines, such as U+2028.
    """
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode("utf-8", "replace").removesuffix("\r") for line in whole)


def _parse(path: str, text: str) -> Any:
    """Parse an answer. Raises RequestFailed for malformed JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestFailed(f"{path}: the server sent no JSON ({error}): {text[:80]}") from error


def refusal(path: str, status: int, text: str) -> PromptTooLong | RequestFailed:
    """Return the error for an answer other than 200."""
    reason = text.strip()[:300] or "no message"
    if _TOO_LONG.search(text):
        return PromptTooLong(
            f"{path}: the server refuses the request with {status}: {reason}; shorten the prompt, "
            "or start the server with a larger -c or a smaller -np"
        )
    return RequestFailed(f"{path}: the server answers {status}: {reason}", code=status)


def _request(
    prompt: Sequence[int] | str, n_predict: int, options: dict[str, Any]
) -> dict[str, Any]:
    given = prompt if isinstance(prompt, str) else list(prompt)
    return {
        "prompt": given,
        "n_predict": n_predict,
        "temperature": 0,
        "n_probs": _PROBABILITIES,
        "ignore_eos": True,
        "cache_prompt": True,
        **options,
    }


def _completion(raw: dict[str, Any], options: dict[str, Any]) -> ServerCompletion:
    """Return the completion that an answer describes. Raises RequestFailed for another form."""
    banned = {token for token, bias in options.get("logit_bias", ()) if bias is False}
    try:
        rows = raw.get("completion_probabilities") or []
        return ServerCompletion(
            text=str(raw["content"]),
            tokens=tuple(int(row["id"]) for row in rows),
            margins=tuple(_margin(row, banned) for row in rows),
            n_prompt=int(raw.get("tokens_evaluated", 0)),
            reused=int(raw.get("tokens_evaluated", 0)) - int(raw["timings"]["prompt_n"]),
            truncated=bool(raw.get("truncated", False)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"/completion: the answer has another form ({error!r}): {str(raw)[:200]}"
        raise RequestFailed(msg) from error


def _margin(row: dict[str, Any], banned: set[int]) -> float:
    """Return the log-probability of a generated token, less that of the best other token.

    A server reports probabilities before it applies biases, and NaN as null.
    """
    listed = [row, *row["top_logprobs"]]
    if any(each["logprob"] is None for each in listed):
        return math.nan
    others = (each for each in listed if each["id"] not in {row["id"], *banned})
    best = max((float(each["logprob"]) for each in others), default=-math.inf)
    return float(row["logprob"]) - best


def package(name: str) -> ModuleType:
    """Return a package of the extra ``server``. Raises ToolMissing if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"driving a server needs {name}, which is not installed: {_HINT}"
        raise ToolMissing(msg, name, _HINT) from error
