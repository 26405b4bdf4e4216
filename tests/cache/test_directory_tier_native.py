"""Test stored prefixes on real builds: logits after a restart, in every kind of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prefix_kit import serve

import pyllamakv as kv
from pyllamakv.building import variant as variants
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import PrefixStoreForeign
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant

pytestmark = [pytest.mark.native, pytest.mark.slow]

SYSTEM = [1 + (7 * i) % 60 for i in range(300)]
CHATS = [[*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5], [*SYSTEM[:50], *range(1, 60)]]
#: A release with streams, windows and states.
LATE = "0.3.36+patched"
#: The limit of other tests of the prefix cache, where batches of other sizes are compared.
TOLERANCE = 0.02


@pytest.fixture
def late() -> Iterator[kv.OpenLibrary]:
    """Open the late release, or skip."""
    found = variants.find(LATE)
    if found is None:
        pytest.skip(f"{LATE} is not built")
    with kv.open(found.folder) as library:
        yield library


def context(model: kv.Model, **options: Any) -> kv.Context:
    """Return a context for all chats."""
    return model.context(
        **{"n_ctx": 2048, "n_batch": 64, "n_ubatch": 32, "n_seq_max": 8, **options}
    )


def next_logits(model: kv.Model, tokens: list[int], **options: Any) -> np.ndarray:
    """Decode tokens in a new context; return the logits of the last."""
    with context(model, **options) as ctx:
        sequence = ctx.sequence()
        sequence.prefill(tokens[:-1])
        sequence.step(tokens[-1])
        return ctx.logits().copy()


@pytest.mark.parametrize(
    "options",
    [{}, {"flash_attn": True}, {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"}],
    ids=["columns", "rows", "q8_0"],
)
def test_logits_after_a_restart_equal_those_before(
    variant: Variant, tiny_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A token after a stored prefix has the same bits as one after the decoded prefix."""
    with kv.open(variant.folder) as library, library.load_model(tiny_model) as model:
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for chat in CHATS:
                serve(cache, chat)
            flushed = cache.flush()
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for chat in CHATS:
                with cache.acquire([*chat, 7]) as lease:
                    assert lease.cached == len(chat)
                    lease.prefill()
                    mine = ctx.logits().copy()
                expected = next_logits(model, [*chat, 7], **options)
                if chat is CHATS[0]:  # decoded in the same batches
                    assert np.array_equal(mine, expected)
                assert np.abs(mine - expected).max() < TOLERANCE
            cache.check()
            # Each stored token was read once, also those that chats share.
            assert cache.stats().loaded_tokens == flushed
            assert ctx.kv.stats.used == flushed + len(CHATS)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["tiny", "sliding", "recurrent", "hybrid", "latent"])
def test_stored_prefixes_of_every_memory_are_reused(
    late: kv.OpenLibrary, name: str, unified: bool, tmp_path: Path
) -> None:
    """All tokens of finished prompts are reused, with logits of a new decode."""
    options = {"kv_unified": unified, "n_ctx": 4096}
    with late.load_model(synthetic_models.model(name)) as model:
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for chat in CHATS:
                serve(cache, chat)
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for chat in CHATS:
                with cache.acquire([*chat, 7]) as lease:
                    assert lease.cached == len(chat)
                    lease.prefill()
                    mine = ctx.logits().copy()
                expected = next_logits(model, [*chat, 7], **options)
                assert np.abs(mine - expected).max() < TOLERANCE
            cache.check()
            kinds = {page.kind for page in cache.stored.store.pages.values()}
            assert kinds == {"cells" if name in ("tiny", "latent") else "state"}


@pytest.mark.regression(
    "a prefix store was not searched for a prefix whose window a longer branch had lost",
    by="random_operations",
    of="Python",
)
def test_a_branch_without_its_window_does_not_hide_a_stored_prefix(
    late: kv.OpenLibrary, tmp_path: Path
) -> None:
    """A restored state of a full-size window has no cells to return to its beginning."""
    short, long = SYSTEM[:20], SYSTEM[:200]
    options = {"swa_full": True}
    with late.load_model(synthetic_models.model("sliding")) as model:
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for prompt in (short, long):
                serve(cache, prompt)
                cache.flush()
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for prompt in (long, short):
                with cache.acquire([*prompt, 7]) as lease:
                    assert lease.cached == len(prompt)
                    lease.prefill()
                    mine = ctx.logits().copy()
                expected = next_logits(model, [*prompt, 7], **options)
                assert np.abs(mine - expected).max() < TOLERANCE
            cache.check()
            assert cache.stats().loaded_tokens == len(short) + len(long)


def test_a_stored_state_inside_a_group_is_not_used(late: kv.OpenLibrary, tmp_path: Path) -> None:
    """The prompt continues after the longest stored state that splits no group."""
    short, long = SYSTEM[:20], SYSTEM[:45]
    with late.load_model(synthetic_models.model("recurrent")) as model:
        with context(model) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            for prompt in (short, long):
                serve(cache, prompt)
                cache.flush()
        with context(model) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            with cache.acquire([*long, 7, 8, 9], groups=[(40, 48)]) as lease:
                assert lease.cached == len(short)
            assert cache.stats().loaded_tokens == len(short)


@pytest.mark.parametrize("name", ["recurrent", "hybrid"])
def test_states_are_stored_without_a_sequence_for_them(
    late: kv.OpenLibrary, name: str, tmp_path: Path
) -> None:
    """With one sequence, the states before the last token and at a branch are on disk."""
    with (
        late.load_model(synthetic_models.model(name)) as model,
        context(model, n_seq_max=1) as ctx,
        PrefixCache(ctx, store=tmp_path / "store") as cache,
    ):
        found = []
        for tail in ([1, 2], [1, 2], [3, 4], [5, 6]):
            with cache.acquire([*SYSTEM, *tail]) as lease:
                found.append(lease.cached)
                lease.prefill()
                mine = ctx.logits().copy()
            cache.check()
            expected = next_logits(model, [*SYSTEM, *tail])
            assert np.abs(mine - expected).max() < TOLERANCE
        # The second is a repeat, and the third leaves a state for the fourth.
        assert found == [0, len(SYSTEM) + 1, 0, len(SYSTEM)]


def test_a_scattered_cache_is_stored_and_loaded(
    stock: Variant, tiny_model: Path, tmp_path: Path
) -> None:
    """Store cells that are not adjacent, and load them if no two free cells are adjacent.

    Through 0.3.16, a state is restored into one hole.
    """
    with kv.open(stock.folder) as library, library.load_model(tiny_model) as model:
        with context(model) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            other = ctx.sequence()
            with cache.acquire(SYSTEM[:100]) as lease:
                for token in lease.rest:
                    ctx.step_all([lease.sequence, other], [token, 1])
        options = {"n_ctx": 256, "n_seq_max": 4}
        with context(model, **options) as ctx, PrefixCache(ctx, store=tmp_path / "store") as cache:
            a, b = ctx.sequence(), ctx.sequence()
            for _ in range(120):
                ctx.step_all([a, b], [1, 2])
            b.close()
            assert ctx.kv.stats.largest_hole < 100
            with cache.acquire([*SYSTEM[:100], 7]) as lease:
                assert lease.cached == 100
                lease.prefill()
                mine = ctx.logits().copy()
        assert np.abs(mine - next_logits(model, [*SYSTEM[:100], 7])).max() < TOLERANCE


@pytest.mark.parametrize("model", ["tiny", "sliding", "recurrent"])
def test_stock_and_patched_builds_use_the_same_store(
    stock: Variant, patched: Variant, tmp_path: Path, model: str
) -> None:
    """In both directions, in every kind of memory: logits are those of a fresh evaluation."""
    path = synthetic_models.model(model)
    for writer, reader in ((stock, patched), (patched, stock)):
        store = tmp_path / writer.folder.name
        with (
            kv.open(writer.folder) as library,
            library.load_model(path) as opened,
            context(opened) as ctx,
            PrefixCache(ctx, store=store) as cache,
        ):
            for chat in CHATS:
                serve(cache, chat)
        with (
            kv.open(reader.folder) as library,
            library.load_model(path) as opened,
            context(opened) as ctx,
            PrefixCache(ctx, store=store) as cache,
        ):
            for chat in CHATS:
                with cache.acquire([*chat, 7]) as lease:
                    assert lease.cached == len(chat)
                    lease.prefill()
                    mine = ctx.logits().copy()
                assert np.abs(mine - next_logits(opened, [*chat, 7])).max() < TOLERANCE


def test_other_models_builds_and_types_are_refused(
    variant: Variant, tiny_model: Path, tmp_path: Path, late: kv.OpenLibrary
) -> None:
    """The error names the difference; the store is used again afterwards."""
    store = tmp_path / "store"
    with kv.open(variant.folder) as library, library.load_model(tiny_model) as model:
        with context(model) as ctx, PrefixCache(ctx, store=store) as cache:
            serve(cache, SYSTEM)
        with late.load_model(tiny_model) as other, context(other) as ctx:
            with pytest.raises(PrefixStoreForeign) as caught:
                PrefixCache(ctx, store=store)
            assert "build" in caught.value.differences
        grouped = synthetic_models.model("grouped")
        with library.load_model(grouped) as other, context(other) as ctx:
            with pytest.raises(PrefixStoreForeign) as caught:
                PrefixCache(ctx, store=store)
            assert {"model", "n_embd"} <= set(caught.value.differences)
        for change, name in (
            ({"type_k": "q8_0"}, "type_k"),
            ({"flash_attn": True}, "v_transposed"),
        ):
            with context(model, **change) as ctx:
                with pytest.raises(PrefixStoreForeign) as caught:
                    PrefixCache(ctx, store=store)
                assert caught.value.differences == (name,)
        with context(model) as ctx, PrefixCache(ctx, store=store) as cache:
            assert serve(cache, [*SYSTEM, 1]) == len(SYSTEM)
