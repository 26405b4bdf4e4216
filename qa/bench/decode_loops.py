"""Run the decode loops: this package's, and the same loop in C with upstream's interface.

Each is a context manager that yields a function; a call runs one round in an emptied cache.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyllamakv
from pyllamakv.building.variant import Variant
from pyllamakv.errors import CommandFailed, HarnessError, ToolMissing
from pyllamakv.source.store import open_store
from qa.bench.workload import Round, Runner, Workload

#: Directories of upstream's public headers.
HEADERS = ("include", "ggml/include")


@contextmanager
def ours(variant: Variant, model: Path, work: Workload) -> Iterator[Runner]:
    """Run a workload with this package."""
    with (
        pyllamakv.open(variant.folder) as library,
        library.load_model(model) as loaded,
        loaded.context(
            n_ctx=work.n_ctx,
            n_batch=work.n_batch,
            n_ubatch=work.n_batch,
            n_seq_max=work.sequences,
            n_threads=1,
        ) as context,
        loaded.sampler() as sampler,
    ):
        sequences = [context.sequence() for _ in range(work.sequences)]
        loop = _loop(context, sampler, sequences, work)

        def run() -> Round:
            for sequence in sequences:
                sequence.remove()
            sampler.reset()
            begin = time.thread_time()
            result = loop()
            return Round(time.thread_time() - begin, result)

        yield run


def _loop(
    context: pyllamakv.Context,
    sampler: pyllamakv.Sampler,
    sequences: list[pyllamakv.Sequence],
    work: Workload,
) -> Callable[[], list[float]]:
    first, one = work.tokens, sequences[0]

    def greedy() -> list[float]:
        tokens = first
        for _ in range(work.steps):
            context.step_all(sequences, tokens)
            tokens = sampler.sample_all(context)
        return list(map(float, tokens))

    def bursts() -> list[float]:
        tokens, left = first, work.steps
        while left:
            # Fewer steps if a text ends, which the other loops do not check.
            rows = context.advance(sequences, tokens, min(work.burst, left), sampler)
            tokens, left = rows[-1], left - len(rows)
        return list(map(float, tokens))

    def greedy_one() -> list[float]:
        token = first[0]
        for _ in range(work.steps):
            one.step(token)
            token = sampler.sample(context)
        return [float(token)]

    def logits() -> list[float]:
        value, tokens = 0.0, first
        for _ in range(work.steps):
            context.step_all(sequences, tokens)
            value = context.logits_all()[-1, 0]
        return [float(value)]

    def logits_one() -> list[float]:
        value = 0.0
        for _ in range(work.steps):
            one.step(first[0])
            value = context.logits()[0]
        return [float(value)]

    def prompt() -> list[float]:
        one.prefill(first)
        return [float(context.logits()[0])]

    alone = len(sequences) == 1
    if work.kind == "prompt":
        return prompt
    if work.burst:
        return bursts
    if work.samples:
        return greedy_one if alone else greedy
    return logits_one if alone else logits


@contextmanager
def plain(variant: Variant, model: Path, work: Workload) -> Iterator[Runner]:
    """Run a workload in C, on the ordinary libraries of the same variant."""
    with tempfile.TemporaryDirectory(prefix="pyllamakv-loop-") as folder:
        loop = compiled(variant, Path(folder))
        _answer(
            loop.prepare(bytes(model), work.n_ctx, work.n_batch, work.sequences), "make a context"
        )
        last = ctypes.c_float()
        call = getattr(loop, work.kind)

        def run() -> Round:
            loop.forget()
            tokens = (ctypes.c_int32 * len(work.tokens))(*work.tokens)
            begin = time.thread_time()
            code = call(work.sequences, work.steps, tokens, ctypes.byref(last))
            seconds = time.thread_time() - begin
            _answer(code, "decode")
            return Round(seconds, list(map(float, tokens)) if work.samples else [last.value])

        try:
            yield run
        finally:
            loop.finish()


def compiled(variant: Variant, folder: Path, source: Path | None = None) -> ctypes.CDLL:
    """Compile the C loops for a variant and load them.

    Raises ToolMissing without a compiler, CommandFailed with the compiler's output.
    """
    named = os.environ.get("CC", "").split()
    compiler = next(filter(None, map(shutil.which, [*named[:1], "cc", "gcc", "clang"])), None)
    if compiler is None:
        msg = "no C compiler for the loop to compare with: install gcc or clang"
        raise ToolMissing(msg, "cc", "install gcc or clang")
    _headers(variant, folder)
    library, source = folder / "loop.so", source or Path(__file__).parent / "native" / "loop.c"
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", *(f"-I{folder / each}" for each in HEADERS)]
    link = [f"-L{variant.dropin}", f"-Wl,-rpath,{variant.dropin}", "-lllama"]
    command = [compiler, *flags, "-o", str(library), str(source), *link]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = errors[0] if errors else done.stderr[-500:]
        msg = f"the loop in C does not compile for {variant.id}: {first}"
        raise CommandFailed(msg, command, done.returncode, done.stderr, first)
    return ctypes.CDLL(str(library))


def _headers(variant: Variant, folder: Path) -> None:
    store, commit = open_store(), variant.manifest.commit
    wanted = [p for each in HEADERS for p in store.ls(commit, each) if p.endswith(".h")]
    for path, content in store.read_many(commit, wanted).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content or b"")


def _answer(code: int, deed: str) -> None:
    if code:
        msg = f"the loop in C could not {deed}: it gave {code}"
        raise HarnessError(msg)
