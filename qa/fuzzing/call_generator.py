"""Generate calls of plk.h: mostly valid, often with extreme arguments.

A call is a name and a value per parameter, which JSON can store: handles are numbers, buffers their
first values, structs their fields, and None is NULL.

The preconditions of the header hold: handles are live, buffers as long as stated, and sizes
possible. The number of threads is at most two, or more than allowed: each thread spins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from pyllamakv.native._plk import ffi
from qa.fuzzing.signatures import EntryPoint, Parameter, fields
from qa.fuzzing.target import EDGES

#: Entry points, and a field, that are left out, and the reasons.
EXCLUDED = {
    "plk_rpc_serve": "a valid call never returns",
    "embd": "for scenarios: no failed decode is undone, and the ledger has no such cell",
}

#: Usual range of a parameter by name.
_USUAL = {
    **dict.fromkeys(("seq", "seq_id", "from", "to"), (0, 2)),
    **dict.fromkeys(("p0", "p1", "pos"), (-1, 40)), "delta": (-9, 9), "divisor": (1, 4),
    "token": (0, 63), "index": (-3, 9), "cache": (0, 1), "room": (0, 300), "words": (1, 2),
    "n": (1, 3), "steps": (1, 5), "n_tokens": (1, 33), "length": (0, 80), "polls": (-1, 60),
    "level": (1, 5), "lowest": (1, 5),
    "n_ctx": (1, 300), "n_batch": (1, 64), "n_ubatch": (0, 64), "n_seq_max": (1, 4),
    "type_k": (0, 2), "type_v": (0, 2), "kv_backing": (0, 2),
    "n_threads": (1, 1), "n_threads_batch": (1, 1), "seq_count": (1, 3),
    "top_k": (0, 70), "penalty_last_n": (0, 70),
}  # fmt: skip
_TEXTS = (
    "MODEL", "FOLDER", "FILE", "/dev/null", "", "general.architecture", "plk_batch", "CPU",
    "nonsense", ",,", "127.0.0.1:1", "\x01\x7f%s%n", "long" * 300,
)  # fmt: skip
_FLOATS = (0.0, -1.0, 0.5, 1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
#: Maximum values that a caller can provide, by name: bytes, cells, words, sequences.
_MOST = {"words": 4096, "n_ctx": 4096, "n_batch": 4096, "n_ubatch": 4096, "n": 1 << 22}
_LONGEST_TEXT = 1 << 12
#: Calls of one input.
_CALLS = 12


#: The name of an entry point, and a value per parameter.
Call = tuple[str, dict[str, Any]]


class CallGenerator:
    """Generate a few calls for each input."""

    def __init__(self, entries: Mapping[str, EntryPoint]) -> None:
        self.entries = {name: each for name, each in entries.items() if name not in EXCLUDED}
        names = list(self.entries)
        # Most other calls depend on those that change the cache.
        changing = [name for name in names if "_seq_" in name or "decode" in name]
        self._names = names + 2 * changing + 4 * [each for each in names if each == "plk_decode"]

    def calls(self, data: bytes) -> tuple[int, list[Call]]:
        """Return the number of a setting and the calls of an input, which is a random seed.

        An input of lines of JSON lists its calls, as those of `tests/data/corpora/entry-points` do;
        lines that are no calls are left out.
        """
        if data[:1] == b"[":
            return 0, _listed(data)
        chance = Random(data)
        return chance.randrange(8), [self.call(chance) for _ in range(_CALLS)]

    def call(self, chance: Random, name: str | None = None) -> Call:
        """Generate one call."""
        name = name or chance.choice(self._names)
        return name, {one.name: self._value(chance, one) for one in self.entries[name].parameters}

    def _value(self, chance: Random, one: Parameter) -> Any:
        if one.kind == "scalar":
            return self._scalar(chance, one.name, one.type)
        if chance.random() < 0.04:
            return None
        if one.kind == "handle":
            return 0 if chance.random() < 0.8 else chance.randrange(4)
        if one.kind == "made":
            return 0
        if one.kind == "handles":
            return [chance.randrange(-1, 3) for _ in range(chance.randint(1, 3))]
        if one.kind == "text":
            return chance.choice(_TEXTS)
        if one.kind == "struct":
            return self._struct(chance, one)
        if one.name == "data" and one.const and chance.random() < 0.7:
            return "saved"
        return [self._scalar(chance, one.name, one.type) for _ in range(chance.randint(1, 9))]

    def _struct(self, chance: Random, one: Parameter) -> dict[str, Any]:
        """Generate some fields; the others keep their defaults, so that most structs are valid."""
        found: dict[str, Any] = {}
        for name, each in fields(one.type).items():
            if name in EXCLUDED:
                continue
            needed = each.kind == "buffer" or name == "n_tokens"
            if one.const and (needed or (name != "size" and chance.random() < 0.2)):
                found[name] = self._value(chance, each)
        if chance.random() < 0.1:
            whole = ffi.sizeof(one.type)
            found["size"] = chance.choice((0, 3, 4, 8, whole - 1, whole + 1, whole * 2, 2**32 - 1))
        return found

    def _scalar(self, chance: Random, name: str, type_: Any) -> Any:
        if type_.cname in ("float", "double"):
            return chance.choice(_FLOATS)
        least, most = _USUAL.get(name, (0, 2))
        value = chance.randint(least, most)
        if chance.random() < 0.2:
            value = chance.choice((chance.choice(EDGES), -chance.choice(EDGES), -1, value - 1))
        if "threads" in name and 2 < value <= 512:
            value = 2
        limit = _MOST.get(name)
        # Far larger values are refused; values in between need more memory than this machine has.
        if limit is not None and limit < value and (name in ("words", "n") or value <= 1 << 30):
            value = limit
        if name == "length":
            value = min(value, _LONGEST_TEXT)
        bits = 8 * ffi.sizeof(type_)
        value %= 1 << bits
        unsigned = type_.cname.startswith("uint")
        return value if unsigned or value < 1 << (bits - 1) else value - (1 << bits)


def _listed(data: bytes) -> list[Call]:
    found = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict):
            found.append((str(row[0]), row[1]))
    return found
