"""Test generations from tasks of an event loop: concurrent, cancelled, failing and closed."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from batching_kit import PROMPTS, Fixed, alone, scripted

from pyllamakv.cache import async_batcher
from pyllamakv.cache.async_batcher import AsyncBatcher, AsyncGeneration
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import Busy, Cancelled, Closed, DecodeError, UsageError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pyllamakv.runtime.context import Context


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    """Return a context of 256 cells and 4 sequences, in batches of 32."""
    return kit.context(tmp_path, n_ctx=256)


def run(ctx: Context, main: Callable[[AsyncBatcher], Awaitable[Any]], **options: Any) -> Any:
    """Run a coroutine with a batcher; its thread must have ended afterwards."""

    async def all_of_it() -> Any:
        async with AsyncBatcher(SlotCache(ctx), **options) as front:
            async with asyncio.timeout(120):  # a failure instead of a hang
                found = await main(front)
        assert front._thread is None or not front._thread.is_alive()
        return found

    return asyncio.run(all_of_it())


def test_text_of_a_first_micro_batch_is_delivered_during_the_next(ctx: Context) -> None:
    """A long prompt in the same step does not delay it."""
    seen = threading.Event()
    native: Any = ctx.native

    class Gate:
        decodes = 0

        def wait(self, seconds: float) -> None:
            self.decodes += 1
            assert self.decodes != 2 or seen.wait(20), "the step has to end first"

    async def main(front: AsyncBatcher) -> None:
        def submit() -> None:  # in one call, so that one step has both
            for prompt in ("abc", "x" * 20):
                made = AsyncGeneration(front._batcher.submit(prompt, 2), loop)
                front._live.append(made)
                generations.append(made)

        loop = asyncio.get_running_loop()
        generations: list[AsyncGeneration] = []
        await front.call(submit)
        parts = aiter(generations[0])
        assert await anext(parts)
        seen.set()
        assert await anext(parts)
        await generations[1].result()

    native.gate = Gate()
    run(ctx, main)
    assert native.gate.decodes > 2


async def ended(front: AsyncBatcher, name: str, n: int) -> None:
    """Let the batcher step until this number of generations have ended with a reason."""
    for _ in range(5000):
        if getattr(await front.stats(), name) == n:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{await front.stats()}")


def test_clients_share_batches(tmp_path: Path, ctx: Context) -> None:
    """Each gets the same text as alone, in parts, while others generate."""

    async def client(front: AsyncBatcher, prompt: str) -> str:
        generation = await front.submit(prompt, 12)
        parts = [part async for part in generation]
        assert len(parts) > 1
        assert "".join(parts) == generation.text == await generation.result()
        assert generation.finish_reason == "length"
        return generation.text

    async def main(front: AsyncBatcher) -> tuple[list[str], Any]:
        texts = await asyncio.gather(*(client(front, each) for each in PROMPTS))
        return texts, await front.stats()

    texts, stats = run(ctx, main)
    assert texts == [alone(tmp_path, prompt, 12) for prompt in PROMPTS]
    assert stats.finished == len(PROMPTS)
    assert stats.decodes < stats.generated_tokens


def test_stop_strings_and_samplers_are_those_of_the_batcher(ctx: Context) -> None:
    """They are all options of `Batcher.submit`, also for chats."""

    async def main(front: AsyncBatcher) -> None:
        one = await front.submit("Hi", stop="lo", sampler=scripted(b"hello"))
        assert await one.result() == "hel"
        assert one.finish_reason == "stop"
        assert "AsyncGeneration" in repr(one)

    run(ctx, main)


@pytest.mark.parametrize("how", ["task", "break", "cancel", "submit"])
def test_a_cancelled_task_frees_its_sequence(ctx: Context, how: str) -> None:
    """It does if the task is cancelled while it waits or iterates; others continue."""
    parts: list[str] = []

    async def reads(generation: AsyncGeneration, started: asyncio.Event) -> None:
        async for text in generation:
            started.set()
            if how == "break":
                break
            if how == "cancel":
                parts.append(text)
                generation.cancel()

    async def main(front: AsyncBatcher) -> None:
        other = await front.submit("Ho", 20)
        if how == "submit":
            task = asyncio.create_task(front.submit("Hi"))
            await asyncio.sleep(0)
        else:
            started = asyncio.Event()
            one = await front.submit("Hi")
            task = asyncio.create_task(reads(one, started))
            await started.wait()
        if how in ("task", "submit"):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "cancel":
            with pytest.raises(Cancelled, match="was cancelled after") as caught:
                await task
            assert caught.value.text == one.text == "".join(parts)
            assert parts
        else:
            await task
        await ended(front, "cancelled", 1)
        if how != "submit":
            assert one.finish_reason == "cancelled"
            assert one.generation.lease is None
        await other.result()
        assert other.finish_reason == "length"
        # All slots are free again.
        more = [await front.submit("Hu", 2) for _ in range(4)]
        assert [await each.result() for each in more]

    run(ctx, main)


def test_generation_that_its_task_cannot_get_is_cancelled(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is cancelled in the iteration of the loop in which the generation began."""

    async def main(front: AsyncBatcher) -> None:
        finish = async_batcher._Call._finish

        def cancel(call: Any, *given: Any) -> None:
            finish(call, *given)
            task.cancel()

        monkeypatch.setattr(async_batcher._Call, "_finish", cancel)
        task = asyncio.create_task(front.submit("Hi"))
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        await ended(front, "cancelled", 1)

    run(ctx, main)


def test_errors_reach_the_task_that_waits(ctx: Context) -> None:
    """They are those of its own generation; the others are not affected."""

    class Failing:
        def sample(self, context: Context, index: int = -1) -> int:
            raise ZeroDivisionError("of a sampler")

    async def main(front: AsyncBatcher) -> None:
        with pytest.raises(UsageError, match="empty"):
            await front.submit([])
        with pytest.raises(TypeError):
            await front.submit("Hi", nonsense=1)
        good, bad = await front.submit("Ho", 8), await front.submit("Hi", sampler=Failing())
        with pytest.raises(ZeroDivisionError, match="sampler"):
            await bad.result()
        assert bad.finish_reason == "failed"
        await good.result()
        assert good.finish_reason == "length"
        ctx.native.fail_next = [-3]  # type: ignore[attr-defined]
        with pytest.raises(DecodeError):
            await (await front.submit("Once", 8)).result()

    run(ctx, main)


@pytest.mark.parametrize("error", [WorkerDied("gone"), RuntimeError("unexpected")], ids=repr)
def test_failed_step_ends_every_waiting_task(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Each task gets the error instead of waiting; the next generation is not affected."""

    async def main(front: AsyncBatcher) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(front._batcher, "_step", raises)
            both = await asyncio.gather(front.submit("Hi"), front.submit("Ho"))
            for each in both:
                with pytest.raises(type(error)):
                    await each.result()
        assert len(await (await front.submit("Hu", 3)).result()) == 3

    def raises() -> None:
        raise error

    run(ctx, main)


def test_closing_cancels_running_and_waiting_generations(ctx: Context) -> None:
    """Generations that wait for a slot are cancelled as well; later calls are refused."""

    async def main() -> None:
        front = AsyncBatcher(PrefixCache(ctx))
        many = [await front.submit("Hi") for _ in range(6)]
        tasks = [asyncio.create_task(each.result()) for each in many]
        await asyncio.sleep(0)
        await front.aclose()
        await front.aclose()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in errors} == {Cancelled}
        assert {each.finish_reason for each in many} == {"cancelled"}
        with pytest.raises(Closed):
            await front.submit("Hi")
        with pytest.raises(Closed):
            await front.stats()

    asyncio.run(main())
    unused = AsyncBatcher(SlotCache(ctx.model.context(256, n_seq_max=4)))
    asyncio.run(unused.aclose())


def test_the_loop_runs_during_a_decode(ctx: Context) -> None:
    """A cancel ends a running decode; meanwhile the context is Busy for other threads."""
    native: Any = ctx.native

    async def main(front: AsyncBatcher) -> None:
        native.gate.clear()
        native.entered.clear()
        try:
            one = await front.submit("Hi")
            await asyncio.to_thread(native.entered.wait, 60)
            with pytest.raises(Busy):
                ctx.clear()
            task = asyncio.create_task(one.result())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            native.gate.set()
        await ended(front, "cancelled", 1)
        assert one.generation.tokens == []

    run(ctx, main)


def test_closing_ends_the_decode_that_runs(ctx: Context) -> None:
    """It is not waited for."""
    native: Any = ctx.native

    async def main() -> None:
        front = AsyncBatcher(SlotCache(ctx))
        native.gate.clear()
        native.entered.clear()
        one = await front.submit("Hi")
        await asyncio.to_thread(native.entered.wait, 60)
        task = asyncio.create_task(front.aclose())
        await asyncio.sleep(0)
        assert ctx.cancels == 1
        native.gate.set()
        await task
        assert one.finish_reason == "cancelled"

    asyncio.run(main())


def test_a_call_runs_between_two_steps(ctx: Context) -> None:
    """It may use the manager, which is Busy for other threads during a step."""
    native: Any = ctx.native

    async def main() -> None:
        cache = PrefixCache(ctx)
        front = AsyncBatcher(cache)
        native.gate.clear()
        native.entered.clear()
        one = await front.submit("Hi", 3)
        await asyncio.to_thread(native.entered.wait, 60)
        task = asyncio.create_task(front.call(lambda: cache.pin("Hi", one.generation.prompt)))
        await asyncio.sleep(0)
        native.gate.set()
        assert await task is None
        assert await front.call(lambda: list(cache.pins)) == ["Hi"]
        with pytest.raises(UsageError, match="no store"):
            await front.call(cache.flush)
        assert len(await one.result()) == 3
        await front.aclose()
        with pytest.raises(Closed):
            await front.call(cache.stats)

    asyncio.run(main())


def test_generation_is_cancelled_after_its_loop_ends(ctx: Context) -> None:
    """A loop may end before its generations do."""
    front = AsyncBatcher(SlotCache(ctx))
    left = asyncio.run(front.submit("Hi", sampler=Fixed([70] * 10_000)))

    async def main() -> None:
        generation = await front.submit("Ho", 5)
        assert len(await generation.result()) == 5
        await ended(front, "cancelled", 1)
        await front.aclose()

    asyncio.run(main())
    assert left.finish_reason == "cancelled"
