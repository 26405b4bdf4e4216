"""Encode batches as arguments of a script: tokens, positions, sequences, logits.

Common values are short: a single sequence is a number, contiguous positions are the first one, and
logits of the last token alone are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.errors import UsageError
from pyllamakv.scenarios.batch_composition import BatchRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Values of ``logits`` with a name; a list contains the indices instead.
LOGITS = ("last", "all", "none")


def encode(
    tokens: list[int],
    pos: list[int],
    seq: Sequence[int | list[int]],
    logits: list[int] | None = None,
) -> dict[str, Any]:
    """Return a batch as arguments; ``seq`` has a sequence, or several, of each token.

    ``logits`` has a flag per token; None requests logits of the last one, as in llama.cpp.
    """
    n, first = len(tokens), pos[0]
    words: dict[str, Any] = {"tokens": tokens}
    alone = isinstance(seq[0], int) and all(each == seq[0] for each in seq)
    words["seq"] = seq[0] if alone else list(seq)
    words["pos"] = first if pos == list(range(first, first + n)) else pos
    places = [n - 1] if logits is None else [i for i, flag in enumerate(logits) if flag]
    if places != [n - 1]:
        words["logits"] = "none" if not places else "all" if len(places) == n else places
    elif n == 1:
        words["logits"] = "all"
    return words


def owners(seq: NDArray[np.int32], counts: NDArray[np.int32] | None) -> list[int | list[int]]:
    """Return the sequence, or the list of sequences, of each token of a batch's arrays."""
    ids = seq.tolist()
    if counts is None:
        return list(ids)
    ends = counts.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return [ids[a] if b == a + 1 else ids[a:b] for a, b in zip(starts, ends, strict=True)]


def decode_words(words: dict[str, Any], following: Callable[[int], int]) -> BatchRows:
    """Return the batch of these arguments; without ``pos``, tokens follow in their sequences.

    ``following`` returns the next position of a sequence. Raises UsageError for invalid arguments.
    """
    tokens = words["tokens"]
    token_owners = _owners(words["seq"], len(tokens))
    return BatchRows(
        np.array(tokens, dtype=np.int32),
        np.array(_positions(words.get("pos"), token_owners, following), dtype=np.int32),
        tuple(token_owners),
        np.array(_flags(words.get("logits", "last"), len(tokens)), dtype=np.int8),
    )


def cut(words: dict[str, Any], n: int) -> dict[str, Any]:
    """Return the arguments of the first ``n`` tokens of a batch."""
    less = {**words, "tokens": words["tokens"][:n]}
    if isinstance(words["seq"], list):
        less["seq"] = words["seq"][:n]
    if isinstance(words.get("pos"), list):
        less["pos"] = words["pos"][:n]
    if isinstance(words.get("logits"), list):
        less["logits"] = [place for place in words["logits"] if place < n] or "last"
    return less


def join(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of two batches as one; neither has positions."""
    n = len(one["tokens"])
    places = [*_places(one), *(n + place for place in _places(other))]
    tokens = [*one["tokens"], *other["tokens"]]
    if one["seq"] == other["seq"] and not isinstance(one["seq"], list):
        seq = one["seq"]
    else:
        seq = [*_each(one), *_each(other)]
    return {"tokens": tokens, "seq": seq, "logits": places}


def check(words: dict[str, Any]) -> str:
    """Return the error in a batch's arguments, or an empty text."""
    tokens, seq, pos = words["tokens"], words["seq"], words.get("pos")
    logits = words.get("logits", "last")
    if not _numbers(tokens) or not tokens:
        return f"tokens must be a list of numbers, found {tokens!r}"
    n = len(tokens)
    if not is_int32(seq) and not (
        isinstance(seq, list)
        and len(seq) == n
        and all(is_int32(each) or (_numbers(each) and each) for each in seq)
    ):
        return f"seq must be a sequence, or one of each token (several: [0, 1]), found {seq!r}"
    if pos is not None and not is_int32(pos) and not (_numbers(pos) and len(pos) == n):
        return f"pos must be the first position, or one of each token, found {pos!r}"
    if logits not in LOGITS and not (_numbers(logits) and all(0 <= i < n for i in logits)):
        return f"logits must be one of {', '.join(LOGITS)}, or a list of places, found {logits!r}"
    return ""


def is_int32(found: Any) -> bool:
    """Return whether a value is a 32-bit integer."""
    return type(found) is int and -(2**31) <= found < 2**31


def _numbers(found: Any) -> bool:
    return isinstance(found, list) and all(map(is_int32, found))


def _each(words: dict[str, Any]) -> list[Any]:
    seq = words["seq"]
    return seq if isinstance(seq, list) else [seq] * len(words["tokens"])


def _places(words: dict[str, Any]) -> list[int]:
    flags = _flags(words.get("logits", "last"), len(words["tokens"]))
    return [place for place, flag in enumerate(flags) if flag]


def _owners(seq: Any, n: int) -> list[tuple[int, ...]]:
    if not isinstance(seq, list):
        return [(int(seq),)] * n
    return [tuple(each) if isinstance(each, list) else (int(each),) for each in seq]


def _positions(
    pos: Any, token_owners: list[tuple[int, ...]], following: Callable[[int], int]
) -> list[int]:
    if isinstance(pos, list):
        return [int(each) for each in pos]
    if pos is not None:
        return list(range(pos, pos + len(token_owners)))
    ends: dict[int, int] = {}
    found = []
    for seqs in token_owners:
        at = ends[seqs[0]] if seqs[0] in ends else following(seqs[0])
        found.append(at)
        ends.update(dict.fromkeys(seqs, at + 1))
    return found


def _flags(logits: Any, n: int) -> list[int]:
    if logits == "all":
        return [1] * n
    flags = [0] * n
    if logits == "last":
        flags[-1] = 1
    elif logits != "none":
        for place in logits:
            if not 0 <= place < n:
                msg = f"there is no place {place} in a batch of {n} tokens"
                raise UsageError(msg)
            flags[place] = 1
    return flags
