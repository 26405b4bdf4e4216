"""Call the entry points of plk.h with extreme arguments.

No call may end the process. Every status is one that plk.h lists. A refused call changes nothing,
and after accepted calls the cells agree with a ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pyllamakv.binding.codes import Code
from pyllamakv.binding.library import find_library
from pyllamakv.native._plk import ffi
from pyllamakv.open_variant import find_built
from pyllamakv.runtime.ledger import POSITION_LIMIT
from pyllamakv.scenarios.cell_ledger import cell_differences
from qa.built import SPEC
from qa.fuzzing.call_generator import CallGenerator
from qa.fuzzing.fuzz_state import FuzzState
from qa.fuzzing.signatures import EntryPoint, entries
from qa.fuzzing.target import Target, WrongAnswer

#: Positive results of functions that return a status.
_STATUSES = {"plk_decode": (1, 2), "plk_run": (1, 2)}
#: Functions that return a count of cells; and those that return a required size below -1.
_COUNTING = {"plk_cells_read"}
_NEEDING = {"plk_tokenize", "plk_token_piece"}
#: Functions that may move cells before they fail.
_MOVING = {"plk_decode", "plk_run", "plk_defrag", "plk_update", "plk_state_load"}
_FREEING = ("plk_model_free", "plk_context_free", "plk_sampler_free", "plk_adapter_free")


def entry_points(folder: Path) -> Target:
    """Return the entry points of the built library; an input is the random seed of some calls."""
    library = find_library(find_built(SPEC))[0]
    player = CallRunner(FuzzState(library, folder))
    # Several contexts exist at once, of half a gigabyte of address space each. If an allocation
    # fails, ggml ends the process, which no argument can prevent.
    return Target(player.run, tuple(map(bytes, range(1, 9))), headroom=8 << 30, longest=512)


class CallRunner:
    """Run the calls of an input, one after another, and check the cells after each."""

    def __init__(self, world: FuzzState) -> None:
        self.world = world
        self.entries = entries()
        self.generator = CallGenerator(self.entries)

    def run(self, data: bytes) -> Iterable[Hashable]:
        """Run the calls of an input; yield the result of each."""
        setting, calls = self.generator.calls(data)
        self.world.begin(setting)
        for name, words in calls:
            if name in self.generator.entries:
                yield self.call(self.entries[name], words)
        self._works()

    def call(self, entry: EntryPoint, words: dict[str, Any]) -> Hashable:
        """Run one call, compare the cells, and return a key of its result."""
        world = self.world
        world.arena.reset()
        words = self._complete(entry, words)
        lain, _ = world.picture()
        arguments = {one.name: world.argument(one, words) for one in entry.parameters}
        if arguments.get("done"):
            arguments["done"][0] = 0  # what is refused at once may leave it as it was
        if entry.name in _FREEING:
            return self._free(entry, words)
        result = getattr(world.lib, entry.name)(*arguments.values())
        message = world.error()
        self._check_code(entry, result)
        status = result if isinstance(result, int) else result != ffi.NULL
        for one in entry.parameters:
            place = arguments[one.name]
            if one.kind == "made" and place != ffi.NULL and place[0] != ffi.NULL:
                world.took(one.type.cname, place[0])
        mine = bool(arguments.get("context", 0)) and arguments["context"] == world.context
        if mine and isinstance(status, int):
            self._enter(entry.name, status, arguments, words)
        now, held = world.picture()
        lost, ghosts, what = cell_differences(world.ledger.contents(), held)
        if lost or ghosts:
            raise WrongAnswer(f"after {entry.name} gave {status}: {what}")
        failed = entry.result == "int" and status < 0
        if failed and entry.name not in _MOVING and now != lain:
            raise WrongAnswer(f"{entry.name} failed with {status} and moved cells")
        negative = isinstance(status, int) and status < 0
        return entry.name, min(status, 3), re.sub(r"-?\d+", "N", message) if negative else ""

    def _complete(self, entry: EntryPoint, words: Mapping[str, Any]) -> dict[str, Any]:
        """Replace placeholders by a state of this context, and empty arrays by numbers."""
        made = dict(words)
        if made.get("data") == "saved":
            seq = made.get("seq", 0) % self.world.n_seq_max
            state = self._state(seq)
            made["data"] = list(state)
            # Sizes that are off by little are the most likely to reveal defects.
            off = made.get("length", 0)
            made["length"] = len(state) + (off if -3 <= off <= 3 else 0)
        for one in entry.parameters:
            if one.kind == "scalar" and type(made.get(one.name)) not in (int, float):
                made[one.name] = 0
        return made

    def _state(self, seq: int) -> bytes:
        lib, context = self.world.lib, self.world.context
        size = lib.plk_state_size(context, seq)
        if size < 1:
            return b"\0"
        room = ffi.new("uint8_t[]", size)
        size = lib.plk_state_save(context, seq, room, size)
        return bytes(ffi.buffer(room, size)) if size > 0 else b"\0"

    def _free(self, entry: EntryPoint, words: Mapping[str, Any]) -> Hashable:
        """Free a handle that an input created; shared objects stay."""
        kind = entry.parameters[0].type.cname
        live = self.world.handles.get(kind, [])
        number = words.get(entry.parameters[0].name)
        at = number % len(live) if live and type(number) is int else 0
        held = kind == "struct plk_model" and len(self.world.handles["struct plk_sampler"]) > 1
        if at == 0 or held:
            getattr(self.world.lib, entry.name)(ffi.NULL)
            return entry.name, "nothing"
        getattr(self.world.lib, entry.name)(live.pop(at))
        return entry.name, "one"

    def _check_code(self, entry: EntryPoint, result: Any) -> None:
        if not isinstance(result, int):
            return
        name, known = entry.name, result in Code._value2member_map_
        if entry.result == "int":
            allowed = known or result == 0 or result in _STATUSES.get(name, ())
            allowed = allowed or (name in _COUNTING and result > 0)
        else:
            allowed = known or result >= -1 or name in _NEEDING
        if not allowed:
            raise WrongAnswer(f"{name} returned {result}, which plk.h does not list")

    # the ledger
    def _enter(self, name: str, status: int, given: Mapping[str, Any], words: Any) -> None:
        """Update the ledger after a call on its context."""
        ledger = self.world.ledger
        effects: dict[str, Callable[[], None]] = {
            "plk_clear": ledger.clear,
            "plk_seq_rm": lambda: ledger.remove(given["seq"], given["p0"], given["p1"]),
            "plk_seq_keep": lambda: ledger.keep(given["seq"]),
            "plk_seq_cp": lambda: ledger.copy(given["from"], given["to"], given["p0"], given["p1"]),
            "plk_seq_add": lambda: ledger.shift(
                given["seq"], given["p0"], given["p1"], given["delta"]
            ),
            "plk_seq_div": lambda: ledger.divide(
                given["seq"], given["p0"], given["p1"], given["divisor"]
            ),
            "plk_decode": lambda: self._batch(given["batch"]),
        }
        if name == "plk_run" and given["done"]:
            self._ran(given)
        elif name == "plk_state_load" and status >= 0:
            self._loaded(given["seq"], status)
        elif status == 0 and name in effects:
            effects[name]()

    def _batch(self, batch: Any) -> None:
        at = 0
        for i in range(batch.n_tokens):
            count = batch.seq_count[i] if batch.seq_count != ffi.NULL else 1
            owners = [batch.seq_id[at + j] for j in range(count)]
            self.world.ledger.add([batch.token[i]], [batch.pos[i]], [owners])
            at += count

    def _ran(self, given: Mapping[str, Any]) -> None:
        n = given["n"]
        for step in range(given["done"][0]):
            for i in range(n):
                pos = given["pos"][i] + step
                self.world.ledger.add([0], [pos], [[given["seq_id"][i]]])

    def _loaded(self, seq: int, status: int) -> None:
        """Copy a restored sequence from the cells into the ledger: its content is unknown."""
        _, held = self.world.picture()
        found = [pos for (pos, owners), n in held.items() if owners == (seq,) for _ in range(n)]
        if status == 0 and found:
            raise WrongAnswer("a state was refused, but changed the cells")
        self.world.ledger.replace(seq, [(pos, -1) for pos in found])

    def _works(self) -> None:
        """Decode in the context, and again after a clear: it must work after any refusal."""
        lib, context, ledger = self.world.lib, self.world.context, self.world.ledger
        lib.plk_cancel_after(context, -1)
        for again in (False, True):
            if again:
                lib.plk_clear(context, 1)
                ledger.clear()
            pos = ledger.next(0)
            if pos >= POSITION_LIMIT:
                continue
            token, place, seq = (ffi.new("int32_t *", each) for each in (1, pos, 0))
            batch = ffi.new("plk_batch *", [ffi.sizeof("plk_batch"), 1, token, place])
            batch.seq_id = seq
            code = lib.plk_decode(context, batch)
            if code == 0:
                ledger.add([1], [pos], [[0]])
            elif code != 1 or again or ledger.used < 64:
                raise WrongAnswer(f"the context no longer decodes: {code} {self.world.error()}")
            lost, ghosts, what = cell_differences(ledger.contents(), self.world.picture()[1])
            if lost or ghosts:
                raise WrongAnswer(f"after a decode at the end: {what}")
