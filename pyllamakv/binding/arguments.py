"""Check the type and range of arguments where they enter the package.

A wrong type raises `ArgumentTypeError` (a `UsageError` and a `TypeError`), a wrong value
`UsageError`. The message contains the argument, its value and the accepted values. The rules are
the same everywhere: an integer is an int or a numpy integer, never a bool or a float; a flag is a
bool; text for C has no NUL and no lone surrogate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from pyllamakv.errors import ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = TypeVar("Kind")

#: Largest values of an int32_t and of a float in C; numpy.finfo takes 5 ms for the latter.
INT32: Final = 2**31 - 1
FLOAT32: Final = (2 - 2**-23) * 2.0**127

#: Maximum number of items of a list argument.
MAX_ITEMS: Final = 1 << 27

#: Maximum length of a value in a message.
_SHOWN: Final = 60


def shown(value: object) -> str:
    """Return a short representation of any value; an object whose repr fails has its type's."""
    if isinstance(value, str | bytes | bytearray):
        value = value[: _SHOWN + 1]
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    elif isinstance(value, range):
        return str(value)
    elif isinstance(value, list | tuple | set | frozenset | dict) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)} items"
    elif isinstance(value, np.ndarray) and value.size > 20:
        return f"an array of {value.dtype} of shape {value.shape}"
    try:
        found = repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"
    return found if len(found) <= _SHOWN else f"{found[:_SHOWN]}..."


def wrong_type(name: str, value: object, expected: str) -> ArgumentTypeError:
    """Create the error for an argument of a wrong type."""
    kind = type(value).__name__
    return ArgumentTypeError(f"{name} must be {expected}, not {shown(value)} (type {kind})")


def wrong_value(name: str, value: object, expected: str) -> UsageError:
    """Create the error for an argument whose value is not accepted."""
    return UsageError(f"{name} must be {expected}, not {shown(value)}")


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number as an int; ``low`` and ``high`` are the limits, both included."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise wrong_type(name, value, _whole(low, high))
        value = int(value)
    if (low is not None and value < low) or (high is not None and value > high):
        raise wrong_value(name, value, _whole(low, high))
    return value


def whole_or_none(
    name: str, value: object, low: int | None = None, high: int | None = None
) -> int | None:
    """Return a whole number as an int, or None."""
    if value is None:
        return None
    try:
        return integer(name, value, low, high)
    except ArgumentTypeError:
        raise wrong_type(name, value, f"{_whole(low, high)}, or None") from None


def _whole(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f"a whole number from {low} to {high}"
    if low is not None:
        return f"a whole number of {low} or more"
    return "a whole number" if high is None else f"a whole number of at most {high}"


def number(name: str, value: object, low: float = -FLOAT32, high: float = FLOAT32) -> float:
    """Return a finite number as a float; ``low`` and ``high`` are the limits, both included."""
    bounds = (
        "a finite number"
        if (low, high) == (-FLOAT32, FLOAT32)
        else f"a number from {low:g} to {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise wrong_type(name, value, bounds)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not low <= found <= high:
        raise wrong_value(name, value, bounds)
    return found


def flag(name: str, value: object) -> bool:
    """Return a bool; a numpy bool is one."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise wrong_type(name, value, "True or False")


def flash_attn(value: object) -> bool | None:
    """Return the requested flash attention: True, False, or None (llama.cpp decides)."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    expected = "True (or 'on'), False ('off') or None ('auto')"
    if not isinstance(value, str):
        raise wrong_type("flash_attn", value, expected)
    known = {"auto": None, "on": True, "off": False}
    if value not in known:
        raise wrong_value("flash_attn", value, expected)
    return known[value]


def text(name: str, value: object) -> str:
    """Return any text."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "text")
    return value


def salt(value: object) -> str:
    """Return the salt of a prompt: text that is not empty.

    A caller without a tenant might pass an empty one by mistake.
    """
    found = text("salt", value)
    if not found:
        raise UsageError("salt must not be empty; pass None to share prefixes with all prompts")
    return found


def c_text(name: str, value: object) -> str:
    """Return text that C can read: UTF-8 without a NUL."""
    found = text(name, value)
    try:
        bad = "\0" in found or not found.encode()
    except UnicodeEncodeError:
        bad = True
    if bad and found:
        raise wrong_value(name, value, "text without a NUL or a lone surrogate")
    return found


def c_text_or_none(name: str, value: object) -> str | None:
    """Return text that C can read, or None."""
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, value, "text or None")
    return None if value is None else c_text(name, value)


def choice(name: str, value: object, known: Iterable[Kind]) -> Kind:
    """Return the value if it is one of the texts ``known``; raise otherwise."""
    names = tuple(known)
    expected = f"one of {', '.join(map(str, names))}"
    if not isinstance(value, str):
        raise wrong_type(name, value, expected)
    if value not in names:
        raise wrong_value(name, value, expected)
    return value


def path(name: str, value: object) -> Path:
    """Return a path; text and os.PathLike are accepted."""
    if not isinstance(value, str | os.PathLike):
        raise wrong_type(name, value, "a path: text or pathlib.Path")
    found = os.fspath(value)
    if not isinstance(found, str):
        raise wrong_type(name, value, "a path of text, not of bytes")
    if not found:
        raise wrong_value(name, value, "a path that is not empty")
    return Path(c_text(name, found))


def instance(name: str, value: object, kind: type[Kind], expected: str) -> Kind:
    """Return a value that must be of a class."""
    if not isinstance(value, kind):
        raise wrong_type(name, value, expected)
    return value


def items(name: str, value: Any, expected: str) -> list[Any]:
    """Return the items of an iterable; text, bytes and mappings are none."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise wrong_type(name, value, expected)
    try:
        walk = iter(value)
        # A range can have more items than a list; its length may exceed a C integer.
        many = hasattr(value, "__len__") and len(value) > MAX_ITEMS
    except TypeError:
        raise wrong_type(name, value, expected) from None
    except OverflowError:
        many = True
    found = [] if many else list(islice(walk, MAX_ITEMS + 1))
    if many or len(found) > MAX_ITEMS:
        raise wrong_value(name, value, f"{expected}, at most {MAX_ITEMS}")
    return found
