"""Put states and kept files into contexts of the built library, which must survive all of them."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

import pyllamakv
from pyllamakv.errors import KvError, KVFileError
from pyllamakv.harness import synthetic
from pyllamakv.trust.built import SPEC
from pyllamakv.trust.fuzzing import filesums
from pyllamakv.trust.fuzzing.readers import summed
from pyllamakv.trust.fuzzing.target import Broken, Target

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model

_SIZES: dict[str, Any] = {"n_ctx": 32, "n_batch": 32, "n_seq_max": 3, "n_threads": 1}
_READ = ("pyllamakv.runtime.state", "pyllamakv.runtime.staterows")


def _model() -> Model:
    """Return a model in the library, both open until the process ends."""
    return pyllamakv.open(SPEC).load_model(synthetic.tiny())


def restored(_folder: Path) -> Target:
    """Return `Sequence.restore` on a context that has other sequences."""
    model = _model()
    contexts = [model.context(**_SIZES, flash_attn=flash) for flash in (False, True)]
    pairs = [(each.sequence(), each.sequence()) for each in contexts]

    def run(data: bytes) -> Iterable[Hashable]:
        # The first byte chooses the layout of V: a state of the other is refused.
        context = contexts[data[0] & 1 if data else 0]
        own, other = pairs[data[0] & 1 if data else 0]
        context.clear()
        context.decode([own.feed(range(5)), other.feed(range(9, 13))])
        before = [(each.tokens, each.positions) for each in (own, other)]
        try:
            own.restore(data[1:])
        except KvError as error:
            agrees(context)
            now = [(each.tokens, each.positions) for each in (own, other)]
            if now != before and "is empty now" not in str(error):
                raise Broken("a state was refused, and the sequences changed") from error
            raise
        agrees(context)
        if (other.tokens, other.positions) != before[1]:
            raise Broken("a state was restored, and another sequence changed")
        context.decode(own.feed([1]))
        agrees(context)
        return [len(own.tokens)]

    seeds = []
    for number, context in enumerate(contexts):
        own, _other = pairs[number]
        for length in (0, 3, 20):
            context.clear()
            if length:
                context.decode(own.feed(range(length)))
            seeds.append(bytes([number]) + own.save())
    return Target(run, tuple(seeds), _READ, mend=_summed, headroom=1 << 30)


def _summed(chance: Random, data: bytes) -> bytes:
    return data[:1] + summed(chance, data[1:])


def kept(folder: Path) -> Target:
    """Return a context that goes on with what a file holds."""
    model = _model()
    path = folder / "cache.kv"

    def make(keep: bool | str = True) -> Context:
        return model.context(**_SIZES, kv_backing=path, kv_keep=keep)  # type: ignore[arg-type]

    def run(data: bytes) -> Iterable[Hashable]:
        path.write_bytes(data)
        try:
            context = make()
        except KVFileError:
            if path.read_bytes() != data:
                raise Broken("a file was refused and changed") from None
            raise
        with context:
            mark = data[filesums.STATE : filesums.STATE + len(filesums.SCRATCH)]
            if data and mark != filesums.SCRATCH and not context.kv.memory.resumed:
                raise Broken("a kept cache was begun anew, and nobody asked for that")
            agrees(context)
            own = context.sequence(0)
            if context.kv.stats.free:
                context.decode(own.feed([1]))
                agrees(context)
            return [len(own.tokens)]

    seeds = []
    for lengths in ((), (4, 2), (25, 0)):
        path.unlink(missing_ok=True)
        with make("fresh") as context:
            for number, length in enumerate(lengths):
                if length:
                    context.decode(context.sequence(number).feed(range(length)))
        seeds.append(path.read_bytes())
    mend = filesums.Mend(len(seeds[0]))
    return Target(run, tuple(seeds), ("pyllamakv.runtime.backing",), mend, _Front(mend).mutate,
                  headroom=1 << 30, longest=1 << 20)  # fmt: skip


class _Front:
    """Change what a kept file begins with: behind it lie keys and values, of which any are good."""

    def __init__(self, mend: filesums.Mend) -> None:
        from pyllamakv.trust.fuzzing.mutate import Bytes

        self._end = mend.front
        self._bytes = Bytes([b"llama-kv", struct.pack("<I", 2)], 1 << 20)

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        """Return another file of mostly the same length."""
        if chance.random() < 0.05:
            return self._bytes(chance, data, other)
        front = self._bytes(chance, data[: self._end], other[: self._end])
        return front[: self._end].ljust(self._end, b"\0") + data[self._end :]


def agrees(context: Context) -> None:
    """Raise Broken where cells and ledgers of a context do not say the same."""
    (stream,) = context.kv.snapshot().streams
    owned = np.zeros(len(stream.pos), bool)
    for number, ledger in enumerate(context.ledgers):
        has = stream.has(number) & (stream.pos >= 0)
        owned |= has
        if sorted(stream.pos[has].tolist()) != sorted(ledger.positions):
            raise Broken(f"sequence {number} has other positions than its ledger")
    if (owned != (stream.pos >= 0)).any():
        raise Broken("cells are taken that no sequence owns")
