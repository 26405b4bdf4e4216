"""A cache in a file outlives its context. Flushed data can be reused, other data cannot."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import Backing, Capability
from pyllamakv.errors import (
    KVFileBusy,
    KVFileDamaged,
    KVFileDirty,
    KVFileForeign,
    NativeError,
    ScenarioFailed,
)
from pyllamakv.scenarios.scenario import PLAIN, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextParams
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

#: Values of ``kv_keep``: reuse the content of a cache file, or start empty.
RESUME, FRESH = 1, 2

#: Header and tables of 512 cells end before this byte; the keys of the first cell follow.
TABLES = 16384


def run(lab: Lab) -> None:
    """Keep a cache, reuse it, and refuse files that are incomplete or do not match."""
    lab.needs(Capability.MAPPING)
    with tempfile.TemporaryDirectory(prefix="pyllamakv-") as folder:
        file = Path(folder) / "cache"
        options: dict[str, Any] = {"kv_backing": int(Backing.FILE), "kv_path": str(file)}
        options |= {"kv_keep": RESUME, "kv_model": "one", "n_seq_max": 4}
        player, tokens = _keep(lab, options)
        _refuse_others(lab, player)
        # Opening without changes leaves the file unchanged.
        _again(lab, player, generation=1).close()
        player = _again(lab, player, generation=1)
        _expect_tokens(lab, player, tokens)
        _same_next_cell(lab, player)
        player.decode({0: 8, 1: 8, 3: 30})
        lab.verify(player)
        _flush(player, None)
        _expect(lab, player, resumed=True, generation=2)
        _expect_tokens(lab, player, np.full(len(tokens), -1, np.int32))
        _change(lab, player)
        player = _again(
            lab, player, generation=player.native.mapping(player.context).info.generation
        )
        lab.verify(player)
        player = _defragmented(lab, player)
        _flush(player, None)
        _damage(lab, player)
        _discard(lab, options)


def _keep(lab: Lab, options: dict[str, Any]) -> tuple[Player, NDArray[np.int32]]:
    """Fill a cache, and flush it with one token id per cell."""
    player = lab.player(512, **options)
    _expect(lab, player, resumed=False, generation=0)
    _count_tensors(lab, player)
    _fill(player)
    n_cells = player.native.mapping(player.context).info.n_cells
    lab.expect(n_cells == player.n_cells, f"{n_cells} of {player.n_cells} cells are mapped")
    _expect_tokens(lab, player, np.full(n_cells, -1, np.int32))
    tokens = np.arange(7, 7 + n_cells, dtype=np.int32)
    _refuse(lab, "a flush with one token too few", NativeError, partial(_flush, player, tokens[1:]))
    _flush(player, tokens)
    _expect(lab, player, resumed=False, generation=1)
    _expect_tokens(lab, player, tokens)
    _refuse(lab, "a second context on the same file", KVFileBusy, partial(_open, player))
    return player, tokens


def _fill(player: Player) -> None:
    """Leave two holes of one cell, and decode more tokens: the slot search continues after them."""
    player.fill({0: 120, 1: 60}, interleave=True)
    player.copy(0, 2)
    player.remove(0, 30, 90)
    player.remove(1, 0, 2)
    player.decode({0: 2})


def _same_next_cell(lab: Lab, player: Player) -> None:
    """Decode a token into the same cell as in a cache that was never closed."""
    never = lab.player(player.params.n_ctx, n_seq_max=player.params.n_seq_max)
    _fill(never)
    for each in (player, never):
        each.decode({3: 1})
    found, expected = (each.native.cells(each.context, 0).pos for each in (player, never))
    lab.expect(
        bool(np.array_equal(found, expected)),
        f"cells {np.flatnonzero(found != expected).tolist()} differ from a cache that stayed open",
    )


def _refuse_others(lab: Lab, player: Player) -> None:
    """Close a kept cache, and open it with parameters that do not match."""
    player.close()
    others: dict[str, Any] = {"kv_model": "two", "n_ctx": 1024, "kv_keep": 0}
    for name, other in others.items():
        params = replace(player.params, **{name: other})
        _refuse(
            lab, f"a file with a different {name}", KVFileForeign, partial(_open, player, params)
        )


def _change(lab: Lab, player: Player) -> None:
    """Change cells with every operation: the file stays dirty until a flush. Closes the player."""
    steps = ["a decode"]
    if player.info.can_shift:
        steps.append("a shift")
    if lab.native.about.capabilities & Capability.DEFRAG:
        steps.append("a defragmentation")
    for what in steps:
        if what == "a decode":
            player.decode({3: 1})
        elif what == "a shift":
            player.shift(3, 0, -1, 5)
            player.update()
        else:
            player.remove(1)
            player.defrag()
        # A copy of the file equals what a process killed at this point would leave.
        copy = shutil.copy2(str(player.params.kv_path), f"{player.params.kv_path}-{len(what)}")
        params = replace(player.params, kv_path=copy)
        _refuse(
            lab,
            f"a file with {what} after its last flush",
            KVFileDirty,
            partial(_open, player, params),
        )
        _flush(player, None)


def _defragmented(lab: Lab, player: Player) -> Player:
    """Reuse a cache that has holes, and defragment before any computation."""
    if not lab.native.about.capabilities & Capability.DEFRAG:
        return player
    player.remove(0, 0, 8)
    _flush(player, None)
    again = _again(lab, player, generation=player.native.mapping(player.context).info.generation)
    again.defrag()
    again.check_cells()
    lab.verify(again)
    return again


def _damage(lab: Lab, player: Player) -> None:
    """Change a byte of the header, of the cell table and of a key. Closes the player."""
    player.close()
    file = Path(str(player.params.kv_path))
    whole = file.read_bytes()
    key = next(at for at in range(TABLES, len(whole)) if whole[at])
    for what, at in (("header", 40), ("table", 600), ("key", key)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        _refuse(lab, f"a file with a damaged {what}", KVFileDamaged, partial(_open, player))
    file.write_bytes(whole[: len(whole) // 2])
    _refuse(lab, "a truncated file", KVFileDamaged, partial(_open, player))


def _discard(lab: Lab, options: dict[str, Any]) -> None:
    """Discard the content of a file on request; a context without tokens leaves no file."""
    anew = lab.player(512, **{**options, "kv_keep": FRESH})
    _expect(lab, anew, resumed=False, generation=0)
    anew.decode({0: 16})
    lab.verify(anew)
    anew.close()
    new = Path(f"{options['kv_path']}-new")
    lab.player(512, **{**options, "kv_path": str(new)}).close()
    lab.expect(not new.exists(), "a context without tokens left its cache file")


def _again(lab: Lab, player: Player, generation: int) -> Player:
    """Close a player, and open its file in another one, which must have equal cells."""
    player.close()
    kept = {"kv_backing", "kv_path", "kv_keep", "kv_model", "n_seq_max"}
    options = {name: getattr(player.params, name) for name in kept}
    again = lab.player(player.params.n_ctx, **options)
    again.resume(player)
    _expect(lab, again, resumed=True, generation=generation)
    again.check_cells()
    return again


def _open(player: Player, params: ContextParams | None = None) -> None:
    """Create a context and free it."""
    native = player.native
    native.context_free(native.context_new(player.model, params or player.params))


def _flush(player: Player, tokens: NDArray[np.int32] | None) -> None:
    player.native.mapping_flush(player.context, tokens)


def _refuse(lab: Lab, what: str, error: type[Exception], act: Callable[[], None]) -> None:
    """Fail the claim unless the call raises the expected error."""
    try:
        act()
    except error:
        return
    except NativeError as other:
        msg = f"{what} raised {type(other).__name__}, expected {error.__name__}: {other}"
        raise ScenarioFailed(msg, failure="claim") from other
    lab.expect(False, f"{what} raised no exception, expected {error.__name__}")


def _expect(lab: Lab, player: Player, *, resumed: bool, generation: int) -> None:
    """Compare the reported state of a kept cache with the expected one."""
    info = player.native.mapping(player.context).info
    lab.expect(
        info.kind == Backing.FILE, f"the cache has backing {info.kind!r}, expected {Backing.FILE!r}"
    )
    lab.expect(info.kept, "the cache reports that its file is not kept")
    lab.expect(info.resumed == resumed, f"resumed={info.resumed}, expected {resumed}")
    lab.expect(
        info.generation == generation, f"generation={info.generation}, expected {generation}"
    )
    lab.expect(
        info.bytes_file >= info.bytes_reserved,
        f"the file has {info.bytes_file} bytes, expected at least {info.bytes_reserved}",
    )


def _expect_tokens(lab: Lab, player: Player, expected: NDArray[np.int32]) -> None:
    found = player.native.mapping_tokens(player.context)
    lab.expect(
        bool(np.array_equal(found, expected)),
        "the token ids in the file differ from those of the flush",
    )


def _count_tensors(lab: Lab, player: Player) -> None:
    """Compare the list of tensors with the layers of the cache."""
    raw = player.native.mapping(player.context)
    found = sorted((int(row[0]), int(row[1]), int(row[2])) for row in raw.rows)
    layers = range(player.native.model_info(player.model).n_layer)
    expected = sorted((0, layer, side) for layer in layers for side in (0, 1))
    lab.expect(found == expected, f"the file lists tensors {found}, expected {expected}")
    for column, total in ((3, raw.info.bytes_reserved), (4, raw.info.bytes_committed)):
        parts = int(raw.rows[:, column].sum())
        lab.expect(
            parts == total, f"the tensors have {parts} bytes together, but the total is {total}"
        )


SCENARIO = Scenario(
    id="mmap-keep",
    kind="feature",
    claim="The next context can reuse flushed data of a cache file, and no other data.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    model="grouped",
    settings=PLAIN,
)
