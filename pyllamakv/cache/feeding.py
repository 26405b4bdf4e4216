"""Say whose tokens make up the next batch, and decode them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.cache import groups as grouping
from pyllamakv.errors import PartialRemovalRefused, ReprocessNeeded
from pyllamakv.runtime.batch import Feed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.cache.generation import Generation
    from pyllamakv.runtime.context import Context

#: Steps after which whoever was left out goes before those that are being continued.
PATIENCE = 8

Portion = tuple["Generation", int]


def plan(active: Sequence[Generation], n_batch: int, steps: int) -> list[Portion]:
    """Share a batch out: who was left out too long, then who needs one token, then the prompts.

    Of each kind the one first that was fed longest ago. Groups of a prompt are not split.
    """
    if len(active) <= n_batch and all(
        len(each.stream) - len(each.ledger.tokens) == 1 for each in active
    ):
        return [(each, 1) for each in active]
    late, single, others = [], [], []
    for each in sorted(active, key=lambda one: one.served):
        if steps - each.served > PATIENCE:
            late.append(each)
        elif len(each.stream) - len(each.ledger.tokens) == 1:
            single.append(each)
        else:
            others.append(each)
    found: list[Portion] = []
    for each in (*late, *single, *others):
        have = len(each.ledger.tokens)
        n = min(len(each.stream) - have, n_batch)
        if each.groups and have + n < len(each.prompt):
            n = grouping.floor(each.groups, have + n) - have
        if n > 0:
            found.append((each, n))
            n_batch -= n
    return found


def make_room(one: Generation, n: int) -> bool:
    """Make room for ``n`` tokens; False when others have to be decoded again before them.

    ``one.stream`` follows what the lease discards. Raises NoKVSlot when there is no room.
    """
    ledger, lease = one.ledger, one.lease
    have = len(ledger.tokens)
    assert lease is not None
    try:
        lease.make_room(n)
    except ReprocessNeeded as needed:
        one.stream = [*ledger.tokens, *needed.tokens, *one.stream[have:]]
        return False
    if len(ledger.tokens) != have:
        one.stream = [*ledger.tokens, *one.stream[have:]]
    return True


def decode(context: Context, portions: Sequence[Portion]) -> None:
    """Decode one batch, with logits where all of a stream is decoded then."""
    if all(n == 1 == len(one.stream) - len(one.ledger.tokens) for one, n in portions):
        if len(portions) == 1:
            one = portions[0][0]
            context.step(one.sequence, one.stream[-1])
        else:
            context.step_all(
                [one.sequence for one, _ in portions], [one.stream[-1] for one, _ in portions]
            )
        return
    feeds = []
    for one, n in portions:
        have = len(one.ledger.tokens)
        piece = np.array(one.stream[have : have + n], dtype=np.int32)
        wants = have + n == len(one.stream) and one.max_tokens != 0
        feeds.append(Feed(one.sequence, piece, "last" if wants else "none"))
    context.decode(feeds)


def restore_logits(one: Generation) -> None:
    """Take the last token back, where none was chosen after it: an exception came between."""
    if one.sequence.open and len(one.stream) == len(one.ledger.tokens):
        try:
            one.sequence.trim(len(one.stream) - 1)
        except PartialRemovalRefused:
            one.sequence.remove()
