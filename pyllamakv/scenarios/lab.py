"""The environment of a scenario: players, references, evidence and notes of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding.protocol import (
    Capability,
    ContextParams,
    Counters,
    ModelHandle,
    Native,
)
from pyllamakv.errors import (
    ContextError,
    HarnessError,
    KvError,
    ScenarioFailed,
    Unsupported,
    Untestable,
)
from pyllamakv.runtime import ggml_types as types
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.frames import TimelinePlayer
from pyllamakv.scenarios.player import Player
from pyllamakv.scenarios.reference import CUDA, Reference, Tolerance

if TYPE_CHECKING:
    from pyllamakv.runtime.snapshot import Snapshot
    from pyllamakv.scenarios.scenario import Setting


class Lab:
    """The environment of a scenario, for one run."""

    def __init__(
        self,
        native: Native,
        model: ModelHandle,
        setting: Setting,
        *,
        tolerance: Tolerance | None = None,
        timeline: bool = False,
        place: DevicePlacement | None = None,
    ) -> None:
        self.player_type: type[Player] = TimelinePlayer if timeline else Player
        self.place = place or DevicePlacement()
        self.native = native
        self.model = model
        self.setting = setting
        self.tolerance = tolerance or (CUDA if self.place.backend == "cuda" else Tolerance())
        self.notes: dict[str, Any] = {}
        self.pictures: list[Picture] = []
        self.players: list[Player] = []
        self._references: dict[int, Reference] = {}

    def player(self, n_ctx: int = 256, **options: Any) -> Player:
        """Create a context in this run's setting; ``options`` are those of `ContextParams`.

        Flash attention pads the cache to multiples of 256 cells: ``n_ctx`` must be such a
        multiple, so that all settings have caches of equal size.
        """
        if n_ctx % 256:
            msg = f"n_ctx must be a multiple of 256, found {n_ctx}"
            raise HarnessError(msg)
        options = {"n_batch": n_ctx, "n_ubatch": 32, "n_seq_max": 8, **options}
        params = ContextParams(
            n_ctx=n_ctx,
            flash_attn=self.setting.flash_attn,
            type_k=types.cache_type(self.setting.type_k, "K").number,
            type_v=types.cache_type(self.setting.type_v, "V").number,
            guard=False,
            **options,
        )
        try:
            player = self.player_type(self.native, self.model, params)
        except (ContextError, Unsupported) as error:
            if isinstance(error, Unsupported) and "kv_backing" in options and self.place.host:
                # In host memory, this means that the library has no mapped memory.
                raise
            msg = f"cannot create a context with {self.setting.name}: {error}"
            raise Untestable(msg) from error
        return self.adopt(player)

    def adopt(self, player: Player) -> Player:
        """Manage a player: its reference, the picture of a failure, its closing."""
        self.players.append(player)
        self._references[id(player)] = Reference(player, self.tolerance)
        self.place.check(player.snapshot())
        return player

    def reference(self, player: Player) -> Reference:
        """Return the reference that follows a player."""
        return self._references[id(player)]

    def verify(self, player: Player) -> None:
        """Check a cache: its cells, then the logits of a further token.

        Needs one free cell for that token, which is removed afterwards.
        """
        player.check_cells()
        reference = self.reference(player)
        reference.catch_up()
        reference.check_next()
        player.check_cells()

    def expect(self, holds: bool, message: str, **evidence: Any) -> None:
        """Fail the claim with a message unless a condition holds."""
        if not holds:
            raise ScenarioFailed(message, failure="claim", evidence=evidence)

    def needs(self, capability: Capability) -> None:
        """Raise Unsupported unless the library has a capability."""
        if not self.native.about.capabilities & capability:
            name = capability.name or str(capability)
            msg = f"this build lacks {name.lower()}"
            raise Unsupported(msg, capability=name.lower())

    def counters(self, player: Player) -> Counters:
        """Return a player's counters. Raises Unsupported if the build has none."""
        found = player.counters()
        if found is None:
            msg = "this build has no counters (patch kv-counters)"
            raise Unsupported(msg, capability="counters")
        return found

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, including the model's first token."""
        return self.native.tokenize(self.model, text.encode(), True, False)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        pieces = (self.native.token_piece(self.model, token, False) for token in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def note(self, **facts: Any) -> None:
        """Record numbers for the report."""
        self.notes |= facts

    def picture(self, player: Player, label: str) -> Snapshot | None:
        """Record the cells for the report, and return them."""
        snapshot = player.snapshot()
        if snapshot is not None:
            self.pictures.append(Picture.of(snapshot, label))
        return snapshot

    def last_picture(self) -> None:
        """Record the cells when a run failed, if they can still be read."""
        try:
            if self.players:
                self.picture(self.players[-1], "when it failed")
        except KvError:
            return

    def logs(self, lowest: int = 3) -> list[str]:
        """Drain the log and return its lines from a level on: 3 warnings, 4 errors."""
        return [text for level, text in self.native.logs() if level >= lowest]

    @property
    def difference(self) -> float:
        """Return the largest difference of logits seen in this run."""
        worst = max((ref.worst for ref in self._references.values()), default=0.0)
        return worst if np.isfinite(worst) else -1.0

    def close(self) -> None:
        """Release the contexts."""
        for reference in self._references.values():
            reference.close()
        for player in self.players:
            player.close()
