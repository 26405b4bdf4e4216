"""Test a cache in mapped memory on real builds: committed lazily, released, exact."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mapping_kit
import numpy as np
import pytest
from mapping_kit import TOKENS, context_options, fill, logits

import pyllamakv as kv
from pyllamakv.errors import KVFileBusy, KVFileDirty, Unsupported, UsageError

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

build, model = mapping_kit.build, mapping_kit.model
pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="files and smaps need Linux"),
]


def mapped(size: int) -> int:
    """Return the resident bytes of all mappings of exactly this size, from smaps."""
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = end - begin == size
        elif inside and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


def test_committed_bytes_equal_the_resident_pages(model: kv.Model) -> None:
    """Committed bytes, in all and per layer, equal the resident pages in smaps."""
    # K and V of 41216 cells of 64 bytes make a buffer of a size that no other mapping has. Those of
    # 40960 cells make 5 MiB, which is the size of other mappings after some tests.
    size = 41216 * 64
    assert mapped(2 * size) == 0
    with model.context(n_ctx=41216, n_batch=64, flash_attn=True, kv_backing="mmap") as ctx:
        assert ctx.kv.memory.committed == 0
        sequence = ctx.sequence()
        for n in (1, 63, 500):
            sequence.prefill(TOKENS[:1] * n)
            memory = ctx.kv.memory
            assert memory.committed == mapped(2 * size)
            assert sum(layer.committed for layer in memory.layers) == memory.committed
            assert sum(layer.reserved for layer in memory.layers) == memory.reserved == 2 * size
            used = len(sequence) * 64 * 2
            assert used <= (memory.committed or 0) <= used + 2 * 2 * resource.getpagesize()
        sequence.trim(64)
        before = ctx.kv.memory.committed or 0
        assert ctx.kv.trim() == before - mapped(2 * size)
        assert mapped(2 * size) == 2 * resource.getpagesize()
        ctx.clear()
        assert mapped(2 * size) == 0


@pytest.mark.parametrize("flash", [False, True])
def test_large_context_commits_only_used_memory(model: kv.Model, flash: bool) -> None:
    """64 tokens of 131072 make at most 5 % of the cache resident."""
    options: Any = {"n_ctx": 131072, "n_batch": 64, "n_ubatch": 64, "flash_attn": flash}
    with model.context(kv_backing="mmap", **options) as ctx:
        fill(ctx, TOKENS[:64])
        memory = ctx.kv.memory
        assert memory.kind == kv.Backing.ANONYMOUS
        assert 0 < (memory.committed or 0) <= memory.reserved // 20


@pytest.mark.parametrize("kind", ["mmap", "folder", "file"])
@pytest.mark.parametrize("types", [(False, "f16"), (True, "f16"), (True, "q8_0")])
def test_logits_are_those_of_the_heap(
    model: kv.Model, tmp_path: Path, kind: str, types: tuple[bool, str]
) -> None:
    """Prompt, removal, shift, defragmentation and later decodes are equal to the last bit."""
    flash, type_ = types
    backing = {"mmap": "mmap", "folder": tmp_path, "file": tmp_path / "cache"}[kind]
    options: Any = {"n_ctx": 512, "n_seq_max": 4, "flash_attn": flash}
    options |= {"type_k": type_, "type_v": type_}
    found = []
    for each in ("heap", backing):
        rows = []
        with model.context(kv_backing=each, **options) as ctx:
            first, second = fill(ctx, TOKENS[:100]), fill(ctx, TOKENS[:150])
            third = fill(ctx, TOKENS[50:90])
            rows.append(third.logits().copy())
            first.remove(10, 60)
            if ctx.info.can_shift:
                first.shift(60, None, -50)
            second.close()
            ctx.kv.defrag()
            if each != "heap":
                ctx.kv.trim()
            for sequence in (first, third):
                ctx.decode(sequence.feed(TOKENS[:30]))
                rows.append(sequence.logits().copy())
            saved = third.save()
            ctx.clear()
            again = ctx.sequence()
            again.restore(saved)
            ctx.decode(again.feed([5]))
            rows.append(again.logits().copy())
        found.append(rows)
    for heap, here in zip(*found, strict=True):
        assert np.array_equal(heap, here)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_defragmentation_and_trim_release_memory(model: kv.Model) -> None:
    """Memory that is free after a defragmentation is released, on request or automatically."""
    options: Any = {"n_ctx": 8192, "n_seq_max": 4, "flash_attn": True, "kv_backing": "mmap"}
    for by_itself in (False, True):
        with model.context(defrag_trim=by_itself, **options) as ctx:
            first, second = fill(ctx, [1] * 4000), fill(ctx, [2] * 500)
            first.remove()
            full = ctx.kv.memory.committed or 0
            ctx.kv.defrag()
            after = ctx.kv.memory.committed or 0
            back = ctx.kv.trim()
            assert (after < full and back == 0) if by_itself else (back > 0 and after == full)
            least = len(second) * 128
            assert least <= (ctx.kv.memory.committed or 0) <= least + 4 * resource.getpagesize()


@pytest.mark.slow
def test_mapped_cache_works_in_a_worker(build: Variant, tiny_model: Path, tmp_path: Path) -> None:
    """All operations work in a worker too, and its errors keep their class."""
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    with kv.open(build.folder, isolated=True) as library:
        other = library.load_model(tiny_model)
        with other.context(**keep) as ctx:
            fill(ctx, TOKENS[:50])
            with pytest.raises(KVFileBusy):
                other.context(**keep)
        with other.context(**keep) as ctx:
            assert ctx.sequence(0).tokens == TOKENS[:50]
            assert ctx.kv.memory.layers[0].reserved > 0
            # Closing the model flushes its contexts.
            ctx.decode(ctx.sequence(1).feed([1, 2]))
            other.close()
        again = library.load_model(tiny_model)
        with again.context(**keep) as ctx:
            assert ctx.sequence(1).tokens == [1, 2]


@pytest.mark.slow
def test_a_sliding_window_keeps_two_files(build: Variant, tmp_path: Path) -> None:
    """A model with a window has two caches, each in a file; both must be of one flush."""
    from pyllamakv.scenarios import synthetic_models

    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    with kv.open(build.folder) as library:
        model = library.load_model(synthetic_models.model("sliding"))
        with model.context(**context_options()) as ctx:
            wanted = logits(ctx, [fill(ctx, TOKENS)])[0]
        with model.context(**keep) as ctx:
            fill(ctx, TOKENS)
            caches = {layer.cache for layer in ctx.kv.memory.layers}
        with model.context(**keep) as ctx:
            sequence = ctx.sequence(0)
            assert sequence.tokens == TOKENS
            assert np.array_equal(logits(ctx, [sequence])[0], wanted)
        if len(caches) == 1:
            return
        second = tmp_path / "cache.1"
        assert second.is_file()
        old = second.read_bytes()
        with model.context(**keep) as ctx:
            fill(ctx, [1])
        second.write_bytes(old)
        # The copies of the last flush replace files of two flushes.
        with model.context(**keep) as ctx:
            assert ctx.sequence(0).tokens[: len(TOKENS)] == TOKENS
            assert ctx.sequence(1).tokens == [1]
        second.write_bytes(old)
        for copy in tmp_path.glob("*.flushed"):
            copy.unlink()
        with pytest.raises(KVFileDirty):
            model.context(**keep)


def test_invalid_backing_options_are_refused(model: kv.Model, tmp_path: Path) -> None:
    """Invalid options are refused before anything is created."""
    wrong: tuple[dict[str, Any], ...] = (
        {"kv_backing": "disk"},
        {"kv_backing": str(tmp_path)},
        {"kv_keep": True},
        {"kv_backing": "mmap", "kv_keep": True},
        {"kv_backing": tmp_path, "kv_keep": True},
        {"kv_backing": tmp_path / "x", "kv_keep": "always"},
        {"kv_huge": True},
        {"defrag_trim": True},
    )
    for options in wrong:
        with pytest.raises(UsageError):
            model.context(**options)
    with model.context() as ctx:
        assert ctx.kv.memory.kind == kv.Backing.HEAP
        assert ctx.kv.memory.reserved > 0 and ctx.kv.memory.committed is None
        for refused in (ctx.kv.trim, ctx.kv.flush):
            with pytest.raises(Unsupported):
                refused()
    with model.context(kv_backing="mmap", kv_huge=True) as ctx:
        fill(ctx, TOKENS[:3])
        with pytest.raises(Unsupported, match="kept"):
            ctx.kv.flush()
    assert not list(tmp_path.iterdir())


def test_stock_refuses_mapped_memory_by_name(stock: Variant, tiny_model: Path) -> None:
    """A build without the patch reports the missing capability."""
    with kv.open(stock.folder) as library, library.load_model(tiny_model) as model:
        with pytest.raises(Unsupported, match="mmap-kv"):
            model.context(kv_backing="mmap")
        with model.context() as ctx, pytest.raises(Unsupported, match="heap"):
            ctx.kv.trim()


def test_environment_variable_selects_the_backing(
    build: Variant, tiny_model: Path, tmp_path: Path
) -> None:
    """A program without any change gets mapped memory by a variable."""
    with (
        kv.open(build.folder, isolated=True, env={"LLAMA_KV_BACKING": "mmap"}) as library,
        library.load_model(tiny_model).context(n_ctx=4096) as ctx,
    ):
        assert ctx.kv.memory.kind == kv.Backing.ANONYMOUS
        assert ctx.kv.memory.committed == 0


@pytest.mark.slow
@pytest.mark.parametrize("flash", [False, True])
def test_random_operations_on_mapped_memory_pass(model: kv.Model, flash: bool) -> None:
    """Every step is checked as on the heap."""
    from qa.random_operations import operation_cases

    def make() -> kv.Context:
        return model.context(256, 96, 32, 5, flash_attn=flash, kv_backing="mmap", defrag_trim=True)

    for seed in range(6):
        operation_cases.run_seed(make, seed, 25)


@pytest.mark.slow
def test_layers_on_devices_stay_there(build: Variant, tmp_path: Path) -> None:
    """They are counted separately; if all layers are on devices, mapping is refused."""
    from pyllamakv.scenarios import synthetic_models

    with (
        kv.serve_rpc(build.folder, threads=1) as server,
        kv.open(build.folder, isolated=True) as library,
    ):
        endpoint = server.endpoint
        path = synthetic_models.model("deep")
        options: dict[str, Any] = {"n_ctx": 512, "flash_attn": True}
        whole = library.load_model(path, n_gpu_layers=999, rpc_servers=endpoint)
        for backing in ("mmap", tmp_path):
            with pytest.raises(Unsupported, match="devices"):
                whole.context(kv_backing=backing, **options)
        with pytest.raises(Unsupported, match="device"):
            whole.context(kv_backing=tmp_path / "cache", kv_keep=True, **options)
        # K and V are in host memory if they are not offloaded.
        with whole.context(kv_backing="mmap", offload_kqv=False, **options) as ctx:
            fill(ctx, TOKENS[:9])
            assert ctx.kv.memory.on_devices == 0 and len(ctx.kv.memory.layers) > 1
        part = library.load_model(path, n_gpu_layers=2, rpc_servers=endpoint)
        with (
            part.context(kv_backing="mmap", **options) as ctx,
            part.context(**options) as heap,
        ):
            memory = ctx.kv.memory
            assert 0 < len(memory.layers) < part.info.n_layer
            assert memory.on_devices == heap.kv.memory.reserved - memory.reserved > 0
            rows = [logits(each, [fill(each, TOKENS[:50])])[0] for each in (ctx, heap)]
            assert np.array_equal(*rows)
            ctx.kv.trim()
        assert not list(tmp_path.iterdir())
