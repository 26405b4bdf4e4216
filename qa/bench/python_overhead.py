"""Measure the overhead of Python: import, a snapshot, one decode call."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyllamakv
from pyllamakv.errors import Untestable
from pyllamakv.home import shim
from pyllamakv.scenarios import synthetic_models
from qa.bench.figure import Figure
from qa.bench.measure import Interval, clock, interleave, interval

GROUP = "What Python costs"
Tick = Callable[[], None]

#: Interleaved pairs of rounds of decodes.
DECODES = 200

#: The same decodes in C, with a context of its own from the same library.
C_LOOP = """
#include "plk.h"
#include <dlfcn.h>
static void *lib;
static plk_context *context;
#define GET(name) __typeof__(&name) f_##name = (__typeof__(&name)) dlsym(lib, #name)
int prepare(const char *library, const char *path, uint32_t n_ctx, uint32_t n_batch) {
    if (!(lib = dlopen(library, RTLD_NOW | RTLD_LOCAL))) return -1;
    GET(plk_init); GET(plk_model_load); GET(plk_context_new);
    plk_model_params mp = {.size = sizeof mp, .use_mmap = 1};
    plk_context_params cp = {.size = sizeof cp, .n_ctx = n_ctx, .n_batch = n_batch,
        .n_ubatch = n_batch, .n_seq_max = 1, .n_threads = 1, .n_threads_batch = 1, .type_k = 1,
        .type_v = 1, .kv_unified = 1, .defrag_thold = -1, .guard = 1, .offload_kqv = 1};
    plk_model *model;
    int code = f_plk_init();
    if (!code) code = f_plk_model_load(path, &mp, &model);
    return code ? code : f_plk_context_new(model, &cp, &context);
}
int steps(int32_t n, float *sum) {
    GET(plk_decode); GET(plk_logits);
    int32_t token, pos, seq = 0;
    plk_batch batch = {.size = sizeof batch, .n_tokens = 1, .token = &token, .pos = &pos,
        .seq_id = &seq};
    for (pos = 0; pos < n; pos++) {
        token = pos % 32;
        int code = f_plk_decode(context, &batch);
        if (code) return code;
        *sum += f_plk_logits(context, -1)[0];
    }
    return 0;
}
int forget(void) { GET(plk_seq_rm); return f_plk_seq_rm(context, 0, -1, -1); }
"""


def figures(tick: Tick) -> list[Figure]:
    """Return all figures of this module."""
    each = (imports, snapshot, decode_call)
    return [figure(tick) for figure in each]


def _python(*words: str) -> Callable[[], float]:
    # Bytecode is cached between runs, as in any second run.
    keep = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return lambda: clock(
        lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True, env=keep)
    )


def imports(tick: Tick) -> Figure:
    """Compare the import of this package with that of numpy and cffi."""
    start = interval([_python("-c", "pass")() for _ in range(10)]).median
    both = ("import pyllamakv", "import numpy, cffi")
    pairs = interleave(*(_python("-c", code) for code in both), progress=tick)
    times = zip(pairs.first, pairs.second, strict=True)
    ratio = interval([(a - start) / (b - start) for a, b in times])
    return Figure(
        GROUP,
        "`import pyllamakv`",
        f"{ratio.format()} x numpy and cffi",
        "<= 1.15 x",
        ratio.median <= 1.15,
        "other modules are imported on first use",
        "alternating processes, minus the start of Python",
        {"ours": pairs.first, "numpy and cffi": pairs.second},
    )


def snapshot(tick: Tick, spec: str = "0.3.9+patched") -> Figure:
    """Measure a snapshot with its statistics of 4096 cells, with 1 to 64 sequences."""
    found, copied = {}, 0.0
    for sequences in (1, 8, 64):
        with (
            pyllamakv.open(spec) as library,
            library.load_model(synthetic_models.tiny()) as model,
            model.context(n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=sequences) as context,
        ):
            _fill(context, sequences, 4096 - 64)
            found[sequences] = _many(partial(_look, context))
            copied = _many(partial(context.native.cells, context.handle, 0)).median
        tick()
    worst = max(found.values(), key=lambda each: each.median)
    return Figure(
        GROUP,
        "a snapshot with statistics of 4096 cells",
        ", ".join(f"{n} sequences {each.format(0, 'us')}" for n, each in found.items()),
        "<= 200 us",
        worst.median <= 200,
        f"copying the cells: {copied:.0f} us",
        "median of 200 calls each",
        {str(n): each.median for n, each in found.items()},
    )


def _look(context: pyllamakv.Context) -> None:
    stats = context.kv.snapshot().stats
    _ = (stats.used, stats.free, stats.holes, stats.largest_hole)
    _ = (stats.fragmentation, len(stats.per_sequence))


def _many(call: Callable[[], object]) -> Interval:
    for _ in range(20):
        call()
    return interval([clock(call) * 1e6 for _ in range(200)])


def _fill(context: pyllamakv.Context, sequences: int, cells: int) -> None:
    each = cells // sequences
    for number in range(sequences):
        sequence = context.sequence()
        sequence.prefill([(number + i) % 32 for i in range(each)])


def decode_call(tick: Tick, spec: str = "0.3.9+patched", steps: int = 64) -> Figure:
    """Compare one-token decodes with logits from Python with the same calls from C.

    The clock is the CPU time of the thread, which other programs affect least.
    """
    with tempfile.TemporaryDirectory() as folder:
        loop = _c_loop(Path(folder))
        with pyllamakv.open(spec) as library, library.load_model(synthetic_models.tiny()) as model:
            _answer(
                loop.prepare(bytes(library.path), bytes(synthetic_models.tiny()), 512, 64),
                "prepare",
            )
            with model.context(n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1) as context:
                total = ctypes.c_float()
                sequence = context.sequence()

                def from_c() -> float:
                    begin = time.thread_time()
                    code = loop.steps(steps, ctypes.byref(total))
                    seconds = time.thread_time() - begin
                    _answer(code, "decode")
                    loop.forget()
                    return seconds / steps

                def from_python() -> float:
                    sequence.remove()
                    begin = time.thread_time()
                    for i in range(steps):
                        sequence.step(i % 32)
                        _ = context.logits()[0]
                    return (time.thread_time() - begin) / steps

                pairs = interleave(from_python, from_c, pairs=DECODES, progress=tick)
    micro = interval([(a - b) * 1e6 for a, b in zip(pairs.first, pairs.second, strict=True)])
    return Figure(
        GROUP,
        "one decode call with its logits, over the same call from C",
        micro.format(1, "us"),
        "<= 20 us",
        micro.median <= 20,
        f"the decode itself: {interval(pairs.second).median * 1e6:.0f} us",
        f"{DECODES} interleaved pairs of {steps} decodes, model of one layer, CPU time",
        {"python": pairs.first, "c": pairs.second},
    )


def _c_loop(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        msg = "no C compiler for the loop to compare with: install gcc or clang"
        raise Untestable(msg)
    source = folder / "loop.c"
    source.write_text(C_LOOP, encoding="utf-8")
    library = folder / "loop.so"
    flags = ["-O2", "-shared", "-fPIC", "-I", str(shim())]
    command = [compiler, *flags, "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _answer(code: int, deed: str) -> None:
    if code:
        msg = f"the loop in C could not {deed}: {code}"
        raise Untestable(msg)
