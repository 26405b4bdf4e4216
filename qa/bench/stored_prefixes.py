"""Measure what a later process reuses of stored prefixes, and how fast.

A child process serves chats, flushes them, decodes more, and kills itself. This process then serves
the same chats. `python -m qa.bench.stored_prefixes VARIANT MODEL STORE` is that child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import pyllamakv
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import HarnessError
from qa import child_environment
from qa.bench.figure import Figure
from qa.bench.loop import model_file
from qa.bench.measure import MINIMUM_PAIRS, interleave, interval

GROUP = "Stored prefixes"
Tick = Callable[[], None]

#: The targets: share of the flushed tokens, and of the time of an evaluation.
REUSED, SHARE = 0.999, 0.05
#: Largest difference of logits, as a share of the largest logit: that of batches of other sizes.
TOLERANCE = 1e-3
PREFIX = 1000
OPTIONS: Final[dict[str, Any]] = {"n_ctx": 4096, "n_batch": 512, "n_seq_max": 8, "n_threads": 1}
_SYSTEM: Final = [3 + i % 400 for i in range(500)]
CHATS: Final = tuple([*_SYSTEM[: 100 * n], *[5 + n] * (40 + 30 * n)] for n in range(6))


def figures(
    tick: Tick, spec: str = "0.3.9+patched", pairs: int = MINIMUM_PAIRS, path: Path | None = None
) -> list[Figure]:
    """Measure with a model of 260 thousand parameters, or the one at ``path``."""
    path = path or model_file()
    with (
        tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as name,
        pyllamakv.open(spec) as library,
        library.load_model(path) as model,
    ):
        folder = Path(name)
        return [
            _reused(model, spec, folder / "killed", tick),
            *(_first_token(model, folder / f"{flash}", flash, pairs, tick) for flash in (0, 1)),
        ]


def _reused(model: pyllamakv.Model, spec: str, store: Path, tick: Tick) -> Figure:
    command = [sys.executable, "-m", "qa.bench.stored_prefixes", spec, str(model.path), str(store)]
    done = subprocess.run(
        command,
        env=child_environment.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        raise HarnessError(f"the child ended with {done.returncode}: {done.stderr[-500:]}")
    flushed, reused, far = int(done.stdout), 0, 0.0
    with model.context(**OPTIONS) as ctx, PrefixCache(ctx, store=store) as cache:
        for chat in CHATS:
            with cache.acquire([*chat, 1]) as lease:
                lease.prefill()
                mine = lease.sequence.logits().copy()
            reused = cache.stats().loaded_tokens
            with ctx.sequence() as fresh:
                ctx.prefill(fresh, chat)
                ctx.step(fresh, 1)
                expected = ctx.logits().copy()
            far = max(far, float(np.abs(mine - expected).max() / np.abs(expected).max()))
            tick()
    share = reused / flushed
    return Figure(
        GROUP,
        "tokens reused after `kill -9`, of those flushed",
        f"{share:.2%}: {reused} of {flushed}; logits differ by {far:.1e} of the largest",
        f">= {REUSED:.1%}, <= {TOLERANCE:.0e}",
        share >= REUSED and far <= TOLERANCE,
        "other batches and cells change the order of sums",
        f"{len(CHATS)} chats with common prefixes, tokens counted once; the child killed itself",
        {"reused": reused, "flushed": flushed, "far": far},
    )


def _first_token(model: pyllamakv.Model, store: Path, flash: int, pairs: int, tick: Tick) -> Figure:
    prompt = [3 + i % 400 for i in range(PREFIX + 1)]
    options: dict[str, Any] = {**OPTIONS, "flash_attn": bool(flash)}
    with model.context(**options) as one, model.context(**options) as other:
        with PrefixCache(one, store=store) as cache:
            with cache.acquire(prompt[:PREFIX]) as lease:
                lease.prefill()
            cache.flush()
            size = cache.stats().stored_bytes
        rows = []

        def stored() -> float:
            begin = time.perf_counter()
            with PrefixCache(one, store=store) as cache, cache.acquire(prompt) as lease:
                lease.prefill()
                rows.append(one.logits().copy())
                seconds = time.perf_counter() - begin
                if lease.cached != PREFIX:
                    raise HarnessError(f"{lease.cached} of {PREFIX} tokens were reused")
                lease.sequence.trim(PREFIX)
            return seconds

        def evaluated() -> float:
            begin = time.perf_counter()
            with other.sequence() as sequence:
                other.prefill(sequence, prompt[:PREFIX])
                other.step(sequence, prompt[PREFIX])
                rows.append(other.logits().copy())
                return time.perf_counter() - begin

        times = interleave(stored, evaluated, pairs=pairs, progress=tick)
    same = all(np.array_equal(rows[0], row) for row in rows)
    ratio = times.ratio
    return Figure(
        GROUP,
        f"the first token after {PREFIX} stored tokens, {'' if flash else 'no '}flash attention: "
        "over evaluating them",
        f"{ratio.format(4)} x, {interval(times.first).median * 1e3:.1f} ms; logits "
        f"{'bit-equal' if same else 'differ'}",
        f"<= {SHARE}, bit-equal",
        ratio.high <= SHARE and same,
        f"{size / 1e6:.1f} MB are read",
        f"{pairs} interleaved pairs with opening the store, the files in the page cache, 1 thread",
        {"stored": times.first, "evaluated": times.second},
    )


def main(spec: str, path: Path, store: Path) -> None:
    """Serve and flush the chats, write the number of flushed tokens, decode more, and die."""
    with (
        pyllamakv.open(spec) as library,
        library.load_model(path) as model,
        model.context(**OPTIONS) as ctx,
    ):
        cache = PrefixCache(ctx, store=store)
        for chat in CHATS:
            with cache.acquire(chat) as lease:
                lease.prefill()
        sys.stdout.write(f"{cache.flush()}\n")
        sys.stdout.flush()
        with cache.acquire([*CHATS[-1], 9, 9, 9]) as lease:
            lease.prefill()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
