"""Say what a cache does for who runs a model: `Cache`, over one context or several in lock-step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError
from pyllamakv.runtime.ledger import POSITIONS

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cache(Protocol):
    """Hold tokens of several sequences, by number and position.

    ``max_sequences`` sequences of up to ``capacity`` tokens each, at most ``max_batch`` in a
    forward pass. Everything that it will ever need was allocated when it was made. What it raises
    leaves it as it was, and a removal of a whole sequence always works.
    """

    @property
    def max_sequences(self) -> int:
        """Return how many sequences there are; their numbers begin with 0."""

    @property
    def capacity(self) -> int:
        """Return how many tokens a sequence can have."""

    @property
    def max_batch(self) -> int:
        """Return how many tokens a forward pass can have."""

    def length(self, sequence: int) -> int:
        """Return the position that a sequence's next token gets."""

    def start_forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Run the model over tokens, each at a position of a sequence, and keep them.

        ``logits`` says of which tokens logits are wanted; None: of the last one of each sequence.
        Raises KVCacheFull, NotSupported, Cancelled, DecodeError, and UsageError for a batch that
        cannot be right.
        """

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Replace what ``target`` holds by the first positions of ``source``; return how many.

        A copy of a sequence to itself changes nothing. Raises NotSupported.
        """

    def can_resume(self, sequence: int, position: int) -> bool:
        """Tell whether ``remove(sequence, position)`` leaves what decoding can go on with."""

    def prepare_restore(self, sequence: int, target: int) -> int:
        """Return the last position up to ``target`` at which the sequence can be resumed."""

    def remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> None:
        """Remove the positions begin <= p < end (None: all from there on); later ones close up.

        Raises SharedCells where those that move lie in cells that another sequence has as well;
        ``unshare`` gives the sequence cells of its own. Raises NotSupported, and KVCacheFull where
        there is no room for those.
        """

    def close(self) -> None:
        """Give everything back; a second call does nothing."""


def check_range(begin: object, end: object) -> tuple[int, int | None]:
    """Return a range of positions, None for an open end; UsageError for a wrong one."""
    first = arguments.whole("begin", begin, 0)
    last = arguments.whole_or_none("end", end, 0)
    if last is not None and last < first:
        msg = (
            f"expected 0 <= begin <= end, not {arguments.shown(first)} and {arguments.shown(last)}"
        )
        raise UsageError(msg)
    # Whatever lies behind all positions is as good as the first that does.
    return min(first, POSITIONS), None if last is None else min(last, POSITIONS)
