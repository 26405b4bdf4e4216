"""Test that a player's ledger and the cells of the library agree after any operations.

Positions are read from members of the cells or, in the oldest releases, from a view. The latter
are tested if they are built.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from native_kit import built

from pyllamakv.binding.library import open_library
from pyllamakv.binding.protocol import Capability, ContextParams, ModelParams
from pyllamakv.scenarios import kv_rows
from pyllamakv.scenarios.cell_ledger import cell_differences
from pyllamakv.scenarios.player import Player

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.binding.protocol import ModelHandle, Native
    from pyllamakv.building.variant import Variant

OLD = ("0.2.90+patched", "0.2.90+stock", "0.3.5+patched", "0.3.5+stock")
OPERATIONS = ("decode", "decode", "decode", "remove", "remove", "drop", "copy", "shift", "shift")
OPERATIONS += ("divide", "defrag", "update", "save", "restore", "restore", "clear", "keep")

pytestmark = pytest.mark.native


@pytest.fixture(scope="module", params=("default", *OLD))
def loaded(
    request: pytest.FixtureRequest, patched: Variant
) -> Iterator[tuple[Native, ModelHandle]]:
    """Open a library in this process, with the smallest model."""
    from pyllamakv.scenarios import synthetic_models

    chosen = patched if request.param == "default" else built(request.param)
    with open_library(chosen.folder) as library:
        native = library.native
        model = native.model_load(str(synthetic_models.tiny()), ModelParams())
        yield native, model
        native.model_free(model)


def new_player(loaded: tuple[Native, ModelHandle], *, guard: bool = False) -> Player:
    """Return a player on four sequences and 256 cells."""
    params = ContextParams(n_ctx=256, n_batch=256, n_ubatch=32, n_seq_max=4, guard=guard)
    return Player(*loaded, params)


def step(player: Player, chance: random.Random) -> str:
    """Run one random operation, and return its name."""
    name, seq = chance.choice(OPERATIONS), chance.randrange(4)
    start = chance.randrange(40)
    if name == "decode":
        count = chance.randrange(1, 24)
        if player.ledger.used + count <= 250:
            player.decode({seq: count}, expect=None)
    elif name == "remove":
        player.remove(seq, start, start + chance.randrange(1, 20))
    elif name == "drop":
        player.remove(seq)
    elif name == "copy":
        other = (seq + 1) % 4
        if not player.ledger.of(other):
            player.copy(seq, other)
    elif name == "shift":
        player.shift(seq, start, -1, chance.choice((-8, -3, 2, 5)))
    elif name == "divide":
        player.divide(seq, start, -1, 2)
    elif name == "save" and player.ledger.of(seq):
        player.save(seq, "kept")
    elif name == "restore" and "kept" in player.saved:
        if not player.restore(seq, "kept", must=False):
            player.remove(seq)  # a failed restore has emptied its sequence
    elif name in ("defrag", "update"):
        getattr(player, name)()
    elif name == "clear" and chance.random() < 0.2:
        player.clear()
    elif name == "keep" and chance.random() < 0.1:
        player.keep(seq)
    return name


@pytest.mark.parametrize("guard", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize("seed", range(8))
def test_cells_equal_the_ledger_after_each_random_operation(
    loaded: tuple[Native, ModelHandle], seed: int, *, guard: bool
) -> None:
    """They are after every step of a random schedule, also while a shift is pending."""
    player = new_player(loaded, guard=guard)
    chance = random.Random(seed)
    done = []
    try:
        for _ in range(60):
            done.append(step(player, chance))
            snapshot = player.snapshot()
            assert snapshot is not None
            lost, ghosts, text = cell_differences(
                player.ledger.contents(), kv_rows.contents(snapshot)
            )
            assert not lost, f"{text} after {done[-8:]}"
            assert not ghosts, f"{text} after {done[-8:]}"
    finally:
        player.close()


def test_a_pending_shift_is_separate_from_positions(loaded: tuple[Native, ModelHandle]) -> None:
    """Cells have new positions after the shift and a pending delta, which is zero once applied."""
    player = new_player(loaded)
    native, context = player.native, player.context
    assert native.about.capabilities & Capability.CELLS
    try:
        player.fill({0: 24, 1: 8})
        native.logs()
        assert native.cells(context, 0).info.has_shift == 0
        player.remove(0, 4, 12)
        player.shift(0, 12, -1, -8)
        player.shift(2, 0, -1, 5)  # an empty sequence
        raw = native.cells(context, 0)
        assert raw.info.has_shift == 1
        assert sorted(raw.pos[raw.pos >= 0].tolist()) == sorted([*range(16), *range(8)])
        assert sorted(raw.shift.tolist())[:12] == [-8] * 12
        assert (raw.shift != 0).sum() == 12
        player.decode({1: 1})
        after = native.cells(context, 0)
        assert not after.shift.any()
        assert after.info.has_shift == 0
        assert not [text for level, text in native.logs() if level >= 3]
    finally:
        player.close()


def test_cells_restored_under_a_pending_shift_have_their_own_positions(
    loaded: tuple[Native, ModelHandle],
) -> None:
    """The shift belonged to tokens that were removed; new tokens in their cells do not move."""
    player = new_player(loaded)
    try:
        player.fill({2: 64})
        player.save(2, "kept")
        player.remove(2)
        player.fill({0: 96, 1: 32})
        player.remove(0, 4, 12)
        player.shift(0, 12, -1, -8)
        player.remove(0)
        player.restore(2, "kept")
        player.check_cells()
    finally:
        player.close()
