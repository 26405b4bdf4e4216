"""Turn requests into generations of an `AsyncBatcher`, and keep its prefix cache flushed.

`Engine` has the model, its cache and its batcher. `ActiveRequest` has the generations of one
request. All methods run in the event loop, except where they say otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pyllamakv.cache.async_batcher import AsyncBatcher
from pyllamakv.errors import (
    Cancelled,
    Closed,
    KvError,
    NativeError,
    NoKVSlot,
    NoSlotAvailable,
    PromptTooLong,
    Unsupported,
    UsageError,
    WorkerDied,
)
from pyllamakv.runtime import metrics
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from pyllamakv.binding.protocol import SamplerParams
    from pyllamakv.cache.async_batcher import AsyncGeneration
    from pyllamakv.cache.prefix_cache import PrefixCache
    from pyllamakv.cache.radix_tree import Node
    from pyllamakv.runtime.metrics import ManagerStats, Metric
    from pyllamakv.runtime.sampler import TokenLogprobs

LOG = logging.getLogger("pyllamakv.serve")

#: Maximum number of seconds between a failed flush in the background and the next one.
_LONGEST_RETRY: Final = 60.0
#: Maximum number of pinned prefixes of a tenant, and the part of the budget for those of all.
_MAX_PINS: Final = 100
_PINNED_SHARE: Final = 0.5
#: Maximum number of log-probabilities of a request, which are in memory until it is answered.
_MAX_LOGPROBS: Final = 1_000_000
#: Bytes of the longest token at least: some vocabularies drop white space around a token.
_LEAST_LONGEST: Final = 16


class InvalidField(UsageError):
    """A field of a request has a value that is not accepted; ``param`` is its name there."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose cached prefixes a request shares.

    ``salt`` is that of its prompts. ``owner`` is the start of the names that it has pinned, and is
    not shown to it; without one, all names are its own.
    """

    salt: str | None = None
    owner: str = ""

    def own(self, names: Iterable[str]) -> list[str]:
        """Return its own among all pinned names, as it knows them."""
        return sorted(name.removeprefix(self.owner) for name in names if self.has(name))

    def has(self, name: str) -> bool:
        """Return whether it has pinned a name."""
        return name.startswith(self.owner)


#: The tenant of all requests that are not separated.
SHARED: Final = Tenant()


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to continue the prompts of a request.

    ``n`` texts for each prompt, of at most ``max_tokens`` tokens (None: up to the end of the
    context). ``top_logprobs`` is the number of most likely tokens to report; None: none at all.
    """

    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_at_end: bool
    params: SamplerParams
    json_schema: Mapping[str, Any] | None
    top_logprobs: int | None
    tenant: Tenant = SHARED

    @property
    def needs_sampler(self) -> bool:
        """Return whether a sampler must be created for each text.

        The batcher creates the others from their parameters, in the thread that decodes. Only
        numbers take no time there.
        """
        params = self.params
        given = (self.json_schema, self.top_logprobs, params.grammar, params.samplers)
        # DRY compares its breakers, also those of its default, with the vocabulary.
        return any(each is not None for each in given) or bool(
            params.logit_bias or params.dry_multiplier
        )


class Engine:
    """Generate with a prefix cache, for at most ``capacity`` generations at once.

    Those that find no sequence wait in the queue of the batcher. ``workers`` tokenize and create
    samplers; wait for them before the model is closed. ``template`` replaces the chat
    template of the model. ``failure`` is the error after which no request can succeed.
    """

    def __init__(
        self, cache: PrefixCache, workers: Executor, *, capacity: int, template: str | None = None
    ) -> None:
        self.cache = cache
        self.context = cache.context
        self.model = cache.context.model
        self.capacity = capacity
        self.failure: BaseException | None = None
        #: Totals of flushes in the background: those done, and those that failed.
        self.flushes = self.flush_failures = 0
        self._batcher = AsyncBatcher(cache)
        self._workers = workers
        self._template = template
        self._requests: set[ActiveRequest] = set()
        #: Number of generations that are prepared, and of prefixes that are pinned.
        self._reserved = 0
        self._stopping = False
        #: Number of evaluated tokens at the last flush.
        self._flushed_at = 0

    @property
    def pending(self) -> int:
        """Return the number of generations that are prepared, wait or run."""
        return self._reserved + sum(request.pending for request in self._requests)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run a function that takes time, without stopping the event loop.

        If the task is cancelled, a function that has not begun does not run. Raises Closed after
        `aclose`.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._workers, work)
        except RuntimeError:
            raise Closed("the server is stopping; send the request to another one") from None
        return await running

    # Prompts...

    def tokenize_text(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a prompt. Takes time: see `in_thread`.

        Text that spells a control token becomes that token, as in llama-server: clients of
        completions write the template of a chat themselves. Raises PromptTooLong.
        """
        return self._tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def _tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text; refuse one that cannot fit before it takes minutes."""
        # No character has fewer bytes than one.
        if len(text) > self._longest_prompt:
            n_bytes = len(text.encode(errors="surrogatepass"))
            if (least := -(-n_bytes // self._longest_token)) > self._longest_prompt:
                raise self._too_long(f"at least {least}", least)
        return self.model.tokenize(text, add_special, True)

    @cached_property
    def _longest_token(self) -> int:
        """The number of bytes of the longest token."""
        piece, handle = self.model.native.token_piece, self.model.handle
        sizes = (len(piece(handle, token, True)) for token in range(self.model.info.n_vocab))
        return max(_LEAST_LONGEST, *sizes)

    @property
    def _longest_prompt(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        return self.cache.max_sequence_tokens or self.context.info.n_ctx

    def _too_long(self, shown: str, needed: int) -> PromptTooLong:
        longest = self._longest_prompt
        msg = f"the prompt has {shown} tokens, and the context {longest}: shorten it"
        return PromptTooLong(msg, needed=needed, available=longest)

    def tokenize_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the tokens of a chat. Takes time: see `in_thread`.

        Raises Unsupported without a template, ChatTemplateError and PromptTooLong.
        """
        # The other parameters of `Model.apply_chat_template`, which takes variables by name.
        names = {"self", "messages", "tools", "template", "add_generation_prompt"}
        if reserved := names & set(variables or {}):
            msg = f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}"
            raise InvalidField(msg, "chat_template_kwargs")
        text = self.model.apply_chat_template(
            messages,
            template=self._template,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
        return self._tokenize(text, add_special=False)

    async def complete(
        self, n_prompts: int, tokenize: Callable[[], list[list[int]]], options: GenerationOptions
    ) -> ActiveRequest:
        """Start the generations of a request; return when the first of each prompt has text.

        ``tokenize`` returns the tokens of ``n_prompts`` prompts. Raises NoSlotAvailable if the
        queue is full, PromptTooLong and BudgetTooSmall for a prompt that can never fit,
        InvalidField for too many texts or log-probabilities, and the errors of `Sampler`, of
        `Batcher.submit` and of a generation that fails at once. Nothing runs then.
        """
        n = n_prompts * options.n
        if n > self.capacity:
            msg = f"the request has {n} texts, and the server takes {self.capacity}: send fewer"
            raise InvalidField(msg, "n" if options.n > 1 else "prompt")
        self._check_logprobs(n, options)

        def prepare() -> tuple[list[list[int]], list[Sampler | SamplerParams]]:
            prompts = tokenize()
            return prompts, self._samplers(len(prompts), options)

        with self._reserve(n):
            prepared = await self.in_thread(prepare)
        made = ActiveRequest(self, options, *prepared)
        try:
            await made.start()
        except NoKVSlot as error:
            made.close()
            raise await self._explained(error, options.tenant) from error
        except BaseException:
            made.close()
            raise
        return made

    def _check_logprobs(self, n_texts: int, options: GenerationOptions) -> None:
        """Raise InvalidField if the texts of a request may have too many log-probabilities."""
        if options.top_logprobs is None:
            return
        longest = self._longest_prompt
        asked = options.max_tokens
        tokens = longest if asked is None else min(asked, longest)
        each = n_texts * (options.top_logprobs + 1)
        if tokens * each > _MAX_LOGPROBS:
            msg = (
                f"{n_texts} texts of up to {tokens} tokens with {options.top_logprobs + 1} "
                f"log-probabilities each exceed {_MAX_LOGPROBS}: send at most "
                f"{_MAX_LOGPROBS // each} as max_tokens, or fewer top_logprobs"
            )
            raise InvalidField(msg, "logprobs")

    async def _explained(self, error: NoKVSlot, tenant: Tenant) -> KvError:
        """Return the error of a prompt without cells: UsageError if pinned prefixes have them.

        If nothing else runs, another try fails as well.
        """
        pins = await self._call(lambda: list(self.cache.pins))
        if self.pending or not pins:
            return error
        names = tenant.own(pins)
        if not names:
            return UsageError("the prompt finds no cells beside the prefixes that others pinned")
        shown = ", ".join(repr(name[:50]) for name in names[:5])
        return UsageError(
            f"the prompt finds no cells beside the {len(names)} pinned prefixes: release some of "
            f"{shown}{', …' if len(names) > 5 else ''}"
        )

    def _samplers(
        self, n_prompts: int, options: GenerationOptions
    ) -> list[Sampler | SamplerParams]:
        """Return a sampler for each text; the second text of a prompt has the next seed.

        Raises InvalidField for a bias of an unknown token, and as `Sampler` does.
        """
        most = self.model.info.n_vocab - 1
        if (last := max(dict(options.params.logit_bias), default=0)) > most:
            msg = f"logit_bias has token {last}, and the tokens of the model are 0 to {most}"
            raise InvalidField(msg, "logit_bias")
        found: list[Sampler | SamplerParams] = []
        for i in range(n_prompts * options.n):
            params = options.params
            if params.seed is not None:
                params = replace(params, seed=(params.seed + i % options.n) % (2**32 - 1))
            if not options.needs_sampler:
                found.append(params)
                continue
            # The collector closes them: a sampler may be in use when its request ends.
            found.append(
                Sampler(
                    self.model,
                    params,
                    json_schema=options.json_schema,
                    top_logprobs=options.top_logprobs,
                )
            )
        return found

    @contextmanager
    def _reserve(self, n: int) -> Iterator[None]:
        """Count ``n`` generations that `_check_room` allows, until the end of the block."""
        self._check_room(n)
        self._reserved += n
        try:
            yield
        finally:
            self._reserved -= n

    def _check_room(self, n: int) -> None:
        """Raise if ``n`` more generations would be too many, or if the server is stopping."""
        if self._stopping:
            raise Closed("the server is stopping; send the request to another one")
        if (pending := self.pending) + n > self.capacity:
            msg = f"{pending} of {self.capacity} generations run or wait; try again later"
            raise NoSlotAvailable(msg, slots=self.capacity)

    def _room(self, prompt: list[int]) -> int:
        """Return how many tokens can follow a prompt; raise if it can never be decoded."""
        longest = self._longest_prompt
        if len(prompt) > longest:
            raise self._too_long(str(len(prompt)), len(prompt))
        self.cache.check_budget(len(prompt))
        # The last token is not decoded.
        return longest - len(prompt) + 1

    async def submit(
        self, prompt: list[int], options: GenerationOptions, sampler: Sampler | SamplerParams
    ) -> AsyncGeneration:
        """Queue one generation, for `ActiveRequest`."""
        room = self._room(prompt)
        asked = options.max_tokens
        submitted = self._batcher.submit(
            prompt,
            room if asked is None else min(asked, room),
            options.stop,
            sampler,
            stop_at_end=options.stop_at_end,
            salt=options.tenant.salt,
        )
        generation: AsyncGeneration = await self.guarded(submitted)
        return generation

    def enter(self, request: ActiveRequest) -> None:
        """Count the generations of a request from now on."""
        self._check_room(request.pending)
        self._requests.add(request)

    def leave(self, request: ActiveRequest) -> None:
        """Forget a request."""
        self._requests.discard(request)

    async def guarded(self, work: Awaitable[Any]) -> Any:
        """Return the result of work with the context, and keep an error that is final."""
        try:
            return await work
        except KvError as error:
            await self.note_error(error)
            raise

    async def note_error(self, error: BaseException) -> None:
        """Keep an error after which no other request can succeed."""
        dead = isinstance(error, Closed | WorkerDied)
        if isinstance(error, NativeError) and not isinstance(error, NoKVSlot | Cancelled):
            dead = dead or await self._refuses_calls()
        if dead and not self._stopping and self.failure is None:
            LOG.error("the context cannot be used any more: %s", error)
            self.failure = error

    async def _refuses_calls(self) -> bool:
        """Return whether the context refuses every call: an assertion of llama.cpp failed.

        The error of the decode is that of any exception, after most of which a context is usable.
        """
        context = self.context
        try:
            await self._batcher.call(lambda: context.native.seq_pos_max(context.handle, 0))
        except KvError:
            return True
        return False

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Run a function in the thread of the batcher, between two steps."""
        return await self.guarded(self._batcher.call(work))

    # The cache...

    async def pin(
        self, name: str, tokenize: Callable[[], list[int]], tenant: Tenant = SHARED
    ) -> int:
        """Evaluate a prefix if it is not cached, and protect it; return the number of tokens.

        ``tokenize`` returns the tokens. Raises UsageError for too many names or bytes, and as
        `complete` and `PrefixCache.pin` do.
        """
        own = tenant.owner + name

        def check() -> None:
            pins = self.cache.pins
            if sum(map(tenant.has, pins)) >= _MAX_PINS and own not in pins:
                msg = f"{_MAX_PINS} prefixes are pinned: release one of them before"
                raise InvalidField(msg, "name")
            self._check_pinned(len(tokens), (pins[each] for each in pins if each != own))

        def pin() -> None:
            check()
            self.cache.pin(own, tokens, salt=tenant.salt)

        try:
            with self._reserve(1):
                tokens = await self.in_thread(tokenize)
                self._room(tokens)
                await self._call(check)
                submitted = self._batcher.submit(
                    tokens, 0, checkpoints=[len(tokens)], salt=tenant.salt
                )
                decoding = await self.guarded(submitted)
                await self.guarded(decoding.result())
                await self._call(pin)
        except NoKVSlot as error:
            raise await self._explained(error, tenant) from error
        return len(tokens)

    def _check_pinned(self, tokens: int, others: Iterable[Node]) -> None:
        """Raise UsageError if the pinned prefixes of all tenants leave too little for others.

        Each name counts with all tokens of its prefix, also those that it shares.
        """
        budget, bytes_of = self.cache.budget, self.cache.branches.bytes_of
        pinned = sum(bytes_of(node.end) for node in others)
        needed = bytes_of(tokens)
        if budget is not None and pinned + needed > (most := int(budget * _PINNED_SHARE)):
            msg = (
                f"the prefix takes {needed} bytes, and {max(0, most - pinned)} of {most} are left "
                f"for pinned prefixes: pin a shorter one, release others, or increase --budget"
            )
            raise UsageError(msg)

    async def unpin(self, name: str, tenant: Tenant = SHARED) -> None:
        """Allow the eviction of a pinned prefix. Raises InvalidField if it is not pinned."""

        def unpin() -> None:
            if tenant.owner + name not in self.cache.pins:
                names = ", ".join(tenant.own(self.cache.pins)) or "none"
                raise InvalidField(f"nothing is pinned as {name!r}; pinned are: {names}", "name")
            self.cache.unpin(tenant.owner + name)

        await self._call(unpin)

    async def flush(self) -> int:
        """Write decoded tokens to the store; return their number. Raises as `PrefixCache.flush`."""
        stored: int = await self._call(self._flush)
        return stored

    def _flush(self) -> int:
        """Flush, in the thread of the batcher."""
        evaluated = self.cache.stats().evaluated_tokens
        stored = self.cache.flush()
        self._flushed_at = evaluated
        return stored

    async def statistics(self, tenant: Tenant = SHARED) -> dict[str, Any]:
        """Return the statistics of the cache and the batcher, and the names that a tenant pinned.

        The statistics are totals of all tenants.
        """
        batcher = await self.guarded(self._batcher.stats())

        def read() -> dict[str, Any]:
            cache, pins = self.cache.stats().to_json(), tenant.own(self.cache.pins)
            return {"prefix_cache": cache, "batcher": batcher.to_json(), "pins": pins}

        found: dict[str, Any] = await self._call(read)
        return found

    async def measure(self) -> tuple[Metric, ...]:
        """Return the metrics of cells, cache and batcher."""
        batcher = await self.guarded(self._batcher.stats())

        def read() -> tuple[Metric, ...]:
            cells = counters = None
            with suppress(Unsupported):  # a memory without cells
                cells = self.context.kv.stats
            with suppress(Unsupported):  # a build without counters
                counters = self.context.counters
            managers: dict[str, ManagerStats] = {"prefix": self.cache.stats(), "batcher": batcher}
            return metrics.metrics(cells, counters, managers)

        found: tuple[Metric, ...] = await self._call(read)
        return found

    async def keep_flushed(self, interval: float, n_bytes: int) -> None:
        """Flush new tokens ``interval`` seconds after the last flush, or about ``n_bytes`` bytes.

        A failed flush is logged and counted, and repeated after ``interval`` or a minute.
        """
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(min(interval, 1.0))
            try:
                stats = await self._call(self.cache.stats)
                new = stats.evaluated_tokens - self._flushed_at
                size = new * (stats.resident_bytes // max(stats.cells, 1))
                if not new or (loop.time() - last < interval and size < n_bytes):
                    continue
                last = loop.time()
                await self.flush()
                self.flushes += 1
            except Exception as error:
                self.flush_failures += 1
                LOG.warning("cannot flush to the store: %s", error or type(error).__name__)
                await asyncio.sleep(min(interval, _LONGEST_RETRY))

    # The end...

    def stop(self) -> None:
        """Refuse new requests."""
        self._stopping = True

    def cancel_all(self) -> None:
        """Cancel all generations; their requests end with `Cancelled`."""
        for request in tuple(self._requests):
            request.cancel()

    async def aclose(self) -> None:
        """Cancel all generations and end the thread of the batcher. The cache stays open."""
        self.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)
        await self._batcher.aclose()


class ActiveRequest:
    """The generations of one request: ``n`` choices for each prompt.

    `close` must be called, also if it was read to the end.
    """

    def __init__(
        self,
        engine: Engine,
        options: GenerationOptions,
        prompts: list[list[int]],
        samplers: list[Sampler | SamplerParams],
    ) -> None:
        self._engine = engine
        self._options = options
        self._prompts = prompts
        self._samplers = samplers
        self.choices: list[Choice] = []

    async def start(self) -> None:
        """Submit all generations, and wait until the first of each prompt has text or has ended."""
        n = self._options.n
        self._engine.enter(self)
        # The first choice of each prompt, then all others, which reuse its evaluation.
        for choice in [await self._submit(i) for i in range(0, len(self._samplers), n)]:
            await self._engine.guarded(choice.begin())
        for i in range(len(self._samplers)):
            if i % n:
                await self._submit(i)
        self.choices.sort(key=lambda choice: choice.index)

    async def _submit(self, index: int) -> Choice:
        sampler = self._samplers[index]
        prompt = self._prompts[index // self._options.n]
        generation = await self._engine.submit(prompt, self._options, sampler)
        logprobs = sampler.logprobs if self.reports and isinstance(sampler, Sampler) else None
        choice = Choice(index, generation, logprobs)
        # At once, because `close` cancels what is in the list.
        self.choices.append(choice)
        return choice

    async def texts(self) -> AsyncIterator[tuple[Choice, str | None]]:
        """Yield text with its choice, as it is generated; None at the end of each choice.

        Raises the error of the first failure.
        """
        if len(self.choices) == 1:
            choice = self.choices[0]
            try:
                async for text in choice.texts():
                    yield choice, text
            except KvError as error:
                await self._engine.note_error(error)
                raise
            yield choice, None
            return
        queue: asyncio.Queue[tuple[Choice, str | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(choice, queue)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                choice, part = await queue.get()
                if part is None:
                    left -= 1
                    await self._engine.guarded(tasks[self.choices.index(choice)])
                yield choice, part
        finally:
            for task in tasks:
                task.cancel()

    async def finish(self) -> None:
        """Wait until all generations have ended. Raises the error of the first failure."""
        async for _ in self.texts():
            pass

    @property
    def reports(self) -> bool:
        """Return whether log-probabilities were requested."""
        return self._options.top_logprobs is not None

    @property
    def pending(self) -> int:
        """Return the number of generations that have not ended."""
        return len(self._samplers) - sum(each.generation.generation.done for each in self.choices)

    def cancel(self) -> None:
        """Cancel the generations that run."""
        for choice in self.choices:
            if not choice.generation.generation.done:
                choice.generation.cancel()

    def close(self) -> None:
        """Cancel what runs, and make room for other requests. May be repeated."""
        self.cancel()
        self._engine.leave(self)

    @property
    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far, as OpenAI reports them."""
        n = self._options.n
        firsts = [choice.generation.usage for choice in self.choices if choice.index % n == 0]
        prompt = sum(each.prompt for each in firsts)
        generated = sum(choice.generation.usage.generated for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in firsts)},
        }


class Choice:
    """One generated text, with its log-probabilities if they were requested."""

    def __init__(
        self, index: int, generation: AsyncGeneration, logprobs: list[TokenLogprobs] | None
    ) -> None:
        self.index = index
        self.generation = generation
        self._logprobs = logprobs
        self._parts = aiter(generation)
        self._begun = False
        self._first: str | None = None

    async def begin(self) -> None:
        """Wait for the first text, or the end. Raises the error of the generation."""
        self._first = await anext(self._parts, None)
        self._begun = True

    async def texts(self) -> AsyncIterator[str]:
        """Yield the text from its start, once. Raises the error of the generation.

        The text ends where others, such as pinned prefixes, leave no cells for more.
        """
        if not self._begun:
            await self.begin()
        if self._first is None:
            return
        yield self._first
        try:
            async for part in self._parts:
                yield part
        except NoKVSlot:
            if not self._is_cut:
                raise

    @property
    def _is_cut(self) -> bool:
        """Return whether the generation ended for lack of cells after its first token."""
        found = self.generation.generation
        return isinstance(found.error, NoKVSlot) and bool(found.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Return OpenAI's word for the end of the generation; None while it runs."""
        reason = self.generation.finish_reason
        if reason == "end":
            return "stop"
        return "length" if self._is_cut else reason

    @property
    def stopped(self) -> bool:
        """Return whether a stop string ended the text: its tokens are no part of the text."""
        return self.generation.finish_reason == "stop"

    def logprobs(self, start: int = 0) -> list[TokenLogprobs] | None:
        """Return those of the tokens so far, from number ``start``; None without a request."""
        if self._logprobs is None:
            return None
        # The sampler also has the token that ended the text.
        return self._logprobs[start : len(self.generation.generation.tokens)]


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[Choice, str | None]]) -> None:
    """Put the texts of a choice into a queue, and None at the end."""
    try:
        async for text in choice.texts():
            queue.put_nowait((choice, text))
    finally:
        queue.put_nowait((choice, None))
