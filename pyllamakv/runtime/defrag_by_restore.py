"""Compact a cache by saving, removing and restoring sequences, if the library cannot move cells.

This uses public functions of llama.cpp only, and works on stock. Sequences that share cells are
refused, because each would get its own cells, and so is memory that a state does not contain
completely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import NativeError, StateError, Unsupported, WorkerDied
from pyllamakv.runtime import state, state_parser

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextHandle, Native
    from pyllamakv.runtime.parts import Cells, ContextParts
    from pyllamakv.runtime.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RestoreDefragReport:
    """The work of one defragmentation: restored bytes of states, and number of rounds."""

    bytes: int
    rounds: int


def repack(context: ContextParts, before: Snapshot) -> RestoreDefragReport:
    """Move all used cells together by saving and restoring sequences.

    The caller holds the context's lock. ``before``: its cells now. Raises Unsupported with nothing
    changed, or StateError if the library refuses a state that it has written; ``saved`` of that
    error has the lost sequences. Other exceptions, such as Ctrl-C, are raised after all sequences
    were restored.
    """
    _check(context.native, context.guard, before)
    held: dict[int, bytes] = {}
    try:
        return _rounds(context, before, held)
    except WorkerDied:
        raise
    except BaseException:
        _put_back(context, sorted(before.stats.per_sequence), held)
        raise


def _rounds(context: ContextParts, before: Snapshot, held: dict[int, bytes]) -> RestoreDefragReport:
    """Remove and restore sequences in rounds; ``held`` has the states of removed ones."""
    everything = sorted(before.stats.per_sequence)
    windows = any(each.swa for each in before.streams)
    # Moving only the highest cells may be enough, and copies less. If that leaves holes, all are
    # moved, as with sliding windows, whose states must be checked before anything is removed.
    choices = [everything] if windows else [_high(before), everything]
    now, written, rounds = before, 0, 0
    for numbers in choices:
        if not held and is_compact(now):
            break
        new = _saved(context, numbers, held)
        if not held:
            for n, raw in new.items():
                _check_whole(now, n, raw)
        held |= new
        rounds += 1
        if _exchange(context.native, context.handle, held, alone=numbers is everything):
            written += sum(map(len, held.values()))
            held.clear()
        now = _read(context.kv)
    if held:
        raise _failure(context, held)
    return RestoreDefragReport(written, rounds)


def _put_back(context: ContextParts, everything: list[int], held: dict[int, bytes]) -> None:
    """Restore the removed sequences. A further Ctrl-C restarts this; the first is raised later."""
    while held:
        try:
            if not _exchange(context.native, context.handle, held, alone=False):
                held |= _saved(context, everything, held)
                if not _exchange(context.native, context.handle, held, alone=True):
                    raise _failure(context, held)
            held.clear()
        except KeyboardInterrupt:
            continue


def is_compact(snapshot: Snapshot) -> bool:
    """Return whether every used cell is below every free cell, in each stream."""
    return all(each.stats.used_max_p1 == each.stats.used for each in snapshot.streams)


def _check(native: Native, guard: bool, before: Snapshot) -> None:
    if Capability.STATES not in native.about.capabilities:
        raise _refusal("this build can neither move nor save it")
    if not guard:
        raise _refusal("guard='off' disables everything that the library does not do itself")
    if before.stats.shared:
        raise _refusal(
            f"{before.stats.shared} cells are shared between sequences, and would be doubled by "
            "saving and restoring them; a variant with the patch compaction moves them"
        )


def _check_whole(before: Snapshot, number: int, raw: bytes) -> None:
    """Refuse a state that leaves out cells, such as those a sliding window has passed."""
    try:
        sections = state_parser.parse(raw).sections
    except StateError:
        # States of other memories contain more than cells; the visible cells are compared
        # afterwards.
        return
    kept = sum(len(section.pos) for section in sections)
    there = sum(int(each.has(number).sum()) for each in before.streams)
    # A hybrid memory has a state in addition to its cells.
    if kept < there:
        raise _refusal(
            f"the state of sequence {number} keeps {kept} of its {there} cells: the others are "
            f"outside "
            "of its window, but not of a shorter sequence's"
        )


def _high(snapshot: Snapshot) -> list[int]:
    """Return the sequences that have a cell where, with all cells together, none would be."""
    high = set()
    for each in snapshot.streams:
        used = each.stats.used
        high |= {n for n in snapshot.stats.per_sequence if each.has(n)[used:].any()}
    return sorted(high)


def _saved(context: ContextParts, numbers: list[int], held: dict[int, bytes]) -> dict[int, bytes]:
    """Return the states of sequences that could not be restored."""
    native, handle = context.native, context.handle
    try:
        return {n: native.state_save(handle, n) for n in numbers if n not in held}
    except WorkerDied:
        raise
    except NativeError as error:
        if not held:
            raise
        raise _failure(context, held) from error


def _exchange(
    native: Native, handle: ContextHandle, states: dict[int, bytes], *, alone: bool
) -> bool:
    """Remove sequences and write them back, ``alone`` in the cache; False when one is refused."""
    try:
        if alone:
            # Only an empty cache is filled starting at its first cell in every release.
            native.clear(handle, False)
        else:
            for number in states:
                native.seq_rm(handle, number, -1, -1)
        return all(native.state_load(handle, n, raw) == len(raw) for n, raw in states.items())
    except WorkerDied:
        raise
    except NativeError:
        return False


def _failure(context: ContextParts, held: dict[int, bytes]) -> StateError:
    """Return the error with the saved states, which the cache no longer has."""
    saved = {n: state.pack(context, context.ledgers[n], raw) for n, raw in held.items()}
    for number in saved:
        context.native.seq_rm(context.handle, number, -1, -1)
    for number in saved:
        context.ledgers[number].clear()
    held.clear()
    msg = (
        "the library refused a state that it had written; sequences "
        f"{', '.join(map(str, saved))} are empty now: pass `saved` of this error to "
        "Sequence.restore()"
    )
    return StateError(msg, saved=saved)


def _read(kv: Cells) -> Snapshot:
    found = kv.try_snapshot()
    assert found is not None
    return found


def _refusal(why: str) -> Unsupported:
    return Unsupported(f"the memory of this context cannot be defragmented: {why}", "DEFRAG")
