"""Use a worker from several threads at once; started with `-m` by `sanitizer_targets.worker`.

The worker is under the thread sanitizer, this process is not: reports are about the worker's
threads, one for requests and one for cancels.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np

from pyllamakv.binding.protocol import (
    Capability,
    ContextHandle,
    ContextParams,
    DecodeStatus,
    ModelHandle,
    ModelParams,
    Native,
)
from pyllamakv.errors import Closed, HarnessError, WorkerDied
from qa.sanitizers import sanitized_process

#: Tokens of a batch: several micro-batches, so that a cancel can happen between two.
_TOKENS: Final = np.arange(1, 33, dtype=np.int32)
_PARAMS: Final = ContextParams(
    n_ctx=256, n_batch=64, n_ubatch=8, n_seq_max=2, n_threads=1, n_threads_batch=1
)


def work(native: Native, context: ContextHandle, times: int, ended: Counter[int]) -> None:
    """Decode, save, restore, shift and defragment, with concurrent cancels."""
    for _ in range(times):
        ended[native.decode(context, _TOKENS, _TOKENS - 1, None, _TOKENS * 0, None)] += 1
        state = native.state_save(context, 0)
        native.seq_rm(context, 0, 2, 9)
        native.seq_add(context, 0, 9, -1, -7)
        native.update(context)
        if native.about.capabilities & Capability.DEFRAG:
            native.defrag(context)
        native.clear(context, True)
        native.state_load(context, 1, state)
        native.clear(context, True)


def round_(native: Native, model: ModelHandle, times: int, ended: Counter[int]) -> None:
    """Use two contexts while cancelling both and reading the log, and close them meanwhile."""
    contexts = [native.context_new(model, _PARAMS) for _ in range(2)]
    over = threading.Event()

    def cancel() -> None:
        # Some decodes complete, and some are cancelled at each of their micro-batches.
        for pause in cycle(range(0, 50, 7)):
            if over.is_set():
                break
            for context in contexts:
                native.cancel(context)
            time.sleep(pause / 1000)

    def read() -> None:
        while not over.is_set():
            native.log_level(1)
            native.logs()
            native.log_level(3)

    beside = [Thread(cancel), Thread(read)]
    workers = [Thread(work, native, context, times, ended) for context in contexts]
    try:
        for each in workers:
            each.end()
        for context in contexts:
            native.context_free(context)
    finally:
        over.set()
        for each in beside:
            each.end()


def close_at_work(library: Any, model: ModelHandle) -> None:
    """Close the library while a thread decodes."""
    native = library.native
    context = native.context_new(model, _PARAMS)

    def go_on() -> None:
        with suppress(Closed, WorkerDied):
            work(native, context, sys.maxsize, Counter())

    thread = Thread(go_on)
    time.sleep(0.2)
    library.close()
    thread.end()


class Thread(threading.Thread):
    """Run a function in a thread; `end` waits for it, and raises its error."""

    def __init__(self, what: Callable[..., None], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._what = (what, arguments)
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Run the function."""
        what, arguments = self._what
        try:
            what(*arguments)
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Wait for the end."""
        self.join(sanitized_process.PATIENCE)
        if self.is_alive():
            raise TimeoutError("a thread does not end")
        if self._error is not None:
            raise self._error


def main(arguments: list[str]) -> None:
    """Run the number of rounds on the command line, with its library and model."""
    folder, file, rounds, logs = arguments
    opener = sanitized_process.opener("thread", Path(logs))
    ended: Counter[int] = Counter()
    for _ in range(int(rounds)):
        library = opener(Path(folder), {})
        try:
            model = library.native.model_load(file, ModelParams())
            round_(library.native, model, 20, ended)
            close_at_work(library, model)
        finally:
            library.close()
    if not (ended[DecodeStatus.OK] and ended[DecodeStatus.ABORTED]):
        raise HarnessError(f"expected completed and cancelled decodes, found {ended}")


if __name__ == "__main__":
    main(sys.argv[1:])
