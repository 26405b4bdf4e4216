"""Use a `Batcher` from tasks of an event loop.

`AsyncBatcher` owns a batcher and a thread that steps it. Tasks send calls to the thread, which runs
them between two steps, and wakes the tasks when their generations have more text. Only the thread
uses the context.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from pyllamakv.cache.batcher import MAX_DEFER, MAX_WAIT, Batcher
from pyllamakv.cache.generation import Generation
from pyllamakv.closing import NotCopied
from pyllamakv.errors import Closed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from pyllamakv.cache.batcher import BatcherStats
    from pyllamakv.cache.interface import CacheManager
    from pyllamakv.runtime.generated_text import Reason, Usage

#: Seconds for which an idle batcher over a memory with states waits for more prompts.
GATHER_SECONDS = 0.01


class AsyncBatcher(NotCopied):
    """Generate for several tasks at once, with the sequences of a cache manager.

    The arguments are those of `Batcher`, without ``on_text``. A thread of its own uses the context
    from the first call until `aclose`: do not use it elsewhere meanwhile. Other threads get Busy
    during a step. The tasks may belong to several event loops.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        n_batch: int | None = None,
        max_wait: int | None = MAX_WAIT,
        max_defer: int = MAX_DEFER,
    ) -> None:
        self._batcher = Batcher(
            manager, n_batch=n_batch, max_wait=max_wait, max_defer=max_defer, on_text=self._notify
        )
        #: Number of prompts to gather: those that the manager serves at once, if any are deferred.
        slots = getattr(manager, "branches", None)
        self._most = getattr(slots, "limit", manager.context.info.n_seq_max) if max_defer else 0
        self._wake = threading.Condition()
        # Shared with the thread, under `_wake`.
        self._calls: list[_Call] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        # Of the thread alone.
        self._live: list[AsyncGeneration] = []

    async def submit(self, *args: Any, **options: Any) -> AsyncGeneration:
        """Queue a prompt and return its generation; the arguments are those of `Batcher.submit`.

        Raises as `Batcher.submit` does, and Closed after `aclose`.
        """
        loop = asyncio.get_running_loop()

        def begin() -> AsyncGeneration:
            made = AsyncGeneration(self._batcher.submit(*args, **options), loop)
            self._live.append(made)
            return made

        made: AsyncGeneration = await self.call(begin)
        return made

    async def stats(self) -> BatcherStats:
        """Return the totals so far."""
        stats: BatcherStats = await self.call(self._batcher.stats)
        return stats

    async def call(self, work: Callable[[], Any]) -> Any:
        """Run a function in the thread, between two steps; return its result or raise its error.

        It may use the manager, for example ``cache.flush``. Raises Closed after `aclose`.
        """
        call = _Call(work, asyncio.get_running_loop())
        with self._wake:
            if self._closing:
                raise Closed("the batcher was closed; create a new one")
            if self._thread is None:
                # A daemon: a program that forgets `aclose` can end.
                self._thread = threading.Thread(
                    target=self._run, name="pyllamakv-batcher", daemon=True
                )
                self._thread.start()
            self._calls.append(call)
            self._wake.notify()
        try:
            return await call.future
        except asyncio.CancelledError:
            call.discard()
            raise

    async def aclose(self) -> None:
        """Cancel all generations and end the thread. The manager stays open. May be repeated."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread = self._thread
        if thread is None:
            self._batcher.close()
            return
        for each in tuple(self._live):
            each.cancel()  # ends the running decode
        await asyncio.to_thread(thread.join)

    def __repr__(self) -> str:
        return f"<Async{repr(self._batcher)[1:]}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # In the thread...

    def _run(self) -> None:
        while True:
            idle = not self._live
            closing = self._run_calls(None if idle else 0.0)
            until = monotonic() + GATHER_SECONDS
            while idle and not closing and self._gathers(left := until - monotonic()):
                closing = self._run_calls(left)
            if closing:
                break
            if self._live:
                self._step()
        try:
            self._batcher.close()
        finally:
            self._deliver()

    def _run_calls(self, seconds: float | None) -> bool:
        """Run the calls of tasks; wait up to ``seconds`` (None: for ever) for the first one.

        Returns whether the batcher is closing.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._closing, seconds)
            calls, self._calls = self._calls, []
            closing = self._closing
        for call in calls:
            call.run(closed=closing)
        return closing

    def _gathers(self, left: float) -> bool:
        """Return whether to wait for more prompts before the first step, ``left`` seconds at most.

        A memory with states has none for prompts that arrive after the prefix was evaluated. There
        is no wait if no prompt is deferred, or if the manager serves no more prompts at once.
        """
        waits = 0 < len(self._live) < self._most and left > 0
        return waits and self._batcher.context.info.memory.keeps_states

    def _step(self) -> None:
        try:
            self._batcher.step()
        except Exception as error:
            # Usually all have ended with this error. If not, their tasks would wait for ever.
            for each in self._live:
                each.generation.end("failed", error)
        self._deliver()

    def _notify(self) -> None:
        """Wake the tasks whose generations have more text, or have ended."""
        for each in self._live:
            each.notify()

    def _deliver(self) -> None:
        """Wake the tasks as `_notify` does, and forget generations that have ended."""
        self._notify()
        self._live = [each for each in self._live if not each.generation.done]


class AsyncGeneration(NotCopied):
    """The text that continues a prompt. `AsyncBatcher.submit` creates it.

    ``async for`` yields the text from its start, and raises the error of a failure, or `Cancelled`
    with the text so far after `cancel`. Leaving the iteration early cancels the generation, also if
    its task is cancelled: the sequence is free after the next step. ``generation`` has the tokens,
    which other threads must not change.
    """

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop) -> None:
        self.generation = generation
        self._loop = loop
        self._changed = asyncio.Event()
        self._seen = 0  # parts of which the tasks know

    @property
    def finish_reason(self) -> Reason | None:
        """Return why the generation ended: see `Generation`; None while it runs."""
        return self.generation.finish_reason

    @property
    def text(self) -> str:
        """Return the text so far."""
        return self.generation.text

    @property
    def usage(self) -> Usage:
        """Return the numbers of tokens so far."""
        return self.generation.usage

    async def result(self) -> str:
        """Wait for the end and return the text, or raise the error, as ``async for`` does."""
        return "".join([part async for part in self])

    def cancel(self) -> None:
        """End the generation, also during a decode, from any thread. Decoded tokens remain."""
        self.generation.cancel()

    def notify(self) -> None:
        """Wake the tasks that wait for more text, for the thread of `AsyncBatcher`."""
        seen = self._seen + len(self.generation.parts(self._seen))
        if seen == self._seen and not self.generation.done:
            return
        self._seen = seen
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # the loop was closed: the text has no reader
            self.generation.cancel()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[str]:
        at = 0
        try:
            while True:
                self._changed.clear()
                done = self.generation.done  # before its last parts are read
                for part in self.generation.parts(at):
                    at += 1
                    yield part
                if done:
                    break
                await self._changed.wait()
        finally:
            if not self.generation.done:
                self.cancel()
        if self.generation.error is not None:
            raise self.generation.error

    def __repr__(self) -> str:
        return repr(self.generation).replace("<", "<Async", 1)


class _Call:
    """A call for the thread, and the future of its result."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def run(self, *, closed: bool) -> None:
        """Run the call and send its result or its error, or Closed."""
        result, error = None, None
        try:
            if closed:
                raise Closed("the batcher was closed; create a new one")
            result = self._work()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._finish, result, error)

    def discard(self) -> None:
        """Cancel a generation that the task does not get, because it was cancelled meanwhile."""
        future = self.future
        if not future.cancelled() and future.done() and future.exception() is None:
            self._drop(future.result())

    @staticmethod
    def _drop(result: Any) -> None:
        if isinstance(result, AsyncGeneration):
            result.cancel()

    def _finish(self, result: Any, error: Exception | None) -> None:
        if self.future.cancelled():
            self._drop(result)
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
