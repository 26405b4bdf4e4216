"""Move fields between the dataclasses of `protocol` and the structs of ``plk.h``, by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from pyllamakv.binding.mapped import Backing
from pyllamakv.binding.protocol import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def _maybe(value: int) -> bool | None:
    return None if value < 0 else bool(value)


#: Annotation of a field -> what makes its value from C's.
_READ: dict[str, Callable[[Any], Any] | None] = {
    "int": None,
    "float": None,
    "bool": bool,
    "bool | None": _maybe,
    "Memory": Memory,
    "Backing": Backing,
}


_Plan = tuple[tuple[str, "Callable[[Any], Any] | None"], ...]
_plans: dict[type, _Plan] = {}


def _plan(kind: Any) -> _Plan:
    made = tuple((item.name, _READ[str(item.type)]) for item in dataclasses.fields(kind))
    _plans[kind] = made
    return made


def read(kind: type[T], struct: Any) -> T:
    """Return a frozen dataclass with the values of a struct whose fields have the same names."""
    return kind(
        *[
            getattr(struct, name) if convert is None else convert(getattr(struct, name))
            for name, convert in _plans.get(kind) or _plan(kind)
        ]
    )


def fill(struct: Any, values: Any, text: Callable[[bytes], Any]) -> list[Any]:
    """Write a dataclass into a struct; return what must live as long as the struct.

    None becomes -1 for a number (the library decides) and NULL for text; ``text`` makes C's
    string from bytes.
    """
    alive: list[Any] = []
    for item in dataclasses.fields(values):
        value = getattr(values, item.name)
        if str(item.type).startswith("str"):
            if value is not None:
                value = text(value.encode())
                alive.append(value)
                setattr(struct, item.name, value)
        else:
            setattr(struct, item.name, -1 if value is None else value)
    return alive
