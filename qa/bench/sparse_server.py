"""Measure what a sparse cache costs llama-server, in CPU time per token."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pyllamakv.errors import HarnessError
from pyllamakv.scenarios import synthetic_models
from pyllamakv.server.server_artifact import BuiltServer, find_server
from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_lab import SLOT, ServerLab
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.source import verified
from qa.bench.figure import Figure
from qa.bench.measure import interleave, interval

GROUP = "llama-server, a sparse cache"
Tick = Callable[[], None]

#: Slots; the last one keeps its cells.
SLOTS = 32

#: Cells that are live at the end of the cache, and tokens of each measured answer.
LIVE = 200
TOKENS = 256

#: The argument of --defrag-thold.
THRESHOLD = "0.5"

#: Largest part of stock's CPU time that patched may need.
SHARE = 0.5

PAIRS = 5


def figures(tick: Tick, release: str = "", pairs: int = PAIRS, slots: int = SLOTS) -> list[Figure]:
    """Compare stock and patched servers of a release (default: the newest verified one).

    Raises NotBuilt without the servers, and Untestable without a test model.
    """
    release = release or verified.newest().name
    stock, patched = (find_server(f"{release}+{side}") for side in ("stock", "patched"))
    model = synthetic_models.model(synthetic_models.TEST)
    with ExitStack() as stack:
        first = stack.enter_context(SparseServer(patched, model, slots))
        second = stack.enter_context(SparseServer(stock, model, slots))
        times = interleave(first.answer, second.answer, pairs=pairs, progress=tick)
    ratio = times.ratio
    return [
        Figure(
            GROUP,
            f"{release}, {LIVE} live of {slots * SLOT:,} cells: CPU per token, patched over stock",
            f"{ratio.format()} x, {_ms(times.first)} and {_ms(times.second)}",
            f"<= {SHARE} x",
            ratio.high <= SHARE,
            "",
            f"{pairs} interleaved pairs of answers of {TOKENS} tokens, "
            f"`--defrag-thold {THRESHOLD}`, {slots} slots, 1 thread, {model.name}",
            {"patched": times.first, "stock": times.second},
        )
    ]


class SparseServer(ExitStack):
    """A server in whose full cache all slots but the last one were erased."""

    def __init__(self, built: BuiltServer, model: Path, slots: int) -> None:
        super().__init__()
        self._lab = ServerLab(built, slots=slots)
        self._model = model
        self._server: ServerProcess
        self._client: ServerClient
        draw = random.Random(1)
        #: Ids that are ordinary tokens of every model.
        self._prompts = [draw.choices(range(32, 320), k=SLOT - 8) for _ in range(slots)]
        self._prompts[-1] = self._prompts[-1][:LIVE]

    def __enter__(self) -> SparseServer:
        super().__enter__()
        try:
            self._fill()
        except BaseException:
            self.close()
            raise
        return self

    def _fill(self) -> None:
        folder = self.enter_context(self._lab.folder())
        options = ("--slot-save-path", f"{folder}/", "--defrag-thold", THRESHOLD)
        self._server = self.enter_context(self._lab.server(*options, model=self._model))
        self._client = self.enter_context(ServerClient(self._server.url))
        *erased, last = range(len(self._prompts))
        for slot in (*erased, last):
            self._client.complete(self._prompts[slot], 1, id_slot=slot, n_probs=0)
        for slot in erased:
            self._client.post(f"/slots/{slot}?action=erase", {})

    def answer(self) -> float:
        """Return the CPU seconds per token of an answer in the last slot."""
        last = len(self._prompts) - 1
        begin = cpu_seconds(self._server.pid)
        found = self._client.complete(self._prompts[last], TOKENS, id_slot=last, n_probs=0)
        used = cpu_seconds(self._server.pid) - begin
        if found.reused != LIVE - 1:
            raise HarnessError(f"{found.reused} of {LIVE} tokens were reused")
        return used / TOKENS


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, by its clock (POSIX.1-2001). Raises ProcessLookupError."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(f"there is no process {pid}")
    return time.clock_gettime(clock.value)


def _ms(seconds: list[float]) -> str:
    return f"{interval(seconds).median * 1e3:.2f} ms"
