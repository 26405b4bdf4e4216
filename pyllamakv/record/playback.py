"""Follow a cache from operation to operation: what was done, and where the cells lie after it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.printable import printable
from pyllamakv.record import results
from pyllamakv.scenarios.player import word
from pyllamakv.view.cell_drawing import NOBODY, Picture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.record.script import Line

#: Operations in which cells of a sequence may come to lie elsewhere.
MOVING = ("decode", "step", "batch", "advance", "defrag", "update")

#: Operations that neither do anything to the cells nor tell of them.
_SILENT = ("context", "note", "expect", "cancel", "threads", "snapshot", "verify")

#: Arguments that say nothing at a glance.
_LONG = ("interleave", "expect", "pos", "logits", "state")


@dataclass(frozen=True)
class Frame:
    """Hold one operation and the cells after it.

    ``failed`` says in a word how it failed, and is empty when it did not; ``moves`` are (source,
    target, cells) of each run of cells that it moved, ``moved`` how many cells that were.
    """

    number: int
    op: str
    detail: str
    picture: Picture
    failed: str = ""
    moves: tuple[tuple[int, int, int], ...] = ()
    moved: int = 0

    def caption(self) -> str:
        """Return what was done, and how it ended, in one line."""
        parts = [f"{self.op} {self.detail}".rstrip()]
        if self.moved:
            plural = "cell" if self.moved == 1 else "cells"
            parts.append(f"{self.moved} {plural} moved")
        if self.failed:
            parts.append(self.failed)
        return printable("; ".join(parts))


@dataclass
class Film:
    """Hold the frames of a run, with a title that names it."""

    title: str
    frames: list[Frame] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def cells(self) -> int:
        """Return how many cells the cache has."""
        return max((len(frame.picture.owner) for frame in self.frames), default=0)

    def deeds(self) -> list[Frame]:
        """Return the frames of operations that do something to the cells."""
        return [frame for frame in self.frames if frame.op not in _SILENT]

    def changes(self) -> list[Frame]:
        """Return the frames whose cells differ from those before, and all that have a label."""
        found: list[Frame] = []
        last: tuple[int, ...] | None = None
        for frame in self.frames:
            if frame.picture.owner != last or frame.op == "snapshot":
                found.append(frame)
            last = frame.picture.owner
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the film as plain JSON values; a picture that did not change is left out."""
        frames = []
        last: tuple[int, ...] | None = None
        for frame in self.frames:
            raw = {
                key: value
                for key, value in vars(frame).items()
                if value and key not in ("picture", "moves")
            }
            raw |= {"moves": [list(each) for each in frame.moves]} if frame.moves else {}
            if frame.picture.owner != last:
                raw["picture"] = frame.picture.to_json()
                last = frame.picture.owner
            frames.append(raw)
        return {"title": self.title, "frames": frames}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Film:
        """Return the film that `to_json` described."""
        film, last = cls(str(raw["title"])), Picture("", ())
        for each in raw["frames"]:
            if "picture" in each:
                last = Picture.from_json(each["picture"])
            film.frames.append(
                Frame(
                    int(each["number"]),
                    str(each["op"]),
                    str(each.get("detail", "")),
                    last,
                    str(each.get("failed", "")),
                    tuple((int(a), int(b), int(n)) for a, b, n in each.get("moves", ())),
                    int(each.get("moved", 0)),
                )
            )
        return film


def of_trace(lines: Iterable[Line], title: str = "") -> Film:
    """Return the film of a recorded trace.

    Raises ScriptError where its pictures have more cells together than memory is lent for.
    """
    return Film(title, list(frames(lines)))


def frames(lines: Iterable[Line]) -> Iterator[Frame]:
    """Yield a frame for every line of a trace from the first that has cells on."""
    last: Picture | None = None
    cells = 0
    for line in lines:
        cells += results.cells(line.result or {})
        if cells > results.DRAWN:
            msg = (
                f"the pictures up to here have {cells} cells, and {results.DRAWN} are drawn at "
                "most; a trace that ends before this line can be shown"
            )
            raise line.wrong(msg)
        found = after(line, line.result or {}, last)
        if found is not None:
            last = found.picture
            yield found


def after(line: Line, result: Mapping[str, Any], last: Picture | None) -> Frame | None:
    """Return the frame of one line with its result, or None before any cells are known."""
    raw = result.get("picture")
    picture = last if raw is None else Picture.from_json(raw)
    if picture is None:
        return None
    frame = Frame(line.number, line.op, detail(line.arguments), picture, _failed(result))
    if "moved" in result:
        moves = tuple((int(a), int(b), int(n)) for a, b, n in result["moved"])
        return replace(frame, moves=moves, moved=sum(length for *_, length in moves))
    return _inferred(frame, last, int(result.get("cells") or 0))


def _inferred(frame: Frame, last: Picture | None, counted: int) -> Frame:
    """Add to a frame what seems to have moved since the picture before; ``counted`` were told."""
    if last is None or frame.op not in MOVING or len(last.owner) != len(frame.picture.owner):
        return replace(frame, moved=counted)
    moves = tuple(infer(last.owner, frame.picture.owner))
    return replace(frame, moves=moves, moved=counted or sum(length for *_, length in moves))


def infer(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, cells) of runs that moved, as far as owners alone can tell.

    Cells that an owner has left go, in their order, to those that it has taken.
    """
    before, now = np.asarray(old), np.asarray(new)
    changed = before != now
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for owner in np.unique(before[changed & (before != NOBODY)]).tolist():
        left = np.flatnonzero(changed & (before == owner))
        taken = np.flatnonzero(changed & (now == owner))
        n = min(len(left), len(taken))
        pairs.append(np.column_stack((left[:n], taken[:n])))
    found = np.concatenate(pairs)
    yield from _runs(found[found[:, 0].argsort()])


def _runs(pairs: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Put neighbouring (source, target) pairs together."""
    if not len(pairs):
        return
    breaks = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(starts, append=len(pairs))
    for (source, target), length in zip(pairs[starts].tolist(), lengths.tolist(), strict=True):
        yield source, target, length


def detail(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a line in few words."""
    words = []
    for key, value in arguments.items():
        if key == "feed" and isinstance(value, dict):
            words += [f"{seq}: {_fed(what)}" for seq, what in value.items()]
        elif key in ("tokens", "steps") and isinstance(value, list):
            words.append(f"{len(value)} {key if len(value) != 1 else key[:-1]}")
        elif key in ("label", "text", "as"):
            words.append(str(value))
        elif key not in _LONG and not (isinstance(value, list) and len(value) > 8):
            words.append(f"{key} {json.dumps(value)}")
    return ", ".join(words)


def _fed(what: Any) -> str:
    if isinstance(what, str):
        return json.dumps(what)
    n = what if isinstance(what, int) else len(what)
    return f"{n} tokens" if n != 1 else "1 token"


def _failed(result: Mapping[str, Any]) -> str:
    status = result.get("status", 0)
    if isinstance(status, int) and status:
        return word(status)
    if result.get("error"):
        return str(result["error"])
    return "refused" if result.get("done") is False else ""
