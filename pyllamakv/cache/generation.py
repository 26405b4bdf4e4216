"""Continue one prompt in a `Batcher`: its request, its tokens and text, and its stop strings.

The request is checked before any decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.cache import token_groups as grouping
from pyllamakv.cache.interface import salt_digest
from pyllamakv.cache.prefix_states import checked_positions
from pyllamakv.cache.radix_tree import common, tokens_to_key
from pyllamakv.closing import NotCopied
from pyllamakv.errors import (
    Cancelled,
    PartialRemovalRefused,
    PromptTooLong,
    ReprocessNeeded,
    SequenceChanged,
    UsageError,
)
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.generated_text import GeneratedText
from pyllamakv.runtime.sampler import Sampler, check_sampler, make_sampler, sample_token
from pyllamakv.runtime.stop_strings import check_stop_strings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyllamakv.cache.batcher import Batcher
    from pyllamakv.cache.interface import CacheManager, Lease, Parked
    from pyllamakv.cache.token_groups import Group
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.generated_text import Reason
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import TokenSampler
    from pyllamakv.runtime.sequence import Sequence

#: Limit of priorities, in both directions.
MAX_PRIORITY = 100


class Generation(NotCopied, GeneratedText):
    """The text that continues a prompt. `Batcher.submit` creates it.

    Iteration runs steps of the batcher, for all its generations, until this one has more text.
    ``finish_reason`` is None while the generation runs, then "end" (end-of-generation token),
    "stop" (stop string), "length" (``max_tokens``), "cancelled" or "failed". The last two have an
    ``error``, which iteration and `result` raise: `Cancelled` with the text so far, or the reason.
    """

    def __init__(self, batcher: Batcher, asked: Request) -> None:
        super().__init__(
            batcher.context.model,
            len(asked.prompt),
            asked.max_tokens,
            asked.stop,
            stop_at_end=asked.stop_at_end,
            known=batcher.known,
        )
        self.prompt = asked.prompt
        self.groups = asked.groups
        self.checkpoints = asked.checkpoints
        self.salt = asked.salt
        self.sampler = asked.sampler
        self.cancelled = False
        self._batcher = batcher
        self._owned = asked.owned
        # State of the batcher, while the generation has a lease.
        self.lease: Lease | None = None
        #: What the generation continues with, while it gave up its sequence.
        self.parked: Parked | None = None
        self.priority = asked.priority
        #: Number of steps for which it waited while another one evaluated a prefix of its prompt,
        #: and that one, with the length of the prefix.
        self.deferred = 0
        self.awaits: tuple[Generation, int] | None = None
        #: Place among all generations: the lowest is admitted first and parked last. It changes
        #: after a long run.
        self.turn = (0, 0)
        #: Step in which the generation began to wait, or to run.
        self.since = 0
        #: Number of all tokens when the generation began to run.
        self.begun_with = 0
        self.sequence: Sequence
        self.ledger: Ledger
        #: All tokens of the sequence: the decoded ones, then those to decode.
        self.all_tokens: list[int] = []
        #: The token that was sampled and not accepted yet, or the error of the sampler.
        self.sampled: int | Exception | None = None
        #: Number of the last step that decoded its tokens.
        self.last_step = 0

    def cancel(self) -> None:
        """End the generation, also during a decode, from any thread. Decoded tokens remain."""
        if self.finish_reason is None:
            self.cancelled = True
            self._batcher.interrupt(self)

    def result(self) -> str:
        """Step until the generation has ended; return its text, or raise its error."""
        return "".join(self)

    def __iter__(self) -> Iterator[str]:
        """Yield the text from its start, as it is generated. Raises `error` at the end."""
        at = 0
        while True:
            while at < len(self._parts):
                at += 1
                yield self._parts[at - 1]
            if self.finish_reason is not None:
                break
            self._batcher.step()
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        state = self.finish_reason or ("waits" if self.lease is None else "runs")
        return f"<Generation of {len(self.prompt)} + {len(self.tokens)} tokens, {state}>"

    # The interface for the batcher.

    def begin(self, manager: CacheManager, steps: int) -> None:
        """Get a lease of a manager, or resume; ``steps`` is the present step.

        Raises NoSlotAvailable, KVCacheFull and other errors of the manager, with nothing changed.
        """
        if self.parked is not None:
            lease = self.parked.resume(self.all_tokens)
            self.parked = None
        else:
            # After an interrupted `park`, the tokens so far are the prompt.
            tokens = self.all_tokens or self.prompt.copy()
            lease = manager.acquire(
                tokens, groups=self.groups, checkpoints=self.checkpoints, salt=self.salt
            )
            self.cached = lease.cached if self.cached is None else self.cached
            self.all_tokens = tokens
        self.awaits = None
        self.last_step = self.since = steps
        self.begun_with = len(self.all_tokens)
        self.lease, self.sequence, self.ledger = lease, lease.sequence, lease.sequence.ledger

    def queue(self, turn: tuple[int, int], steps: int) -> None:
        """Wait from step ``steps`` for ``turn``, the place among all generations."""
        self.turn, self.since = turn, steps

    @cached_property
    def key(self) -> bytes:
        """The prompt as the bytes that a radix tree compares."""
        return tokens_to_key(self.prompt)

    def common_with(self, other: Generation) -> int:
        """Return the length of the prefix of another prompt that this one can continue."""
        if self.salt != other.salt:
            return 0
        length = min(common(self.key, other.key), len(self.prompt) - 1)
        return grouping.floor(self.groups, length)

    def wait_for(self, other: Generation, length: int) -> None:
        """Wait while an active generation evaluates a prefix of ``length`` tokens."""
        self.awaits = other, length
        assert other.lease is not None
        # A memory that cannot go back needs a state there.
        keep = getattr(other.lease, "add_checkpoint", None)
        if keep is not None:
            keep(length)

    def defer(self) -> None:
        """Count a step for which this waits while another one evaluates a prefix."""
        self.deferred += 1

    @property
    def progressed(self) -> bool:
        """Return whether it has a token that it had not when it began to run."""
        return len(self.all_tokens) > self.begun_with

    def yield_turn(self, turn: tuple[int, int]) -> None:
        """Get a later turn."""
        self.turn = turn

    def park(self, steps: int) -> None:
        """Give the sequence up, and keep tokens, text, sampler and stop strings."""
        lease, self.lease = self.lease, None
        assert lease is not None
        self.since = steps
        try:
            self.parked = lease.park()
        except BaseException:
            # An interruption such as Ctrl-C: the tokens stay cached as those of ended prompts do.
            lease.release()
            raise

    @property
    def is_decoded(self) -> bool:
        """Return whether no token waits to be decoded, so that the next one can be sampled."""
        return len(self.all_tokens) == len(self.ledger.tokens)

    def sample(self, context: Context) -> None:
        """Sample a token with the own sampler, or keep the sampler's error."""
        try:
            self.sampled = sample_token(self.sampler, context, self.ledger.logits_at)
        except Exception as error:
            self.sampled = error

    def keep_sample(self, token: int) -> None:
        """Keep a token that the batcher sampled for several generations at once."""
        self.sampled = token

    def accept_sample(self) -> bool:
        """Accept the sampled token, or end with the error; return False if the generation ended."""
        token, self.sampled = self.sampled, None
        if token is None:
            return self.finish_reason is None
        if isinstance(token, Exception):
            self.end("failed", token)
            return False
        if self.accept_token(token):
            self.all_tokens.append(token)
            return True
        return False

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        """End the generation, emit withheld text, and release the lease."""
        if self.finish_reason is not None:
            return
        super().end(reason, error)
        self.awaits = None  # otherwise it keeps that one, and all that it awaited, in memory
        if self.finish_reason == "cancelled" and self.error is None:
            msg = f"the generation was cancelled after {len(self.tokens)} tokens"
            self.error = Cancelled(msg, text=self.text)
        try:
            self.release_lease()
        finally:
            if self._owned is not None:
                self._owned.close()

    def release_lease(self) -> None:
        """Release the lease. Decoded tokens stay in the cache."""
        lease, self.lease = self.lease, None
        parked, self.parked = self.parked, None
        if lease is not None:
            lease.release()
        if parked is not None:
            parked.close()


def follow_ledger(one: Generation, have: int, again: Iterable[int] = ()) -> None:
    """Start the token list of a generation with the tokens of its sequence.

    ``have`` is how many tokens of the stream were decoded before; ``again`` are decoded next.
    """
    one.all_tokens = [*one.ledger.tokens, *again, *one.all_tokens[have:]]


def record_step(those: Iterable[Generation], step: int) -> None:
    """Record the step in which generations were fed last."""
    for one in those:
        one.last_step = step


def make_room(one: Generation, n: int) -> bool:
    """Free cells for ``n`` tokens; return False if others must be decoded again first.

    ``one.stream`` follows what the lease discards. Raises NoKVSlot if not enough cells are free.
    """
    ledger, lease = one.ledger, one.lease
    have, end = len(ledger.tokens), ledger.marks[-1:]
    assert lease is not None
    try:
        lease.make_room(n)
    except ReprocessNeeded as needed:
        follow_ledger(one, have, needed.tokens)
        return False
    if len(ledger.tokens) != have:
        # The lease discards tokens before the last one; only others remove that.
        if ledger.marks[-1:] != end:
            return False
        follow_ledger(one, have)
    return True


def changed_elsewhere(one: Generation) -> SequenceChanged | None:
    """Return the error of a generation whose sequence others have changed; None if it continues.

    Tokens that others removed from the end are decoded again.
    """
    have = one.ledger.tokens
    behind = one.sequence.open and len(have) < len(one.all_tokens)
    if behind and have == one.all_tokens[: len(have)]:
        return None
    what = "changed its tokens" if one.sequence.open else "closed it"
    msg = f"sequence {one.sequence.id} belongs to a generation, and something else {what}"
    return SequenceChanged(msg)


def drop_last_token(one: Generation) -> None:
    """Remove the last token if an exception prevented sampling after it.

    The generation has accepted what was sampled.
    """
    if one.sequence.open and len(one.all_tokens) == len(one.ledger.tokens):
        try:
            one.sequence.trim(len(one.all_tokens) - 1)
        except PartialRemovalRefused:
            one.sequence.remove()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and its parameters; ``owned`` is a sampler created for it."""

    prompt: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_at_end: bool
    groups: tuple[Group, ...]
    checkpoints: tuple[int, ...]
    salt: str | None
    priority: int
    sampler: TokenSampler
    owned: Sampler | None


def checked_request(
    manager: CacheManager,
    greedy: TokenSampler,
    n_batch: int,
    prompt: str | Iterable[int] | None,
    *,
    messages: Iterable[Mapping[str, Any]] | None,
    tools: Iterable[Mapping[str, Any]] | None,
    max_tokens: int | None,
    stop: str | Iterable[str],
    sampler: TokenSampler | SamplerParams | None,
    groups: Iterable[tuple[int, int]],
    checkpoints: Iterable[int],
    salt: str | None,
    priority: int,
    stop_at_end: bool,
) -> Request:
    """Check and return a request. Raises UsageError, and Unsupported as stop strings do."""
    context = manager.context
    model = context.model
    if (prompt is None) == (messages is None) or (tools is not None and messages is None):
        msg = "pass either a prompt or messages=, and tools= with messages only"
        raise UsageError(msg)
    if messages is not None:
        prompt = model.tokenize_chat(messages, tools)
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    given: list[int] = as_int32(tokens, "prompt").tolist()
    if not given:
        msg = "the prompt is empty"
        raise UsageError(msg)
    wrong = next((token for token in given if not 0 <= token < context.n_vocab), None)
    if wrong is not None:
        msg = f"token {wrong} is out of range: this model has tokens 0..{context.n_vocab - 1}"
        raise UsageError(msg)
    longest = manager.max_sequence_tokens
    if longest is not None and len(given) > longest:
        msg = (
            f"the prompt has {len(given)} tokens, and a sequence at most {longest}: shorten it, or "
            "create the context or the cache manager with more"
        )
        raise PromptTooLong(msg, needed=len(given), available=longest)
    check_budget = getattr(manager, "check_budget", None)
    if check_budget is not None:
        check_budget(len(given))
    max_tokens = arguments.whole_or_none("max_tokens", max_tokens, 0)
    stop_at_end = arguments.flag("stop_at_end", stop_at_end)
    check_sampler(sampler)
    strings = check_stop_strings(stop, has_vocab=model.info.has_vocab)
    together = grouping.checked(groups, len(given), n_batch)
    named = checked_positions(checkpoints, len(given))
    salt_digest(salt)
    priority = arguments.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    picker, owned = _picker(model, greedy, sampler)
    return Request(
        given, max_tokens, strings, stop_at_end, together, named, salt, priority, picker, owned
    )


def _picker(
    model: Model, greedy: TokenSampler, sampler: Any
) -> tuple[TokenSampler, Sampler | None]:
    if sampler is None:
        return greedy, None
    if not isinstance(sampler, SamplerParams):
        return sampler, None
    if sampler.is_greedy:
        return greedy, None
    made = make_sampler(model, sampler)
    return made, made if isinstance(made, Sampler) else None
