"""Record the cells of a cache after every operation of a run, also after failures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyllamakv.printable import printable
from pyllamakv.scenarios import cell_samples
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.player import Player, word

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import RawDefrag
    from pyllamakv.scenarios.batch_composition import BatchRows
    from pyllamakv.scenarios.cell_samples import CellSample

#: Operations that may move cells of a sequence.
MOVING = ("decode", "step", "batch", "advance", "defrag", "update")

#: Operations that neither change nor show the cells.
_SILENT = ("context", "note", "expect", "cancel", "threads", "snapshot", "verify")

#: The name of result 1 of llama_decode.
NO_SLOT = "no-slot"

#: Arguments that are omitted from captions.
_LONG = ("interleave", "expect", "pos", "logits", "state")


@dataclass(frozen=True)
class Frame:
    """One operation and the cells after it.

    ``failed`` is the result of a failed operation in one word, otherwise empty. ``moves`` contains
    (source, target, cells) of each run of cells that moved, and ``moved`` the number of these
    cells. ``tokens`` is the number of tokens of a decode, 0 if unknown. ``counted`` is the number
    of used cells after an operation that recorded no cells: ``picture`` is then an earlier one.
    """

    number: int
    op: str
    detail: str
    picture: Picture
    failed: str = ""
    moves: tuple[tuple[int, int, int], ...] = ()
    moved: int = 0
    tokens: int = 0
    counted: int | None = None

    @property
    def used(self) -> int:
        """Return the number of used cells."""
        return self.picture.used if self.counted is None else self.counted

    def numbers(self) -> str:
        """Return the statistics of the cells in words."""
        if self.counted is None:
            return self.picture.numbers()
        return f"{self.counted} of {len(self.picture.owner)} cells used; which was not recorded"

    @property
    def failure(self) -> str:
        """Return why the operation failed: "48 tokens, largest hole 16", or the result's name.

        The number is that of the whole batch. llama.cpp places one micro-batch after another, so a
        batch may fail although its first micro-batch fits into the hole.
        """
        if self.failed != NO_SLOT or not self.tokens or self.counted is not None:
            return self.failed
        plural = "token" if self.tokens == 1 else "tokens"
        return f"{self.tokens} {plural}, largest hole {self.picture.holes[1]}"

    def caption(self) -> str:
        """Return operation and result in one line."""
        parts = [f"{self.op} {self.detail}".rstrip()]
        if self.moved:
            plural = "cell" if self.moved == 1 else "cells"
            parts.append(f"{self.moved} {plural} moved")
        if self.failed:
            numbers = f": {self.failure}" if self.failure != self.failed else ""
            parts.append(self.failed + numbers)
        return printable("; ".join(parts))


@dataclass
class Timeline:
    """The frames of a run, with a title that names it."""

    title: str
    frames: list[Frame] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def cells(self) -> int:
        """Return how many cells the cache has."""
        return max((len(frame.picture.owner) for frame in self.frames), default=0)

    def operations(self) -> list[Frame]:
        """Return the frames of operations that affect the cells."""
        return [frame for frame in self.frames if frame.op not in _SILENT]

    def changes(self) -> list[Frame]:
        """Return the frames whose cells differ from those before, and all frames with a label."""
        found: list[Frame] = []
        last: tuple[int, ...] | None = None
        for frame in self.frames:
            if frame.picture.owner != last or frame.op == "snapshot":
                found.append(frame)
            last = frame.picture.owner
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as plain JSON values; an unchanged picture is omitted."""
        frames = []
        last: tuple[int, ...] | None = None
        for frame in self.frames:
            raw = {
                key: value
                for key, value in vars(frame).items()
                if key not in ("picture", "moves") and (value or (key == "counted" and value == 0))
            }
            raw |= {"moves": [list(each) for each in frame.moves]} if frame.moves else {}
            if frame.picture.owner != last:
                raw["picture"] = frame.picture.to_json()
                last = frame.picture.owner
            frames.append(raw)
        return {"title": self.title, "frames": frames}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Timeline:
        """Return the timeline that `to_json` described."""
        timeline, last = cls(str(raw["title"])), Picture("", ())
        for each in raw["frames"]:
            if "picture" in each:
                last = Picture.from_json(each["picture"])
            timeline.frames.append(
                Frame(
                    int(each["number"]),
                    str(each["op"]),
                    str(each.get("detail", "")),
                    last,
                    str(each.get("failed", "")),
                    tuple((int(a), int(b), int(n)) for a, b, n in each.get("moves", ())),
                    int(each.get("moved", 0)),
                    int(each.get("tokens", 0)),
                    each.get("counted"),
                )
            )
        return timeline


#: Maximum number of frames of a timeline that is displayed.
LONGEST = 400


class TimelinePlayer(Player):
    """Record the timeline of a run; it is empty if the build cannot show cells."""

    timeline: Timeline
    _before: CellSample | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeline = Timeline("")
        self._before = None

    def defrag(self) -> RawDefrag:
        """Defragment now. Raises Unsupported if the build cannot."""
        done = super().defrag()
        self._take("defrag", "")
        return done

    def _run(self, feed: BatchRows) -> int:
        status = super()._run(feed)
        fed: dict[str, int] = {}
        for owners in feed.owners:
            name = "+".join(map(str, owners))
            fed[name] = fed.get(name, 0) + 1
        tokens = len(feed.owners)
        self._take("decode", detail({"feed": fed}), word(status) if status else "", tokens)
        return status

    def _step(self, op: str, *arguments: Any) -> None:
        super()._step(op, *arguments)
        self._take(op, ", ".join(str(each) for each in arguments if each != -1))

    def _take(self, op: str, detail: str, failed: str = "", tokens: int = 0) -> None:
        if len(self.timeline) >= LONGEST:
            return
        now = cell_samples.sample_cells(self.native, self.context, self.info)
        if now is None:
            return
        moves: tuple[tuple[int, int, int], ...] = ()
        if self._before is not None and op in MOVING:
            moves = tuple((a, b, n) for a, b, n in now.moved(self._before))
        number = len(self.timeline) + 1
        moved = sum(length for *_, length in moves)
        picture = Picture.of(now.snapshot)
        made = Frame(number, op, detail, picture, failed, moves, moved, tokens)
        self.timeline.frames.append(made)
        self._before = now


def timelines(players: Iterable[Player]) -> tuple[Timeline, ...]:
    """Return the timelines of the players that recorded frames."""
    recorded = (each.timeline for each in players if isinstance(each, TimelinePlayer))
    return tuple(timeline for timeline in recorded if len(timeline))


def detail(arguments: Mapping[str, Any]) -> str:
    """Return a short text for the arguments of a line."""
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
