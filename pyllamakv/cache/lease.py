"""Say what a cache manager gives for a prompt, whichever manager it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence


class Lease(Protocol):
    """Hold a sequence for one prompt, with as much of the prompt as the cache had.

    A context manager: leaving it releases. Whoever holds it feeds ``sequence`` with ``rest`` and
    with what follows; what the sequence holds when it is released stays for later prompts.
    """

    @property
    def sequence(self) -> Sequence:
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


class Manager(Protocol):
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
