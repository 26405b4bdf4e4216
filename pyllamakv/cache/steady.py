"""Step generations that all need one token, as cheaply as Python can.

Most steps are like the one before: nobody came, went or was cancelled. Between two decodes the
processor's caches hold the model, so every line here costs several times what it costs alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import NoKVSlot, ReprocessNeeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.cache.generation import Generation
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sampler import NumpySampler, Sampler


class Steady:
    """Hold generations that need one token each."""

    __slots__ = (
        "_alike",
        "_context",
        "_greedy",
        "_room",
        "_sequences",
        "_takes",
        "generations",
        "portions",
    )

    def __init__(
        self,
        context: Context,
        greedy: Sampler | NumpySampler,
        generations: Sequence[Generation],
    ) -> None:
        self.generations = tuple(generations)
        self.portions = [(one, 1) for one in generations]
        self._context = context
        self._greedy = greedy
        self._sequences = [one.sequence for one in generations]
        self._room = [(one, one.ledger, one.lease.make_room) for one in generations if one.lease]
        #: Whether all of them have the greedy sampler, which chooses for all in one call.
        self._alike = all(one.sampler is greedy for one in generations)
        self._takes = [one.take for one in generations]

    def prepare(self) -> list[int] | None:
        """Make room, and return the token of each; None where the general way is needed."""
        tokens: list[int] = []
        for one, ledger, make_room in self._room:
            have = len(ledger.tokens)
            if len(one.stream) != have + 1:
                return None
            try:
                make_room(1)
            except ReprocessNeeded as needed:
                one.stream = [*ledger.tokens, *needed.tokens, one.stream[-1]]
                return None
            except NoKVSlot:
                return None
            if len(ledger.tokens) != have:
                one.stream = [*ledger.tokens, one.stream[-1]]
            tokens.append(one.stream[-1])
        return tokens

    def decode(self, tokens: list[int]) -> None:
        """Decode a token of each."""
        if len(tokens) == 1:
            self._context.step(self._sequences[0], tokens[0])
        else:
            self._context.step_all(self._sequences, tokens)

    def choose(self) -> bool:
        """Let each take its next token; False when one of them has ended."""
        context, takes, going = self._context, self._takes, True
        if not self._alike:
            for one in self.generations:
                going = one.choose(context) and going
            return going
        if len(takes) == 1:
            return takes[0](self._greedy.pick(context))
        for take, token in zip(takes, self._greedy.pick_all(context), strict=True):
            if not take(token):
                going = False
        return going
