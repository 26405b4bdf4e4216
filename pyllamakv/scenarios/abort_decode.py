"""Abort decodes at chosen polls, and remove tokens that a release keeps by its documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import ScenarioFailed, Untestable
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.cell_ledger import cell_differences
from pyllamakv.scenarios.player import Player, word

if TYPE_CHECKING:
    from pyllamakv.scenarios.batch_composition import Feeds
    from pyllamakv.scenarios.lab import Lab


def count_abort_polls(player: Player, feeds: Feeds) -> int:
    """Return how often a decode polls the abort callback; the decoded tokens are removed again."""
    feed = player.feed(feeds)
    starts = {owners[0]: player.ledger.next(owners[0]) for owners in feed.owners}
    player.decode(feed)
    polls = player.native.cancel_polls(player.context)
    for seq, start in starts.items():
        player.remove(seq, start)
    if polls < 8:
        msg = (
            f"this backend polls the abort callback only {polls} times in a decode, expected 8 or "
            f"more: a decode cannot be aborted halfway"
        )
        raise Untestable(msg)
    return polls


def abort(lab: Lab, player: Player, feeds: Feeds, at: int, polls: int) -> None:
    """Abort a decode at one of its polls, and check that nothing else has changed.

    Newer releases keep completed micro-batches, which the caller must remove; they are allowed here
    and removed. Tokens of the aborted micro-batch, or of another sequence, are not.
    """
    feed = player.feed(feeds)
    starts = {owners[0]: player.ledger.next(owners[0]) for owners in feed.owners}
    player.cancel_after(at)
    status = player.decode(feed, expect=None)
    player.cancel_after(-1)
    lab.expect(
        status == DecodeStatus.ABORTED,
        f"a decode cancelled at poll {at} of {polls} ended with {word(status)}, expected aborted",
    )
    snapshot = player.snapshot()
    if snapshot is not None:
        lost, ghosts, text = cell_differences(player.ledger.contents(), kv_rows.contents(snapshot))
        size = player.info.n_ubatch
        whole = at * len(feed.token) // polls // size * size
        if lost or ghosts > whole or (ghosts and not _keeps_finished_ubatches(player)):
            evidence = {"lost": lost, "ghosts": ghosts, "allowed": whole}
            msg = f"an aborted decode left {text}"
            raise ScenarioFailed(msg, failure="lost", evidence=evidence)
        if ghosts:
            lab.note(kept_micro_batches=ghosts // size)
    for seq, start in starts.items():
        player.native.seq_rm(player.context, seq, start, -1)
    player.check_cells()


def _keeps_finished_ubatches(player: Player) -> bool:
    """Return whether llama.h lets an aborted decode keep completed micro-batches.

    It does since 0.3.10, which introduced memories. Before that, the complete decode is rolled
    back.
    """
    scattered = player.info.contiguous_slots is False
    return scattered or player.native.about.probes.get("memory") == "memory"
