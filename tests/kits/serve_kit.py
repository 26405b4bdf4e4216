"""Helpers for tests of the server: its API without a socket, and processes of `pyllamakv serve`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import runtime_kit

from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.serve.app import Api
from pyllamakv.serve.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
#: A chat that takes few tokens.
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


def engine(
    folder: Path, *, capacity: int = 4, n_ctx: int = 256, n_seq_max: int = 4, **options: Any
) -> Engine:
    """Return an engine of a simulated library, whose tokens are bytes."""
    context = runtime_kit.context(folder, n_ctx=n_ctx, n_seq_max=n_seq_max)
    cache = PrefixCache(context, **options)
    return Engine(cache, ThreadPoolExecutor(1), capacity=capacity, template=TEMPLATE)


def run(served: Engine, main: Callable[[httpx.AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """Run a coroutine with a client of the API of an engine, which is closed afterwards."""

    async def all_of_it() -> Any:
        transport = httpx.ASGITransport(Api(served, "tiny", **options), raise_app_exceptions=False)
        try:
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
                asyncio.timeout(120),  # a failure instead of a hang
            ):
                return await main(client)
        finally:
            await served.aclose()

    return asyncio.run(all_of_it())


def post(served: Engine, path: str, body: Any, **options: Any) -> httpx.Response:
    """Send one request to an engine, and close the engine."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def main(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, content=content)

    answer: httpx.Response = run(served, main, **options)
    return answer


def events(text: str) -> list[Any]:
    """Return the events of a stream; the last one is the text [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class ServeProcess:
    """A process of `pyllamakv serve`, and a client of it."""

    def __init__(self, model: Path, *options: object, ready: bool = True) -> None:
        words = [sys.executable, "-m", "pyllamakv.cli.main", "serve", str(model), "--port", "0"]
        self.child = subprocess.Popen(
            [*words, "--json", *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYLLAMAKV_THREADS": "1"},
        )
        self.first: dict[str, Any] = {}
        self.client = httpx.Client(timeout=60)
        if ready:
            assert self.child.stdout is not None
            line = self.child.stdout.readline()
            assert line, self.child.communicate()[1]
            self.first = json.loads(line)
            self.client.base_url = httpx.URL(self.first["url"])

    @property
    def url(self) -> str:
        """Return the address of the API for clients of OpenAI."""
        return f"{self.first['url']}/v1"

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a request, which must succeed."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and what was written."""
        out, err = self.child.communicate(timeout=60)
        self.client.close()
        return self.child.returncode, out + err


@contextmanager
def process(model: Path, *options: object) -> Iterator[ServeProcess]:
    """Run a server until the end of the block."""
    served = ServeProcess(model, *options)
    try:
        yield served
    finally:
        served.child.kill()
        served.end()
