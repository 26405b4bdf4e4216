"""Define the protocols of cache managers.

`Cache` is used by sequence number, `CacheManager` and `Lease` by prompt.
`ContextCache` and `LockstepCache` implement `Cache`; `PrefixCache` and `SlotCache` are managers.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from pyllamakv.binding import arguments
from pyllamakv.cache.radix_tree import NO_SALT
from pyllamakv.errors import UsageError
from pyllamakv.runtime.ledger import POSITION_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from pyllamakv.runtime import sequence as runtime
    from pyllamakv.runtime.context import Context


class Cache(Protocol):
    """Store tokens of several sequences, addressed by number and position.

    There are ``max_sequences`` sequences of up to ``capacity`` tokens each, and at most
    ``max_batch`` tokens in a forward pass. All memory is allocated at creation. An operation that
    raises leaves the cache unchanged, except a failed pass over states or windows that cannot go
    back: it empties the sequences in `Context.emptied`. Removing a complete sequence always
    succeeds.
    """

    @property
    def max_sequences(self) -> int:
        """The number of sequences; they are numbered from 0."""

    @property
    def capacity(self) -> int:
        """The maximum number of tokens per sequence."""

    @property
    def max_batch(self) -> int:
        """The maximum number of tokens per forward pass."""

    def length(self, sequence: int) -> int:
        """Return the position of the sequence's next token."""

    def start_forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Evaluate tokens, each at a position of a sequence, and store them.

        ``logits`` marks the tokens whose logits are needed; None marks the last one of each
        sequence. Raises KVCacheFull, Unsupported, Cancelled, DecodeError, or UsageError for an
        invalid batch.
        """

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Replace ``target`` by the first positions of ``source``; return their number.

        Copying a sequence to itself changes nothing. Raises Unsupported, and KVCacheFull if there
        are no cells for the state of a checkpoint.
        """

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return whether decoding can continue after ``remove(sequence, position)``."""

    def prepare_restore(self, sequence: int, target: int) -> int:
        """Return the last position up to ``target`` from which the sequence can be resumed."""

    def remove(
        self, sequence: int, begin: int, end: int | None = None, *, unshare: bool = False
    ) -> None:
        """Remove the positions begin <= p < end (None: to the end) and shift later ones down.

        Raises SharedCells if the shifted tokens are in cells that another sequence shares;
        ``unshare`` copies them first. Raises Unsupported, and KVCacheFull if there are no cells for
        the copies.
        """

    def close(self) -> None:
        """Free all resources. A second call does nothing."""


def check_range(begin: object, end: object) -> tuple[int, int | None]:
    """Return a range of positions, None for an open end; UsageError for a wrong one."""
    first = arguments.integer("begin", begin, 0)
    last = arguments.whole_or_none("end", end, 0)
    if last is not None and last < first:
        msg = (
            f"expected 0 <= begin <= end, not {arguments.shown(first)} and {arguments.shown(last)}"
        )
        raise UsageError(msg)
    # Every index above all positions is equivalent to the first one.
    return min(first, POSITION_LIMIT), None if last is None else min(last, POSITION_LIMIT)


#: Bytes of the digest of a salt.
_SALT_BYTES = 16


def salt_digest(salt: object) -> bytes:
    """Return the digest of a prompt's salt for trees and stores; `NO_SALT` for None.

    Salts may be secrets, so that only their digests are kept. Raises UsageError for another type,
    and for an empty text.
    """
    if salt is None:
        return NO_SALT
    return blake2b(
        arguments.salt(salt).encode(errors="surrogatepass"), digest_size=_SALT_BYTES
    ).digest()


#: The error of parking a lease that was released.
PARKED_LATE = "this lease was released, and has no content to park; acquire its tokens instead"


class Lease(Protocol):
    """A sequence for one prompt, with the cached part of the prompt.

    As a context manager, it releases the sequence at the end. Decode ``rest`` with ``sequence``,
    then further tokens. Tokens that the sequence has at release stay cached for later prompts.
    """

    @property
    def sequence(self) -> runtime.Sequence:
        """The sequence to decode with."""

    @property
    def cached(self) -> int:
        """The number of prompt tokens that the sequence has already."""

    @property
    def rest(self) -> list[int]:
        """The prompt tokens from ``cached``; never empty."""

    def make_room(self, n: int) -> None:
        """Free cells for ``n`` more tokens in the sequence and the cache, by eviction and shifts.

        Raises KVCacheFull if that is impossible. Raises ReprocessNeeded if the sequence must be
        decoded again: it has the tokens to decode next, and the sequence keeps those before them.
        """

    def limit_batch(self, n: int) -> int:
        """Return how many of the next ``n`` tokens to decode before `checkpoint` is called."""

    def checkpoint(self) -> None:
        """Keep the state after the present tokens, if one is due here. Never fails a prompt."""

    def park(self) -> Parked:
        """Release the sequence, and keep its content until `Parked.resume` or `Parked.close`.

        Raises UsageError after a release.
        """

    def release(self) -> None:
        """Release the sequence. A second call does nothing."""

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


class Parked(Protocol):
    """The content of a lease that gave up its sequence and, when others need them, its cells."""

    def resume(self, tokens: Iterable[int]) -> Lease:
        """Return a new lease for the parked tokens and at least one more.

        Tokens whose content was lost are to be decoded again. Raises NoSlotAvailable or
        KVCacheFull; the content stays parked then.
        """

    def close(self) -> None:
        """Give the content up. A second call does nothing."""


class CacheManager(Protocol):
    """Manage the cache of a context, and assign its sequences to prompts."""

    @property
    def context(self) -> Context:
        """The context whose cache is managed."""

    @property
    def max_sequence_tokens(self) -> int | None:
        """The maximum number of tokens of a sequence, also of a prompt; None: no limit."""

    def acquire(
        self,
        tokens: Iterable[int],
        *,
        groups: Iterable[tuple[int, int]] = (),
        checkpoints: Iterable[int] = (),
        salt: str | None = None,
    ) -> Lease:
        """Return a lease for a prompt, with the cached part of the prompt.

        ``groups`` are ranges (first, end) of the prompt that a shift never splits.
        ``checkpoints`` are lengths of the prompt after which a state is kept. Prompts with
        different ``salt`` share nothing: no prefix, no count and no page. Raises
        UsageError (the prompt is empty or longer than a sequence), NoSlotAvailable (all sequences
        are in use) or KVCacheFull; the cache is unchanged then.
        """

    def relieve(self) -> bool:
        """Free cells of an idle sequence after a decode found none; False if nothing is left."""

    def close(self) -> None:
        """Free the sequences of the context. A second call does nothing."""
