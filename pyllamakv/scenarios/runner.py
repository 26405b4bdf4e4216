"""Run scenarios in workers, one library and environment each, and return their results.

A run happens in a worker, so that a crash or a hang affects this run alone; the next run gets a new
worker. A worker without failures is reused. With caches behind RPC, each worker has its own server,
because a server accepts one client.

On a device, a control run precedes the scenarios. A device with wrong kernels would fail scenarios
that no patch can fix. Therefore, the control evaluates the same tokens twice without moving cells:
in one batch at the start of a cache, and one by one after it. A setting that ends the process on a
device is not verified; if stock can run it, patched has failed (`verdict.Pair`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.binding.library import open_library
from pyllamakv.binding.rpc_server import RpcServer
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import (
    HarnessError,
    KvError,
    ModelError,
    Untestable,
    WorkerDied,
    WorkerTimeout,
)
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.cell_picture import Picture
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.frames import Timeline, timelines
from pyllamakv.scenarios.lab import Lab
from pyllamakv.scenarios.outcome import Outcome, classify
from pyllamakv.scenarios.reference import distance

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ModelHandle
    from pyllamakv.scenarios.scenario import Scenario, Setting

#: Default timeout of one call into the library in seconds; the slowest call takes well
#: under one.
CALL_TIMEOUT = 30.0

#: Start of the variables that the patches read.
_PATCHES = "LLAMA_KV_"

#: Failures after which a worker is replaced: it has ended, or its memory may be damaged.
FATAL_FAILURES = ("data", "crash", "hang")

#: Function that opens the library at a path in a worker, with an environment.
Opener = Callable[[Path, dict[str, str]], Any]
#: A library and the environment of its worker.
Key = tuple[str, tuple[tuple[str, str], ...]]
#: More than a micro-batch; the second half of the cells then also starts at an odd number.
TOKENS = 40


@dataclass(frozen=True)
class Run:
    """The result of one scenario in one setting on one side, with its notes."""

    scenario: str
    setting: str
    outcome: Outcome
    seconds: float = 0.0
    difference: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    timelines: tuple[Timeline, ...] = ()


class Workers:
    """Open workers when they are first needed, and end those in an unknown state."""

    def __init__(self, opener: Opener, place: DevicePlacement, timeout: float | None) -> None:
        self._opener = opener
        self._place = place
        self._timeout = timeout if timeout is not None else place.call_timeout
        self._open: dict[Key, Any] = {}
        self._servers: dict[Key, RpcServer] = {}
        self._models: dict[tuple[Key, str], ModelHandle] = {}

    def open(self, key: Key) -> Any:
        """Return the library of a worker."""
        library = self._open.get(key)
        if library is None:
            library = self._open[key] = self._opener(Path(key[0]), dict(key[1]))
            if self._timeout is not None:
                library.native.timeout = self._timeout
        return library

    def model(self, key: Key, name: str) -> ModelHandle:
        """Return a named model in a worker. Raises Untestable if it cannot be loaded."""
        name = self._place.model(name)
        found = self._models.get((key, name))
        if found is None:
            path = synthetic_models.model(name)
            params = self._place.params(self._endpoint(key))
            try:
                found = self.open(key).native.model_load(str(path), params)
            except ModelError as error:
                if "RPC server" in str(error):
                    msg = f"{name} cannot be loaded: {error}"
                    raise HarnessError(msg) from error
                # Architectures added later cannot verify a patch for this release.
                msg = f"the model {name} cannot be loaded here: {error}"
                raise Untestable(msg) from error
            except WorkerTimeout:
                raise
            except WorkerDied as error:
                # On stock, the release cannot load the architecture; on patched alone, the verdict
                # counts it as a failure.
                msg = f"the model {name} cannot be loaded here: {error}"
                raise Untestable(msg, failure="crash") from error
            self._models[key, name] = found
        return found

    def drop(self, key: Key) -> None:
        """End a worker and its server; the next run gets new ones."""
        library, server = self._open.pop(key, None), self._servers.pop(key, None)
        self._models = {k: v for k, v in self._models.items() if k[0] != key}
        if library is not None:
            _close(library)
        if server is not None:
            server.close()

    def cut(self) -> None:
        """End the workers of runs in other threads."""
        for library in list(self._open.values()):
            library.native.close()

    def close(self) -> None:
        """End all workers."""
        for key in list(self._open):
            self.drop(key)

    def _endpoint(self, key: Key) -> str | None:
        if not self._place.remote:
            return None
        server = self._servers.get(key)
        if server is None:
            # One thread, because there are as many runs as processors, and waiting threads spin.
            try:
                server = self._servers[key] = RpcServer(Path(key[0]), threads=1)
            except KvError as error:
                msg = f"no RPC server for {key[0]}: {error}"
                raise HarnessError(msg) from error
        return server.endpoint


def _close(library: Any) -> None:
    try:
        library.close()
    except KvError:
        # A dead worker has nothing left to release.
        return


class DeviceControls:
    """Cache the result of the control for each key."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Untestable | None] = {}

    def check(self, key: Hashable, make: Callable[[], Lab]) -> None:
        """Raise Untestable with the reason if a control fails; each key is run once."""
        if key not in self._found:
            self._found[key] = _run_control(make)
        reason = self._found[key]
        if reason is not None:
            raise reason


def _run_control(make: Callable[[], Lab]) -> Untestable | None:
    """Run the control in its own lab; return why the setting cannot be verified, or None."""
    lab = make()
    try:
        wrong = control(lab)
        reason = Untestable(wrong) if wrong else None
    except Untestable as error:
        reason = error
    except WorkerTimeout:
        # A timeout may not repeat, so it is not cached.
        raise
    except WorkerDied as error:
        msg = f"the device ends the process before cells are moved: {error}"
        return Untestable(msg, failure="crash")
    lab.close()
    return reason


def control(lab: Lab) -> str:
    """Return the defect of the device, or an empty text."""
    player = lab.player()
    same = [number % player.n_vocab for number in range(TOKENS)]
    player.decode({0: same})
    for token in same:
        player.decode({1: [token]})
    one, *_, other = (next(iter(step.logits.values())) for step in player.steps)
    found, bound = distance(one, other), lab.reference(player).bound
    if found <= bound:
        return ""
    return (
        "the device computes wrong logits before cells are moved: logits of the same tokens "
        f"differ by {found:.3g}, allowed {bound:g}"
    )


class ScenarioRunner(ClosedOnExit):
    """Run scenarios one by one, on a worker per library and environment.

    ``timeout`` is that of one call into the library in seconds; None uses the backend's default.
    """

    def __init__(
        self,
        opener: Opener | None = None,
        place: DevicePlacement | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self._place = place or DevicePlacement()
        self._workers = Workers(opener or open_worker, self._place, timeout)
        self._controls = DeviceControls()

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def cut(self) -> None:
        """End the workers of a run in another thread; the run then fails at once."""
        self._workers.cut()

    def run(self, path: Path, scenario: Scenario, setting: Setting) -> Run:
        """Run a scenario in a setting on the library at ``path``."""
        environment = {**dict(scenario.environment), **dict(setting.environment)}
        environment |= self._place.environment
        key = (str(path), tuple(sorted(environment.items())))
        started = time.monotonic()
        lab: Lab | None = None
        try:
            native = self._workers.open(key).native
            model = self._workers.model(key, scenario.model)
            if self._place.off_cpu:
                self._controls.check(
                    (key, scenario.model, setting),
                    lambda: Lab(native, model, setting, place=self._place),
                )
            # The report shows one timeline per scenario.
            timeline = scenario.record_frames and setting == scenario.settings[0]
            lab = Lab(native, model, setting, timeline=timeline, place=self._place)
            scenario.run(lab)
            outcome = Outcome("pass")
        except Exception as error:
            outcome = classify(error)
            if lab is not None and outcome.failed:
                lab.last_picture()
        if outcome.failure in FATAL_FAILURES or outcome.status == "fault":
            self._workers.drop(key)
        elif lab is not None:
            lab.close()
        return Run(
            scenario.id,
            setting.name,
            outcome,
            round(time.monotonic() - started, 3),
            lab.difference if lab else 0.0,
            lab.notes if lab else {},
            tuple(lab.pictures) if lab else (),
            timelines(lab.players) if lab else (),
        )


def open_worker(path: Path, environment: dict[str, str]) -> Any:
    """Open a library in a new worker with the given variables.

    The user's variables of the patches have no effect, since results are cached without them.
    """
    # An empty value is no value.
    unset = {name: "" for name in os.environ if name.startswith(_PATCHES)}
    return open_library(path, isolated=True, env=unset | environment, timeout=CALL_TIMEOUT)
