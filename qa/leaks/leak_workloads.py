"""Repeat one operation in a process that is sampled; started with `-m qa.leaks.leak_workloads`.

Each function is a generator: it opens its objects, and each step runs some operations and yields
their number.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models
from qa.leaks import sampling

_TOKENS: Final = [1 + n % 20 for n in range(40)]
_SHAPE: Final[dict[str, Any]] = {"n_ctx": 256, "n_batch": 64, "n_seq_max": 4, "n_threads": 1}


@contextlib.contextmanager
def _library(variant: Path, **options: Any) -> Iterator[Any]:
    with kv.open(variant, **options) as library:
        sampling.opened.append(library)
        try:
            yield library
        finally:
            sampling.opened.remove(library)


def contexts(variant: Path, folder: Path) -> Iterator[int]:
    """Open, use and close contexts of several kinds."""
    kinds: Iterator[dict[str, Any]]
    kinds = cycle(({}, {"flash_attn": True}, {"type_k": "q8_0"}, {"n_ctx": 1024, "n_ubatch": 16}))
    with _library(variant) as library, library.load_model(synthetic_models.tiny()) as model:
        for options in kinds:
            yield _use(model, **options)


def mapped(variant: Path, folder: Path) -> Iterator[int]:
    """Open, use and close contexts in anonymous memory, a directory, and a kept file."""
    kinds: Iterator[dict[str, Any]]
    kinds = cycle(
        (
            {"kv_backing": "mmap"},
            {"kv_backing": folder},
            {"kv_backing": folder / "kept", "kv_keep": "fresh"},
        )
    )
    with _library(variant) as library, library.load_model(synthetic_models.tiny()) as model:
        for options in kinds:
            yield _use(model, **options)


def _use(model: kv.Model, **options: Any) -> int:
    with model.context(**{**_SHAPE, **options}) as ctx:
        ctx.sequence().prefill(_TOKENS)
        ctx.logits().copy()
    return 1


def refused(variant: Path, folder: Path) -> Iterator[int]:
    """Request contexts that cannot be created."""
    path = folder / "no cache"
    path.write_text("something else", encoding="utf-8")
    with _library(variant) as library, library.load_model(synthetic_models.tiny()) as model:
        while True:
            with contextlib.suppress(kv.KvError):
                model.context(**_SHAPE, kv_backing=path, kv_keep=True)
                raise AssertionError("a file that is not a cache was accepted")
            with contextlib.suppress(kv.KvError):
                library.load_model(path)
                raise AssertionError("a file that is not a model was accepted")
            yield 2


def models(variant: Path, folder: Path) -> Iterator[int]:
    """Open a library, load a model, decode once, and close everything."""
    while True:
        with _library(variant) as library, library.load_model(synthetic_models.tiny()) as model:
            _use(model)
        yield 1


@contextlib.contextmanager
def _context(variant: Path, **options: Any) -> Iterator[kv.Context]:
    with (
        _library(variant) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(**{**_SHAPE, **options}) as ctx,
    ):
        yield ctx


def decodes(variant: Path, folder: Path) -> Iterator[int]:
    """Decode single tokens and batches of several sequences."""
    with _context(variant) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        while True:
            for token in _TOKENS:
                a.step(token)
                ctx.step_all([a, b], [token, token])
                ctx.decode([a.feed([token]), b.feed([token])])
            ctx.logits().copy()
            a.remove()
            b.remove()
            yield 3 * len(_TOKENS)


def advances(variant: Path, folder: Path) -> Iterator[int]:
    """Decode and sample in the C loop."""
    with _context(variant) as ctx:
        sampler = ctx.model.sampler()
        a, b = ctx.sequence(), ctx.sequence()
        while True:
            ctx.advance([a, b], [1, 2], 100, sampler)
            a.remove()
            b.remove()
            yield 100


def failing(variant: Path, folder: Path) -> Iterator[int]:
    """Decode batches that do not fit."""
    with _context(variant) as ctx:
        ctx.sequence().prefill(_TOKENS * 6)
        other = ctx.sequence()
        while True:
            for _ in range(20):
                with contextlib.suppress(kv.NoKVSlot):
                    ctx.decode(other.feed(_TOKENS))
                    raise AssertionError("a full cache accepted tokens")
            yield 20


def defrags(variant: Path, folder: Path) -> Iterator[int]:
    """Scatter cells and defragment them."""
    with _context(variant) as ctx:
        while True:
            with ctx.sequence() as a, ctx.sequence() as b:
                for token in _TOKENS[:10]:
                    ctx.step_all([a, b], [token, token])
                a.remove()
                ctx.kv.defrag()
            yield 1


def saves(variant: Path, folder: Path) -> Iterator[int]:
    """Save a sequence and restore it elsewhere."""
    with _context(variant) as ctx:
        a = ctx.sequence()
        a.prefill(_TOKENS)
        while True:
            saved = a.save()
            with ctx.sequence() as b, a.fork() as c:
                b.restore(saved)
                c.trim(3)
            yield 1


def snapshots(variant: Path, folder: Path) -> Iterator[int]:
    """Read cells, statistics, and rows of K and V."""
    with _context(variant) as ctx:
        a = ctx.sequence()
        a.prefill(_TOKENS)
        while True:
            ctx.kv.snapshot()
            ctx.kv.rows(0, a)
            _ = ctx.kv.stats, ctx.kv.memory, ctx.counters
            yield 1


def recordings(variant: Path, folder: Path) -> Iterator[int]:
    """Record short runs."""
    with _context(variant) as ctx:
        while True:
            with kv.record(ctx, folder / "run.jsonl"), ctx.sequence() as a:
                a.prefill(_TOKENS[:8])
            yield 1


def slots(variant: Path, folder: Path) -> Iterator[int]:
    """Send prompts to a slot cache, most of them new."""
    with _context(variant) as ctx, kv.SlotCache(ctx) as cache:
        for number in cycle(range(1000)):
            with cache.acquire(_prompt(number)) as lease:
                lease.decode()
            yield 1


def prefixes(variant: Path, folder: Path) -> Iterator[int]:
    """Send prompts to a prefix cache that pages branches to files and drops them."""
    with _context(variant) as ctx, kv.PrefixCache(ctx, paging=folder, budget=200_000) as cache:
        for number in cycle(range(1000)):
            with cache.acquire(_prompt(number)) as lease:
                lease.prefill()
            yield 1


def _prompt(number: int) -> list[int]:
    return [*_TOKENS[: 10 + number % 7], *(1 + (number * k) % 23 for k in range(1, 14))]


def workers(variant: Path, folder: Path) -> Iterator[int]:
    """Open a library in a worker, decode there, and close it."""
    while True:
        with (
            _library(variant, isolated=True) as library,
            library.load_model(synthetic_models.tiny()) as model,
        ):
            _use(model)
        yield 1


def main(arguments: list[str]) -> None:
    """Run the workload that the command line names; write the samples as JSON."""
    name, variant, seconds, target, folder = arguments
    module, _, function = name.rpartition(":")
    # Running the same module twice would sample its imports twice.
    there = sys.modules["__main__"] if module == __spec__.name else importlib.import_module(module)
    work: Callable[[Path, Path], Iterator[int]] = getattr(there, function)
    samples = sampling.run(work(Path(variant), Path(folder)), float(seconds), int(target))
    sys.stdout.write(json.dumps(samples) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
