"""Record what a script did, line by line, and play it again to compare.

A trace begins with a head that names the variant and the model; every line after it is an
operation with its result and, where something moved, the cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pyllamakv.errors import ScenarioFailed, ScriptError, UsageError
from pyllamakv.harness import script
from pyllamakv.harness.cellmap import Picture

if TYPE_CHECKING:
    from pyllamakv.harness.script import Line, Stage

#: The version of the file's shape.
SCHEMA = 1

#: Results that another variant may rightly have otherwise: how much it moved, and where to.
_WORK = ("moves", "cells", "holes", "largest_hole")


@dataclass(frozen=True)
class Head:
    """Hold the first line of a trace: where it was recorded."""

    variant: str
    model: str
    schema: int = SCHEMA


@dataclass(frozen=True)
class Difference:
    """Name one result that came out otherwise."""

    line: int
    op: str
    what: str
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return (
            f"line {self.line} ({self.op}): {self.what} was {self.recorded!r}, now {self.found!r}"
        )


class Recorder:
    """Write a trace while a script is played: its `observe` goes into `script.play`."""

    def __init__(self, file: TextIO, head: Head, stage: Stage) -> None:
        self._file = file
        self._stage = stage
        self._last: tuple[int, ...] = ()
        self._write({"trace": head.schema, "variant": head.variant, "model": head.model})

    def observe(self, line: Line, result: dict[str, Any]) -> None:
        """Write one line with its result."""
        snapshot = self._stage.player.snapshot() if self._stage.player else None
        written = dict(result)
        if snapshot is not None:
            picture = Picture.of(snapshot, str(line.arguments.get("label", line.op)))
            if picture.owner != self._last or line.op == "snapshot":
                self._last = picture.owner
                written["picture"] = picture.to_json()
        self._write({**line.to_json(), "result": written})

    def _write(self, raw: dict[str, Any]) -> None:
        self._file.write(json.dumps(raw) + "\n")
        self._file.flush()


def read(path: Path) -> tuple[Head, list[Line]]:
    """Return head and lines of a trace. Raises ScriptError when it is none."""
    lines = script.read(path)
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        raw = json.loads(first)
        head = Head(str(raw["variant"]), str(raw["model"]), int(raw["trace"]))
    except (ValueError, KeyError, TypeError) as error:
        msg = f'{path} is no trace: its first line must be like {{"trace": {SCHEMA}, …}}'
        raise ScriptError(msg, 1) from error
    if head.schema != SCHEMA:
        msg = f"{path} is a trace of schema {head.schema}, this package reads {SCHEMA}"
        raise ScriptError(msg, 1)
    return head, lines


def pictures(lines: list[Line]) -> Iterator[tuple[int, Picture]]:
    """Yield the line number and the cells of every line of a trace that has them."""
    for line in lines:
        raw = (line.result or {}).get("picture")
        if raw is not None:
            yield line.number, Picture.from_json(raw)


def replay(lines: list[Line], stage: Stage, *, strict: bool = True) -> list[Difference]:
    """Play the lines of a trace and return what came out otherwise.

    ``strict`` compares everything that was recorded; otherwise statuses, used cells and likely
    tokens alone, which another variant must have in common.
    """
    found: list[Difference] = []
    for line in lines:
        plain = script.Line(line.number, line.op, _any(line), line.result)
        try:
            result = script.play_line(plain, stage)
        except UsageError as error:
            raise line.wrong(str(error)) from error
        except ScenarioFailed as error:
            found.append(Difference(line.number, line.op, "it", "met", str(error)))
            continue
        for what, recorded in (line.result or {}).items():
            if what == "picture" or (not strict and what in _WORK):
                continue
            if result.get(what) != recorded:
                found.append(Difference(line.number, line.op, what, recorded, result.get(what)))
    return found


def _any(line: Line) -> dict[str, Any]:
    """Return a line's arguments without its expectation: a replay compares, and goes on."""
    return {**line.arguments, **({"expect": "any"} if line.op in ("decode", "restore") else {})}
