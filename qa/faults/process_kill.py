"""Kill a worker or a server while it works: by signals, at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

import pyllamakv as kv
from pyllamakv.errors import DeviceLost, KvError, WorkerDied, WorkerTimeout
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.device_placement import ALL
from qa.entry import Tick
from qa.faults.fault_injection import InjectionRecord

#: Each signal, and the expected error.
_WORKER: Final = {
    signal.SIGKILL: WorkerDied,
    signal.SIGABRT: WorkerDied,
    signal.SIGSEGV: WorkerDied,
    signal.SIGSTOP: WorkerTimeout,
}
_SERVER: Final = {signal.SIGKILL: DeviceLost, signal.SIGSTOP: WorkerTimeout}
#: Timeout in seconds; no call takes a hundredth of it.
_SILENCE: Final = 4.0
#: Seconds within which the signal is sent.
_WINDOW: Final = 0.1
_PATIENCE: Final = 60.0
_TOKENS: Final = [1 + n % 20 for n in range(24)]


def workers(variant: Path, seconds: float, seed: int, tick: Tick) -> InjectionRecord:
    """Kill workers; a new one replaces each and must compute the same logits."""
    record = InjectionRecord("workers", "lost")
    model = synthetic_models.tiny()

    @contextlib.contextmanager
    def opened() -> Iterator[tuple[Any, int]]:
        with kv.open(variant, isolated=True, timeout=_PATIENCE) as library:
            yield library.load_model(model), library.native.pid  # type: ignore[attr-defined]

    _lose(record, opened, _WORKER, seconds, seed, tick)
    return record


def servers(variant: Path, seconds: float, seed: int, tick: Tick) -> InjectionRecord:
    """Kill servers that hold a model and its cache; the next client uses a new one."""
    record = InjectionRecord("servers", "lost")
    model = synthetic_models.model("grouped")

    @contextlib.contextmanager
    def opened() -> Iterator[tuple[Any, int]]:
        with (
            kv.serve_rpc(variant, threads=1) as server,
            kv.open(variant, backend="rpc", timeout=_PATIENCE) as library,
        ):
            loaded = library.load_model(model, n_gpu_layers=ALL, rpc_servers=server.endpoint)
            yield loaded, server.pid

    _lose(record, opened, _SERVER, seconds, seed, tick)
    return record


def _lose(
    record: InjectionRecord,
    opened: Callable[[], contextlib.AbstractContextManager[tuple[Any, int]]],
    signals: Mapping[signal.Signals, type[KvError]],
    seconds: float,
    seed: int,
    tick: Tick,
) -> None:
    chance = random.Random(seed)
    begin = time.monotonic()
    expected = None
    sent = list(signals)
    while record.tried < len(sent) or time.monotonic() - begin < seconds:
        number = sent[record.tried % len(sent)]
        delay = chance.random() * _WINDOW
        about = f"{record.step}, {number.name} after {delay * 1000:.0f} ms"
        tick(about)
        before = children()
        try:
            with opened() as (model, pid):
                with model.context(n_ctx=256, n_batch=64, n_seq_max=4, n_threads=1) as ctx:
                    found = _logits(ctx)
                if expected is None:
                    expected = found
                elif (found == expected).all():
                    # The previous worker was killed; this is its repeat.
                    record.repeated += 1
                else:
                    record.defects.append(f"{about}: logits differ from those before the kill")
                problem = _strike(model, pid, number, delay, signals[number], record)
        except Exception as error:
            problem = f"closing or opening raised {type(error).__name__}: {error}"
        left = children() - before
        if left:
            problem += f" processes still run: {sorted(left)}"
        if problem:
            record.defects.append(f"{about}: {problem.strip()}")
        record.tried += 1
    try:
        with opened() as (model, _), model.context(n_ctx=256, n_seq_max=4, n_threads=1) as ctx:
            if expected is not None and (_logits(ctx) == expected).all():
                record.repeated += 1
            else:
                record.defects.append(f"{record.step}: the last repeat returned other logits")
    except KvError as error:
        record.defects.append(f"{record.step}: the last repeat failed: {error}")
    record.seconds = time.monotonic() - begin


def _logits(ctx: Any) -> np.ndarray[Any, Any]:
    with ctx.sequence() as sequence:
        sequence.prefill(_TOKENS)
        found: np.ndarray[Any, Any] = ctx.logits().copy()
    return found


def _strike(
    model: Any,
    pid: int,
    number: signal.Signals,
    delay: float,
    expected: type[KvError],
    record: InjectionRecord,
) -> str:
    """Work until the signal arrives; return the defect in the resulting error, if any."""
    native = model.native
    native.timeout = _SILENCE if number is signal.SIGSTOP else _PATIENCE
    timer = threading.Timer(delay, os.kill, (pid, number))
    try:
        ctx = model.context(n_ctx=256, n_batch=64, n_seq_max=4, n_threads=1)
        timer.start()
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            _work(ctx)
        return "no exception was raised"
    except expected as error:
        record.struck += 1
        record.errors[type(error).__name__] += 1
        # All later requests raise the same error.
        with contextlib.suppress(expected):
            model.context(n_ctx=256)
            return f"a context was created after {type(error).__name__}"
        return ""
    except Exception as error:
        return f"{type(error).__name__} instead of {expected.__name__}: {error}"
    finally:
        timer.cancel()
        if timer.ident:
            timer.join()
        if number is signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _work(ctx: Any) -> None:
    """Use each kind of request that a worker serves."""
    with ctx.sequence() as a, ctx.sequence() as b:
        ctx.decode([a.feed(_TOKENS), b.feed(_TOKENS[:9])])
        saved = a.save()
        b.trim(0)
        ctx.kv.defrag()
        a.trim(0)
        a.restore(saved)
        for token in _TOKENS[:4]:
            a.step(token)
        ctx.kv.snapshot()


def children() -> set[int]:
    """Return the child processes of this one, including zombies."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text(encoding="ascii").split()}
    return found
