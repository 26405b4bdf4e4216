"""LoRA adapters on real builds: logits, kept K and V, and files that llama.cpp must not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import adapter_kit
import numpy as np
import pytest
from adapter_kit import AdapterFile
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import AdapterError, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.native

#: A release for each interface of adapters, and one that reuses graphs.
RELEASES = ("0.3.6", "0.3.9", "0.3.16", "0.3.36", "b11549")
PROMPT = [1 + (7 * i) % 60 for i in range(40)]
FILE = AdapterFile()


@pytest.fixture(scope="module", params=[f"{release}+stock" for release in RELEASES])
def library(request: pytest.FixtureRequest) -> Iterator[kv.OpenLibrary]:
    """Open several releases."""
    with kv.open(built(request.param).folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two adapters."""
    found = tmp_path_factory.mktemp("adapters")
    FILE.write(found / "one.gguf")
    AdapterFile(seed=2, names=("blk.0.attn_k.weight", "blk.1.ffn_up.weight")).write(
        found / "two.gguf"
    )
    return found


@pytest.fixture(scope="module")
def model(library: kv.OpenLibrary, folder: Path) -> Iterator[kv.Model]:
    """Load the model that the adapters are for."""
    with library.load_model(adapter_kit.base(folder)) as loaded:
        yield loaded


def logits(model: kv.Model, scales: dict[kv.Adapter, float], n: int = 40) -> NDArray[np.float32]:
    """Return the logits after a prompt in a new context with these adapters."""
    with model.context(64, adapters=scales) as context:
        context.sequence().prefill(PROMPT[:n])
        return context.logits().copy()


@pytest.mark.slow
def test_logits_are_those_of_the_merged_model(model: kv.Model, folder: Path) -> None:
    """With two adapters and scales; with scale 0, they are bit-equal to those without."""
    one, two = (model.load_adapter(folder / f"{name}.gguf") for name in ("one", "two"))
    plain = logits(model, {})
    assert np.array_equal(logits(model, {one: 0.0, two: 0.0}), plain)
    adapted = logits(model, {one: 1.0})
    assert np.abs(adapted - plain).max() > 0.5
    both = logits(model, {one: 0.5, two: -1.5})
    second = AdapterFile(seed=2, names=("blk.0.attn_k.weight", "blk.1.ffn_up.weight"))
    for found, files in (
        (adapted, [(FILE, 1.0)]),
        (both, [(FILE, 0.5), (second, -1.5)]),
    ):
        path = adapter_kit.merged(folder, *files)
        with kv.open(model.native.about.variant) as library, library.load_model(path) as merged:
            assert np.abs(found - logits(merged, {})).max() < 2e-3
    for each in (one, two):
        each.close()


def test_a_change_takes_effect_in_the_next_decode(model: kv.Model, folder: Path) -> None:
    """It does for graphs of one shape, too, which some releases reuse."""
    one = model.load_adapter(folder / "one.gguf")
    expected = {scale: logits(model, {one: scale}, 1) for scale in (0.0, 1.0, 2.0)}
    with model.context(64) as context:
        for scale in (0.0, 1.0, 2.0, 0.0, 1.0):
            context.set_adapters({one: scale})
            assert context.adapters == ({one: scale} if scale else {})
            with context.sequence() as sequence:
                sequence.step(PROMPT[0])
                assert np.array_equal(context.logits().copy(), expected[scale])
        one.close()  # the context keeps it
        with context.sequence() as sequence:
            sequence.step(PROMPT[0])
            assert np.array_equal(context.logits().copy(), expected[1.0])
        with pytest.raises(kv.Closed):
            context.set_adapters({one: 2.0})


@pytest.mark.slow
def test_too_many_adapters_for_a_graph_are_refused(model: kv.Model, folder: Path) -> None:
    """Through 0.3.16, llama.cpp would assert in the next decode; the former ones stay in use."""
    many = [model.load_adapter(folder / "one.gguf") for _ in range(100)]
    with model.context(64) as context:
        context.set_adapters({many[0]: 1.0})
        try:
            context.set_adapters(dict.fromkeys(many, 0.01))
        except Unsupported as error:
            assert "fewer adapters" in str(error)
            assert context.adapters == {many[0]: 1.0}
        context.sequence().prefill(PROMPT)
    for each in many:
        each.close()


def test_prefixes_of_other_adapters_are_not_reused(model: kv.Model, folder: Path) -> None:
    """Neither by the managers, nor in a saved sequence."""
    one = model.load_adapter(folder / "one.gguf")
    expected = {scale: logits(model, {one: scale}) for scale in (0.0, 1.0)}
    for make in (kv.PrefixCache, kv.SlotCache):
        with model.context(256, n_seq_max=3) as context, make(context) as cache:
            for scale, known in ((0.0, 0), (0.0, 39), (1.0, 0), (1.0, 39), (0.0, 0)):
                context.set_adapters({one: scale})
                with cache.acquire(PROMPT) as lease:
                    assert lease.cached == known
                    lease.sequence.prefill(lease.rest)
                    assert np.abs(context.logits().copy() - expected[scale]).max() < 2e-3
                    with pytest.raises(UsageError, match="lease"):
                        context.set_adapters({one: 3.0})
    with model.context(64, n_seq_max=2) as context:
        sequence = context.sequence()
        sequence.prefill(PROMPT)
        saved = sequence.save()
        with pytest.raises(UsageError, match=r"sequences \[0\]"):
            context.set_adapters({one: 1.0})
        sequence.remove()
        context.set_adapters({one: 1.0})
        with pytest.raises(kv.StateError, match="adapters"):
            sequence.restore(saved)
        context.set_adapters({})
        sequence.restore(saved)
    one.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architecture": "gemma2"}, "not an adapter of .*gemma2"),
        ({"meta": {"general.type": "model"}}, "not a LoRA adapter: general.type"),
        ({"meta": {"general.type": "adapter"}}, "not a LoRA adapter: adapter.type is None"),
        ({"names": ()}, "no tensors"),
        ({"tensors": {"blk.0.attn_q.weight.lora_a": None}}, "only one of"),
        ({"tensors": {"blk.7.attn_q.weight.lora_a": np.ones((4, 32), np.float32),
                      "blk.7.attn_q.weight.lora_b": np.ones((32, 4), np.float32)}},
         "the model does not have"),
        ({"tensors": {"blk.0.attn_q.weight.lora_b": np.ones((32, 5), np.float32)}}, "shapes"),
        ({"tensors": {"blk.0.attn_q.weight.lora_b": np.ones((31, 4), np.float32)}}, "shapes"),
        ({"tensors": {"token_embd.weight.lora_a": np.ones((320, 4), np.float32),
                      "token_embd.weight.lora_b": np.ones((32, 3), np.float32)}}, "shapes"),
        ({"tensors": {"blk.0.attn_q.weight.lora_a": np.ones((4, 32), np.int32)}}, "type i32"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((4, 32), np.float32)}}, "unexpected tensor"),
        ({"alpha": float("nan")}, "finite"),
        ({"alpha": 8, "alpha_type": adapter_kit.gguf.GGUFValueType.UINT32}, "32-bit float"),
    ],
    ids=str,
)  # fmt: skip
def test_incompatible_adapter_is_refused_with_its_reason(
    model: kv.Model, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """It is before llama.cpp reads the file."""
    path = AdapterFile(**change).write(tmp_path / "wrong.gguf")  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=reason):
        model.load_adapter(path)


def test_damaged_files_are_refused(model: kv.Model, folder: Path, tmp_path: Path) -> None:
    """They are truncated at many places, missing, a model, or of another format."""
    whole = (folder / "one.gguf").read_bytes()
    path = tmp_path / "adapter.gguf"
    for n in (0, 3, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(AdapterError):
            model.load_adapter(path)
    for other in (model.path, tmp_path / "missing", tmp_path):
        with pytest.raises(AdapterError):
            model.load_adapter(other)


def test_another_model_refuses_an_adapter(model: kv.Model, folder: Path) -> None:
    """It is bound to the model that loaded it, also for two models of one file."""
    one = model.load_adapter(folder / "one.gguf")
    with kv.open(model.native.about.variant) as library:
        other = library.load_model(model.path)
        with pytest.raises(UsageError, match="another model"):
            other.context(64, adapters={one: 1.0})
    one.close()


@pytest.mark.slow
def test_a_worker_has_adapters(library: kv.OpenLibrary, folder: Path) -> None:
    """The logits are the same."""
    with kv.open(library.about.variant, isolated=True) as apart:
        model = apart.load_model(adapter_kit.base(folder))
        one = model.load_adapter(folder / "one.gguf")
        found = logits(model, {one: 1.0})
    with library.load_model(adapter_kit.base(folder)) as here:
        assert np.array_equal(found, logits(here, {here.load_adapter(folder / "one.gguf"): 1.0}))


@pytest.mark.slow
def test_a_kept_cache_is_for_its_adapters(folder: Path, tmp_path: Path) -> None:
    """A file of other adapters is refused; that of the same ones continues."""
    with kv.open(built("0.3.9+patched").folder) as library:
        model = library.load_model(adapter_kit.base(folder))
        one = model.load_adapter(folder / "one.gguf")

        def kept(scales: dict[kv.Adapter, float]) -> kv.Context:
            return model.context(64, adapters=scales, kv_backing=tmp_path / "kept", kv_keep=True)

        with kept({one: 1.0}) as context:
            context.sequence().prefill(PROMPT)
            with pytest.raises(UsageError, match="kept file"):
                context.set_adapters({})
        for other in ({}, {one: 2.0}):
            with pytest.raises(kv.KVFileForeign):
                kept(other)
        with kept({one: 1.0}) as context:
            assert context.ledgers[0].tokens == PROMPT
