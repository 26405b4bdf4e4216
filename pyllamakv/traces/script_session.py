"""The objects that a script or trace is played on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.protocol import ContextParams, ModelParams
from pyllamakv.errors import UsageError, WorkerDied
from pyllamakv.runtime import ggml_types as types
from pyllamakv.scenarios import cell_samples, synthetic_models
from pyllamakv.scenarios.player import Player
from pyllamakv.scenarios.reference import Reference
from pyllamakv.traces.script import Line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyllamakv.binding.protocol import Native
    from pyllamakv.scenarios.batch_composition import BatchRows
    from pyllamakv.scenarios.cell_samples import CellSample


@dataclass
class ScriptSession:
    """The objects of a script: a library, the model, and the context after its creation.

    ``file`` is the model's file if the script does not select it. ``guard`` overrides the setting
    of a trace. With ``lenient``, decodes and restores may have any result. ``player_type`` is the
    class of the player.
    """

    native: Native
    model: str = "tiny"
    file: Path | None = None
    guard: bool | None = None
    lenient: bool = False
    player_type: type[Player] = Player
    player: Player | None = None
    reference: Reference | None = None
    #: A state came from outside, so that no reference can follow.
    foreign: bool = False
    last_sample: CellSample | None = None
    #: A batch that failed in the recording and succeeded here; removed before the next line.
    extra: BatchRows | None = None
    loaded: dict[str, Any] = field(default_factory=dict)

    def play_leniently(self) -> None:
        """Accept every result of later decodes and restores."""
        self.lenient = True

    def check_expectation(self, line: Line) -> None:
        """Check the expectation of a line only if it has no recorded result."""
        self.lenient = line.result is not None

    def follow(self, reference: Reference) -> None:
        """Replace the reference of the context."""
        self.reference = reference

    def accept_foreign_state(self) -> None:
        """Record that a state came from outside, so that no reference is possible."""
        self.foreign = True

    def take_back_later(self, feed: BatchRows) -> None:
        """Store a batch that succeeded here and failed in the recording, for `take_back`."""
        self.extra = feed

    def take_back(self) -> None:
        """Remove the batch of `take_back_later`, if there is one."""
        if self.extra is not None and self.player is not None:
            remove(self.player, self.extra)
        self.extra = None

    def sample(self) -> dict[str, int]:
        """Sample the cells and return their counts; empty if the build cannot show cells."""
        assert self.player is not None
        player = self.player
        self.last_sample = cell_samples.sample_cells(player.native, player.context, player.info)
        return {} if self.last_sample is None else self.last_sample.counts

    def close(self) -> None:
        """Free the contexts; a dead worker has none."""
        with suppress(WorkerDied):
            if self.reference is not None:
                self.reference.close()
            if self.player is not None:
                self.player.close()


def model_name(lines: Iterable[Line], default: str) -> str:
    """Return the model that a script is played on."""
    first = next(iter(lines), None)
    named = first.arguments.get("model") if first is not None and first.op == "context" else None
    return str(named or default)


def open_context(line: Line, session: ScriptSession) -> None:
    """Create the context of a line."""
    if session.player is not None:
        raise line.wrong("a second context: it must be the first operation")
    words = dict(line.arguments)
    name = words.pop("model", session.model)
    for key in ("type_k", "type_v"):
        words[key] = types.cache_type(words.get(key, "f16"), key[-1].upper()).number
    words.setdefault("n_ctx", 256)
    words.setdefault("n_batch", words["n_ctx"])
    words.setdefault("n_ubatch", min(words["n_batch"], 512))
    words.setdefault("n_seq_max", 8)
    guard = bool(words.pop("guard", False))
    try:
        params = ContextParams(guard=guard if session.guard is None else session.guard, **words)
    except (TypeError, UsageError) as error:
        raise line.wrong(f"cannot create a context from these arguments: {error}") from error
    try:
        key = str(session.file or name)
        if key not in session.loaded:
            path = session.file or synthetic_models.model(name)
            session.loaded[key] = session.native.model_load(str(path), ModelParams())
        session.player = session.player_type(session.native, session.loaded[key], params)
    except (TypeError, OverflowError) as error:
        raise line.wrong(f"cannot create a context from these arguments: {error}") from error
    session.reference = Reference(session.player)


def remove(player: Player, feed: BatchRows) -> None:
    """Remove the tokens of a batch."""
    ends: dict[int, tuple[int, int]] = {}
    for pos, seqs in zip(feed.pos.tolist(), feed.owners, strict=True):
        for seq in seqs:
            low, high = ends.get(seq, (pos, pos))
            ends[seq] = min(low, pos), max(high, pos)
    for seq, (low, high) in ends.items():
        player.remove(seq, low, high + 1)
