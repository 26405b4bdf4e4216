"""Run every operation on a memory, and check it after each one.

A memory may refuse an operation, but must then be unchanged. Each memory type of llama.cpp has a
scenario that runs this.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import (
    NativeError,
    PartialRemovalRefused,
    ScenarioFailed,
    Unsupported,
    Untestable,
    WorkerDied,
)
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.reference import distance

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: Bytes that are not a state.
GARBAGE = (b"\0", b"\1\0\0\0" * 16, bytes(range(256)))


def exercise_memory(
    lab: Lab,
    player: Player,
    *,
    window: int = 0,
    rows: bool = True,
    shifts: bool = True,
    moves: bool = True,
) -> None:
    """Decode, copy, trim, shift, save, restore, defragment; invalid input must be refused.

    With ``rows`` False, rows are not compared, for memory whose states contain more than rows. With
    ``shifts`` False, nothing is shifted, for memory in which llama.cpp aborts. With ``moves``, the
    patches claim to move the cells of this memory in place: the library must not refuse.
    """
    verify = partial(verify_memory, lab, player, window, rows=rows)
    done: dict[str, bool] = {}
    snapshot = player.snapshot()
    if snapshot is not None:
        seen, reported = len({each.stream for each in snapshot.streams}), player.info.n_streams
        lab.expect(
            reported == seen, f"the caches have {seen} streams, but the context reports {reported}"
        )
    player.fill({0: 40, 1: 40}, interleave=True)
    verify()
    player.copy(0, 2)
    supported(player.update)
    verify()
    done["end removed"] = player.remove(1, 34)
    verify()
    done["middle removed"] = player.remove(1, 8, 16)
    if done["middle removed"] and player.info.can_shift and shifts:
        done["shifted"] = supported(lambda: player.shift(1, 16, -1, -8))
    verify()
    check_invalid_calls(player)
    _save_and_restore(player, window, rows=rows)
    verify()
    player.fill({0: 24})
    player.remove(1)
    claimed = moves and bool(lab.native.about.capabilities & Capability.DEFRAG_OPTIONS)
    if player.info.defrag or claimed:
        with player.unchanged(window=window) if rows else nullcontext():
            done["defragmented"] = supported(player.defrag)
        lab.expect(
            done["defragmented"] or not claimed,
            "the patches move the cells of this memory, but the library refused",
        )
    verify()
    if player.ledger.streams:
        # llama.cpp's `keep` affects one stream only, so remove the other sequences one by one.
        for seq in player.ledger.sequences:
            if seq != 3:
                player.remove(seq)
    else:
        player.keep(3)
    verify()
    player.clear()
    player.fill({1: 8})
    verify()
    lab.note(memory=player.info.memory.name.lower(), **done)


def _save_and_restore(player: Player, window: int, *, rows: bool) -> None:
    """Move sequence 2 to sequence 3 by its saved state, and compare the rows of all layers.

    The reference repeats a restore, so that its logits do not show what the restore omits.
    """
    before = player.rows() if rows else {}
    player.save(2, "kept")
    player.remove(2)
    player.restore(3, "kept")
    if rows:
        kv_rows.compare({3: before[2]}, player.rows(), "the restore", window=window)


def verify_memory(lab: Lab, player: Player, window: int = 0, *, rows: bool = True) -> None:
    """Compare cells, rows and logits with the ledger and the reference."""
    if window:
        player.check_windows(window)
    for seq, state in player.rows().items() if rows else ():
        expected = [pos for pos, _ in player.ledger.of(seq)]
        for section in state.sections:
            found = np.sort(section.pos).tolist()
            # A window contains the last positions, a recurrent state only the last one.
            some = section.cache == 1 or not player.info.n_caches
            right = found == expected[len(expected) - len(found) :] if some else found == expected
            lab.expect(right, f"sequence {seq} has rows of positions {found}, expected {expected}")
    lab.verify(player)


def check_searches(lab: Lab, player: Player) -> None:
    """Decode a token: its slot is searched once per cache, which the counters must agree with.

    A cache that mirrors another one has no search of its own. Does nothing without counters.
    """
    if not lab.native.about.capabilities & Capability.COUNTERS:
        return
    snapshot = player.snapshot()
    caches = len({each.swa for each in snapshot.streams}) if snapshot is not None else 1
    before = player.counters()
    player.decode({0: 1})
    after = player.counters()
    if before is None or after is None:
        msg = "the library reports counters, but none for this memory"
        raise ScenarioFailed(msg, failure="claim")
    found = after - before
    lab.expect(
        (found.slot_searches, found.slot_failures) == (caches, 0),
        f"one token in {caches} caches: expected {caches} slot searches, counted {found}",
    )


def supported(what: Callable[[], Any]) -> bool:
    """Run an operation that a memory may refuse; return whether it was done."""
    try:
        what()
    except (Unsupported, PartialRemovalRefused):
        return False
    return True


def check_invalid_calls(player: Player) -> None:
    """Pass invalid arguments to the library: each must be an error, and change nothing."""
    native, context = player.native, player.context
    beyond, empty = player.info.n_seq_max, player.info.n_seq_max - 1
    one = np.zeros(1, dtype=np.int32)
    calls: list[Callable[[], Any]] = [
        lambda: native.seq_cp(context, 0, beyond, -1, -1),
        lambda: native.seq_rm(context, beyond, -1, -1),
        lambda: native.seq_add(context, 0, 8, 4, 1),
        lambda: native.seq_div(context, 0, -1, -1, 0),
        lambda: native.decode(context, one, one, None, one + beyond, None),
        lambda: native.decode(context, one + player.n_vocab, one, None, one, None),
        lambda: native.decode(context, one, one - 1, None, one, None),
        lambda: native.cells(context, player.info.n_caches),
        lambda: native.state_save(context, beyond),
    ]
    calls += [partial(native.state_load, context, empty, data) for data in GARBAGE]
    for number, call in enumerate(calls):
        try:
            answer = call()
        except WorkerDied:
            raise
        except (NativeError, Unsupported, PartialRemovalRefused):
            continue
        # For an invalid state, llama.cpp returns 0: it read no bytes.
        if not isinstance(answer, int) or answer > 0:
            msg = f"invalid call {number} returned {answer!r}, expected an error"
            raise NativeError(msg)


def require_deterministic(lab: Lab, player: Player, tokens: int = 40) -> None:
    """Raise Untestable if two sequences of equal tokens have different logits.

    A reference on the same library would be wrong too. The note ``clean`` records whether a
    sequence that replaces a removed one starts empty; if not, `exercise_memory` avoids that.
    """
    same = [number % player.n_vocab for number in range(tokens)]
    player.decode({0: same})
    player.decode({1: same})
    player.remove(0)
    clean = supported(lambda: player.decode({0: same}))
    one, other, *more = (next(iter(step.logits.values())) for step in player.steps if step.logits)
    found = distance(one, other)
    if found > lab.tolerance.exact:
        msg = f"logits of two sequences of equal tokens differ by {found:.3g} on this release"
        raise Untestable(msg)
    lab.note(clean=clean and distance(one, more[0]) <= lab.tolerance.exact)
    player.clear()
