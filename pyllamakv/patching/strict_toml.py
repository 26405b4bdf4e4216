"""Read TOML tables strictly: unknown keys and wrong types are errors that name the file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import PatchFormatError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

#: Maximum number of dots in a line. The memory of Python's reader grows with the square of the
#: parts of a key: a hundred thousand dots would take forty gigabytes.
_DOTS = 100


@dataclass(frozen=True)
class Table:
    """A table and its place in the file, for errors."""

    data: dict[str, Any]
    where: str
    path: str = ""

    def wrong(self, message: str) -> PatchFormatError:
        """Create the error for this table."""
        return PatchFormatError(f"{self.where}: {message}", self.path or self.where)

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(f"`{key}` must be a text that is not empty")
        return value

    def strings(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of strings; one string counts as a list of one."""
        value = self.data.get(key, default)
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.wrong(f"`{key}` must be a list of texts")
        if any(not v for v in value) or (default is None and not value):
            raise self.wrong(f"`{key}` must not be empty")
        return tuple(value)

    def tables(
        self, key: str, keys: Collection[str], *, optional: bool = False
    ) -> tuple[Table, ...]:
        """Return a list of tables that have no other keys than these.

        Only an optional list may be absent, and none may be empty.
        """
        value = self.data.get(key)
        if optional and value is None:
            return ()
        if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
            raise self.wrong(f"`{key}` must be a list of tables, at least one")
        path = self.path or self.where
        found = tuple(Table(v, f"{self.where}: {key} {n}", path) for n, v in enumerate(value, 1))
        for table in found:
            table.reject_unknown_keys(keys)
        return found

    def reject_unknown_keys(self, keys: Collection[str]) -> None:
        """Refuse keys that are not among these."""
        unknown = sorted(set(self.data) - set(keys))
        if unknown:
            raise self.wrong(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")


def load(path: Path, keys: Collection[str], *, schema: int) -> Table:
    """Read a TOML file with these keys and this schema number."""
    try:
        text = path.read_text("utf-8")
        if any(line.count(".") > _DOTS for line in text.split("\n")):
            msg = f"{path}: a line has more than {_DOTS} dots; no key has so many parts"
            raise PatchFormatError(msg, str(path))
        data = tomllib.loads(text)
    except OSError as error:
        raise PatchFormatError(f"{path} cannot be read: {error.strerror}", str(path)) from error
    except (ValueError, RecursionError) as error:  # also raised for numbers of thousands of digits
        raise PatchFormatError(f"{path}: {error}", str(path)) from error
    table = Table(data, str(path))
    table.reject_unknown_keys(keys)
    if data.get("schema") != schema:
        raise table.wrong(f"schema is {data.get('schema')!r}; this version reads {schema}")
    return table
