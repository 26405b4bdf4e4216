"""Compare the prompt caches of this package and of llama-server, in one run.

All of them use the libraries of one variant, one model, and the same sizes and prompts. Each round
has new tokens, and the systems take turns. The time to the first token starts with the request: it
contains the search in the cache, what is read from files, and the connection to a server.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import pyllamakv
from pyllamakv import models
from pyllamakv.building.variant import Variant
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import HarnessError
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_process import ServerProcess
from qa.bench.figure import Figure
from qa.bench.loop import built
from qa.bench.measure import interval
from qa.load.server_load import start_serve

GROUP = "Peers"
MODEL = "smollm2-135m"
Tick = Callable[[], None]

#: Cells and batches of every system; its threads.
N_CTX, N_BATCH, THREADS = 8192, 512, 1
#: Slots of the server. Ours has more sequences: a branch of the tree needs one.
SLOTS, SEQUENCES = 8, 24
#: Largest share of the time of an evaluation, and the target beside a server.
SHARE = 0.05
NOT_SLOWER = "median <= 1 x"
#: What prompts are drawn from: a server does not stream the tokens of incomplete characters.
_TEXT: Final = (
    "the quick brown fox jumps over a lazy dog while seven wise men count every star in the sky "
    "and once upon a time there was a little girl who lived in a house by the sea with her cat"
)
OURS, SERVE = "pyllamakv", "pyllamakv serve"
SERVER = "llama-server"


@dataclass(frozen=True)
class Sizes:
    """The number of rounds, and of known tokens."""

    rounds: int = 5
    prefix: int = 1000


@dataclass(frozen=True)
class PeerAnswer:
    """Seconds up to the first token, prompt tokens that were evaluated, tokens of the answer.

    ``own_clock`` are the seconds that the system itself reports for the prompt; 0: none.
    """

    first: float
    evaluated: int
    tokens: list[int]
    own_clock: float = 0.0


class CacheSystem(Protocol):
    """A system under test."""

    def answer(self, prompt: list[int], n: int) -> PeerAnswer:
        """Complete a prompt with ``n`` tokens."""

    def restart(self) -> None:
        """Save the cache as far as the system can, end it, and start it again."""

    def resume(self, prompt: list[int], n: int) -> PeerAnswer:
        """Complete a prompt after a restart; the time includes what is restored for it."""

    def close(self) -> None:
        """End the system."""


class Ours(ExitStack):
    """`Batcher` over `PrefixCache` with a store, in this process."""

    def __init__(self, model: pyllamakv.Model, folder: Path) -> None:
        super().__init__()
        self._model, self._folder = model, folder
        self._batcher = self._start()

    def _start(self) -> Batcher:
        context = self.enter_context(
            self._model.context(
                n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_BATCH, n_seq_max=SEQUENCES,
                n_threads=THREADS, n_threads_batch=THREADS,
                flash_attn=True,  # as llama-server decides by default
            )
        )  # fmt: skip
        cache = self.enter_context(PrefixCache(context, store=self._folder / "store"))
        return self.enter_context(Batcher(cache))

    def answer(self, prompt: list[int], n: int) -> PeerAnswer:
        """Complete a prompt."""
        begin = time.perf_counter()
        one = self._batcher.submit(prompt, n, stop_at_end=False)
        while not one.tokens and not one.done:
            self._batcher.step()
        first = time.perf_counter() - begin
        self._batcher.run()
        if one.cached is None or one.error is not None:
            raise HarnessError(f"a prompt of {len(prompt)} tokens failed: {one.error}")
        return PeerAnswer(first, len(prompt) - one.cached, one.tokens)

    def restart(self) -> None:
        """Close the context, which flushes the store, and open another one."""
        self.close()
        self._batcher = self._start()

    resume = answer


class Server:
    """llama-server with its prompt cache; a restart saves and restores the slot used last."""

    def __init__(self, spec: str, model: Path, folder: Path) -> None:
        self._program = find_server(spec).check_program()
        folder.mkdir()
        self._words = [
            *("-m", str(model), "--host", "127.0.0.1", "--port", "0"),
            *("-np", str(SLOTS), "-c", str(N_CTX), "--kv-unified"),
            *("-b", str(N_BATCH), "-ub", str(N_BATCH), "--slot-save-path", f"{folder}/"),
            *("-t", str(THREADS), "-tb", str(THREADS)),
        ]
        self._stack = ExitStack()
        self._slot = 0
        self._client = self._start()

    def _start(self) -> ServerClient:
        server = self._stack.enter_context(ServerProcess(self._program, self._words))
        return self._stack.enter_context(ServerClient(server.url))

    def answer(self, prompt: list[int], n: int, **options: Any) -> PeerAnswer:
        """Complete a prompt."""
        begin = time.perf_counter()
        return self._complete(begin, prompt, n, **options)

    def _complete(self, begin: float, prompt: list[int], n: int, **options: Any) -> PeerAnswer:
        first, tokens, last = 0.0, [], {}
        for last in self._client.stream(prompt, n, n_probs=0, return_tokens=True, **options):
            first = first or time.perf_counter() - begin
            tokens += last.get("tokens", [])
        self._slot = int(last["id_slot"])
        timings = last["timings"]
        return PeerAnswer(first, int(timings["prompt_n"]), tokens, timings["prompt_ms"] / 1e3)

    def restart(self) -> None:
        """Save the slot, end the server, and start it again."""
        self._client.post(f"/slots/{self._slot}?action=save", {"filename": "slot.bin"})
        self.close()
        self._client = self._start()

    def resume(self, prompt: list[int], n: int) -> PeerAnswer:
        """Restore the saved slot, and complete the prompt in it."""
        begin = time.perf_counter()
        self._client.post("/slots/0?action=restore", {"filename": "slot.bin"})
        return self._complete(begin, prompt, n, id_slot=0)

    def close(self) -> None:
        """End the server."""
        self._stack.close()


class Serve:
    """`pyllamakv serve` with a store; a restart flushes it and kills the process."""

    def __init__(
        self, variant: Variant, model: Path, folder: Path, tokenize: Callable[[str], list[int]]
    ) -> None:
        self._arguments = (variant.folder, model, N_CTX, SLOTS, THREADS)
        self._folder = folder
        self._tokenize = tokenize
        self._stack = ExitStack()
        self._start()

    def _start(self) -> None:
        more = ("--store", self._folder, "--flush-every", 3600)
        try:
            self._server = self._stack.enter_context(start_serve(*self._arguments, *more))
            self._client = self._stack.enter_context(ServerClient(self._server.url))
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: list[int], n: int) -> PeerAnswer:
        """Complete a prompt. The API of OpenAI has no tokens: they are those of the text."""
        begin = time.perf_counter()
        first, text, last = 0.0, "", {}
        for last in self._client.stream_openai(prompt, n):
            first = first or time.perf_counter() - begin
            text += "".join(each["text"] for each in last["choices"])
        cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
        return PeerAnswer(first, len(prompt) - cached, self._tokenize(text))

    def restart(self) -> None:
        """Flush the store, kill the server, and start it again."""
        self._client.post("/v1/cache/flush", {})
        os.kill(self._server.pid, signal.SIGKILL)
        self.close()
        self._start()

    def close(self) -> None:
        """End the server."""
        self._stack.close()

    resume = answer


@dataclass
class Measured:
    """Seconds up to the first token per round, and evaluated tokens per round."""

    first: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    own_clock: list[float] = field(default_factory=list)


#: Measurements by system and workload.
Results = dict[str, dict[str, Measured]]

#: A prompt of new tokens; the same with another last token; the same after a restart.
FRESH, KNOWN, RESTART = "fresh", "known", "restart"


def figures(
    tick: Tick, spec: str = "0.3.36+patched", path: Path | None = None, sizes: Sizes | None = None
) -> list[Figure]:
    """Measure with SmolLM2-135M, or the model at ``path``.

    Raises NotBuilt without the variant or its server, and NotFetched without the model.
    """
    sizes = sizes or Sizes()
    variant, path = built(spec), path or models.get(MODEL)
    with (
        tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as name,
        ExitStack() as stack,
        pyllamakv.open(variant.folder) as library,
        library.load_model(path) as model,
    ):
        folder = Path(name)
        makers: dict[str, Callable[[], CacheSystem]] = {
            OURS: lambda: Ours(model, folder),
            SERVE: lambda: Serve(variant, path, folder / "served", model.tokenize),
            SERVER: lambda: Server(spec, path, folder / "slots"),
        }
        systems = {name: stack.enter_context(closing(make())) for name, make in makers.items()}
        found = run(systems, [*dict.fromkeys(model.tokenize(_TEXT))], sizes, tick)
        stack.close()  # contexts end before their model
    how = f"{spec}, {path.stem}, {N_CTX:,} cells, batches of {N_BATCH}, {THREADS} thread"
    return report(found, sizes, how)


def run(
    systems: Mapping[str, CacheSystem], words: Sequence[int], sizes: Sizes, tick: Tick
) -> Results:
    """Run all rounds with prompts of some tokens; the systems take turns, in alternating order."""
    found: Results = {name: {} for name in systems}
    for number in range(sizes.rounds):
        for name in sorted(systems, reverse=number % 2 == 1):
            measure_round(systems[name], words, sizes, random.Random(number), found[name])
            tick()
    return found


def measure_round(
    system: CacheSystem,
    words: Sequence[int],
    sizes: Sizes,
    draw: random.Random,
    found: dict[str, Measured],
) -> None:
    """Run the workloads once, with a prefix that is drawn from ``words``."""

    def add(name: str, answer: PeerAnswer) -> None:
        one = found.setdefault(name, Measured())
        one.first.append(answer.first)
        one.evaluated.append(answer.evaluated)
        one.own_clock.append(answer.own_clock)

    prefix = draw.choices(words, k=sizes.prefix)
    fresh, known, later = ([*prefix, end] for end in draw.sample(words, 3))
    add(FRESH, system.answer(fresh, 1))
    add(KNOWN, system.answer(known, 1))
    system.restart()
    add(RESTART, system.resume(later, 1))


def report(found: Results, sizes: Sizes, how: str) -> list[Figure]:
    """Return the figures."""
    ours, served, theirs = found[OURS], found[SERVE], found[SERVER]
    clock = f"{1e3 * statistics.median(theirs[KNOWN].own_clock):.1f} ms by the server's own clock"
    note = "the server verifies no checksum of its file"
    pairs: tuple[tuple[str, Measured, Measured, float | None, str], ...] = (
        ("evaluating them", ours[KNOWN], ours[FRESH], SHARE, ""),
        (f"{SERVER}", ours[KNOWN], theirs[KNOWN], None, clock),
        ("evaluating them, after a restart", ours[RESTART], ours[FRESH], SHARE, ""),
        (f"{SERVER} with a slot file, after a restart", ours[RESTART], theirs[RESTART], None, note),
        (f"{SERVER}, by {SERVE}", served[KNOWN], theirs[KNOWN], None, clock),
        (
            f"{SERVER} with a slot file, by {SERVE}, after kill -9",
            served[RESTART], theirs[RESTART], None, note,
        ),
    )  # fmt: skip
    return [_ratio(*each, sizes, how) for each in pairs]


def _ratio(
    over: str,
    first: Measured,
    second: Measured,
    share: float | None,
    limit: str,
    sizes: Sizes,
    how: str,
) -> Figure:
    """Return the figure of one pair. Without ``share``, the first must not be slower.

    Few rounds have a wide interval, which would include 1.0 for a slower system as well.
    """
    ratio = interval([a / b for a, b in zip(first.first, second.first, strict=True)])
    times = [f"{interval([1e3 * s for s in each.first]).median:.1f}" for each in (first, second)]
    return Figure(
        GROUP,
        f"the first token after {sizes.prefix:,} known tokens: over {over}",
        f"{ratio.format(4 if share else 2)} x, {times[0]} and {times[1]} ms",
        f"<= {share:g} x" if share else NOT_SLOWER,
        ratio.high <= share if share else ratio.median <= 1.0,
        limit,
        f"{sizes.rounds} rounds, interleaved, {how}",
        {"first": first.first, "second": second.first, "evaluated": first.evaluated},
    )
