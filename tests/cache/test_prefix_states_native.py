"""Test reuse in each type of memory on real builds, compared with new decodes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.native

#: Largest difference of logits between batches of different sizes, of all these models.
NOISE = 0.02

#: Tokens of the shared text. More cells than a sliding-window cache has are in use, so that it has
#: dropped the windows of earlier positions.
LENGTHS = {"sliding": 300}

CASES = [
    ("0.3.36+patched", "tiny"),
    ("0.3.36+patched", "sliding"),
    ("0.3.36+patched", "recurrent"),
    ("0.3.36+patched", "hybrid"),
    ("0.3.36+patched", "hybrid-sliding"),
    ("0.3.36+patched", "compressed"),
    ("0.3.36+patched", "indexed-sliding"),
    ("b11549+patched", "sliding"),
    ("b11549+patched", "recurrent"),
    ("b11549+patched", "hybrid"),
    ("0.3.9+patched", "sliding"),
    ("0.3.9+patched", "recurrent"),
]


def text(n: int) -> list[int]:
    """Return tokens of the shared text."""
    return [1 + (7 * i * i + i) % 60 for i in range(n)]


def branch(base: list[int], length: int, number: int) -> list[int]:
    """Return a prompt that has this number of tokens in common with the text, and a tail."""
    tail = [1 + (11 * length + 17 * number + 5 * j) % 60 for j in range(4)]
    tail[0] = 1 + (base[length] + number) % 60  # another token than that of the text
    return [*base[:length], *tail]


class Fresh:
    """Decode tokens in a new context."""

    def __init__(self, model: kv.Model) -> None:
        self.context = model.context(n_ctx=512, n_batch=512)

    def __call__(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after the last token."""
        self.context.clear()
        with self.context.sequence() as sequence:
            sequence.prefill(tokens)
            return self.context.logits().copy()


@pytest.fixture(params=["PrefixCache", "SlotCache"])
def manager(request: pytest.FixtureRequest) -> Any:
    """Return the class of a manager."""
    return getattr(kv, request.param)


@pytest.fixture(params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[kv.Model]:
    """Load a model in a release."""
    spec, name = request.param
    with (
        kv.open(built(spec).folder) as library,
        library.load_model(synthetic_models.model(name)) as loaded,
    ):
        yield loaded


@pytest.mark.slow
def test_every_prefix_is_reused_and_exact(model: kv.Model, manager: Any) -> None:
    """Diverge three times after each prefix of a text: the third prompt finds all of it."""
    name = model.path.stem
    length = next((n for kind, n in LENGTHS.items() if kind in name), 40)
    base, fresh, n = text(length), Fresh(model), 0
    schedule = kv.CheckpointSchedule(size=4096, interval=64, first=1)
    with context(model) as ctx, manager(ctx, checkpoints=schedule) as cache:
        for at in range(1, length, 1 if length <= 40 else 13):
            for number in range(3):
                prompt = branch(base, at, number)
                with cache.acquire(prompt) as lease:
                    n = lease.cached
                    logits = decode(lease)
                assert np.abs(logits - fresh(prompt)).max() < NOISE, (at, number, n)
            assert n == at
        cache.check()


def context(model: kv.Model) -> kv.Context:
    """Return a context of 4 sequences."""
    return model.context(n_ctx=2048, n_batch=64, n_ubatch=32, n_seq_max=4)


def decode(lease: Any) -> np.ndarray:
    """Decode the rest of a prompt; return a copy of the logits."""
    run = lease.prefill if hasattr(lease, "prefill") else lease.decode
    run()
    logits: np.ndarray = lease.sequence.logits().copy()
    return logits


def test_a_batcher_reuses_as_much_as_with_attention(model: kv.Model, manager: Any) -> None:
    """Of two chats with one system prompt, only the first turn of the second is evaluated."""
    system = text(120)
    with context(model) as ctx, manager(ctx) as cache, kv.Batcher(cache) as batcher:
        reused = []
        for chat in (1, 2, 3, 4):
            prompt = [*system, 1 + (system[-1] + chat) % 60]
            for turn in range(3):
                one = batcher.submit(prompt, 5, stop_at_end=False)
                batcher.run()
                assert one.tokens
                reused.append(one.cached)
                prompt = [*prompt, *one.tokens, 3 + turn, 4]
        cache.check()
    turns = [125, 132]
    assert reused[1:3] == turns
    assert reused[3] in (0, 120)  # the first divergence: later ones find a state there
    assert reused[4:] == [*turns, 120, *turns, 120, *turns]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batched"),
    [
        (("b11549+patched", "hybrid"), False),
        (("b11549+patched", "hybrid"), True),
        (("0.3.9+patched", "recurrent"), False),
    ],
    indirect=["model"],
)
def test_a_prompt_that_is_cancelled_repeatedly_is_complete_and_exact(
    model: kv.Model, manager: Any, batched: bool
) -> None:
    """2,000 tokens, cancelled every 320, need at most 8 tries in micro-batches of 64."""
    prompt = text(2000)
    with (
        model.context(n_ctx=8192, n_batch=256, n_ubatch=64, n_seq_max=2) as ctx,
        manager(ctx) as cache,
        kv.Batcher(cache) as batcher,
    ):
        whole = batcher.submit(prompt, 1, stop_at_end=False)
        batcher.run()
        with cache.acquire(prompt) as lease:
            expected = decode(lease)
        cancels, done = CancelledPrompts(ctx.native), False
        for _ in range(8):
            cancels.left = 320
            if batched:
                one = batcher.submit(prompt, 1, salt="another", stop_at_end=False)
                batcher.run()
                done = one.finish_reason == "length" and one.tokens == whole.tokens
                continue
            found = cache.cached_length(prompt, salt="another")
            with cache.acquire(prompt, salt="another") as lease, suppress(kv.Cancelled):
                assert lease.cached == found
                logits = decode(lease)
                assert lease.sequence.tokens == prompt
                assert np.abs(logits - expected).max() < NOISE
                done = True
        assert done
        cache.check()
