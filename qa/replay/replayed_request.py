"""A replayed request, recorded traces of requests, and the cells that requests need at most.

A cell represents a number of tokens. Requests are equal for equal arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pyllamakv.cache.radix_tree import NO_SALT, RadixTree, tokens_to_key
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

#: Tokens of a prefix block in the traces of Mooncake
#: (https://github.com/kvcache-ai/Mooncake, FAST'25 traces).
BLOCK = 512


@dataclass(frozen=True)
class ReplayedRequest:
    """The cells of a prompt, and those of the text that is generated after it."""

    prompt: tuple[int, ...]
    text: tuple[int, ...] = ()

    @property
    def cells(self) -> tuple[int, ...]:
        """Return all cells of the request."""
        return self.prompt + self.text


def read_trace(path: Path, most: int = 0, skip: int = 0) -> list[ReplayedRequest]:
    """Read the prompts of a trace after ``skip``, with a cell per block; at most ``most`` if not 0.

    A line is a JSON object whose ``hash_ids`` are the blocks of the prompt: equal ids in equal
    places are equal prefixes. Raises UsageError for another file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = [
                ReplayedRequest(tuple(map(int, json.loads(line)["hash_ids"])))
                for line in islice(file, skip, skip + most if most else None)
            ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = f"{path} is not a trace of JSON lines with hash_ids: {error}"
        raise UsageError(msg) from error
    if not found or not all(each.prompt and min(each.prompt) >= 0 for each in found):
        msg = f"{path} has no requests, or a request without blocks"
        raise UsageError(msg)
    return found


def unique_cells(requests: Iterable[ReplayedRequest]) -> int:
    """Return the number of cells that all requests need if nothing is evicted."""
    tree = RadixTree()
    for each in requests:
        tree.insert(tokens_to_key(each.cells), NO_SALT)
    return tree.tokens


def share_of(capacity: float, requests: Sequence[ReplayedRequest]) -> int:
    """Return a share of the unique cells, at least the cells of the largest request."""
    longest = max(len(each.cells) for each in requests)
    return max(longest, round(capacity * unique_cells(requests)))
