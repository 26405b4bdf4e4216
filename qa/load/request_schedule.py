"""Generate the requests of a workload: when they arrive, their prompts and their answers.

Requests arrive whether or not earlier ones were answered, except those of a closed loop, which a
client sends after its previous answer. A schedule depends on its arguments alone, so every system
gets the same requests.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from pyllamakv.errors import UsageError
from pyllamakv.server.server_lab import SLOT

if TYPE_CHECKING:
    from pathlib import Path

#: Workload -> what its requests are.
WORKLOADS: Final = {
    "fits": "Poisson arrivals; prompt and answer fit into a slot.",
    "shift": "Poisson arrivals; half of the answers outgrow their slots.",
    "trace": "Arrivals, lengths and common prefixes of a recorded trace, scaled down.",
    "chats": "Closed loop; chats of 200 tokens and 150 to generate share a cache.",
    "overcommit-1": "Closed loop; the slots share a cache that has all cells that they need.",
    "overcommit-2": "Closed loop; the slots need twice the cells of the cache that they share.",
    "overcommit-4": "Closed loop; the slots need 4 times the cells of the cache that they share.",
    "overcommit-8": "Closed loop; the slots need 8 times the cells of the cache that they share.",
}

#: Lengths of prompts and answers of a closed loop, at least and at most; each fits into a slot.
_LOOP_PROMPTS, _LOOP_ANSWERS = (64, 320), (32, 192)

#: The same of a chat, and the cells of the cache that chats share.
_CHAT_PROMPT, _CHAT_ANSWER, _CHAT_CELLS = 200, 150, 1024

#: Token ids that are ordinary tokens of every model: neither control tokens nor out of range.
_TOKENS: Final = range(32, 320)

#: Length of the common start of half of the prompts.
_PREFACE: Final = SLOT // 8

#: Largest part of a slot that a prompt takes, and free cells after an answer that fits.
_LONGEST, _SPARE = SLOT * 4 // 5, 8

#: Divisors of the lengths in a trace, whose prompts have thousands of tokens; tokens of a prefix
#: block there (https://github.com/kvcache-ai/Mooncake, FAST'25 traces).
_PROMPTS, _ANSWERS, _BLOCK = 64, 8, 512


@dataclass(frozen=True)
class LoadRequest:
    """A request: seconds from the start until it arrives, its tokens, and how many to generate.

    ``at`` None: it arrives when a client is free.
    """

    at: float | None
    prompt: tuple[int, ...]
    n_predict: int


def schedule(
    workload: str, count: int, rate: float, *, trace: Path | None = None, seed: int = 1
) -> list[LoadRequest]:
    """Return ``count`` requests, ``rate`` per second on average, in the order of arrival.

    Raises UsageError for an unknown workload, and for a trace that is missing, short or malformed.
    """
    if workload not in WORKLOADS:
        msg = f"there is no workload {workload!r}: choose from {', '.join(WORKLOADS)}"
        raise UsageError(msg)
    if overcommit(workload) or workload == "chats":
        prompts, answers = _LOOP_PROMPTS, _LOOP_ANSWERS
        if workload == "chats":
            prompts, answers = (_CHAT_PROMPT, _CHAT_PROMPT), (_CHAT_ANSWER, _CHAT_ANSWER)
        draw = random.Random(seed)
        return [
            LoadRequest(
                None,
                tuple(draw.choices(_TOKENS, k=draw.randint(*prompts))),
                draw.randint(*answers),
            )
            for _ in range(count)
        ]
    if workload != "trace":
        return _poisson(count, rate, shift=workload == "shift", seed=seed)
    if trace is None:
        msg = "the workload trace needs --trace FILE"
        raise UsageError(msg)
    return _recorded(trace, count, rate)


def overcommit(workload: str) -> int:
    """Return how many times the cells of a cache a workload needs, 0 if it has a share per slot."""
    name, _, times = workload.partition("-")
    return int(times) if name == "overcommit" else 0


def cells(workload: str, clients: int) -> int | None:
    """Return the cells that slots share, None if each slot has its own.

    Raises UsageError if a request would not fit alone.
    """
    if workload == "chats":
        return _CHAT_CELLS
    times = overcommit(workload)
    if times <= 1:
        return clients * SLOT if times else None
    mean = (sum(_LOOP_PROMPTS) + sum(_LOOP_ANSWERS)) / 2
    # Caches have a multiple of 256 cells.
    found = round(clients * mean / times / 256) * 256
    if found < SLOT:
        msg = f"{workload} needs more than {clients} clients: its cache would have {found} cells"
        raise UsageError(msg)
    return found


def _poisson(count: int, rate: float, *, shift: bool, seed: int) -> list[LoadRequest]:
    draw = random.Random(seed)
    preface = draw.choices(_TOKENS, k=_PREFACE)
    found, at = [], 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        length = draw.randint(SLOT // 10, _LONGEST)
        prompt = draw.choices(_TOKENS, k=length)
        if draw.random() < 0.5:
            prompt[:_PREFACE] = preface[:length]
        n_predict = draw.randint(8, min(192, SLOT - length - _SPARE))
        if shift and draw.random() < 0.5:
            n_predict = SLOT - length + draw.randint(1, SLOT // 2)
        found.append(LoadRequest(at, tuple(prompt), n_predict))
    return found


def _recorded(path: Path, count: int, rate: float) -> list[LoadRequest]:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, count)]
        begin = rows[0]["timestamp"] if rows else 0
        span = max(rows[-1]["timestamp"] - begin, 1) if rows else 1
        found = [
            LoadRequest(
                (row["timestamp"] - begin) / span * count / rate,
                prompt := _prompt(row["hash_ids"], row["input_length"]),
                max(1, min(row["output_length"] // _ANSWERS, SLOT - len(prompt) - _SPARE)),
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = (
            f"{path} is not a trace with timestamp, input_length, output_length and hash_ids per "
            f"line: {error}"
        )
        raise UsageError(msg) from error
    if len(found) < count:
        msg = f"{path} has {len(found)} requests, not {count}: choose fewer --requests"
        raise UsageError(msg)
    return found


def _prompt(blocks: list[int], length: int) -> tuple[int, ...]:
    """Return the tokens of a prompt; equal blocks have equal tokens."""
    size = max(8, min(length // _PROMPTS, _LONGEST))
    tokens: list[int] = []
    for block in blocks:
        tokens += random.Random(f"block {block}").choices(_TOKENS, k=_BLOCK // _PROMPTS)
    tokens += random.Random(f"rest {blocks}").choices(_TOKENS, k=size)
    return tuple(tokens[:size])
