"""Step generations that all need one token, as cheaply as Python can.

Most steps are like the one before: nobody came, went or was cancelled. Between two decodes the
processor's caches hold the model, so every line here costs several times what it costs alone.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from pyllamakv.errors import NoKVSlot, ReprocessNeeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.cache.generation import Generation
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sampler import NumpySampler, Sampler


class Outcome(Enum):
    """Say what became of a step: all go on, somebody ended, or nothing was decoded."""

    GOING = 0
    ENDED = 1
    NOTHING = 2


GOING, ENDED, NOTHING = Outcome


class Steady:
    """Hold generations that need one token each.

    ``steps`` counts what was decoded, ``decoding`` says that it is being done, and another number
    than the context's in ``cancels`` ends it before the next step.
    """

    __slots__ = (
        "_alike", "_context", "_greedy", "_rooms", "_sequences", "cancels",
        "decoding", "generations", "portions", "steps",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        greedy: Sampler | NumpySampler,
        generations: Sequence[Generation],
        cancels: int,
    ) -> None:
        self.generations = tuple(generations)
        self.portions = [(one, 1) for one in generations]
        self.steps = 0
        self.cancels = cancels
        self.decoding = False
        self._context = context
        self._greedy = greedy
        #: Whether all of them have the greedy sampler, which chooses for all in one call.
        self._alike = all(one.sampler is greedy for one in generations)
        self._sequences = [one.sequence for one in generations]
        self._rooms = [(one, one.ledger, one.lease.make_room) for one in generations if one.lease]

    def step(self) -> Outcome:
        """Make room, decode a token of each, and let each take its next one.

        NOTHING when that has to be done in the general way. Raises DecodeError.
        """
        context = self._context
        if context.cancels != self.cancels:
            return NOTHING
        tokens = []
        for one, ledger, make_room in self._rooms:
            have = len(ledger.tokens)
            if len(one.stream) != have + 1:
                return NOTHING
            try:
                make_room(1)
            except ReprocessNeeded as needed:
                one.stream = [*ledger.tokens, *needed.tokens, one.stream[-1]]
                return NOTHING
            except NoKVSlot:
                return NOTHING
            token = one.stream[-1]
            if len(ledger.tokens) != have:
                one.stream = [*ledger.tokens, token]
            tokens.append(token)
        self.decoding = True
        if len(tokens) == 1:
            context.step(self._sequences[0], token)
        else:
            context.step_all(self._sequences, tokens)
        self.decoding = False
        self.steps += 1
        outcome = GOING
        if self._alike:
            if len(tokens) == 1:
                return GOING if one.take(self._greedy.pick(context)) else ENDED
            chosen = self._greedy.pick_all(context)
            for one, token in zip(self.generations, chosen, strict=True):
                if not one.take(token):
                    outcome = ENDED
        else:
            for one in self.generations:
                if not one.choose(context):
                    outcome = ENDED
        return outcome
