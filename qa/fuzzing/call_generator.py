"""Generate calls of plk.h: mostly valid, often with extreme arguments.

A call is [name, {parameter: value}], so that it can be stored as JSON and mutated: handles are
numbers, buffers their first values, structs their fields, and None is NULL.

The preconditions of the header hold: handles are live, buffers as long as stated, and sizes
possible. The number of threads is at most two, or more than allowed: each thread spins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from pyllamakv.native._plk import ffi
from qa.fuzzing.mutate import EDGES
from qa.fuzzing.signatures import EntryPoint, Parameter, fields

#: Entry points that are left out, and the reasons.
EXCLUDED = {
    "plk_rpc_serve": "a valid call never returns",
    "plk_decode_embd": "for scenarios: no failed decode is undone, and the ledger has no such cell",
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


class CallGenerator:
    """Generate and mutate inputs of a few calls each."""

    def __init__(self, entries: Mapping[str, EntryPoint]) -> None:
        self.entries = {name: each for name, each in entries.items() if name not in EXCLUDED}
        names = list(self.entries)
        # Most other calls depend on those that change the cache.
        changing = [name for name in names if "_seq_" in name or "decode" in name]
        self._names = names + 2 * changing + 4 * [each for each in names if each == "plk_decode"]

    def seed(self, number: int) -> bytes:
        """Return the input of a random seed."""
        chance = Random(number)
        return self._packed(number, [self.call(chance) for _ in range(_CALLS)])

    def each(self) -> bytes:
        """Return an input that calls every entry point once."""
        chance = Random(0)
        return self._packed(0, [self.call(chance, name) for name in self.entries])

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        """Return an input with a call added, removed, duplicated, spliced or changed."""
        if chance.random() < 0.3:
            return self.seed(chance.randrange(1 << 32))
        setting, calls = unpacked(data)
        for _ in range(chance.choice((1, 2, 4, 8))):
            at = chance.randrange(len(calls) + 1)
            way = chance.randrange(8)
            if way < 3 or not calls:
                calls.insert(at, self.call(chance))
            elif way == 3:
                del calls[at - 1]
            elif way == 4:
                calls.insert(at, calls[chance.randrange(len(calls))])
            elif way == 5:
                calls[at:at] = unpacked(other)[1][:4]
            else:
                calls[at - 1] = self._changed(chance, calls[at - 1])
        if chance.random() < 0.05:
            setting = chance.randrange(8)
        return self._packed(setting, calls[:_CALLS])

    def call(self, chance: Random, name: str | None = None) -> list[Any]:
        """Generate one call."""
        name = name or chance.choice(self._names)
        drawn = {each.name: self._value(chance, each) for each in self.entries[name].parameters}
        return [name, drawn]

    def _changed(self, chance: Random, call: list[Any]) -> list[Any]:
        name, words = call
        entry = self.entries.get(name)
        if entry is None or not entry.parameters:
            return self.call(chance)
        one = chance.choice(entry.parameters)
        value = words.get(one.name)
        if one.kind == "struct" and value and chance.random() < 0.8:
            inner = chance.choice(list(fields(one.type).values()))
            return [name, {**words, one.name: {**value, inner.name: self._value(chance, inner)}}]
        return [name, {**words, one.name: self._value(chance, one)}]

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

    @staticmethod
    def _packed(setting: int, calls: list[Any]) -> bytes:
        rows = [json.dumps({"setting": setting}), *map(json.dumps, calls)]
        return ("\n".join(rows) + "\n").encode()


def unpacked(data: bytes) -> tuple[int, list[list[Any]]]:
    """Return the number of a setting, and the calls; invalid lines are left out."""
    setting, calls = 0, []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            setting = row.get("setting", 0)
        elif isinstance(row, list) and len(row) == 2:
            calls.append(row)
    return setting, calls
