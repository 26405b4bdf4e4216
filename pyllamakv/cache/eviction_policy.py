"""Choose which tokens of a prefix tree are evicted first.

A policy only compares nodes. `Allocator` decides which of them may be evicted: never a node with a
lease or a pin, and never a node before its children.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal, get_args

from pyllamakv.binding import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

EvictionPolicyName = Literal["lru", "adaptive"]

#: The policy of a cache that names none.
DEFAULT: Final[EvictionPolicyName] = "adaptive"

#: Tokens of a block: of the tokens that are evicted together at least, and of a digest.
BLOCK: Final = 64

#: Maximum number of digests for each block of the cache, and in all.
DIGESTS_PER_BLOCK: Final = 4
MAX_DIGESTS: Final = 32_768

#: Bytes of a digest with its place in an ordered dictionary, measured with CPython 3.11.
DIGEST_BYTES: Final = 136

#: Bytes per token of a key: see `radix_tree`.
_TOKEN_BYTES: Final = 4


class EvictionPolicy:
    """Evict the least recently used tokens, and a branch whole: the base of the other policy."""

    #: Whether nodes are in two lists, and a part of a branch may be evicted.
    adaptive = False
    #: Tokens of a block.
    block = BLOCK

    def frequent_first(self, tokens: int, frequent: int) -> bool:
        """Return whether to evict from the frequent list first.

        ``tokens`` are those of the tree, ``frequent`` those of its frequent list.
        """
        return False

    def recall(self, key: bytes, salt: bytes, start: int, tokens: int) -> int:
        """Return the end of the last block of a key that was evicted, or ``start``.

        Tokens before ``start`` are in the tree, which has ``tokens``.
        """
        return start

    def remember(self, key: bytes, salt: bytes, start: int, tokens: int, *, frequent: bool) -> None:
        """Record that a tree of ``tokens`` loses the tokens of a key from ``start`` on."""

    @property
    def digest_bytes(self) -> int:
        """Return the bytes of what is remembered of evicted tokens."""
        return 0


class AdaptiveReplacement(EvictionPolicy):
    """Divide the cache between recent and frequent tokens, by what was evicted too early.

    ARC (Megiddo and Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003) on the
    blocks of a tree. Tokens that one prompt used are in the recent list, the others in the frequent
    one; each list is in order of use. ``recent_share`` is the part of the cache for the recent
    list. It grows when a prompt needs a block that was evicted from the recent list, and shrinks
    for one from the frequent list, by one block or by the ratio of the other list of digests to
    this one. It differs from the source in two values: the lists of digests are four times as long
    as the cache, because chats return later than pages of a disk; and the share starts at one half
    instead of zero, so that neither list is preferred before there is evidence.
    """

    adaptive = True

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.recent_share = 0.5
        #: Digests of evicted blocks in the order of eviction: recent ones, frequent ones.
        self.evicted: tuple[OrderedDict[bytes, None], ...] = (OrderedDict(), OrderedDict())
        #: Maximum number of tokens that the tree had at an eviction.
        self.capacity = 0

    def frequent_first(self, tokens: int, frequent: int) -> bool:
        """Return whether the recent list is within its share."""
        return tokens - frequent <= self.recent_share * tokens

    def recall(self, key: bytes, salt: bytes, start: int, tokens: int) -> int:
        """Return the end of the last block that was evicted, and adapt the share."""
        end = start
        if not any(self.evicted):
            return end
        capacity = max(self.capacity, tokens, self.block)
        for at, digest in self._digests(key, salt, start):
            recent, frequent = self.evicted
            if digest in recent:
                step = max(1.0, len(frequent) / len(recent))
                del recent[digest]
            elif digest in frequent:
                step = -max(1.0, len(recent) / len(frequent))
                del frequent[digest]
            else:
                continue
            share = self.recent_share + step * self.block / capacity
            self.recent_share = min(1.0, max(0.0, share))
            end = at
        return end

    def remember(self, key: bytes, salt: bytes, start: int, tokens: int, *, frequent: bool) -> None:
        """Add the digests of blocks, and forget the oldest of the longer list."""
        self.capacity = max(self.capacity, tokens)
        digests = self.evicted[frequent]
        # The end of a branch is evicted before its beginning.
        for _, digest in reversed(list(self._digests(key, salt, start))):
            self.evicted[not frequent].pop(digest, None)
            digests[digest] = None
            digests.move_to_end(digest)
        most = min(MAX_DIGESTS, DIGESTS_PER_BLOCK * self.capacity // self.block)
        while sum(map(len, self.evicted)) > most:
            longer = self.evicted[len(self.evicted[0]) <= most / 2]
            longer.popitem(last=False)

    def _digests(self, key: bytes, salt: bytes, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield each block of a key that ends after ``start`` tokens: its end and its digest.

        A digest depends on the salt, and on all tokens up to the end of the block: what one salt
        had evicted changes nothing for another one.
        """
        size, first = self.block * _TOKEN_BYTES, start // self.block
        if len(key) < (first + 1) * size:
            return
        known = hashlib.blake2b(memoryview(key)[: first * size], digest_size=8, key=salt)
        for at in range(first * size, len(key) - size + 1, size):
            known.update(memoryview(key)[at : at + size])
            yield (at + size) // _TOKEN_BYTES, known.copy().digest()

    @property
    def digest_bytes(self) -> int:
        """Return the bytes of all digests."""
        return sum(map(len, self.evicted)) * DIGEST_BYTES


def checked(policy: str) -> EvictionPolicyName:
    """Return the name of a policy. Raises UsageError for an unknown one."""
    return arguments.choice("policy", policy, get_args(EvictionPolicyName))


def make(policy: EvictionPolicyName) -> EvictionPolicy:
    """Return a policy for a cache."""
    return AdaptiveReplacement() if policy == "adaptive" else EvictionPolicy()
