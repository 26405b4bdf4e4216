"""Run every native operation on every kind of memory, with arguments at their boundaries.

Run as a program, this module is the worker of `qa.native_calls`: its arguments are a variant's
spec, which part of the cases to run and of how many, and names of generated models (default: all).
Each case runs in a child process. A line that starts with ``!`` is a child that ended otherwise
than by a result or a typed error, ``~`` an assertion of llama.cpp that became an error, and the
last line has the numbers. The calls bypass the checks of the Python API: plk.h must refuse what
llama.cpp would assert.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from adapter_kit import AdapterFile
from sweep_kit import say

import pyllamakv as kv
from pyllamakv.binding.protocol import ContextParams, ModelParams, SamplerParams
from pyllamakv.errors import KvError
from pyllamakv.scenarios import architectures, synthetic_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SMALLEST, LARGEST = -(2**31), 2**31 - 1
N_CTX, N_SEQ = 256, 4

PLAIN = ContextParams(n_ctx=N_CTX, n_batch=64, n_ubatch=32, n_seq_max=N_SEQ)
STREAMS = replace(PLAIN, n_ctx=N_SEQ * N_CTX, kv_unified=False)
EMBEDS = replace(PLAIN, embeddings=True)
#: The contexts, by name. `few` has micro-batches that are smaller than the number of sequences.
SETTINGS = {
    "plain": PLAIN,
    "streams": STREAMS,
    "single": replace(PLAIN, n_seq_max=1),
    "few": replace(PLAIN, n_ubatch=2, n_seq_max=8),
    "few-streams": replace(STREAMS, n_ctx=8 * N_CTX, n_ubatch=2, n_seq_max=8),
    "narrow": replace(PLAIN, n_batch=2, n_ubatch=2, n_seq_max=8),
    "flash": replace(PLAIN, flash_attn=True),
    "quantized": replace(PLAIN, flash_attn=True, type_k=8, type_v=8),
    "swa-full": replace(PLAIN, swa_full=True),
    "defrag": replace(PLAIN, defrag_thold=0.1),
    **{f"embeds {n}": replace(EMBEDS, pooling=n) for n in range(-1, 5)},
    **{f"embeds {n} streams": replace(STREAMS, embeddings=True, pooling=n) for n in range(-1, 5)},
    "embeds 1 few": replace(EMBEDS, pooling=1, n_ubatch=4, n_batch=4, n_seq_max=8),
}
#: The models whose memories are swept: one per class of memory.
MEMORIES = tuple(name for name in synthetic_models.SHAPES if name not in ("tiny", "deep"))
#: Names of tensors that adapters change, of which a model has some.
ADAPTED = ("attn_q", "attn_k", "attn_q_a", "ssm_in", "ffn_up")
SEQUENCES = (-1, -2, SMALLEST, LARGEST, 0, 1, 3, N_SEQ, 8, 63, 64, 255, 256)
POSITIONS = (
    *(-1, -2, SMALLEST, LARGEST, 0, 3, 10, N_CTX - 1, N_CTX, N_CTX + 1, 5000),
    *(2**30 - 1, 2**30, 2**30 + 1),
)
TOKENS = (-1, -2, SMALLEST, LARGEST, 0, 63, 64, 320)
RANGES = (
    *((-1, -1), (0, -1), (0, 0), (0, 1), (2, 5), (5, 2), (8, -1), (9, -1), (10, -1), (-1, 1)),
    *((-2, -2), (SMALLEST, LARGEST), (LARGEST, LARGEST), (LARGEST, SMALLEST), (N_CTX, 5000)),
    *((0, 2**30), (0, LARGEST), (1, -1), (-1, 9), (-1, 10)),
)
DELTAS = (0, 1, -1, 7, -9, -100, N_CTX, 5000, 2**30 - 11, 2**30, LARGEST, SMALLEST, SMALLEST + 1)
DIVISORS = (1, 2, 3, 1000, LARGEST, 0, -1, SMALLEST)


@dataclass
class Cell:
    """A context under test: sequence 0 has 10 tokens, 1 has 4, and 2 shares those of 0."""

    native: Any
    model: int
    handle: int
    n_vocab: int
    n_seq: int
    adapter: int | None
    #: Assertions of llama.cpp that the library turned into errors.
    assertions: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[[], Any]) -> bool:
        """Make a call that may be refused; return whether it was accepted."""
        try:
            step()
        except KvError as error:
            if "an assertion of llama.cpp failed" in str(error):
                self.assertions.append(str(error))
            return False
        return True

    def decode(self, *tokens: tuple[int, int, tuple[int, ...]], every: bool = True) -> int:
        """Decode one batch of (token, position, sequences)."""
        ids = [n for _, _, seqs in tokens for n in seqs]
        flags = [1 if every else 0] * len(tokens)
        code: int = self.native.decode(
            self.handle,
            np.array([token for token, _, _ in tokens], np.int32),
            np.array([pos for _, pos, _ in tokens], np.int32),
            np.array([len(seqs) for _, _, seqs in tokens], np.int32),
            np.array(ids, np.int32),
            np.array(flags, np.int8),
        )
        return code

    def append(self, seq: int, n: int) -> None:
        """Decode n more tokens of a sequence, in batches of two at most."""
        for at in range(0, n, 2):
            start = max(0, self.native.seq_pos_max(self.handle, seq) + 1)
            some = [(3 + (start + i) % 50, start + i, (seq,)) for i in range(min(2, n - at))]
            self.decode(*some)

    def fill(self) -> None:
        """Decode the tokens that a case starts with; a refusal leaves less of them."""
        self.attempt(lambda: self.append(0, 10))
        if self.n_seq > 2:
            self.attempt(lambda: self.append(1, 4))
            self.attempt(lambda: self.native.seq_cp(self.handle, 0, 2, -1, -1))

    def use(self) -> None:
        """Do what a program does afterwards: each step may be refused."""
        native, handle = self.native, self.handle
        steps: list[Callable[[], Any]] = [
            lambda: native.update(handle),
            lambda: self.append(0, 1),
            lambda: self.decode(*[(5, native.seq_pos_max(handle, n) + 1, (n,)) for n in (0, 1)]),
            lambda: native.state_load(handle, 0, native.state_save(handle, 0)),
            lambda: native.seq_rm(handle, 0, -1, -1),
            lambda: self.append(0, 3),
            lambda: native.clear(handle, True),
            lambda: self.append(0, 3),
        ]
        for step in steps:
            self.attempt(step)


Case = tuple[str, "Callable[[Cell], Any]"]


def sequence_cases() -> Iterator[Case]:
    """Yield the operations on sequences, with each argument at its boundaries."""
    for seq in SEQUENCES:
        for p0, p1 in RANGES if seq in (-1, 0, 2) else RANGES[:2]:
            yield (
                f"seq_rm({seq}, {p0}, {p1})",
                lambda c, a=(seq, p0, p1): c.native.seq_rm(c.handle, *a),
            )
            yield (
                f"seq_add({seq}, {p0}, {p1}, 1)",
                lambda c, a=(seq, p0, p1, 1): c.native.seq_add(c.handle, *a),
            )
            yield (
                f"seq_div({seq}, {p0}, {p1}, 2)",
                lambda c, a=(seq, p0, p1, 2): c.native.seq_div(c.handle, *a),
            )
            yield (
                f"seq_cp({seq}, 3, {p0}, {p1})",
                lambda c, a=(seq, 3, p0, p1): c.native.seq_cp(c.handle, *a),
            )
            yield (
                f"seq_cp(0, {seq}, {p0}, {p1})",
                lambda c, a=(0, seq, p0, p1): c.native.seq_cp(c.handle, *a),
            )
        for name in ("seq_keep", "seq_pos_min", "seq_pos_max", "state_save"):
            yield f"{name}({seq})", lambda c, n=name, s=seq: getattr(c.native, n)(c.handle, s)
    for delta in DELTAS:
        for p0, p1 in ((-1, -1), (3, 6), (0, 1)):
            for seq in (0, 3):
                yield (
                    f"seq_add({seq}, {p0}, {p1}, {delta})",
                    lambda c, a=(seq, p0, p1, delta): c.native.seq_add(c.handle, *a),
                )
    for divisor in DIVISORS:
        yield (
            f"seq_div(0, -1, -1, {divisor})",
            lambda c, d=divisor: c.native.seq_div(c.handle, 0, -1, -1, d),
        )


def decode_cases() -> Iterator[Case]:
    """Yield batches with boundaries, and with several sequences per token."""
    for pos in POSITIONS:
        for seq in (0, 3):
            yield (
                f"decode([5], [{pos}], {seq})",
                lambda c, p=pos, s=seq: c.native.decode(c.handle, [5], [p], None, (s,), None),
            )
        yield f"decode(pos {pos}, 3)", lambda c, p=pos: c.decode((5, p, (3,)))
        yield (
            f"decode(pos {pos} and the next, 3)",
            lambda c, p=pos: c.decode((5, p, (3,)), (6, min(p, LARGEST - 1) + 1, (3,))),
        )
    for seq in SEQUENCES:
        yield (
            f"decode([5], [10], {seq})",
            lambda c, s=seq: c.native.decode(c.handle, [5], [10], None, (s,), None),
        )
        yield f"decode(sequences 0, {seq})", lambda c, s=seq: c.decode((5, 10, (0, s)))
    for token in TOKENS:
        yield (
            f"decode([{token}], [10], 0)",
            lambda c, t=token: c.native.decode(c.handle, [t], [10], None, (0,), None),
        )
        yield f"decode(token {token})", lambda c, t=token: c.decode((t, 10, (0,)))
    for owners in ((0, 1), (1, 0), (0, 2), (2, 0), (0, 0), (0, 3), (3, 4), (0, 1, 2, 3), ()):
        for pos in (0, 4, 10):
            yield (
                f"decode(pos {pos} of {owners})",
                lambda c, p=pos, o=owners: c.decode((5, p, o)),
            )
        yield f"decode(two of {owners})", lambda c, o=owners: c.decode((5, 10, o), (6, 11, o))
        yield (
            f"clear, decode({owners}), then each",
            lambda c, o=owners: (
                c.native.clear(c.handle, True),
                c.decode((5, 0, o), (6, 1, o)),
                [c.append(n, 1) for n in o],
            ),
        )
        yield (
            f"decode(pos 10 of 0 and of {owners})",
            lambda c, o=owners: c.decode((5, 10, (0,)), (6, 11, o)),
        )
    for order in ((0, 1), (1, 0), (0, 2, 1), (3, 1), (3, 0), (0, 1, 2, 3), (3, 2, 1, 0)):
        yield (
            f"decode(one each of {order})",
            lambda c, o=order: c.decode(
                *[(5, c.native.seq_pos_max(c.handle, n) + 1, (n,)) for n in o]
            ),
        )
        yield (
            f"clear, decode(one each of {order})",
            lambda c, o=order: (
                c.native.clear(c.handle, True),
                c.decode(*[(5, 0, (n,)) for n in o]),
            ),
        )
        yield (
            f"clear, decode(uneven {order})",
            lambda c, o=order: (
                c.native.clear(c.handle, True),
                c.decode(*[(5, i, (n,)) for n in o for i in range(1 + n)]),
            ),
        )
    yield "decode(nothing)", lambda c: c.decode()
    yield "decode(n_batch)", lambda c: c.decode(*[(5, 10 + i, (0,)) for i in range(64)])
    yield "decode(n_batch + 1)", lambda c: c.decode(*[(5, 10 + i, (0,)) for i in range(65)])
    yield "decode without outputs", lambda c: c.decode((5, 10, (0,)), every=False)
    yield "append(300)", lambda c: c.append(0, 300)
    yield "append to 3", lambda c: c.append(3, 40)
    for polls in (0, 1, 2, 5):
        yield f"cancel at poll {polls}", lambda c, n=polls: cancelled(c, n)


def cancelled(c: Cell, polls: int) -> None:
    """Abort a decode of several micro-batches."""
    c.native.cancel_after(c.handle, polls)
    try:
        c.decode(*[(5, 10 + i, (0,)) for i in range(40)])
    finally:
        c.native.cancel_after(c.handle, -1)


def state_cases() -> Iterator[Case]:
    """Yield states that are empty, cut, of other sequences, and restored twice."""
    for source in (0, 1, 2, 3):
        for target in SEQUENCES:
            yield (
                f"load {source} into {target}",
                lambda c, a=source, b=target: c.native.state_load(
                    c.handle, b, c.native.state_save(c.handle, a)
                ),
            )
        for cut in (1, 4, 8, 12, 20, 100):
            yield (
                f"load {source} without its last {cut}",
                lambda c, a=source, n=cut: c.native.state_load(
                    c.handle, 1, c.native.state_save(c.handle, a)[:-n]
                ),
            )
            yield (
                f"load the first {cut} of {source}",
                lambda c, a=source, n=cut: c.native.state_load(
                    c.handle, 1, c.native.state_save(c.handle, a)[:n]
                ),
            )
    yield "load an empty state into an empty context", empty_state
    yield "load nothing", lambda c: c.native.state_load(c.handle, 0, b"")
    yield "load zeros", lambda c: c.native.state_load(c.handle, 0, bytes(400))
    yield "load ones", lambda c: c.native.state_load(c.handle, 0, b"\xff" * 400)


def empty_state(c: Cell) -> None:
    """Save and load a state of a context in which nothing was decoded."""
    c.native.clear(c.handle, True)
    data = c.native.state_save(c.handle, 0)
    c.native.state_load(c.handle, 0, data)
    c.append(0, 2)
    c.native.state_load(c.handle, 0, data)


def graph_cases() -> Iterator[Case]:
    """Yield what reserves or builds graphs: adapters, updates, defragmentation, outputs."""
    for name in ("update", "defrag", "context_info", "counters", "mapping"):
        yield name, lambda c, n=name: getattr(c.native, n)(c.handle)
    for data in (True, False):
        yield f"clear({data})", lambda c, d=data: c.native.clear(c.handle, d)
    for cache in (-1, 0, 1, 2, 64, LARGEST, SMALLEST):
        yield f"cells({cache})", lambda c, n=cache: c.native.cells(c.handle, n)
    for index in (-1, -2, 0, 1, 2, 3, 64, LARGEST, SMALLEST):
        yield (
            f"embeddings({index})",
            lambda c, n=index: (c.append(0, 2), c.native.embeddings(c.handle, n)),
        )
        yield (
            f"logits({index})",
            lambda c, n=index: (c.append(0, 2), c.native.logits(c.handle, n, c.n_vocab)),
        )
    for threads in ((1, 2), (0, 1), (-1, 1), (513, 1), (LARGEST, 1), (SMALLEST, SMALLEST)):
        yield f"threads{threads}", lambda c, n=threads: c.native.threads(c.handle, *n)
    yield "adapter", lambda c: adapt(c)
    yield "adapter, two sequences", lambda c: (adapt(c), c.decode((5, 10, (0,)), (5, 4, (1,))))
    yield (
        "clear, adapter, fill, no adapter",
        lambda c: (
            c.native.clear(c.handle, True),
            adapt(c),
            c.fill(),
            c.native.adapters_set(c.handle, [], []),
            c.fill(),
        ),
    )
    yield "shift, adapter", lambda c: (c.native.seq_add(c.handle, 0, 2, -1, 5), adapt(c))
    for seq, p0 in ((0, 0), (0, 4), (2, 4)):
        yield (
            f"remove, shift {seq} from {p0}, update",
            lambda c, s=seq, p=p0: (
                c.native.seq_rm(c.handle, s, p, p + 2),
                c.native.seq_add(c.handle, s, p + 2, -1, -2),
                c.native.update(c.handle),
            ),
        )
    yield (
        "remove all, shift, update",
        lambda c: (
            c.native.seq_rm(c.handle, 0, -1, -1),
            c.native.seq_add(c.handle, 2, -1, -1, 3),
            c.native.update(c.handle),
        ),
    )
    yield (
        "fill the cells, shift, update",
        lambda c: (
            c.append(0, N_CTX - 20),
            c.native.seq_rm(c.handle, 0, 0, 40),
            c.native.seq_add(c.handle, 0, 40, -1, -40),
            c.native.update(c.handle),
        ),
    )
    yield (
        "holes, defrag, update",
        lambda c: (
            c.append(1, 20),
            c.append(0, 20),
            c.native.seq_rm(c.handle, 0, -1, -1),
            c.native.defrag(c.handle),
            c.native.update(c.handle),
        ),
    )
    yield "run", lambda c: sample(c, [0], [c.native.seq_pos_max(c.handle, 0) + 1])
    for seq in SEQUENCES:
        yield f"run({seq})", lambda c, s=seq: sample(c, [s], [10])
    for pos in POSITIONS:
        yield f"run(pos {pos})", lambda c, p=pos: sample(c, [3], [p])


def adapt(c: Cell) -> None:
    """Use an adapter, if the model has one, with and without a scale."""
    if c.adapter is not None:
        c.native.adapters_set(c.handle, [c.adapter], [0.5])
        c.append(0, 1)
        c.native.adapters_set(c.handle, [c.adapter], [1.0])


def sample(c: Cell, seqs: list[int], places: list[int]) -> None:
    """Run four steps of decoding and sampling."""
    sampler = c.native.sampler_new(c.model, SamplerParams(temperature=0.0))
    try:
        c.native.run(sampler, c.handle, [5] * len(seqs), places, tuple(seqs), 4, False)
    finally:
        c.native.sampler_free(sampler)


def cases() -> list[Case]:
    """Return all cases of a context."""
    return [*sequence_cases(), *decode_cases(), *state_cases(), *graph_cases()]


#: Bytes of address space: a damaged state must not ask for more.
MEMORY = 8 << 30
#: Seconds after which a case counts as one that never ends.
SILENCE = 120


class Worker:
    """Run the cases of a variant, each in a child process and a context of its own."""

    def __init__(self, spec: str, part: int, every: int) -> None:
        self.lib = kv.open(spec)
        self.native = self.lib.native
        self.part, self.every = part, every
        self.counts = {"memories": 0, "calls": 0, "accepted": 0, "refused": 0}
        self.counts["assertions"] = 0
        self.ends: list[str] = []

    def run(self, memories: Iterable[str]) -> None:
        """Run the cases of these memories, and print what was found."""
        listed = cases()
        with tempfile.TemporaryDirectory() as folder:
            for name in memories:
                self._memory(name, listed, Path(folder))
        say("=", json.dumps({**self.counts, "signals": len(self.ends)}))

    def _memory(self, name: str, listed: list[Case], folder: Path) -> None:
        try:
            model = self.native.model_load(str(synthetic_models.model(name)), ModelParams())
        except KvError:
            return
        self.counts["memories"] += 1
        adapter = self._adapter(name, model, folder)
        for setting, params in SETTINGS.items():
            where = f"{name}, {setting}: "
            if self._child(f"{where}create", model, adapter, params, lambda _: None) != "accepted":
                continue
            for title, case in listed:
                text = f"{where}{title}"
                if zlib.crc32(text.encode()) % self.every == self.part:
                    self._child(text, model, adapter, params, case)
        if adapter is not None:
            self.native.adapter_free(adapter)
        self.native.model_free(model)

    def _adapter(self, name: str, model: int, folder: Path) -> int | None:
        shape = synthetic_models.SHAPES[name]
        names = [
            each
            for each, tensor in architectures.tensors(shape).items()
            if each.startswith("blk.") and tensor.ndim == 2 and each.split(".")[2] in ADAPTED
        ]
        try:
            file = AdapterFile(names=tuple(names[:2]), shape=shape)
            path = file.write(folder / f"{name}.gguf")
            return int(self.native.adapter_load(model, str(path), len(names[:2])))
        except KvError:
            return None

    def _child(self, text: str, model: int, adapter: int | None, params: Any, case: Any) -> str:
        """Run a case in a fork of this process; return its outcome."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(SILENCE)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                outcome = self._case(model, adapter, params, case)
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"[:300]
            os.write(writer, outcome.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            outcome, *assertions = pipe.read().decode().split("\n")
        for each in assertions:
            say("~", f"{text}: {each}"[:400])
        self.counts["assertions"] += len(assertions)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            outcome = signal.Signals(os.WTERMSIG(status)).name
            self.ends.append(text)
        if outcome in ("accepted", "refused"):
            self.counts["calls"] += 1
            self.counts[outcome] += 1
        elif outcome != "none":
            say("!", f"{text}: {outcome}")
        return outcome

    def _case(self, model: int, adapter: int | None, params: Any, case: Any) -> str:
        """Run a case in a new context."""
        try:
            handle = self.native.context_new(model, params)
        except KvError:
            return "none"
        n_vocab = self.native.model_info(model).n_vocab
        n_seq = self.native.context_info(handle).n_seq_max
        cell = Cell(self.native, model, handle, n_vocab, n_seq, adapter)
        cell.fill()
        outcome = "accepted" if cell.attempt(lambda: case(cell)) else "refused"
        cell.use()
        self.native.context_free(handle)
        return "\n".join([outcome, *cell.assertions])


def main() -> None:
    """Run the worker: SPEC PART EVERY [MEMORY ...]; it runs the cases of one of so many parts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    Worker(sys.argv[1], *map(int, sys.argv[2:4])).run(sys.argv[4:] or MEMORIES)


if __name__ == "__main__":
    main()
