"""Test where a sequence can be resumed, by brute force on every kind of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cache_kit import forward, fresh, picture, simulated, some
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache.checkpoints import CheckpointSchedule
from pyllamakv.errors import KVCacheFull, StateError, Unsupported
from pyllamakv.scenarios import architectures, synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.cache.context_cache import ContextCache

#: More than the noise of flash attention, whose blocks begin elsewhere (0.09 of 15), and far less
#: than what a lost part of a window does (7 and more).
CLOSE = 0.5
#: Long enough for a sliding-window cache of 256 cells to have reused most of them.
LENGTH = 700

CASES = [
    pytest.param(spec, name, options, id=f"{spec}-{name}-{'-'.join(map(str, options.values()))}")
    for spec, name, options in (
        ("0.3.9+patched", "tiny", {"flash_attn": False}),
        ("0.3.9+patched", "sliding", {"flash_attn": True}),
        ("0.3.9+patched", "recurrent", {"flash_attn": False}),
        ("0.3.36+patched", "tiny", {"flash_attn": True}),
        ("0.3.36+patched", "sliding", {"flash_attn": False}),
        ("0.3.36+patched", "sliding", {"flash_attn": True}),
        ("0.3.36+patched", "sliding", {"flash_attn": False, "swa_full": True}),
        ("0.3.36+patched", "sliding", {"flash_attn": False, "kv_unified": False}),
        ("0.3.36+patched", "recurrent", {"flash_attn": False}),
        ("0.3.36+patched", "hybrid", {"flash_attn": False}),
        ("b11549+patched", "compressed", {"flash_attn": False}),
        ("b11549+patched", "pooled", {"flash_attn": False}),
    )
]


def window() -> str:
    """Return the model of a narrow window, whose loss is visible in the logits."""
    from pyllamakv.home import home

    shape = architectures.Shape("narrow", n_layer=26, architecture="gemma2", window=8)
    return str(synthetic_models.generate(shape, home() / "models"))


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize(("spec", "name", "options"), CASES)
def test_can_resume_agrees_with_a_fresh_context(
    spec: str, name: str, options: dict[str, Any]
) -> None:
    """Brute force: roll back, continue, and compare with a new context."""
    tokens = some(LENGTH)
    path = window() if name == "sliding" else synthetic_models.model(name)
    with kv.open(built(spec).folder) as library, library.load_model(path) as model:
        sizes = {"max_sequences": 2, "capacity": LENGTH + 68, "max_batch": 64, "n_ubatch": 64}
        reference = {k: v for k, v in options.items() if k in ("flash_attn", "kv_unified")}
        rows = every_row(model, tokens, **reference)
        with kv.ContextCache.init(
            model, checkpoints=CheckpointSchedule(size=0), **sizes, **options
        ) as cache:
            answers = {}
            for position in (0, 1, 9, 200, 400, 530, 640, 655, 680, 691, 692, 693, 699, 700):
                cache.remove(0, 0)
                forward(cache, 0, tokens)
                answers[position] = cache.can_resume(0, position)
                right = content_after(cache, position, tokens, rows)
                assert answers[position] == right, (position, answers[position])
            assert answers[0]
            assert answers[LENGTH]
            whole = name == "tiny" or (name == "sliding" and spec.startswith("0.3.9"))
            assert all(answers.values()) == (whole or "swa_full" in options)


def every_row(model: kv.Model, tokens: list[int], **options: Any) -> np.ndarray:
    """Decode tokens in a new context that keeps everything; return all logits."""
    if model.info.is_recurrent or "jamba" in str(model.path):
        options.pop("kv_unified", None)
    with model.context(1024, 64, 64, swa_full=True, **options) as ctx:
        sequence, found = ctx.sequence(), []
        for at in range(0, len(tokens), 64):
            ctx.decode(sequence.feed(tokens[at : at + 64], logits="all"))
            found.append(ctx.logits_all().copy())
        return np.concatenate(found)


def content_after(cache: ContextCache, position: int, tokens: list[int], rows: np.ndarray) -> bool:
    """Roll back without the cache's knowledge, continue, and return whether logits are right."""
    lane, context = cache.sequences[0], cache.context
    if 0 < position < len(tokens):
        if not context.native.seq_rm(context.handle, 0, position, -1):
            return False
        lane.ledger.remove(position, None)
    else:
        cache.remove(0, position)
    rest = tokens[position : position + 40] or [7]
    expected = rows[position : position + 40]
    if position == len(tokens):
        expected = every_row(context.model, [*tokens, 7], flash_attn=bool(context.info.flash_attn))[
            -1:
        ]
    start = cache.length(0)
    context.decode(lane.feed(rest, logits="all"))
    assert start == position
    return bool(np.abs(context.logits_all().copy() - expected).max() < CLOSE)


@pytest.fixture(
    params=[
        ("0.3.9+patched", "recurrent"),
        ("0.3.36+patched", "recurrent"),
        ("0.3.36+patched", "hybrid"),
        ("0.3.36+patched", "sliding"),
        ("b11549+patched", "compressed"),
        ("b11549+patched", "pooled"),
    ],
    ids=lambda each: "-".join(each),
)
def forgetful(request: pytest.FixtureRequest) -> Iterator[tuple[kv.Model, ContextCache]]:
    """Return a cache whose memory cannot roll back, with a checkpoint every 120 positions."""
    spec, name = request.param
    with kv.open(built(spec).folder) as library:
        model = library.load_model(window() if name == "sliding" else synthetic_models.model(name))
        with kv.ContextCache.init(
            model,
            max_sequences=2,
            capacity=LENGTH + 68,
            max_batch=64,
            n_ubatch=64,
            checkpoints=CheckpointSchedule(interval=120),
        ) as cache:
            yield model, cache


@pytest.mark.native
def test_restored_checkpoint_continues_as_a_fresh_context(
    forgetful: tuple[kv.Model, ContextCache],
) -> None:
    """Later logits are those of a new context, and so after a second restore."""
    model, cache = forgetful
    tokens = some(LENGTH)
    forward(cache, 0, tokens)
    forward(cache, 1, tokens[:60])
    assert cache.rewinder.rings[0].positions == [63, 191, 319, 447, 575, 699]
    target = cache.prepare_restore(0, 420)
    assert target in (320, 420)
    assert cache.can_resume(0, target)
    cache.remove(0, target)
    assert cache.sequences[0].tokens == tokens[:target]
    assert cache.rewinder.rings[0].positions == [63, 191, 319]
    forward(cache, 0, [3, 4, 5])
    there = cache.sequences[0].logits().copy()
    expected = fresh(model, [*tokens[:target], 3, 4, 5], swa_full=True)
    assert np.abs(there - expected).max() < CLOSE
    assert cache.sequences[1].tokens == tokens[:60]
    cache.check()
    assert cache.prepare_restore(0, 20) in (0, 20)


@pytest.mark.native
def test_copy_of_a_state_restores_a_checkpoint(forgetful: tuple[kv.Model, ContextCache]) -> None:
    """If the memory cannot copy a prefix, it is restored into the target."""
    model, cache = forgetful
    tokens = some(LENGTH)
    forward(cache, 0, tokens)
    forward(cache, 1, [9] * 20)
    before = picture(cache)
    if not cache.can_resume(0, 333):
        with pytest.raises(Unsupported):
            cache.copy_prefix(0, 1, 333)
        assert picture(cache) == before
    assert cache.copy_prefix(0, 1, 320) == 320
    forward(cache, 1, [3])
    expected = fresh(model, [*tokens[:320], 3], swa_full=True)
    assert np.abs(cache.sequences[1].logits().copy() - expected).max() < CLOSE
    assert cache.rewinder.rings[1].positions == [63, 191, 319]
    cache.check()


@pytest.mark.native
def test_aborted_pass_leaves_a_usable_checkpoint(
    forgetful: tuple[kv.Model, ContextCache],
) -> None:
    """A partial state cannot be rolled back; its sequence can be decoded again."""
    _, cache = forgetful
    tokens = some(300)
    forward(cache, 0, tokens)
    cache.context.native.cancel_after(cache.context.handle, 1)
    with pytest.raises(kv.Cancelled):
        forward(cache, 0, [1] * 20)
    cache.context.native.cancel_after(cache.context.handle, -1)
    cache.check()
    at = cache.prepare_restore(0, 300)
    assert at in (192, 300)
    cache.remove(0, at)
    assert cache.sequences[0].tokens == tokens[:at]
    forward(cache, 0, [1])
    cache.check()


@pytest.mark.native
def test_reused_cells_of_a_full_sized_window_cannot_be_resumed() -> None:
    """With ``swa_full``, llama.cpp writes over tokens outside of the window, too."""
    with (
        kv.open(built("b11549+patched").folder) as library,
        library.load_model(synthetic_models.model("sliding")) as model,
        kv.ContextCache.init(
            model, max_sequences=2, capacity=256, max_batch=64, swa_full=True
        ) as cache,
    ):
        forward(cache, 1, some(10))
        forward(cache, 0, some(128))
        assert all(cache.can_resume(0, position) for position in range(129))
        cache.remove(1, 0)
        forward(cache, 1, some(20))
        assert not cache.can_resume(0, 5)
        assert cache.prepare_restore(0, 5) == 0
        assert cache.can_resume(0, 128)
        cache.check()


def test_checkpoints_are_dropped_when_new_tokens_replace_a_sequence(tmp_path: Path) -> None:
    """A state of other tokens must not be used for the present ones."""
    cache = simulated(tmp_path, {"partial": False})
    cache.rewinder.saves = True
    forward(cache, 0, range(20))
    cache.sequences[0].remove()  # like an aborted pass
    assert cache.prepare_restore(0, 20) == 20
    forward(cache, 0, range(30, 60))
    assert not cache.can_resume(0, 20)
    with pytest.raises(kv.Unsupported):
        cache.remove(0, 20)
    assert cache.sequences[0].tokens == list(range(30, 60))


def test_empty_removal_keeps_all_checkpoints(tmp_path: Path) -> None:
    """An empty range neither drops later checkpoints nor restores one."""
    cache = simulated(tmp_path, {"partial": False})
    cache.rewinder.saves = True
    forward(cache, 0, range(20))
    forward(cache, 0, [5])
    for at in (0, 7, 20, 21, 40):
        cache.remove(0, at, at)
        assert (cache.length(0), cache.rewinder.rings[0].positions) == (21, [19])


def test_copy_from_a_checkpoint_without_free_cells_is_refused(tmp_path: Path) -> None:
    """The error has the counts of cells, and nothing has changed."""
    cache = simulated(tmp_path, {"partial": False})
    cache.rewinder.saves = True
    forward(cache, 0, range(20))
    forward(cache, 0, [5] * 30)
    before = picture(cache)
    with pytest.raises(KVCacheFull, match="no free cells to restore sequence 1") as caught:
        cache.copy_prefix(0, 1, 20)
    assert (caught.value.cells, caught.value.used, caught.value.wanted) == (64, 50, 20)
    assert picture(cache) == before
    cache.check()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """A wrong checksum is detected, and the sequence does not change."""
    cache = simulated(tmp_path, {"partial": False})
    cache.rewinder.saves = True
    forward(cache, 0, range(20))
    ring = cache.rewinder.rings[0]
    assert ring.positions == [19]
    forward(cache, 0, [5])
    broken = ring.at(19)
    assert broken is not None
    damaged = bytearray(broken.saved)
    damaged[-1] ^= 1
    ring.put(type(broken)(19, bytes(damaged)))
    before = picture(cache)
    with pytest.raises(StateError, match="damaged"):
        cache.remove(0, 20)
    assert picture(cache) == before
    cache.remove(0, 0)


def test_decoding_continues_without_state_support(tmp_path: Path) -> None:
    """Without checkpoints, decoding still works."""
    cache = simulated(tmp_path, {"partial": False})
    cache.rewinder.saves = True

    def fail(*_: object) -> bytes:
        raise MemoryError

    cache.context.native.state_save = fail
    forward(cache, 0, range(20))
    assert cache.length(0) == 20
    assert not cache.rewinder.saves
