"""Count what prompts reuse that are submitted together, or cancelled again and again.

The counts are exact: no time is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyllamakv
from pyllamakv.cache.batcher import MAX_DEFER, Batcher
from pyllamakv.cache.generation import Generation
from pyllamakv.errors import Cancelled
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench.figure import Figure

GROUP: Final = "Reuse"
Tick = Callable[[], None]

#: Kind of memory -> the release, the model of `synthetic_models`, and options of the context.
KINDS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "attention": ("b11549", "tiny", {}),
    "separate streams": ("b11549", "tiny", {"kv_unified": False}),
    "sliding window": ("b11549", "sliding", {}),
    "full-size window": ("b11549", "sliding", {"swa_full": True}),
    "recurrent": ("b11549", "recurrent", {}),
    "hybrid": ("b11549", "hybrid", {}),
    f"attention, {TEST_RELEASE}": (TEST_RELEASE, "tiny", {}),
    f"sliding window, {TEST_RELEASE}": (TEST_RELEASE, "sliding", {}),
    f"recurrent, {TEST_RELEASE}": (TEST_RELEASE, "recurrent", {}),
}
USERS: Final = 8
#: Tokens that all users have in common, and the maximum that they reuse together.
COMMON: Final = [1 + (7 * i * i + i) % 60 for i in range(400)]
POSSIBLE: Final = (USERS - 1) * len(COMMON)
SHARE: Final = 0.95
#: Tokens of a prompt, those after which it is cancelled, and the maximum number of tries.
PROMPT, CANCEL, TRIES = 2000, 320, 8


def figures(tick: Tick) -> list[Figure]:
    """Measure the burst with each kind of memory, and the cancelled prompt with each manager."""
    found = []
    for kind, (spec, name, options) in KINDS.items():
        with (
            pyllamakv.open(f"{spec}+patched") as library,
            library.load_model(synthetic_models.model(name)) as model,
            model.context(4096, 64, 64, USERS + 1, 1, **options) as context,
            pyllamakv.PrefixCache(context) as cache,
            Batcher(cache) as batcher,
        ):
            found += burst_figures(kind, burst(batcher))
            tick()
    with (
        pyllamakv.open("b11549+patched") as library,
        library.load_model(synthetic_models.model("hybrid")) as model,
    ):
        cancels = CancelledPrompts(model.native)
        for manager in (pyllamakv.PrefixCache, pyllamakv.SlotCache):
            for batched in (False, True):
                found.append(cancelled_figure(model, cancels, manager, batched=batched))
                tick()
    return found


def burst(batcher: Batcher) -> list[Generation]:
    """Complete the prompts of 8 users, which are submitted together."""
    tails = [[1 + 7 * i % 60, 1 + (5 * i + 1) % 60, *range(1, 10 + i)] for i in range(USERS)]
    users = [batcher.submit([*COMMON, *tail], 4, stop_at_end=False) for tail in tails]
    batcher.run()
    assert {one.finish_reason for one in users} == {"length"}
    return users


def reused(users: list[Generation]) -> float:
    """Return the share of the possible reuse."""
    return sum(min(one.cached or 0, len(COMMON)) for one in users) / POSSIBLE


def burst_figures(kind: str, users: list[Generation]) -> list[Figure]:
    """Return the reuse of a burst, and its longest wait."""
    share, longest = reused(users), max(one.deferred for one in users)
    how = f"{USERS} prompts with {len(COMMON)} common tokens, micro-batches of 64"
    return [
        Figure(
            GROUP,
            f"a burst of {USERS} users, {kind}",
            f"{share:.1%} of the possible reuse",
            f">= {SHARE:.0%}",
            share >= SHARE,
            f"all but one reuse {len(COMMON)} tokens",
            how,
            {"reused": round(share * POSSIBLE), "possible": POSSIBLE},
        ),
        Figure(
            GROUP,
            f"the longest wait in a burst, {kind}",
            f"{longest} steps",
            f"<= {MAX_DEFER} steps",
            longest <= MAX_DEFER,
            f"{-(-len(COMMON) // 64)} steps evaluate the common tokens",
            how,
            {"steps": longest},
        ),
    ]


class CancelledPrompts:
    """Cancel decodes of a library: the one in which more than ``left`` tokens are decoded."""

    def __init__(self, native: Any) -> None:
        self.left = 1 << 30
        decode = native.decode

        def counting(handle: Any, tokens: Any, *others: Any) -> int:
            self.left -= len(tokens)
            native.cancel_after(handle, 0 if self.left < 0 else -1)
            code: int = decode(handle, tokens, *others)
            return code

        native.decode = counting


def cancelled_figure(
    model: pyllamakv.Model, cancels: CancelledPrompts, manager: Any, *, batched: bool
) -> Figure:
    """Return the number of tries that a prompt needs if each is cancelled."""
    prompt = [1 + (7 * i * i + i) % 60 for i in range(PROMPT)]
    with (
        model.context(8192, 256, 64, 2, 1) as context,
        manager(context) as cache,
        Batcher(cache) as batcher,
    ):

        def complete() -> bool:
            cancels.left = CANCEL
            if batched:
                one = batcher.submit(prompt, 1, stop_at_end=False)
                batcher.run()
                return one.finish_reason == "length"
            with cache.acquire(prompt) as lease:
                try:
                    (lease.prefill if hasattr(lease, "prefill") else lease.decode)()
                except Cancelled:
                    return False
                return True

        tries = next((number for number in range(1, 2 * TRIES) if complete()), 2 * TRIES)
        cache.check()
    front = "Batcher" if batched else "acquire"
    return Figure(
        GROUP,
        f"a hybrid prompt of {PROMPT:,} tokens that is cancelled every {CANCEL}: "
        f"`{front}` of `{manager.__name__}`",
        f"{tries} tries",
        f"<= {TRIES}",
        tries <= TRIES,
        f"{-(-PROMPT // CANCEL)} if no token is evaluated twice",
        "micro-batches of 64 tokens, batches of 256",
        {"tries": tries},
    )
