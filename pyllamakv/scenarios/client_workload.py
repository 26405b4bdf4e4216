"""Serve clients concurrently from one cache, like a server.

Each client has a sequence and a share of the cells. A prompt is decoded in pieces that fit into the
batch; a generating client adds one token per batch. The cells of an answer remain until the
sequence's next request, which keeps the common prefix.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.scenarios.player import Player

#: Tokens that every prompt begins with, and that stay when a client's share is full.
KEPT_PREFIX = 5


@dataclass
class ClientRequest:
    """One request: the remaining tokens of its prompt and its answer."""

    seq: int
    prompt: int = 0
    answer: int = 0

    @property
    def busy(self) -> bool:
        """Return whether there is anything left to decode."""
        return self.prompt + self.answer > 0


class SlotServer:
    """Divide a player's cells equally among ``clients`` sequences."""

    def __init__(self, player: Player, clients: int) -> None:
        self.player = player
        self.share = player.n_cells // clients
        self.clients = [ClientRequest(seq) for seq in range(clients)]
        self.truncated = 0
        self.shifted = 0

    def serve(self, requests: Iterable[tuple[int, int]]) -> None:
        """Serve (prompt, answer) token counts in order; a prompt is longer than `HEAD`.

        The shares sum up to the cache, so every decode has enough cells and must succeed. Prompts
        are truncated to a share, and old tokens are dropped during an answer.
        """
        waiting = deque(requests)
        while waiting or any(client.busy for client in self.clients):
            for client in self.clients:
                if waiting and not client.busy:
                    self._begin(client, *waiting.popleft())
            # Generating clients come first, so that they never wait for prompts of others.
            self.clients.sort(key=lambda client: client.prompt)
            self._decode()
        self.player.check_cells()

    def _begin(self, client: ClientRequest, prompt: int, answer: int) -> None:
        self.player.remove(client.seq, KEPT_PREFIX)
        self.truncated += max(0, prompt - self.share)
        client.prompt = min(prompt, self.share) - self.player.ledger.next(client.seq)
        client.answer = answer

    def _decode(self) -> None:
        room = self.player.info.n_batch
        feeds = {}
        for client in self.clients:
            count = min(client.prompt or min(client.answer, 1), room)
            if not count:
                continue
            if self.player.ledger.next(client.seq) == self.share:
                self._drop_oldest_half(client.seq)
            feeds[client.seq] = count
            room -= count
            if client.prompt:
                client.prompt -= count
            else:
                client.answer -= count
        self.player.decode(feeds)

    def _drop_oldest_half(self, seq: int) -> None:
        gone = (self.share - KEPT_PREFIX) // 2
        self.player.remove(seq, KEPT_PREFIX, KEPT_PREFIX + gone)
        self.player.shift(seq, KEPT_PREFIX + gone, -1, -gone)
        self.shifted += 1
