"""Test the server workload: shares of the cache, split prompts, and complete responses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyllamakv.scenarios.cell_ledger import CellLedger
from pyllamakv.scenarios.client_workload import KEPT_PREFIX, SlotServer


class Player:
    """Simulate with the ledger only; every decode succeeds."""

    n_cells = 64
    info = SimpleNamespace(n_batch=8)

    def __init__(self) -> None:
        self.ledger = CellLedger()
        self.batches: list[dict[int, int]] = []

    def decode(self, feeds: dict[int, int]) -> None:
        self.batches.append(dict(feeds))
        for seq, count in feeds.items():
            start = self.ledger.next(seq)
            self.ledger.add([0] * count, range(start, start + count), [{seq}] * count)

    def remove(self, *arguments: int) -> None:
        self.ledger.remove(*arguments)

    def shift(self, *arguments: int) -> None:
        self.ledger.shift(*arguments)

    def check_cells(self) -> None:
        for seq in self.ledger.sequences:
            assert [pos for pos, _ in self.ledger.of(seq)] == list(range(self.ledger.next(seq)))


def test_every_request_is_answered_within_its_share() -> None:
    """Prompts and responses are decoded in order, in batches within the limit."""
    player = Player()
    SlotServer(player, 2).serve([(20, 5), (30, 2), (12, 3)])
    fed = sum(sum(batch.values()) for batch in player.batches)
    # The third prompt reuses a sequence, and shares its head with the one before.
    assert fed == 20 + 5 + 30 + 2 + 12 + 3 - KEPT_PREFIX
    assert all(sum(batch.values()) <= 8 for batch in player.batches)


def test_running_answers_get_a_token_in_every_batch() -> None:
    """Each batch has a token of every response; prompts fill the rest."""
    player = Player()
    SlotServer(player, 2).serve([(4, 6), (30, 1)])
    answering = [batch for batch in player.batches if batch.get(0) == 1]
    assert len(answering) == 6
    assert sum(batch.get(1, 0) == 7 for batch in answering) >= 3


def test_long_prompt_is_truncated_and_shifted() -> None:
    """A prompt is truncated to the share; half of the share is shifted out for the response."""
    player = Player()
    server = SlotServer(player, 2)
    server.serve([(server.share + 4, 20)])
    assert server.truncated == 4
    assert server.shifted == 2
    assert player.ledger.used <= server.share


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_client_shares_sum_to_the_cache(clients: int) -> None:
    """No batch can request more cells than are free."""
    player = Player()
    server = SlotServer(player, clients)
    assert server.share * clients == player.n_cells
    server.serve([(server.share, 9)] * (clients + 1))
    assert player.ledger.used <= player.n_cells
