"""Restore states and cache files into contexts of the built library, which must survive."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

import pyllamakv
from pyllamakv.errors import KvError, KVFileError, NoKVSlot
from pyllamakv.runtime.ledger import POSITION_LIMIT
from pyllamakv.scenarios import synthetic_models
from qa.built import SPEC
from qa.fuzzing import kv_file_checksums
from qa.fuzzing.mutate import Bytes, words
from qa.fuzzing.python_targets import summed
from qa.fuzzing.target import Target, WrongAnswer

if TYPE_CHECKING:
    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sequence import Sequence

_SIZES: dict[str, Any] = {"n_ctx": 32, "n_batch": 32, "n_seq_max": 3, "n_threads": 1}
_READ = ("pyllamakv.runtime.state", "pyllamakv.runtime.state_parser")


def _model() -> Model:
    """Return a model in the library; both stay open until the process ends."""
    return pyllamakv.open(SPEC).load_model(synthetic_models.tiny())


def restored(_folder: Path) -> Target:
    """Return `Sequence.restore` on a context with other sequences."""
    model = _model()

    def make(flash: bool) -> tuple[Context, Sequence, Sequence]:
        context = model.context(**_SIZES, flash_attn=flash)
        return context, context.sequence(), context.sequence()

    made = [make(flash) for flash in (False, True)]

    def run(data: bytes) -> Iterable[Hashable]:
        # The first byte selects the layout of V: a state of the other layout is refused.
        number = data[0] & 1 if data else 0
        try:
            return _restore(*made[number], data[1:])
        except WrongAnswer:
            # A context that stays broken would be blamed on later inputs.
            with needed():
                made[number][0].close()
                made[number] = make(bool(number))
            raise

    seeds = []
    for number, (context, own, _other) in enumerate(made):
        for length in (0, 3, 20):
            context.clear()
            if length:
                context.decode(own.feed(range(length)))
            seeds.append(bytes([number]) + own.save())
    return Target(run, tuple(seeds), _READ, _summed, _Saved(seeds).mutate, headroom=1 << 30)


class _Saved:
    """Mutate a saved state, in half of the cases in place: another length is refused at once."""

    def __init__(self, seeds: list[bytes]) -> None:
        self._seeds = seeds
        self._bytes = Bytes(words(seeds, ()), 1 << 16)

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        """Return a mutated state."""
        if chance.random() < 0.5:
            return self._bytes.in_place(chance, chance.choice(self._seeds))
        return self._bytes(chance, data, other)


def _restore(context: Context, own: Sequence, other: Sequence, saved: bytes) -> list[Hashable]:
    with needed():
        context.clear()
    goes_on(context, own.feed(range(5)), other.feed(range(9, 13)))
    before = [(each.tokens, each.positions) for each in (own, other)]
    try:
        own.restore(saved)
    except KvError as error:
        agrees(context)
        now = [(each.tokens, each.positions) for each in (own, other)]
        if now != before and "is empty now" not in str(error):
            raise WrongAnswer("a state was refused, but the sequences changed") from error
        goes_on(context, own.feed([1]))
        raise
    agrees(context)
    if (other.tokens, other.positions) != before[1]:
        raise WrongAnswer("a restore changed another sequence")
    goes_on(context, own.feed([1]))
    return [len(own.tokens)]


def _summed(chance: Random, data: bytes) -> bytes:
    return data[:1] + summed(chance, data[1:])


def kept(folder: Path) -> Target:
    """Return the opening of a context with an existing cache file."""
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
                raise WrongAnswer("a file was refused, but changed") from None
            raise
        with needed(), context:
            mark = data[
                kv_file_checksums.STATE : kv_file_checksums.STATE + len(kv_file_checksums.SCRATCH)
            ]
            if data and mark != kv_file_checksums.SCRATCH and not context.kv.memory.resumed:
                raise WrongAnswer("the contents of a kept cache were discarded without a request")
            agrees(context)
            own = context.sequence(0)
            goes_on(context, own.feed([1]))
            return [len(own.tokens)]

    seeds = []
    for lengths in ((), (4, 2), (25, 0)):
        path.unlink(missing_ok=True)
        with make("fresh") as context:
            for number, length in enumerate(lengths):
                if length:
                    context.decode(context.sequence(number).feed(range(length)))
        seeds.append(path.read_bytes())
    mend = kv_file_checksums.ChecksumFixer(len(seeds[0]))
    return Target(run, tuple(seeds), ("pyllamakv.runtime.backing",), mend, _Front(mend).mutate,
                  headroom=1 << 30, longest=1 << 20)  # fmt: skip


class _Front:
    """Mutate the start of a cache file: the keys and values after it may have any content."""

    def __init__(self, mend: kv_file_checksums.ChecksumFixer) -> None:
        self._end = mend.front
        self._bytes = Bytes([b"llama-kv", struct.pack("<I", 2)], 1 << 20)

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        """Return a mutated file, usually of the same length."""
        if chance.random() < 0.05:
            return self._bytes(chance, data, other)
        front = self._bytes(chance, data[: self._end], other[: self._end])
        return front[: self._end].ljust(self._end, b"\0") + data[self._end :]


@contextmanager
def needed() -> Iterator[None]:
    """Raise WrongAnswer for an unexpected error, which would otherwise count as a refused input."""
    try:
        yield
    except KvError as error:
        what = f"{type(error).__name__}: {error}"
        raise WrongAnswer(f"the context no longer works: {what}") from error


def goes_on(context: Context, *feeds: Feed) -> None:
    """Decode more tokens, and compare cells and ledgers; raise WrongAnswer if it fails.

    Only a full cache, or one without further positions, may refuse it.
    """
    last = any(feed.sequence.next_pos + len(feed.tokens) > POSITION_LIMIT for feed in feeds)
    with needed():
        try:
            # A single token takes another code path than a batch.
            context.decode(list(feeds) if len(feeds) > 1 else feeds[0])
        except KvError as error:
            full = context.kv.stats.free < sum(len(feed.tokens) for feed in feeds)
            if not (last or (full and isinstance(error, NoKVSlot))):
                raise
    agrees(context)


def agrees(context: Context) -> None:
    """Raise WrongAnswer if cells and ledgers of a context differ."""
    with needed():
        (stream,) = context.kv.snapshot().streams
    owned = np.zeros(len(stream.pos), bool)
    for number, ledger in enumerate(context.ledgers):
        has = stream.has(number) & (stream.pos >= 0)
        owned |= has
        if sorted(stream.pos[has].tolist()) != sorted(ledger.positions):
            raise WrongAnswer(f"the positions of sequence {number} differ from its ledger")
    if (owned != (stream.pos >= 0)).any():
        raise WrongAnswer("cells are used that no sequence owns")
