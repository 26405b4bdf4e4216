"""Libraries with planted faults, and stages of random schedules that play on them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fakes.simulated import SimulatedNative

from pyllamakv.errors import Unsupported
from pyllamakv.open_variant import OpenLibrary
from qa.random_operations.case_session import CaseSession
from qa.random_operations.combination import Combination
from qa.random_operations.task import CaseTask, Played

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.runtime.model import Model

PLAIN = Combination()


class Vanishing(SimulatedNative):
    """Forget the last used cell with every defragmentation."""

    def defrag(self, context: int) -> Any:
        cache = self._get(context).cache
        found = super().defrag(context)
        cache.discard(cache.of(-1)[-1:])
        return found


class Swapping(SimulatedNative):
    """Exchange the values of the first two tokens with every defragmentation."""

    def defrag(self, context: int) -> Any:
        cache = self._get(context).cache
        found = super().defrag(context)
        cache.rows[-1, [0, 1]] = cache.rows[-1, [1, 0]]
        one, two = cache.slots[:2]
        if one and two:
            one.token, two.token = two.token, one.token
        return found


class Keeping(SimulatedNative):
    """Leave a cell behind when the cache is emptied."""

    def clear(self, context: int, data: bool) -> None:
        cache = self._get(context).cache
        cache.discard(cache.of(-1)[1:])


class Refusing(SimulatedNative):
    """Find no cells as soon as no hole is large enough, as stock does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "heals": False})


class Broken(SimulatedNative):
    """Decode nothing."""

    def decode(self, *_: Any) -> Any:
        msg = "no batch is decoded here"
        raise Unsupported(msg)


class Dying(SimulatedNative):
    """End the process in a defragmentation."""

    def defrag(self, context: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Silent(SimulatedNative):
    """Hang in a defragmentation."""

    def defrag(self, context: int) -> Any:
        signal.pause()


class Simulated(CaseSession):
    """Play on a simulated library, which has neither devices nor mapped memory."""

    native: type[SimulatedNative] = SimulatedNative

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._simulated)

    def _simulated(self, folder: Path, _combination: Combination, _apart: bool) -> OpenLibrary:
        return OpenLibrary(self.native(heals=True), folder, None, isolated=True)

    def play(self, task: CaseTask) -> Played:
        given = task.combination
        here = replace(PLAIN, cache=given.cache, manager=given.manager)
        return super().play(replace(task, combination=here))


class OnVanishing(Simulated):
    native = Vanishing


class OnSwapping(Simulated):
    native = Swapping


class OnKeeping(Simulated):
    native = Keeping


class OnRefusing(Simulated):
    native = Refusing


class OnDying(Simulated):
    native = Dying


class OnSilent(Simulated):
    native = Silent


class Far(Simulated):
    """Treat the simulated library as one with RPC."""

    def play(self, task: CaseTask) -> Played:
        here = replace(PLAIN, device="rpc", manager=task.combination.manager)
        return CaseSession.play(self, replace(task, combination=here))

    def _model(self, key: tuple[str, bool], _combination: Combination) -> Model:
        return super()._model(key, PLAIN)


class FarVanishing(Far):
    native = Vanishing


class FarBroken(Far):
    native = Broken


class FarBrokenByPatches(Far):
    """Decode nothing except in the directory of stock."""

    def __init__(self, folder: Path) -> None:
        self.native = SimulatedNative if folder.name == "stock" else Broken
        super().__init__(folder)


class Unmapped(Simulated):
    """Refuse everything but the heap."""

    def play(self, task: CaseTask) -> Played:
        if task.combination.backing != "heap":
            return Played(absent="this build keeps its cache on the heap only")
        return super().play(task)


class Unquantized(Simulated):
    """Have no keys of 8 bits except in the directory of stock."""

    def __init__(self, folder: Path) -> None:
        self.lacks = folder.name != "stock"
        super().__init__(folder)

    def play(self, task: CaseTask) -> Played:
        if self.lacks and task.combination.cache == "flash q8_0":
            return Played(absent="no such keys here")
        return super().play(task)


class Unopened(Simulated):
    """End before anything is played."""

    def __init__(self, folder: Path) -> None:
        raise SystemExit(3)
