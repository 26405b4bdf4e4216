"""Test arguments of plk.h at their limits: an error or the right result, but no crash.

The sweep (`test_arguments_sweep`) makes more calls; these are those that failed before, with the
right results. The libraries run in workers, where an abort is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from adapter_kit import AdapterFile
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import KvError, ModelError, NativeError, Unsupported, UsageError
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.native

#: A release per interface of memories, and the test release.
RELEASES = ("0.3.5", "b4980", "0.3.8", "0.3.9", "0.3.14", "0.3.16", "0.3.36", "b11549")
#: Largest difference of logits of equal tokens in other batches.
EXACT = 0.02
SMALLEST = -(2**31)


@pytest.fixture(scope="module", params=[f"{release}+stock" for release in RELEASES])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a build in a worker."""
    with kv.open(built(request.param).folder, isolated=True) as opened:
        yield opened


def load(library: Any, name: str) -> Any:
    """Load a generated model, or skip the test if the release does not support it."""
    try:
        return library.load_model(synthetic_models.model(name))
    except ModelError:
        pytest.skip(f"the release has no {name}")


def create(model: Any, **options: Any) -> Any:
    """Create a small context."""
    return model.context(**({"n_ctx": 256, "n_batch": 64, "n_seq_max": 4} | options))


def after(sequence: Any, tokens: list[int]) -> NDArray[np.float32]:
    """Append tokens; return the logits after the last one."""
    sequence.context.decode(sequence.feed(tokens))
    found: NDArray[np.float32] = sequence.logits().copy()
    return found


def decode(ctx: Any, *tokens: tuple[int, int, tuple[int, ...]]) -> int:
    """Decode (token, position, sequences) without the checks of the Python API."""
    code: int = ctx.native.decode(
        ctx.handle,
        np.array([token for token, _, _ in tokens], np.int32),
        np.array([pos for _, pos, _ in tokens], np.int32),
        np.array([len(seqs) for _, _, seqs in tokens], np.int32),
        np.array([n for _, _, seqs in tokens for n in seqs], np.int32),
        None,
    )
    return code


@pytest.mark.parametrize("length", [1, 2])
def test_removed_short_state_is_empty(library: Any, length: int) -> None:
    """The removed position is 0, which some releases also report for an empty sequence."""
    model = load(library, "recurrent")
    try:
        fresh = create(model)
    except Unsupported:
        pytest.skip("the release mixes up states")
    with fresh, create(model) as ctx:
        expected = after(fresh.sequence(), [1, 2, 3])
        one = ctx.sequence()
        assert one.pos_max == -1
        ctx.decode(one.feed([9, 8][:length]))
        assert (one.pos_min, one.pos_max) in ((length - 1, length - 1), (0, length - 1))
        one.remove()
        assert one.pos_max == -1
        assert np.abs(after(one, [1, 2, 3]) - expected).max() <= EXACT
        # After another state, a release may refuse, but must not be wrong.
        two = ctx.sequence()
        ctx.decode(two.feed([9]))
        two.remove()
        try:
            assert np.abs(after(two, [1, 2, 3]) - expected).max() <= EXACT
        except Unsupported as error:
            assert "clear the context" in str(error)


@pytest.mark.parametrize("name", ["bytes", "hybrid", "sliding"])
def test_a_token_of_several_streams_is_refused_with_the_reason(library: Any, name: str) -> None:
    """It is neither reported as a missing slot nor the end of the process."""
    if kv.Capability.STREAMS not in library.native.about.capabilities:
        pytest.skip("the release has no streams")
    with create(load(library, name), n_ctx=1024, kv_unified=False) as ctx:
        if not ctx.stream_per_sequence:
            pytest.skip("the release has no streams")
        with pytest.raises(UsageError, match="cannot belong to several streams"):
            ctx.decode(kv.Batch.of([1], [0], [0, 1], counts=[2]))
        with pytest.raises(NativeError, match="cannot belong to several streams"):
            decode(ctx, (1, 0, (0, 1)))
        with pytest.raises(KvError, match="twice"):
            decode(ctx, (1, 0, (1, 1)))
        assert ctx.native.seq_pos_max(ctx.handle, 0) == -1
        after(ctx.sequence(), [1, 2, 3])


@pytest.mark.parametrize("name", ["bytes", "sliding", "recurrent", "hybrid", "latent"])
def test_a_token_of_several_sequences_is_right_or_refused(library: Any, name: str) -> None:
    """Each sequence continues like a new one with the same tokens."""
    model = load(library, name)
    try:
        ctx, fresh = create(model), create(model)
    except Unsupported:
        pytest.skip("the release mixes up states")
    with ctx, fresh:
        expected = after(fresh.sequence(), [1, 2, 3])
        try:
            assert decode(ctx, (1, 0, (0, 1)), (2, 1, (0, 1))) == 0
        except (NativeError, Unsupported) as error:
            assert "assertion" not in str(error)
            return
        for seq in (0, 1):
            assert ctx.native.decode(ctx.handle, [3], [2], None, (seq,), None) == 0
            found = ctx.native.logits(ctx.handle, 0, ctx.n_vocab)
            assert np.abs(found - expected).max() <= EXACT


@pytest.mark.parametrize("name", ["bytes", "sliding", "recurrent", "hybrid", "latent"])
@pytest.mark.parametrize("seq", [-1, -2, SMALLEST])
def test_a_negative_sequence_removes_all(library: Any, name: str, seq: int) -> None:
    """As plk.h documents; a later decode is right."""
    model = load(library, name)
    try:
        ctx = create(model)
    except Unsupported:
        pytest.skip("the release mixes up states")
    with ctx:
        native, handle = ctx.native, ctx.handle
        expected = after(ctx.sequence(0), [1, 2, 3])
        after(ctx.sequence(1), [4, 5])
        assert native.seq_rm(handle, seq, -1, -1)
        assert [native.seq_pos_max(handle, n) for n in range(4)] == [-1] * 4
        assert decode(ctx, (1, 0, (0,)), (2, 1, (0,)), (3, 2, (0,))) == 0
        assert np.abs(native.logits(handle, 2, ctx.n_vocab) - expected).max() <= EXACT
        for other in (4, 2**31 - 1):
            with pytest.raises(NativeError, match="outside"):
                native.seq_rm(handle, other, -1, -1)
            with pytest.raises(NativeError, match="outside"):
                native.seq_keep(handle, -1)


@pytest.mark.parametrize("name", ["bytes", "sliding", "recurrent", "hybrid", "compressed"])
@pytest.mark.parametrize("unified", [True, False])
def test_the_state_of_an_empty_sequence_empties(library: Any, name: str, unified: bool) -> None:
    """An unmodified state is accepted or refused; an invalid number of states is refused."""
    model = load(library, name)
    n_seq = 1 if name == "compressed" and "0.3.3" in library.native.about.variant else 4
    try:
        ctx = create(model, n_ctx=1024, kv_unified=unified, n_seq_max=n_seq)
    except Unsupported:
        pytest.skip("the release mixes up states")
    with ctx:
        native, handle = ctx.native, ctx.handle
        try:
            empty = native.state_save(handle, 0)
        except Unsupported:
            pytest.skip("the release saves no hybrid state")
        after(ctx.sequence(), [1, 2, 3])
        assert native.state_load(handle, 0, empty) == len(empty)
        assert native.seq_pos_max(handle, 0) == -1
        if name == "recurrent":
            with pytest.raises(KvError, match="damaged"):
                native.state_load(handle, 0, b"\xff" * 400)


def test_partly_shared_position_is_copied_once(library: Any) -> None:
    """Divided positions have several cells, of which an earlier copy shares one."""
    with create(load(library, "bytes")) as ctx:
        native, handle = ctx.native, ctx.handle
        decode(ctx, *[(3 + pos, pos, (0,)) for pos in range(6)])
        native.seq_cp(handle, 0, 1, -1, 3)
        native.seq_div(handle, 0, 4, 6, 2)  # 4 and 5 become 2
        native.update(handle) if "update" in ctx.native.about.probes else None
        native.seq_cp(handle, 0, 1, -1, -1)
        assert native.seq_pos_max(handle, 1) == 3
        assert native.seq_rm(handle, 1, 2, -1)
        assert native.seq_pos_max(handle, 1) == 1
        assert native.seq_pos_max(handle, 0) == 3
        assert native.seq_rm(handle, 0, -1, -1)
        assert native.seq_pos_max(handle, 0) == -1


def test_position_beyond_compressed_rows_is_refused(library: Any) -> None:
    """llama.cpp would write outside of its rows."""
    with create(load(library, "compressed"), n_seq_max=1) as ctx:
        last = ctx.info.n_ctx - 1
        for pos in (last + 1, 5000, 2**30 - 1):
            with pytest.raises(NativeError, match=f"expected 0 to {last}"):
                decode(ctx, (1, pos, (0,)))
            with pytest.raises(NativeError, match=f"expected 0 to {last}"):
                ctx.native.decode(ctx.handle, [1], [pos], None, (0,), None)
        assert ctx.native.decode(ctx.handle, [1], [0], None, (0,), None) == 0


@pytest.mark.parametrize("name", ["bytes", "sliding", "hybrid", "recurrent", "latent"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("pooling", [None, "none", "mean", "last"])
def test_adapters_are_set_in_every_context(
    library: Any, name: str, unified: bool, pooling: Any, tmp_path: Path
) -> None:
    """The graph that is reserved afterwards has the sequences of the context."""
    model = load(library, name)
    shape = synthetic_models.SHAPES[name]
    tensor = "blk.0.ssm_in.weight" if name in ("recurrent", "hybrid") else "blk.0.ffn_up.weight"
    file = AdapterFile(names=(tensor,), shape=shape)
    try:
        adapter = model.load_adapter(file.write(tmp_path / "adapter.gguf"))
        more = {} if pooling is None else {"embeddings": True, "pooling": pooling}
        ctx = create(model, n_ctx=1024, kv_unified=unified, n_seq_max=2, **more)
    except Unsupported as error:
        pytest.skip(str(error))
    with ctx:
        ctx.set_adapters({adapter: 0.5})
        ctx.decode([ctx.sequence().feed([1, 2])])
        ctx.clear()
        ctx.set_adapters({})


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
@pytest.mark.parametrize("name", ["bytes", "sliding", "latent", "hybrid", "compressed", "pooled"])
def test_embeddings_are_decoded_after_a_shift(library: Any, name: str, pooling: str) -> None:
    """Decode, remove, shift and update, or be refused with an error."""
    model = load(library, name)
    try:
        with create(model, embeddings=True, pooling=pooling, n_seq_max=1) as ctx:
            one = ctx.sequence()
            ctx.decode(one.feed([1, 2, 3, 4]))
            one.remove(0, 1)
            one.shift(1, None, -1)
            ctx.kv.update()
            ctx.decode(one.feed([5]))
    except KvError as error:
        assert "assertion" not in str(error)


def test_pooling_by_rank_needs_a_head(library: Any) -> None:
    """A model without a classification head is refused before llama.cpp asserts one."""
    with pytest.raises(Unsupported, match="classification head"):
        create(load(library, "bytes"), embeddings=True, pooling="rank")


def test_an_assertion_of_llama_cpp_ends_a_context_and_no_process() -> None:
    """Without a guard, an update of a pooled context asserts on 0.3.9."""
    with kv.open(built("0.3.9+stock").folder, isolated=True) as library:
        model = load(library, "bytes")
        with create(model) as other:
            with create(model, embeddings=True, pooling="mean", guard="off") as ctx:
                decode(ctx, *[(5, pos, (0,)) for pos in range(4)])
                ctx.native.seq_add(ctx.handle, 0, 2, -1, 3)
                with pytest.raises(NativeError, match=r"an assertion of llama\.cpp failed"):
                    ctx.native.update(ctx.handle)
                with pytest.raises(NativeError, match="an earlier call on this context"):
                    decode(ctx, (5, 7, (0,)))
            after(other.sequence(), [1, 2, 3])
