"""What a server scenario works with: servers of one build, and clients that drive them."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from pyllamakv.errors import (
    AddressInUse,
    LoadError,
    PromptTooLong,
    RequestFailed,
    ScenarioFailed,
    Untestable,
)
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.device_placement import ALL, DevicePlacement
from pyllamakv.scenarios.synthetic_models import BYTE_OFFSET, SHAPES, WIDENED, with_wide_rows
from pyllamakv.server.server_client import ServerClient, ServerCompletion
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.source import architectures
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyllamakv.scenarios.architectures import Shape
    from pyllamakv.server.server_artifact import BuiltServer

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Flags that a server gets if its release has them: what older releases do without a flag.
_WHERE_KNOWN = ("--slots", "--no-cache-idle-slots", "--no-warmup")

#: Cells of each slot: its share of one cache.
SLOT = 512

#: Clients of the scenarios; each can have a slot.
CLIENTS = 4
CELLS = CLIENTS * SLOT
SETTING = f"-np {CLIENTS} -c {CELLS}"

#: Seconds in which a server ends whose clients have lost their connections.
ENDING = 2.0

#: Difference of log-probabilities up to which another batch may select another token: a batch of
#: another size adds the same numbers in another order. The margins of equal tokens changed by up to
#: 0.02 in conversations with the model "sliding", and by up to 0.25 where windows had lost cells.
TIE = 0.05

#: The same on a GPU, which computes batches of different sizes with different kernels.
GPU_TIE = 0.2

_TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wise men count every star in the sky "
    "and once upon a time there was a little girl who lived in a house by the sea with her cat "
)


_BYTES = SHAPES["bytes"]

#: The generated models that servers run, by their memory: one token per byte of text.
MODELS = {
    "full": _BYTES,
    **{
        name: replace(shape, name=f"bytes-{name}", n_vocab=_BYTES.n_vocab, vocab=_BYTES.vocab)
        for name, shape in (
            # Four windows and a micro-batch of 32 tokens take all 256 cells of a unified cache.
            ("sliding", replace(SHAPES["sliding"], window=56)),
            ("hybrid", SHAPES["hybrid"]),
            ("recurrent", SHAPES["recurrent"]),
            # The shape of "full" with other weights.
            ("other", replace(_BYTES, seed=_BYTES.seed + 1)),
        )
    },
}

#: What a server logs for each buffer of a cache: the device, or CPU.
_CACHE_BUFFER = re.compile(r"(\S+) KV buffer size")

#: Tokens that no answer contains: a server holds incomplete UTF-8 back, with its probabilities, and
#: between 0.3.33 and b10566 its parser refuses an answer that is not UTF-8.
NOT_ASCII = [
    [token, False]
    for token in range(_BYTES.n_vocab)
    if not BYTE_OFFSET <= token < BYTE_OFFSET + 128
]


@dataclass(frozen=True)
class CompletionRequest:
    """A request of a client: the tokens of its prompt, and how many tokens to generate."""

    prompt: tuple[int, ...]
    n_predict: int


class ServerLab:
    """Start servers of one build, and drive them. Each has ``slots`` slots of `SLOT` cells."""

    def __init__(self, built: BuiltServer, *, slots: int = CLIENTS) -> None:
        self.built = built
        self.slots = slots
        self.random = random.Random(1)
        #: Facts for the report: counts of requests, retries and differences.
        self.notes: dict[str, int] = {}

    @cached_property
    def flags(self) -> frozenset[str]:
        """Return the options that the server documents. Raises LoadError if it cannot run."""
        program = self.built.check_program()
        try:
            done = subprocess.run(
                [str(program), "--help"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env=self._environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LoadError(f"{program} --help cannot be run: {error}") from error
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise LoadError(f"{program} --help ended with status {done.returncode}: {last}")
        words = done.stdout.replace(",", " ").split()
        return frozenset(word for word in words if word.startswith("-"))

    @cached_property
    def sharing(self) -> tuple[str, ...]:
        """Return the flags with which the slots share one cache, each with its part of the cells.

        Older releases do so without a flag. A few have only slots that may use the whole cache;
        their slots get a cache each.
        """
        if "--kv-unified-per-slot" in self.flags:
            return "--kv-unified", "--kv-unified-per-slot", str(SLOT)
        if "--kv-unified" not in self.flags:
            return ()
        with self._start("--kv-unified") as server, _explained(server):
            return ("--kv-unified",) if _parts(server) == {SLOT} else ()

    @property
    def tie(self) -> float:
        """Return the difference of log-probabilities up to which texts may differ."""
        return GPU_TIE if self._place.off_cpu else TIE

    @property
    def _place(self) -> DevicePlacement:
        return DevicePlacement(self.built.variant.manifest.backend)

    @property
    def _environment(self) -> dict[str, str]:
        """Return the environment of servers: without their settings and the user's file."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        # An empty value would select ~/.config.
        return kept | {"XDG_CONFIG_HOME": os.devnull} | self._place.environment

    @cached_property
    def placement(self) -> tuple[str, ...]:
        """Return the flags that put layers and cache on the device of a GPU backend, else none.

        Raises Untestable if the server reports that the cache is in host memory nevertheless.
        """
        if not self._place.off_cpu:
            return ()
        flags = ("-ngl", str(ALL))
        found: list[str] = []
        # Newer releases log the buffers only if asked to.
        with self._start(
            *flags, "-v", placed=False, sink=lambda line: found.extend(_CACHE_BUFFER.findall(line))
        ):
            pass
        if not found or "CPU" in found:
            where = self._place.backend
            raise Untestable(f"the cache is in host memory, not on a {where} device")
        return flags

    @cached_property
    def architectures(self) -> set[str]:
        """Return the architectures of models that the release supports; none if unknown.

        A server cannot be asked: before 0.3.9, it aborts on a model that it does not support.
        """
        return architectures.read(open_store(), self.built.variant.manifest.tree)

    def _start(
        self,
        *arguments: str,
        model: str | Path = "full",
        slots: int | None = None,
        cells: int | None = None,
        placed: bool = True,
        env: Mapping[str, str] | None = None,
        sink: Callable[[str], None] | None = None,
    ) -> ServerProcess:
        more = [flag for flag in _WHERE_KNOWN if flag in self.flags]
        if placed:
            more += self.placement
        if isinstance(model, str):
            shape = self._shape(model)
            if self.architectures and shape.architecture not in self.architectures:
                raise Untestable(f"the release does not support {shape.architecture}")
            model = synthetic_models.generate(shape, home() / "models")
        words = ["-m", str(model), "--host", "127.0.0.1", "--port", "0", "-t", "1"]
        slots = self.slots if slots is None else slots
        size = ["-np", str(slots), "-c", str(cells or slots * SLOT)]
        every = [*words, *size, *more, *arguments]
        env = self._environment | dict(env or {})
        try:
            return ServerProcess(self.built.program, every, env=env, sink=sink)
        except AddressInUse:
            # Another program took the free port before the server did.
            return ServerProcess(self.built.program, every, env=env, sink=sink)

    def _shape(self, model: str) -> Shape:
        """Return the shape of one of `MODELS`, with the rows that a device computes correctly."""
        shape = MODELS[model]
        wide = self._place.off_cpu and shape.architecture in WIDENED
        return with_wide_rows(shape) if wide else shape

    @contextlib.contextmanager
    def server(
        self,
        *arguments: str,
        shift: bool = False,
        model: str | Path = "full",
        slots: int | None = None,
        one_cache: bool = False,
        cells: int | None = None,
        env: Mapping[str, str] | None = None,
        sink: Callable[[str], None] | None = None,
    ) -> Iterator[ServerProcess]:
        """Run a server with one of `MODELS` or a file; ``shift`` enables context shifts.

        ``slots`` None is the number of the lab. With ``one_cache`` the slots share one cache also
        where each of them may then use all cells. With ``cells``, the cache has so many, and each
        slot may use all of them, up to the context size that the model was trained with, as on a
        server whose arguments do not give the number of slots.
        ``env`` has more variables, and ``sink`` receives each line of the log.

        If the server ends in the block, ServerDied replaces what its clients saw. Other errors of
        connections, and refused requests, raise ScenarioFailed. Raises Untestable if a slot cannot
        have its share, or cells that others may use, or if the release does not support the model.
        """
        if cells and "--kv-unified" not in self.flags:
            raise Untestable("the slots of this release never share the cells of one cache")
        switch = "--context-shift" if shift else "--no-context-shift"
        switches = [switch] if switch in self.flags else []
        whole = bool(cells) or (one_cache and not self.sharing and "--kv-unified" in self.flags)
        every = (*(("--kv-unified",) if whole else self.sharing), *switches, *arguments)
        with (
            self._start(
                *every, model=model, slots=slots, cells=cells, env=env, sink=sink
            ) as server,
            _explained(server),
        ):
            size = (cells or SLOT * (slots or self.slots)) if whole else SLOT
            parts = _parts(server)
            fewer = max(parts, default=size) < size
            if parts != {size} and not (fewer and parts == {_trained(server)}):
                raise Untestable(f"expected slots of {size} cells, found {sorted(parts)}")
            yield server

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield an empty directory that is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="pyllamakv-server-") as name:
            yield Path(name)

    def prompt(self, client: ServerClient, length: int) -> tuple[int, ...]:
        """Return a prompt of ``length`` random tokens of a text."""
        tokens = client.tokenize(self.words(length))
        if len(tokens) < length:
            raise ScenarioFailed(f"expected {length} tokens of {length} words, got {len(tokens)}")
        return tuple(tokens[:length])

    def words(self, count: int) -> str:
        """Return random words."""
        return " ".join(self.random.choices(_TEXT.split(), k=count))

    def note(self, **facts: int) -> None:
        """Add counts to the report."""
        for name, count in facts.items():
            self.notes[name] = self.notes.get(name, 0) + count


def answers(
    server: ServerProcess, requests: Sequence[CompletionRequest], clients: int, **options: Any
) -> list[ServerCompletion]:
    """Return the completion of each request, sent by ``clients`` threads.

    ``options`` are fields of llama-server's /completion. Raises ScenarioFailed if a request was not
    answered ("claim") or has a probability that is no number ("data"), and TimeoutError.
    """

    def ask(client: ServerClient, request: CompletionRequest) -> ServerCompletion:
        return complete(client, request.prompt, request.n_predict, **options)

    return answered(in_parallel(server.url, requests, clients, ask))


def answered(found: Sequence[ServerCompletion | Exception]) -> list[ServerCompletion]:
    """Return the answers. Raises what `answers` raises."""
    failed = [each for each in found if isinstance(each, Exception)]
    for each in failed:
        if isinstance(each, ScenarioFailed):
            raise each
    if failed:
        message = f"{len(failed)} of {len(found)} requests were not answered: {failed[0]}"
        raise ScenarioFailed(message)
    return [each for each in found if isinstance(each, ServerCompletion)]


def in_parallel(
    url: str, items: Sequence[_T], clients: int, act: Callable[[ServerClient, _T], _R]
) -> list[_R | Exception]:
    """Return the result or the exception of ``act`` for each item, from ``clients`` threads.

    An interrupt, and TimeoutError of ``act``, is raised when the requests that are running have
    ended; no others are sent, because a server that hangs answers none of them.
    """
    stopped = Event()

    def one(mine: Sequence[tuple[int, _T]]) -> list[tuple[int, _R | Exception]]:
        done: list[tuple[int, _R | Exception]] = []
        with ServerClient(url) as client:
            for index, item in mine:
                if stopped.is_set():
                    break
                try:
                    done.append((index, act(client, item)))
                except TimeoutError:
                    stopped.set()
                    raise
                except Exception as error:
                    done.append((index, error))
        return done

    shares = [list(enumerate(items))[start::clients] for start in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        try:
            rows = [row for each in pool.map(one, shares) for row in each]
        except BaseException:
            stopped.set()
            raise
    return [result for _, result in sorted(rows, key=lambda row: row[0])]


def first_difference(
    one: ServerCompletion, other: ServerCompletion, tie: float = TIE
) -> int | None:
    """Return the index of the first token that differs and was no tie, or None.

    After a tie the texts go separate ways, so nothing after it is compared.
    """
    for index, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return None if min(one.margins[index], other.margins[index]) <= tie else index
    return None if len(one.tokens) == len(other.tokens) else min(len(one.tokens), len(other.tokens))


def largest_change(one: ServerCompletion, other: ServerCompletion) -> float:
    """Return by how much the margin of a token differs at most, before the texts part."""
    changes = [0.0]
    for index, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            break
        margins = one.margins[index], other.margins[index]
        if all(map(math.isfinite, margins)):
            changes.append(abs(margins[0] - margins[1]))
    return max(changes)


@contextlib.contextmanager
def _explained(server: ServerProcess) -> Iterator[None]:
    """Raise ServerDied or ScenarioFailed for what the clients of a server see in the block."""
    try:
        yield
    except TimeoutError as error:
        raise ScenarioFailed(str(error), failure="hang") from error
    except (ConnectionError, PromptTooLong, RequestFailed, ScenarioFailed) as error:
        if server.ended(ENDING):
            raise server.death() from error
        raise ScenarioFailed(str(error), failure=getattr(error, "failure", "claim")) from error
    if server.ended(0.0):
        raise server.death()


def _parts(server: ServerProcess) -> set[int]:
    """Return the sizes of a server's slots."""
    with ServerClient(server.url) as client:
        return {int(slot["n_ctx"]) for slot in client.slots()}


def _trained(server: ServerProcess) -> int:
    """Return the context size that the model was trained with, which limits each slot."""
    with ServerClient(server.url) as client:
        return client.trained_context()


def complete(
    client: ServerClient,
    prompt: Sequence[int],
    n_predict: int,
    *,
    streamed: bool = False,
    **options: Any,
) -> ServerCompletion:
    """Complete a prompt with characters of ASCII; ``streamed`` requests the answer as events.

    Raises what `ServerClient.complete` raises, and ScenarioFailed for a probability that is no
    number.
    """
    ask = client.complete_stream if streamed else client.complete
    found = ask(prompt, n_predict, logit_bias=NOT_ASCII, **options)
    if any(map(math.isnan, found.margins)):
        raise ScenarioFailed("the probability of a token is not a number", failure="data")
    return found
