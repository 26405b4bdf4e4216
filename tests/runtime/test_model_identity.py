"""Test that saved data of a `Model` is refused by a model with other content."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adapter_kit
import gguf
import mapping_kit
import numpy as np
import prefix_kit
import pytest
import runtime_kit as kit
from adapter_kit import AdapterFile
from fakes.tiny_gguf import gguf_bytes, write_gguf
from native_kit import built

import pyllamakv as kv
from pyllamakv import content_digest
from pyllamakv.errors import (
    KVFileForeign,
    ModelUnverified,
    PrefixStoreForeign,
    StateForeign,
)
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant

SHAPE: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 32, "n_seq_max": 3}
TOKENS = [1 + i % 50 for i in range(40)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each file whose digest is requested."""
    found: list[str] = []
    real = content_digest.compute

    def compute(files: Any, progress: Any = None) -> str:
        found.extend(each.path.name for each in files)
        return real(files, progress)

    monkeypatch.setattr(content_digest, "compute", compute)
    return found


def load(path: Path) -> kv.Model:
    """Load a file in a separate simulated library."""
    return kit.library().load_model(path)


def fill(model: kv.Model, **options: Any) -> kv.Sequence:
    """Return a sequence with tokens in a new context."""
    sequence = model.context(**SHAPE, **options).sequence()
    sequence.prefill(TOKENS)
    return sequence


def regions(path: Path) -> list[tuple[str, int]]:
    """Return a name and the offset of a byte to change, for each tensor and for the metadata."""
    reader = gguf.GGUFReader(path)
    found = [(each.name, int(each.data_offset) + int(each.n_bytes) // 2) for each in reader.tensors]
    name = reader.fields.get("general.name")
    if name is not None:
        # After the key with its length, the type of the value, and its length.
        found.append(("metadata", int(name.offset) + 8 + len(name.name) + 4 + 8))
    return found


def changed(path: Path, at: int, target: Path) -> Path:
    """Copy a file, with the lowest bit of one byte changed."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    target.write_bytes(data)
    return target


def test_a_change_anywhere_is_another_model(tmp_path: Path) -> None:
    """A byte of each tensor, and a value of the metadata: states and stores are refused."""
    path = Path(shutil.copy(synthetic_models.model("grouped"), tmp_path / "m1.gguf"))
    m1 = load(path)
    saved = fill(m1).save()
    with kv.PrefixCache(m1.context(**SHAPE), store=tmp_path / "store") as cache:
        prefix_kit.serve(cache, TOKENS)
    places = regions(path)
    assert len(places) > 15
    for name, at in places:
        m2 = load(changed(path, at, tmp_path / "m2.gguf"))
        assert m2.digest() != m1.digest()
        sequence = fill(m2)
        before = sequence.tokens
        for accept in (False, True):
            with pytest.raises(StateForeign) as state:
                sequence.restore(saved, accept_unverified_model=accept)
            with pytest.raises(PrefixStoreForeign) as store:
                kv.PrefixCache(
                    sequence.context, store=tmp_path / "store", accept_unverified_model=accept
                )
            for refused in (state, store):
                assert m1.digest() in str(refused.value), name
                assert m2.digest() in str(refused.value), name
                assert "accept_unverified_model" not in str(refused.value)
            assert state.value.differences == ("digest",)
            assert store.value.differences == ("model",)
        assert sequence.tokens == before


def test_the_name_of_a_file_is_not_its_content(tmp_path: Path) -> None:
    """A copy of the model accepts the data of the model."""
    path = write_gguf(tmp_path / "m1.gguf")
    copy = Path(shutil.copy(path, tmp_path / "other.gguf"))
    m1, m2 = load(path), load(copy)
    sequence = m2.context(**SHAPE).sequence()
    sequence.restore(fill(m1).save())
    assert sequence.tokens == TOKENS
    with kv.PrefixCache(m1.context(**SHAPE), store=tmp_path / "store") as cache:
        prefix_kit.serve(cache, TOKENS)
    with kv.PrefixCache(m2.context(**SHAPE), store=tmp_path / "store") as cache:
        assert prefix_kit.serve(cache, [*TOKENS, 7]) == len(TOKENS)


def test_operations_within_a_model_compute_no_digest(tmp_path: Path, computed: list[str]) -> None:
    """Loads, decodes, forks, paging, and restores of the same object read no file."""
    model = adapter_kit.simulated_model(tmp_path)
    one = model.load_adapter(AdapterFile().write(tmp_path / "one.gguf"))
    sequence = fill(model, adapters={one: 1.0})
    saved = sequence.save(portable=False)
    other = model.context(**SHAPE, adapters={one: 1.0}).sequence()
    other.restore(saved)
    with pytest.raises(StateForeign, match="other LoRA adapters"):
        model.context(**SHAPE).sequence().restore(saved)
    del computed[:]
    cache = kv.PrefixCache(model.context(**SHAPE), entries=1, paging=tmp_path / "pages")
    for prompt in ([3, 4, 5], [6, 7, 8], [3, 4, 5, 6]):
        prefix_kit.serve(cache, prompt)
    assert cache.stats().paged_in_tokens
    assert computed == []
    portable = sequence.save()
    assert computed == ["one.gguf", model.path.name]
    other.restore(portable)
    assert len(computed) == 2


def test_state_without_a_digest_is_refused_by_another_model(tmp_path: Path) -> None:
    """Its digest is unknown: refused, or accepted by name."""
    path = write_gguf(tmp_path / "m.gguf")
    m1, m2 = load(path), load(path)
    saved = fill(m1).save(portable=False)
    sequence = m2.context(**SHAPE).sequence()
    with pytest.raises(StateForeign, match=r"portable=False.*save: unknown.*accept_unverified"):
        sequence.restore(saved)
    assert sequence.tokens == []
    sequence.restore(saved, accept_unverified_model=True)
    assert sequence.tokens == TOKENS
    with pytest.raises(kv.errors.UsageError):
        sequence.restore(saved, accept_unverified_model="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["replaced", "in place", "removed"])
def test_file_changed_after_the_load_has_no_digest(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest would be of another content, so it is unknown; within the object, all works."""
    path = write_gguf(tmp_path / "m.gguf")
    verified = fill(load(path)).save()
    model = load(path)
    data = gguf_bytes(architecture="llama")[:-1] + b"\x01"
    if change == "replaced":
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").replace(path)
    elif change == "in place":
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(ModelUnverified, match=r"cannot be read|replaced or changed"):
        model.digest()
    sequence = fill(model)
    saved = sequence.save()
    assert "unverified model" in caplog.text
    sequence.restore(saved)
    write_gguf(path)
    now = load(path).context(**SHAPE).sequence()
    for target, given in ((now, saved), (sequence, verified)):
        with pytest.raises(StateForeign, match="accept_unverified_model") as refused:
            target.restore(given)
        assert load(path).digest() in str(refused.value)
        target.restore(given, accept_unverified_model=True)
        assert target.tokens == TOKENS
    store = tmp_path / "store"
    with pytest.raises(ModelUnverified):
        kv.PrefixCache(model.context(**SHAPE), store=store)
    assert not store.exists()
    accepted: dict[str, Any] = {"store": store, "accept_unverified_model": True}
    with kv.PrefixCache(model.context(**SHAPE), **accepted) as cache:
        prefix_kit.serve(cache, TOKENS)
    with pytest.raises(PrefixStoreForeign, match=r"unverified.*accept_unverified_model=True"):
        kv.PrefixCache(now.context, store=store)
    with kv.PrefixCache(load(path).context(**SHAPE), **accepted) as cache:
        assert prefix_kit.serve(cache, [*TOKENS, 7]) == len(TOKENS)


def test_computed_digest_is_kept_after_a_file_change(tmp_path: Path) -> None:
    """A model that was verified once keeps its identity when a new version replaces its file."""
    path = write_gguf(tmp_path / "m.gguf")
    model = load(path)
    before = model.digest()
    (tmp_path / "new").write_bytes(gguf_bytes(architecture="qwen2"))
    (tmp_path / "new").replace(path)
    assert model.digest() == before
    path.unlink()
    assert model.digest() == before


@pytest.mark.parametrize("size", ["the same size", "another size"])
def test_computed_digest_is_lost_when_the_file_is_written_in_place(
    tmp_path: Path, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Mapped weights change with the file, so a later save must not name the earlier content."""
    path = write_gguf(tmp_path / "m.gguf")
    model = load(path)
    sequence = fill(model)
    verified = sequence.save()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\x01" if size == "the same size" else data + b"\x00" * 64)
    with pytest.raises(
        ModelUnverified, match=r"replaced or changed.*mtime_ns.*load the file again"
    ):
        model.digest()
    saved = sequence.save()
    assert "unverified model" in caplog.text
    path.write_bytes(data)
    now = load(path).context(**SHAPE).sequence()
    now.restore(verified)
    with pytest.raises(StateForeign, match="accept_unverified_model"):
        now.restore(saved)


def test_state_depends_on_the_content_of_adapters(tmp_path: Path) -> None:
    """A state fits equal adapters of any name, and no adapter with a changed byte."""
    base = adapter_kit.base(tmp_path)
    m1, m2 = load(base), load(base)
    path = AdapterFile().write(tmp_path / "one.gguf")
    saved = fill(m1, adapters={m1.load_adapter(path): 0.5}).save()
    same = m2.load_adapter(shutil.copy(path, tmp_path / "same.gguf"))
    for adapters in ({}, {same: 0.25}):
        with pytest.raises(StateForeign, match="LoRA") as refused:
            m2.context(**SHAPE, adapters=adapters).sequence().restore(saved)
        assert refused.value.differences == ("adapters",)
    m2.context(**SHAPE, adapters={same: 0.5}).sequence().restore(saved)
    for name, at in regions(path):
        if name == "metadata":
            continue
        other = m2.load_adapter(changed(path, at, tmp_path / "other.gguf"))
        context = m2.context(**SHAPE, adapters={other: 0.5})
        with pytest.raises(StateForeign, match="LoRA"):
            context.sequence().restore(saved, accept_unverified_model=True)
    gone = m2.load_adapter(same.path)
    same.path.unlink()
    context = m2.context(**SHAPE, adapters={gone: 0.5})
    with pytest.raises(StateForeign, match="here unverified"):
        context.sequence().restore(saved, accept_unverified_model=True)
    lost = fill(m2, adapters={gone: 0.5}).save()
    context.sequence().restore(lost)  # of the same object
    with pytest.raises(StateForeign, match="digest is unverified, here none"):
        load(base).context(**SHAPE).sequence().restore(lost, accept_unverified_model=True)
    with pytest.raises(ModelUnverified):
        kv.PrefixCache(context, store=tmp_path / "store", accept_unverified_model=True)


# --- real builds ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["0.3.9+patched", "b11549+patched"])
def build(request: pytest.FixtureRequest) -> Variant:
    """Return a variant with mapped memory."""
    return built(request.param)


@pytest.fixture
def library(build: Variant) -> Iterator[kv.OpenLibrary]:
    """Open it."""
    with kv.open(build.folder) as opened:
        yield opened


@pytest.mark.native
def test_kept_file_of_another_model_content_is_refused(
    library: kv.OpenLibrary, tmp_path: Path
) -> None:
    """A file is refused after a change of any tensor, and fits a copy with another name."""
    path = Path(shutil.copy(synthetic_models.tiny(), tmp_path / "m1.gguf"))
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **mapping_kit.context_options()}
    m1 = library.load_model(path)
    with m1.context(**keep) as ctx:
        mapping_kit.fill(ctx, TOKENS)
    before = file.read_bytes()
    for _, at in regions(path):
        with library.load_model(changed(path, at, tmp_path / "m2.gguf")) as m2:
            for accept in (False, True):
                with pytest.raises(KVFileForeign) as refused:
                    m2.context(**keep, accept_unverified_model=accept)
                assert m1.digest() in str(refused.value)
                assert m2.digest() in str(refused.value)
    assert file.read_bytes() == before
    copy = Path(shutil.copy(path, tmp_path / ("模" * 60 + ".gguf")))
    with library.load_model(copy) as same, same.context(**keep) as ctx:
        assert ctx.sequence(0).tokens == TOKENS


@pytest.mark.native
def test_kept_file_of_an_unverified_model_is_refused(
    library: kv.OpenLibrary, tmp_path: Path
) -> None:
    """The file of the model changed after its load: refused, or accepted by name."""
    path = Path(shutil.copy(synthetic_models.tiny(), tmp_path / "m.gguf"))
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **mapping_kit.context_options()}
    model = library.load_model(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelUnverified, match="mtime_ns"):
        model.context(**keep)
    assert not file.exists()
    accepted = {**keep, "accept_unverified_model": True}
    with model.context(**accepted) as ctx:
        mapping_kit.fill(ctx, TOKENS)
    now = library.load_model(path)
    with pytest.raises(KVFileForeign, match=r"unverified.*accept_unverified_model=True"):
        now.context(**keep)
    for each in (now, model):
        with each.context(**accepted) as ctx:
            assert ctx.sequence(0).tokens == TOKENS


@pytest.mark.native
def test_state_of_other_weights_is_refused(library: kv.OpenLibrary, tmp_path: Path) -> None:
    """The logits would differ; the sequence keeps its tokens and its logits."""
    path = Path(shutil.copy(synthetic_models.model("deep"), tmp_path / "m1.gguf"))
    at = dict(regions(path))["blk.30.attn_v.weight"]
    m1, m2 = (library.load_model(each) for each in (path, changed(path, at, tmp_path / "m2.gguf")))
    shape = {"n_ctx": 64, "n_batch": 64}
    with m1.context(**shape) as ctx:
        first = ctx.sequence()
        first.prefill(TOKENS)
        saved = first.save()
    with m2.context(**shape) as ctx:
        sequence = ctx.sequence()
        sequence.prefill(TOKENS[:9])
        with pytest.raises(StateForeign, match=m1.digest()):
            sequence.restore(saved)
        assert sequence.tokens == TOKENS[:9]
    with library.load_model(path) as again, again.context(**shape) as ctx:
        sequence = ctx.sequence()
        sequence.restore(saved)
        assert sequence.tokens == TOKENS


@pytest.mark.native
@pytest.mark.parametrize("linked", [False, True])
def test_digest_of_a_split_model_covers_all_files(
    library: kv.OpenLibrary, tmp_path: Path, linked: bool
) -> None:
    """Each of the files counts, also with links, as model hubs store them."""
    source = split(Path(synthetic_models.model("grouped")), tmp_path / "source")
    m1 = library.load_model(source[0])
    first = m1.digest()
    assert [each.path for each in m1.file.records] == source
    if linked:
        # The targets have names without a number.
        copies = [shutil.copy(each, tmp_path / f"blob{n}") for n, each in enumerate(source)]
        (tmp_path / "links").mkdir()
        for each, copy in zip(source, copies, strict=True):
            (tmp_path / "links" / each.name).symlink_to(copy)
        source = [tmp_path / "links" / each.name for each in source]
    with m1.context(64) as ctx:
        sequence = ctx.sequence()
        sequence.prefill(TOKENS)
        saved = sequence.save()
    with library.load_model(source[0]) as same, same.context(64) as ctx:
        assert same.digest() == first
        ctx.sequence().restore(saved)
    for each in source:
        at = regions(each)[-2 if each is source[0] else -1][1]
        target = each.resolve()
        data = target.read_bytes()
        changed(target, at, target)
        with library.load_model(source[0]) as m2, m2.context(64) as ctx:
            assert m2.digest() != first
            with pytest.raises(StateForeign):
                ctx.sequence().restore(saved)
        target.write_bytes(data)
    model = library.load_model(source[0])
    os.utime(source[-1], ns=(1, 1))
    with pytest.raises(ModelUnverified, match="mtime_ns"):
        model.digest()


def split(path: Path, folder: Path, n: int = 3) -> list[Path]:
    """Write a model as several files, as llama.cpp's gguf-split does."""
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    tensors = [reader.tensors[i::n] for i in range(n)]
    found = []
    for number, part in enumerate(tensors):
        target = folder / f"model-{number + 1:05d}-of-{n:05d}.gguf"
        writer = gguf.GGUFWriter(target, "llama")
        if number == 0:
            for field in reader.fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in part:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(target)
    return found
