"""Define the protocols of cache managers.

`Cache` is used by sequence number, `Manager` and `Lease` by prompt.
`ContextCache` and `LockstepCache` implement `Cache`; `PrefixCache` and `SlotCache` are managers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError
from pyllamakv.runtime.ledger import POSITION_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context


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
        Raises KVCacheFull, Unsupported, Cancelled, DecodeError, and UsageError for a batch that
        cannot be right.
        """

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Replace what ``target`` holds by the first positions of ``source``; return how many.

        A copy of a sequence to itself changes nothing. Raises Unsupported.
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
        ``unshare`` gives the sequence cells of its own. Raises Unsupported, and KVCacheFull where
        there is no room for those.
        """

    def close(self) -> None:
        """Give everything back; a second call does nothing."""


def check_range(begin: object, end: object) -> tuple[int, int | None]:
    """Return a range of positions, None for an open end; UsageError for a wrong one."""
    first = arguments.integer("begin", begin, 0)
    last = arguments.whole_or_none("end", end, 0)
    if last is not None and last < first:
        msg = (
            f"expected 0 <= begin <= end, not {arguments.shown(first)} and {arguments.shown(last)}"
        )
        raise UsageError(msg)
    # Whatever lies behind all positions is as good as the first that does.
    return min(first, POSITION_LIMIT), None if last is None else min(last, POSITION_LIMIT)


class Lease(Protocol):
    """Hold a sequence for one prompt, with as much of the prompt as the cache had.

    A context manager: leaving it releases. Whoever holds it feeds ``sequence`` with ``rest`` and
    with what follows; what the sequence holds when it is released stays for later prompts.
    """

    @property
    def sequence(self) -> runtime.Sequence:
        """Return the sequence to feed."""

    @property
    def cached(self) -> int:
        """Return how many of the prompt's tokens the sequence holds already."""

    @property
    def rest(self) -> list[int]:
        """Return the prompt's tokens from ``cached`` on, never empty."""

    def make_room(self, n: int) -> None:
        """Make room for ``n`` more tokens in the sequence and in the cache: evict, shift.

        Raises KVCacheFull when it cannot; ReprocessNeeded when the sequence has to be decoded
        again, with the tokens to decode next: it holds what comes before them.
        """

    def release(self) -> None:
        """Give the sequence back; a second call does nothing."""

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


class CacheManager(Protocol):
    """Own the cache of a context, and hand out its sequences prompt by prompt."""

    @property
    def context(self) -> Context:
        """Return the context whose cache this owns."""

    def acquire(self, tokens: Iterable[int], *, groups: Iterable[tuple[int, int]] = ()) -> Lease:
        """Return a lease for a prompt, with what the cache has of it already.

        ``groups`` are ranges (first, end) of the prompt that are never split by a shift. Raises
        UsageError (an empty prompt, one longer than a sequence can be), NoSlotAvailable when all
        sequences are in use, KVCacheFull; the cache is as it was then.
        """

    def close(self) -> None:
        """Free what the manager holds, the context's sequences; a second call does nothing."""
