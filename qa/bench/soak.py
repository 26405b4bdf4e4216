"""Run clients on a slot cache for a long time, and check every cell after every decode.

Four clients use the batching loop at once: they continue a conversation, go back in it, start
another, or cancel. After each decode the ledger of every sequence is compared with the cells: a
cell without a ledger entry, or a token without a cell, is a ghost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pyllamakv
from pyllamakv.building import variant as variants
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.generation import Generation
from pyllamakv.cache.slot_cache import SlotCache, ledger_mismatches
from pyllamakv.errors import NotBuilt
from pyllamakv.scenarios import synthetic_models
from qa.bench.figure import Figure

GROUP = "The soak"
Tick = Callable[[], None]

#: Length of a run.
DECODES, CLIENTS, N_CTX, LENGTHS = 20_000, 4, 8192, (10, 2100)


@dataclass
class SoakResult:
    """The result of a run; ``ghosts`` are positions, summed over all decodes."""

    decodes: int = 0
    prompts: int = 0
    truncated: int = 0
    slot_failures: int = 0
    failed: int = 0
    ghosts: int = 0
    ledger_errors: int = 0
    seconds: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict)
    batcher: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Return whether no token was lost, left over or refused."""
        return not (self.slot_failures or self.failed or self.ghosts or self.ledger_errors)


class Client:
    """Request one continuation after another; the requests depend on the seed alone."""

    def __init__(self, seed: int, lengths: tuple[int, int], n_vocab: int) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths
        self._n_vocab = n_vocab
        self._history: list[int] = []
        self.going: Generation | None = None
        #: Number of tokens after which the client cancels.
        self.patience = 0

    def prompt(self) -> tuple[list[int], int]:
        """Return the next prompt, and the number of tokens to generate."""
        draw, (low, high) = self._random, self._lengths
        if self.going is not None:
            self._history = [*self.going.prompt, *self.going.tokens]
        kind = draw.random()
        if kind < 0.3 or not self._history:
            # Half of the conversations start with a common prefix.
            self._history = _preface(draw.randrange(6), high // 6, self._n_vocab)
        elif kind < 0.5:
            del self._history[draw.randrange(len(self._history)) :]
        length = draw.randint(*draw.choice(((low, high), (3 * high // 4, high))))
        del self._history[max(length - 1, 0) :]
        more = min(length - len(self._history), draw.choice((5, 40, high, high)))
        self._history += [draw.randrange(self._n_vocab) for _ in range(max(more, low))]
        wanted = draw.choice((1, 10, 40, 120))
        self.patience = draw.choice((wanted // 2, wanted, wanted, wanted))
        return self._history[:high], wanted


def _preface(number: int, length: int, n_vocab: int) -> list[int]:
    return [(number * 11 + n * n) % n_vocab for n in range(length)] if number < 3 else []


def soak(
    context: pyllamakv.Context,
    decodes: int,
    *,
    clients: int = CLIENTS,
    lengths: tuple[int, int] = LENGTHS,
    seed: int = 1,
    tick: Tick | None = None,
    **options: Any,
) -> SoakResult:
    """Run the given number of decodes; ``options`` are those of `SlotCache`."""
    found, begin = SoakResult(), time.perf_counter()
    n_vocab = context.n_vocab
    with SlotCache(context, keep=8, **options) as cache, Batcher(cache) as batcher:
        those = [Client(seed * 1000 + n, lengths, n_vocab) for n in range(clients)]
        while batcher.stats().decodes < decodes:
            for client in those:
                _serve(client, cache, batcher, found)
            batcher.step()
            _look(context, batcher, those, found)
            if tick is not None:
                tick()
        stats = batcher.stats()
        found.decodes, found.slot_failures, found.failed = (
            stats.decodes, stats.slot_failures, stats.failed,
        )  # fmt: skip
        found.cache, found.batcher = cache.stats().to_json(), stats.to_json()
    found.seconds = time.perf_counter() - begin
    return found


def _serve(client: Client, cache: SlotCache, batcher: Batcher, found: SoakResult) -> None:
    going = client.going
    if going is not None and not going.done:
        if len(going.tokens) < client.patience or not going.tokens:
            return
        going.cancel()
        return
    tokens, wanted = client.prompt()
    found.prompts += 1
    if len(tokens) > cache.size:
        found.truncated += 1
        tokens = cache.truncate(tokens)
    client.going = batcher.submit(tokens, wanted, stop_at_end=False)


def _look(
    context: pyllamakv.Context, batcher: Batcher, clients: list[Client], found: SoakResult
) -> None:
    found.ghosts += sum(ledger_mismatches(context).values())
    for client in clients:
        going = client.going
        if going is not None and going.lease is not None:
            held = going.ledger.tokens
            # The ledger is a prefix of the sequence's expected tokens.
            found.ledger_errors += held != going.all_tokens[: len(held)]


def figures(
    tick: Tick,
    spec: str = "0.3.9+patched",
    decodes: int = DECODES,
    control: str = "0.3.9+stock",
) -> list[Figure]:
    """Run both policies, and one run on a build without rollback."""
    found = []
    for each, policy in ((spec, "best"), (spec, "longest"), (control, "best")):
        variant = variants.find(each)
        if variant is None:
            msg = f"{each} is not built here; run: pyllamakv build {each.partition('+')[0]}"
            raise NotBuilt(msg)
        with (
            pyllamakv.open(variant.folder) as library,
            library.load_model(synthetic_models.tiny()) as model,
            model.context(
                n_ctx=N_CTX, n_batch=512, n_ubatch=128, n_seq_max=CLIENTS, flash_attn=True
            ) as context,
        ):
            done = soak(context, decodes, tick=tick, policy=policy)
        found.append(figure(policy, done, each, asked=each == spec))
    return found


def figure(policy: str, done: SoakResult, spec: str, *, asked: bool = True) -> Figure:
    """Return the figure of a run; only ``asked`` runs have a target."""
    low, high = LENGTHS
    return Figure(
        GROUP,
        f"{done.decodes:,} decodes for {CLIENTS} clients, `SlotCache`, {policy} match, {spec}",
        f"{done.slot_failures} slot failures, {done.ghosts + done.ledger_errors} ghosts, "
        f"{done.failed} prompts failed",
        "0, 0, 0" if asked else "",
        done.clean if asked else None,
        "",
        f"{done.prompts} prompts of {low} to {high} tokens in {N_CTX} cells, "
        f"{done.truncated} truncated, {done.cache['shifts']} shifts, {done.cache['reprocessed']} "
        f"tokens decoded again, {done.cache['reused_tokens']:,} of "
        f"{done.cache['prompt_tokens']:,} prompt tokens were cached; ledgers compared with "
        "all cells after every decode",
        asdict(done),
    )
