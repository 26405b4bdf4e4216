"""Read the entry points from plk.h: names from its text, types through cffi.

Parameter names define the length of buffers: `room` counts writable elements; `length`, `n_tokens`,
`n_bias` or `n` count readable ones. A new entry point is therefore fuzzed without changes here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pyllamakv.binding.loading import struct_names
from pyllamakv.native import generate
from pyllamakv.native._plk import ffi

_DECLARED = re.compile(r"([\w\s]+[\s*])(plk_\w+)\(([^()]*)\);")
_READ, _WRITTEN = ("length", "n_tokens", "n_bias", "n"), ("room", "n")
#: Pointers to one value, although the call has a count.
_SINGLE = {"plk_log_read.level", "plk_run.done"}
#: Factors of a buffer's length: values per element, or another parameter and an addend.
_WIDER: dict[str, int | str] = {
    "plk_mapping_tensors.rows": 5,
    "plk_cells_read.seqs": "words",
    "plk_run.tokens": "steps",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    ``kind`` is scalar, handle, handles (array), made (receives a handle), text, struct or buffer;
    ``type`` is the target type of a pointer, ``const`` whether it is read-only. ``count`` names the
    parameter with the length of an array, ``wider`` is as in `_WIDER`.
    """

    name: str
    kind: str
    type: Any
    const: bool = False
    count: str = ""
    wider: int | str = 1

    def elements(self, words: Mapping[str, Any]) -> int:
        """Return the required number of elements of a call's buffer."""
        if not self.count:
            return 1
        count, wider = int(words[self.count]), self.wider
        if isinstance(wider, str):
            wider = int(words[wider]) + (wider == "steps")  # the first row is given
        return max(0, count) * max(0, wider)


@dataclass(frozen=True)
class EntryPoint:
    """One entry point; ``result`` is the name of a C type."""

    name: str
    result: str
    parameters: tuple[Parameter, ...]


def entries(text: str | None = None) -> dict[str, EntryPoint]:
    """Return every entry point of plk.h, or of a similar text, by name."""
    text = generate.HEADER.read_text("utf-8") if text is None else text
    found = {}
    for result, name, inside in _DECLARED.findall(generate.declarations(text)):
        parts = re.findall(r"(.+?)(\w+)(?:,|$)", re.sub(r"\s+", " ", inside).strip())
        declared = {} if inside.strip() == "void" else {each: kind for kind, each in parts}
        parameters = tuple(_parameter(name, each, declared) for each in declared)
        found[name] = EntryPoint(name, result.strip(), parameters)
    return found


@cache
def fields(struct: Any) -> dict[str, Parameter]:
    """Return the fields of a struct like parameters.

    Its pointers have the length `n_tokens` or `n_bias`. Arrays are left out: only structs that
    plk.h fills in have them.
    """
    ffi.sizeof(struct)  # or cffi has not read its fields yet
    declared = {name: each.type for name, each in struct.fields if each.type.kind != "array"}
    return {name: _field(name, type_, declared) for name, type_ in declared.items()}


def _field(name: str, type_: Any, declared: dict[str, Any]) -> Parameter:
    if type_.kind != "pointer":
        return Parameter(name, "scalar", type_)
    if type_.item.cname == "char":
        return Parameter(name, "text", type_.item, True)
    return Parameter(name, "buffer", type_.item, True, _first(_READ, declared))


def _parameter(entry: str, name: str, declared: dict[str, str]) -> Parameter:
    text = declared[name].strip()
    type_, const = ffi.typeof(text), "const" in text
    if type_.kind != "pointer":
        return Parameter(name, "scalar", type_)
    item = type_.item
    if item.kind == "pointer":
        if const:
            return Parameter(name, "handles", item.item, const, _first(_READ, declared))
        return Parameter(name, "made", item.item)
    if item.kind == "struct":
        known = item.cname in struct_names()
        return Parameter(name, "struct" if known else "handle", item, const)
    count = _first(_READ if const else _WRITTEN, declared)
    if item.cname == "char" and const and not count:
        return Parameter(name, "text", item, const)
    key = f"{entry}.{name}"
    count = "" if key in _SINGLE else count
    return Parameter(name, "buffer", item, const, count, _WIDER.get(key, 1))


def _first(names: tuple[str, ...], declared: dict[str, Any]) -> str:
    return next((each for each in names if each in declared), "")
