"""Save a sequence with its tokens, and restore it without losing the present content on failure."""

from __future__ import annotations

import json
import logging
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.protocol import Capability
from pyllamakv.content_digest import is_digest
from pyllamakv.errors import ModelUnverified, NativeError, StateError, StateForeign, WorkerDied
from pyllamakv.runtime import adapter, state_parser, state_slices
from pyllamakv.runtime.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextInfo, ContextParams
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.parts import Cells, ContextParts, ModelParts, SequenceParts

LOG = logging.getLogger("pyllamakv.runtime")

_MAGIC = b"PLKSEQ1\n"
_HEAD = struct.Struct("<8sII")
_UNKNOWN = "it was saved for one Model object alone (portable=False), or by an earlier version"
_UNVERIFIED = "unverified"
_REFUSED = (
    "the library refused the state: it may belong to another release, be damaged, or the cache has "
    "no hole large enough; nothing was changed"
)


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """An unpacked save: tokens and positions (n,) int32, the library's bytes, model and shape.

    ``first_moved`` is as in a `Ledger`.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    raw: bytes | memoryview = b""
    first_moved: int | None = None
    fits: dict[str, Any] = field(default_factory=dict)


def save(sequence: SequenceParts, *, portable: bool) -> bytes:
    """Return a sequence as bytes; `Sequence.save` describes it."""
    context = sequence.context
    sequence.check(context)
    identity = _identity(context.model, context.adapters) if portable else {}
    if "unverified" in identity:
        LOG.warning("a saved sequence is of an unverified model: %s", identity["unverified"])
    with context.lock:
        sequence.check(context)
        context.native.about.require(Capability.STATES, "save the state of a sequence")
        ledger = sequence.ledger
        raw = context.native.state_save(context.handle, sequence.id) if len(ledger) else b""
        return pack(context, ledger, raw, identity)


def pack(
    context: ContextParts,
    ledger: Ledger,
    raw: bytes,
    identity: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Serialise a sequence's tokens and the library's state; `unpack` is the inverse.

    Without ``identity``, only the same `Model` object can restore it.
    """
    tokens = np.array(ledger.tokens, dtype="<i4").tobytes()
    positions = np.array(ledger.positions, dtype="<i4").tobytes()
    applied = {"adapters": _UNVERIFIED if context.adapters_key else ""}
    origin = _origin(context.model, context.adapters_key)
    own = shape(context.model, context.params, context.info)
    fits = {**own, **applied, **identity, "origin": origin}
    about = {"fits": fits, "tokens": len(ledger), "exact": ledger.first_moved}
    head = json.dumps(about, sort_keys=True).encode()
    body = b"".join((head, tokens, positions, raw))
    return _HEAD.pack(_MAGIC, len(head), zlib.crc32(body)) + body


def unpack(saved: bytes) -> SavedSequence:
    """Parse a saved sequence. Raises StateError if it is damaged or something else."""
    if len(saved) < _HEAD.size or not saved.startswith(_MAGIC):
        msg = "this is not a saved sequence: expected a result of Sequence.save()"
        raise StateError(msg)
    _, size, checksum = _HEAD.unpack_from(saved)
    body = memoryview(saved)[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        msg = "this saved sequence is damaged: its checksum does not match; save it again"
        raise StateError(msg)
    try:
        about = json.loads(bytes(body[:size]))
        n, fits = int(about["tokens"]), dict(about["fits"])
        if n < 0:
            raise ValueError(f"it counts {n} tokens")
        first_moved = about.get("exact")
        first_moved = None if first_moved is None else int(first_moved)
        tokens = np.frombuffer(body, "<i4", n, size).astype(np.int32)
        positions = np.frombuffer(body, "<i4", n, size + 4 * n).astype(np.int32)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        msg = f"this saved sequence cannot be read: {error}"
        raise StateError(msg) from error
    return SavedSequence(tokens, positions, bytes(body[size + 8 * n :]), first_moved, fits)


def restore(sequence: SequenceParts, saved: bytes, *, accept_unverified_model: bool) -> None:
    """Restore a saved sequence: see `Sequence.restore`."""
    content = unpack(saved)
    sequence.check(sequence.context)
    _check_fits(sequence.context, content.fits, accept=accept_unverified_model)
    load(sequence, content)


def _check_fits(context: ContextParts, fits: dict[str, Any], *, accept: bool) -> None:
    """Raise StateForeign unless a save is of this model, cache type and these adapters."""
    model = context.model
    here = shape(model, context.params, context.info)
    wrong = [key for key in here if fits.get(key) != here[key]]
    if wrong:
        shown = ", ".join(f"{key} {fits.get(key)} (here {here[key]})" for key in wrong)
        msg = f"this saved sequence belongs to another model or cache: {shown}; nothing was changed"
        raise StateForeign(msg, wrong)
    if fits.get("origin") == _origin(model, context.adapters_key):
        return
    applied, there = _adapters(context.adapters), fits.get("adapters", "")
    if there != applied or applied == _UNVERIFIED:
        msg = (
            f"this saved sequence was evaluated with other LoRA adapters: their digest is "
            f"{there or 'none'}, here {applied or 'none'}; use the adapters and scales of the "
            "save; nothing was changed"
        )
        raise StateForeign(msg, ("adapters",))
    there = fits.get("digest")
    known = is_digest(there)
    if accept and not known:
        return
    own, path = _identity(model, context.adapters), model.path
    if known and there == own["digest"]:
        return
    if known and is_digest(own["digest"]):
        msg = (
            f"this saved sequence is of another model: its digest is {there}, and that of {path} "
            f"is {own['digest']}; load the model of the save; nothing was changed"
        )
        raise StateForeign(msg, ("digest",))
    if accept:
        return  # this model is unverified
    why = own.get("unverified") if known else fits.get("unverified", _UNKNOWN)
    msg = (
        f"the model of this saved sequence cannot be compared with this one: {why} (digest of the "
        f"save: {there if known else 'unknown'}, of {path}: {own['digest'] or 'unknown'}); if it "
        "is the same model, pass accept_unverified_model=True; nothing was changed"
    )
    raise StateForeign(msg, ("digest",))


def load(sequence: SequenceParts, content: SavedSequence) -> None:
    """Replace a sequence by an unpacked save of its model. Raises StateError; nothing changes."""
    context = sequence.context
    with context.lock, Uninterrupted():
        sequence.check(context)
        context.native.about.require(Capability.STATES, "restore the state of a sequence")
        n_vocab = context.model.info.n_vocab
        if ((content.tokens < 0) | (content.tokens >= n_vocab)).any():
            msg = f"this save has tokens outside [0, {n_vocab}); nothing was changed"
            raise StateError(msg)
        if content.raw:
            _load(sequence, content)
        elif len(content.tokens):
            msg = "this save has tokens and no state; nothing was changed"
            raise StateError(msg)
        elif not context.native.seq_rm(context.handle, sequence.id, -1, -1):
            msg = "the memory refuses to remove the sequence; nothing was changed"
            raise StateError(msg)
        _record(sequence, content)


def _load(sequence: SequenceParts, content: SavedSequence) -> None:
    context, native = sequence.context, sequence.context.native
    snapshot = context.kv.try_snapshot()
    # A recurrent memory has no cells per token, and always a place for the state of each sequence.
    counts = snapshot is not None and snapshot.streams
    needed = _cells(content) if counts else 0
    room = _room(snapshot, sequence.id) if snapshot is not None and needed else None
    if room is not None and room[0] < needed:
        msg = (
            f"the state has {needed} cells and {room[0]} are free (this sequence's own counted); "
            "remove tokens first; nothing was changed"
        )
        raise StateError(msg)
    if room is not None and room[1] < needed and context.info.contiguous_slots:
        _need_defrag(context.info, needed, room[1])
    backup = native.state_save(context.handle, sequence.id) if len(sequence) else b""
    together = room is None or room[1] >= needed
    try:
        if _place(sequence, content.raw, together=together) and (
            not counts or _positions(context.kv, sequence.id) == content.positions.tolist()
        ):
            return
    except WorkerDied:
        raise
    except BaseException:
        # The progress is unknown, for example without memory.
        if not (backup and _put_back(sequence, backup)):
            native.seq_rm(context.handle, sequence.id, -1, -1)
            sequence.ledger.clear()
        raise
    if backup and not _put_back(sequence, backup):
        lost = {sequence.id: pack(context, sequence.ledger, backup)}
        sequence.ledger.clear()
        msg = (
            "the library refused the state, and the cache is too fragmented to restore "
            f"the sequence's content: sequence {sequence.id} is empty now; make room, then restore "
            f"error.saved[{sequence.id}]"
        )
        raise StateError(msg, saved=lost)
    if not backup:
        native.seq_rm(context.handle, sequence.id, -1, -1)
    raise StateError(_REFUSED)


def load_parts(
    sequence: SequenceParts,
    spare: SequenceParts,
    content: SavedSequence,
    parts: Iterable[memoryview],
) -> None:
    """Fill an empty sequence with the states of its tokens in several parts, one after the other.

    The tokens and positions are those of ``content``; its ``raw`` is not used. Each part is loaded
    into ``spare``, another empty sequence, which then shares its cells. Raises StateError, or what
    the iteration over ``parts`` raises, with both sequences empty.
    """
    context, native = sequence.context, sequence.context.native
    with context.lock, Uninterrupted():
        sequence.check(context)
        spare.check(context)
        try:
            for raw in parts:
                if not _place(spare, raw, together=True):
                    raise StateError(_REFUSED)
                native.seq_cp(context.handle, spare.id, sequence.id, -1, -1)
                native.seq_rm(context.handle, spare.id, -1, -1)
            if _positions(context.kv, sequence.id) != content.positions.tolist():
                raise StateError(_REFUSED)
        except WorkerDied:
            raise
        except BaseException:
            for each in (spare, sequence):
                native.seq_rm(context.handle, each.id, -1, -1)
            raise
        _record(sequence, content)


def _record(sequence: SequenceParts, content: SavedSequence) -> None:
    """Write a restored sequence to the ledger."""
    context = sequence.context
    context.defrag_policy.freed()
    first = context.new_marks(len(content.tokens))
    sequence.ledger.replace(
        content.tokens.tolist(),
        content.positions.tolist(),
        range(first, first + len(content.tokens)),
        content.first_moved,
    )


def _put_back(sequence: SequenceParts, backup: bytes) -> bool:
    """Restore the previous content of the sequence into new cells."""
    if not _try(sequence, backup):
        return False
    sequence.ledger.renew_marks(sequence.context.new_marks(len(sequence.ledger)))
    return True


def _place(sequence: SequenceParts, raw: bytes | memoryview, *, together: bool) -> bool:
    """Load a state; False when the library refuses it. ``together``: there is a hole for it."""
    context = sequence.context
    # Most releases restore a state into one hole: defragment if no hole is large enough.
    scattered = context.info.contiguous_slots is False or not context.info.defrag
    if (together or scattered) and _try(sequence, raw):
        return True
    if not context.info.defrag:
        return False
    context.native.seq_rm(context.handle, sequence.id, -1, -1)
    context.native.defrag(context.handle)
    return _try(sequence, raw)


def _need_defrag(info: ContextInfo, needed: int, hole: int) -> None:
    if not info.defrag:
        msg = (
            f"the state needs {needed} contiguous cells, the largest hole has {hole}, and this "
            "build cannot defragment; remove tokens first; nothing was changed"
        )
        raise StateError(msg)


def _try(sequence: SequenceParts, raw: bytes | memoryview) -> bool:
    context = sequence.context
    try:
        return context.native.state_load(context.handle, sequence.id, raw) == len(raw)
    except WorkerDied:
        raise
    except NativeError:
        return False


def _cells(content: SavedSequence) -> int:
    """Return how many cells a state needs; 0 where its memory has none per token."""
    # Slices find one attention cache without copying V; the parser knows all memories.
    with suppress(StateError):
        return len(state_slices.read(content.raw).positions)
    try:
        return state_parser.parse(content.raw).cells
    except StateError:
        return 0


def _positions(kv: Cells, number: int) -> list[int]:
    """Return the positions of a sequence in the cells, except those outside a window."""
    snapshot = kv.try_snapshot()
    streams = () if snapshot is None else (each for each in snapshot.streams if not each.swa)
    return sorted(pos for each in streams for pos in each.pos[each.has(number)].tolist())


def _room(snapshot: Snapshot, number: int) -> tuple[int, int]:
    """Return free cells and largest hole, were the sequence's own cells free."""
    free = largest = 0
    for each in snapshot.streams:
        if each.swa:
            continue
        own = each.has(number) & (each.sharers == 1)
        pos = np.where(own, np.int32(-1), each.pos)
        stats = type(each)(pos, each.shift, each.seqs, each.info).stats
        free, largest = max(free, stats.free), max(largest, stats.largest_hole)
    return free, largest


def _origin(model: ModelParts, adapters_key: str) -> list[str]:
    """Return what identifies model and adapters within the process, without reading their files."""
    return [model.origin, adapters_key]


def _identity(model: ModelParts, adapters: Mapping[Any, float]) -> dict[str, str]:
    """Return the digests of model and adapters; with the reason, if the model is unverified."""
    found = {"digest": "", "adapters": _adapters(adapters)}
    try:
        found["digest"] = model.digest()
    except ModelUnverified as error:
        found["unverified"] = str(error)
    return found


def _adapters(adapters: Mapping[Any, float]) -> str:
    """Return the digest of the adapters, empty for none."""
    try:
        return adapter.digest(tuple(adapters.items()))
    except ModelUnverified as error:
        LOG.warning("the adapters of a sequence are unverified: %s", error)
        return _UNVERIFIED


def shape(model: ModelParts, params: ContextParams, info: ContextInfo) -> dict[str, Any]:
    """Return what a save and a context must have in common besides the content of the model."""
    return {
        "n_vocab": model.info.n_vocab,
        "n_embd": model.info.n_embd,
        "n_layer": model.info.n_layer,
        "n_head_kv": model.info.n_head_kv,
        "n_params": model.info.n_params,
        "type_k": params.type_k,
        "type_v": params.type_v,
        "v_transposed": info.v_transposed,
    }
