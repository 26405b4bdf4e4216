"""Sequences of later memory classes are exact or refused, on releases that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import Cancelled, PartialRemovalRefused, StateError, Unsupported
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model

pytestmark = [pytest.mark.native, pytest.mark.slow]

SPECS = ("0.3.36+patched", "b11549+stock", "b11549+patched")
#: Models whose sequences have a state beside their cells, with the number of caches.
STATES = {"compressed": 2, "pooled": 1, "pooled-latent": 1, "hybrid-sliding": 2}
#: Models with an indexer that mirrors the cells, with the number of caches.
INDEXED = {"indexed": 1, "blocks": 1, "indexed-sliding": 2}
#: Largest difference of logits that equal tokens may have in another batch.
EXACT = 0.02
#: So many tokens that rows of 128 tokens are visible, and a window has moved on.
TOKENS = [(7 * i * i + 3 * i) % 64 for i in range(150)]
MORE = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module", params=SPECS)
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a build in a worker, where an abort is an error."""
    with kv.open(built(request.param).folder, isolated=True) as opened:
        yield opened


@pytest.fixture(scope="module", params=[*STATES, *INDEXED])
def model(request: pytest.FixtureRequest, library: Any) -> Iterator[Model]:
    """Load a model of each class."""
    with library.load_model(synthetic_models.model(request.param)) as opened:
        opened.name = request.param
        yield opened


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    """Create a context of several micro-batches."""
    with create(model) as made:
        yield made


def create(model: Any, **options: Any) -> Context:
    """Create a context of a model, with streams if cells of others change the selection."""
    if model.name == "pooled" and model.native.about.variant.startswith("0.3.36"):
        options |= {"kv_unified": False, "n_ctx": 1024}
    options = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 32, "n_seq_max": 4} | options
    made: Context = model.context(**options)
    return made


def fresh(model: Model, tokens: list[int]) -> NDArray[np.float32]:
    """Return the logits after tokens in a new context."""
    with create(model) as ctx:
        return after(ctx.sequence(), tokens)


def after(sequence: Any, tokens: list[int]) -> NDArray[np.float32]:
    """Append tokens to a sequence; return the logits after the last one."""
    sequence.prefill(tokens)
    found: NDArray[np.float32] = sequence.logits().copy()
    return found


def equal(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Return whether the logits differ only by rounding."""
    return float(np.abs(one - other).max()) <= EXACT


def test_memory_class_is_reported_with_its_caches(context: Context, model: Any) -> None:
    """The kind of memory, its caches, and a snapshot with every token."""
    states, streams = model.name in STATES, context.info.n_streams
    assert context.info.memory is (MemoryType.HYBRID if states else MemoryType.OTHER)
    assert context.info.n_caches == (STATES | INDEXED)[model.name] * streams
    assert streams == 4 if model.name == "compressed" else streams in (1, 4)
    sequence = context.sequence()
    after(sequence, TOKENS)
    snapshot = context.kv.snapshot()
    cells = [each for each in snapshot.streams if not each.swa]
    assert sum(int(each.has(sequence.id).sum()) for each in cells) == len(TOKENS)
    windows = {"compressed", "hybrid-sliding", "indexed-sliding"}
    assert any(each.swa for each in snapshot.streams) is (model.name in windows)


def test_a_fork_outlives_its_source(context: Context, model: Model) -> None:
    """Each continues as a new context would; the source is removed before the next decode."""
    source = context.sequence()
    after(source, TOKENS)
    other = source.fork()
    source.remove()
    assert equal(after(other, MORE), fresh(model, TOKENS + MORE))
    assert equal(after(source, MORE), fresh(model, MORE))
    # The target of a copy is replaced, also by a second one.
    source.copy_to(other)
    source.copy_to(other)
    assert equal(after(other, TOKENS[:40]), fresh(model, MORE + TOKENS[:40]))


def test_repeated_copies_end_no_process(context: Context) -> None:
    """The native call replaces the target if the memory keeps states."""
    native, handle = context.native, context.handle
    source = context.sequence()
    after(source, TOKENS[:40])
    native.seq_cp(handle, source.id, 3, -1, -1)
    after(source, MORE)
    native.seq_cp(handle, source.id, 3, -1, -1)
    assert native.seq_pos_max(handle, 3) == len(source) - 1
    if context.info.memory.keeps_states:
        with pytest.raises(PartialRemovalRefused):
            native.seq_cp(handle, source.id, 3, 2, 8)
    assert native.seq_rm(handle, 3, -1, -1)


def test_a_saved_sequence_continues(context: Context, model: Model) -> None:
    """It does in another sequence, and after its own was removed; damage is refused."""
    source, other = context.sequence(), context.sequence()
    after(source, TOKENS)
    saved = source.save()
    source.remove()
    after(other, MORE)
    other.restore(saved)
    raw = context.native.state_save(context.handle, other.id)
    for damaged in (raw[:-7], raw[: len(raw) // 2], raw[:40] + b"\xff" * 40 + raw[80:]):
        try:
            size = context.native.state_load(context.handle, source.id, damaged)
        except (kv.errors.NativeError, StateError):
            size = 0
        assert size <= 0 or size == len(damaged)
    assert equal(after(other, MORE), fresh(model, TOKENS + MORE))


def test_a_part_is_removed_or_refused(context: Context, model: Any) -> None:
    """The remaining tokens continue as in a new context."""
    sequence = context.sequence()
    after(sequence, TOKENS)
    kept = TOKENS
    try:
        sequence.trim(len(TOKENS) - 8)
        kept = TOKENS[:-8]
        assert model.name not in STATES
    except PartialRemovalRefused:
        assert model.name != "indexed"
    assert equal(after(sequence, MORE), fresh(model, kept + MORE))


def test_a_shift_is_exact_or_refused(context: Context, model: Any) -> None:
    """Only distances matter, so the logits do not change."""
    sequence = context.sequence()
    after(sequence, TOKENS)
    if not context.info.can_shift:
        with pytest.raises(Unsupported):
            sequence.shift(None, None, 3)
        assert model.name not in ("hybrid-sliding", "blocks", "pooled-latent")
    else:
        sequence.shift(None, None, 3)
    assert equal(after(sequence, MORE), fresh(model, TOKENS + MORE))


def test_cancelled_decode_leaves_no_tokens(context: Context, model: Model) -> None:
    """Sequences that cannot roll back are emptied."""
    sequence = context.sequence()
    after(sequence, TOKENS[:100])
    context.native.cancel_after(context.handle, 40)
    with pytest.raises(Cancelled):
        sequence.prefill(TOKENS[100:])
    context.native.cancel_after(context.handle, -1)
    rest = TOKENS if not len(sequence) else TOKENS[100:]
    assert len(sequence) in (0, 100)
    assert equal(after(sequence, rest), fresh(model, TOKENS))


def test_defragmentation_is_exact_or_refused(context: Context, model: Any) -> None:
    """The library's own one is refused if the memory has more than cells."""
    gone, sequence = context.sequence(), context.sequence()
    after(gone, TOKENS[:60])
    after(sequence, TOKENS[:90])
    gone.remove()
    if model.name in ("compressed", "pooled", "pooled-latent"):
        with pytest.raises(Unsupported):
            context.kv.defrag(fallback=False)
    context.kv.defrag()
    assert equal(after(sequence, MORE), fresh(model, TOKENS[:90] + MORE))


def test_mapped_memory_is_exact_or_refused(library: Any, model: Any) -> None:
    """Compressed rows have no cells, up to which the patch copies and trims."""
    if kv.Capability.MAPPING not in library.about.capabilities:
        pytest.skip("this build has no mapped memory")
    if model.name == "compressed":
        with pytest.raises(Unsupported, match="mapped memory does not support"):
            create(model, kv_backing="mmap")
        return
    with create(model, kv_backing="mmap") as context:
        source = context.sequence()
        after(source, TOKENS)
        other = source.fork()
        context.kv.trim()
        assert equal(after(other, MORE), fresh(model, TOKENS + MORE))
