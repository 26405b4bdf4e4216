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
from qa.fuzzing.python_targets import summed
from qa.fuzzing.target import EDGES, Mutate, Target, WrongAnswer

if TYPE_CHECKING:
    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sequence import Sequence

_SIZES: dict[str, Any] = {"n_ctx": 32, "n_batch": 32, "n_seq_max": 3, "n_threads": 1}
#: Constants of the checksum of a cache file.
_A, _B, _ALL = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
_SUM, _SUM_CELLS, _FORMAT = 16, 24, 3
#: Bytes of a file's header.
SIZE = 88 + 3 * 128
#: Offset of the state, and its value in a file that was never flushed.
_STATE, _SCRATCH = 12, struct.pack("<I", 0x96699669)


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
    return Target(run, tuple(seeds), _mutate_state, headroom=1 << 30)


def _mutate_state(chance: Random, data: bytes, mutate: Mutate) -> bytes:
    """Mutate a saved state, in half of the cases in place: another length is refused at once."""
    if chance.random() < 0.5:
        made = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4)) if len(made) >= 8 else 0):
            at, size = chance.randrange(len(made) - 7), chance.choice((1, 4, 8))
            value = chance.choice((*EDGES, made[at] + 1, made[at] ^ 1 << chance.randrange(8)))
            made[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        data = bytes(made)
    else:
        data = mutate(data)
    return data[:1] + summed(chance, data[1:])


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
            mark = data[_STATE : _STATE + len(_SCRATCH)]
            if data and mark != _SCRATCH and not context.kv.memory.resumed:
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
    front = min(len(seeds[0]), SIZE + _meta(_SIZES["n_ctx"]))

    def mutate(chance: Random, data: bytes, mutated: Mutate) -> bytes:
        """Mutate the start of a file: the keys and values after it may have any content."""
        if chance.random() < 0.05:
            return mutated(data)
        start = mutated(data[:front])[:front].ljust(front, b"\0")
        made = start + (data if len(data) > front else seeds[1])[front:]
        return made if chance.random() < 0.2 else with_file_checksums(made)

    return Target(run, tuple(seeds), mutate, headroom=1 << 30, longest=1 << 20)


def with_file_checksums(data: bytes, n_cells: int = 32) -> bytes:
    """Return a cache file with the checksums that llama-kv-mmap.h computes.

    The checksum of K and V stays as it is: few mutations affect it. Layout (bytes): magic 8,
    format 4, state 4, checksum 8, then the checked part: checksum of cells, checksum of data,
    generation, bytes, page (8 each), cells, streams, words, tensors (4 each), layout 8, three texts
    of 128. Then the search heads, sequences, positions and tokens of the cells.
    """
    end = SIZE + _meta(n_cells)
    if len(data) < end:
        return data
    made = bytearray(data)
    struct.pack_into("<Q", made, _SUM_CELLS, checksum(data[SIZE:end], 1))
    struct.pack_into("<Q", made, _SUM, checksum(bytes(made[_SUM_CELLS:SIZE]), _FORMAT))
    return bytes(made)


def _meta(n_cells: int) -> int:
    """Return the bytes that describe the cells after the header: search head, then each cell."""
    return 8 + n_cells * (8 + 4 + 4)


def checksum(data: bytes, seed: int) -> int:
    """Return the 64-bit checksum of bytes."""

    def mix(total: int, word: int) -> int:
        total = (total ^ word) * _A & _ALL
        return total ^ total >> 29

    sums = [seed ^ _A, (seed + _B) & _ALL, ~seed & _ALL, seed ^ (_A + _B) & _ALL]
    whole = len(data) // 32 * 32
    words = struct.unpack_from(f"<{whole // 8}Q", data)
    for at in range(0, len(words), 4):
        for i in range(4):
            sums[i] = mix(sums[i], words[at + i])
    found = len(data)
    for each, word in zip(sums, struct.unpack("<4Q", data[whole:].ljust(32, b"\0")), strict=True):
        found = mix(found, mix(each, word))
    return found ^ found >> 32


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
