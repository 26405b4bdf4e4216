"""Decode in a context: choose threads, defragment, call, retry, undo a failure, and record.

`Decoder` is the only caller of the library's `decode` and `run` for a `Context`. Each of its ways
to decode is a call of `_attempt` with what differs: the arguments and the record.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pyllamakv.binding import arguments, codes
from pyllamakv.binding.interrupts import Uninterrupted
from pyllamakv.binding.protocol import DecodeStatus, MemoryType
from pyllamakv.binding.signal_check import take_run
from pyllamakv.cpus import free_cpus
from pyllamakv.errors import DecodeError, KvError, NativeError, UsageError
from pyllamakv.runtime import decode_failure
from pyllamakv.runtime.batch import (
    Batch,
    BatchArrays,
    as_int32,
    check_batch,
    check_pooled_batch,
    to_arrays,
)
from pyllamakv.runtime.decode_failure import roll_back
from pyllamakv.runtime.defrag_policy import DefragPolicy
from pyllamakv.runtime.ledger import record_batch, record_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyllamakv.binding.protocol import ContextHandle, SamplerHandle
    from pyllamakv.runtime.batch import Feed
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.parts import ContextParts

#: Maximum number of steps in one C call, whose output has the tokens of all steps.
_STEPS: Final = 1 << 14

#: Seconds between two choices of the number of threads. A choice takes about 0.02 ms.
_ADAPT_EVERY: Final = 0.25

#: The types of the items of a list that needs no conversion.
_INTEGERS: Final = {int}


class StepGroup:
    """Sequences that decode one token each in a batch, all with logits."""

    __slots__ = ("flags", "ids", "ledgers")

    def __init__(self, ids: tuple[int, ...], ledgers: list[Ledger]) -> None:
        # Tuples, because the library compares identities to detect a change.
        self.ids = ids
        #: The flags of the logits; the last token has logits without.
        self.flags = (1,) * len(ids) if len(ids) > 1 else None
        self.ledgers = ledgers


def _is_ours(error: BaseException) -> bool:
    """Return whether only code of this package took part in raising: no handler of a signal."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(frame.f_globals.get("__name__", "").startswith("pyllamakv.") for frame in frames)


class Decoder:
    """Decode in one context. In every call, the caller holds the context's lock."""

    def __init__(self, context: ContextParts, *, adapt_threads: bool) -> None:
        self._context = context
        self._outputs = context.outputs
        self.policy = DefragPolicy(context, "never")
        #: Ids of the sequences that the last failed decode emptied, because the memory cannot
        #: return to an earlier position.
        self.emptied: tuple[int, ...] = ()
        #: How many failed decodes emptied sequences.
        self.emptyings = 0
        self._marks = 0
        #: When `_adapt_threads` is due; None: never.
        self._threads_due: float | None = 0.0 if adapt_threads else None
        self._singles = [StepGroup((i,), [own]) for i, own in enumerate(context.ledgers)]
        #: The sequences that stepped last.
        self._last: tuple[list[Any], StepGroup] = ([], self._singles[0])

    def new_marks(self, n: int) -> int:
        """Reserve marks for ``n`` cells and return the first."""
        self._marks += n
        return self._marks - n

    def use_policy(self, policy: DefragPolicy) -> None:
        """Defragment by a policy from now on."""
        self.policy = policy

    def keep_threads(self) -> None:
        """Choose no number of threads from now on."""
        self._threads_due = None

    def forget_groups(self) -> None:
        """Forget the sequences that stepped last: one of them was closed."""
        self._last = ([], self._singles[0])

    # The ways to decode...

    def decode(self, work: Feed | Batch | list[Feed], allowed: tuple[int, ...] = (0,)) -> int:
        """Decode one batch, and return its status.

        Raises the error of `decode_failure.failure` for a status that is not ``allowed``.
        """
        context = self._context
        batch = to_arrays(context, work)
        if context.guard:
            check_batch(context, batch, positions=isinstance(work, Batch))
        if context.embeds:
            if context.guard:
                check_pooled_batch(context.info, batch)
            batch = BatchArrays(*batch[:-1], np.ones(len(batch.token), np.int8))
        ids, n = batch.seq.tolist(), len(batch.token)
        decode = context.native.decode
        code = self._attempt(
            ids, n, decode, context.handle, *batch, record=self._record_batch, work=batch
        )
        if code and code not in allowed:
            raise decode_failure.failure(context, code, ids, n)
        return code

    def step(self, handle: ContextHandle, group: StepGroup, tokens: list[int]) -> None:
        """Decode the next token of each sequence of a group. Raises as `decode` does.

        This runs between two decodes, when the CPU caches contain the model: each line costs
        several times more than in isolation, so it uses plain lists and no numpy.
        """
        ids, ledgers = group.ids, group.ledgers
        places = [ledgers[0].next] if len(ids) == 1 else [each.next for each in ledgers]
        decode, record = self._context.native.decode, self._record_step
        code = self._attempt(
            ids, len(ids), decode, handle, tokens, places, None, ids, group.flags, record, group
        )
        if code:
            raise decode_failure.failure(self._context, code, ids)

    def run(
        self, sampler: SamplerHandle, handle: ContextHandle, group: StepGroup, tokens: list[int],
        steps: int,
    ) -> tuple[BaseException | None, list[list[int]]]:  # fmt: skip
        """Decode and sample ``steps`` times, or until a token ends a generation.

        Returns the error of the first failed step, or the exception of a signal handler, and the
        tokens sampled before it. Raises the error of the sampler; the step before it was decoded.
        """
        context, ids, cancels = self._context, group.ids, self._context.cancels
        chosen: list[list[int]] = []
        refused: KvError | None = None
        interrupt: BaseException | None = None

        def run_steps(*_: object) -> int:
            nonlocal refused, interrupt
            while True:
                left = min(steps - len(chosen), _STEPS)
                given = chosen[-1] if chosen else tokens
                places, first = [ledger.next for ledger in group.ledgers], self._marks
                try:
                    code, rows = context.native.run(sampler, handle, given, places, ids, left, True)
                except BaseException as error:
                    completed = take_run(error)
                    if completed is None:
                        raise
                    interrupt, (code, rows) = error, completed
                decoded = [given, *rows][: len(rows)]
                for last in (False, False, True):  # a user may press Ctrl-C again
                    try:
                        self._record_steps(group, places, first, decoded)
                        break
                    except BaseException as error:
                        if last:
                            raise
                        interrupt = error
                if rows and min(rows[-1]) < 0:
                    # The last step was decoded, but no token could be sampled after it.
                    refused = codes.error(code, f"sample after {len(chosen) + len(rows)} steps")
                    return 0
                chosen.extend(rows)
                if interrupt is not None:
                    return int(DecodeStatus.ABORTED) if code else 0
                if code:
                    return code
                ended = len(rows) < left or any(map(context.model.is_eog, rows[-1]))
                if ended or len(chosen) == steps:
                    return 0
                if context.cancels != cancels:
                    return int(DecodeStatus.ABORTED)

        self.emptied = ()
        code = self._attempt(ids, len(ids), run_steps, handle, tokens, None, None, ids, None)
        if interrupt is None and refused is not None:
            raise refused
        if interrupt is None and code:
            return decode_failure.failure(context, code, ids), chosen
        return interrupt, chosen

    # Arguments of steps...

    def single(self, number: int) -> StepGroup:
        """Return the group of the one sequence with this number."""
        return self._singles[number]

    def group(self, sequences: list[Any], check: Callable[[Any], None]) -> StepGroup:
        """Return the group of some sequences; ``check`` raises for an object that is none.

        Raises UsageError for an object that is not a sequence of the context, for no or too many
        sequences, and for a duplicate.
        """
        last, group = self._last
        try:
            if last and last == sequences:
                return group
        except Exception:  # what is no sequence may refuse to be compared
            last = []
        n_batch = self._context.info.n_batch
        for each in sequences:
            check(each)
        ids = tuple(each.id for each in sequences)
        if not 0 < len(ids) <= n_batch or len(set(ids)) != len(ids):
            msg = f"expected 1 to {n_batch} sequences (n_batch), each of them once, not {list(ids)}"
            raise UsageError(msg)
        group = StepGroup(ids, [each.ledger for each in sequences])
        self._last = sequences.copy(), group
        return group

    def tokens(self, group: StepGroup, tokens: Any) -> list[int]:
        """Return the checked tokens of a step."""
        given: list[int] = tokens
        if type(tokens) is not list or set(map(type, tokens)) != _INTEGERS:
            given = as_int32(tokens, "tokens").tolist()
        if len(given) != len(group.ids):
            msg = f"expected one token for each of {len(group.ids)} sequences, not {len(given)}"
            raise UsageError(msg)
        if min(given) < 0 or max(given) >= self._context.n_vocab:
            for token in given:
                self.check_token(token)
        return given

    def check_token(self, token: int) -> None:
        """Raise UsageError for a token that is not in the vocabulary."""
        n_vocab = self._context.n_vocab
        if not 0 <= token < n_vocab and (self._context.guard or abs(token) > arguments.INT32):
            msg = (
                f"token {arguments.shown(token)} is out of range: this model has tokens "
                f"0..{n_vocab - 1}"
            )
            raise UsageError(msg)

    # One decode...

    def _attempt(
        self,
        ids: list[int] | tuple[int, ...],
        n_tokens: int,
        decode: Callable[..., int],
        handle: ContextHandle,
        token: Any,
        pos: Any,
        counts: Any,
        seq: Any,
        logits: Any,
        record: Callable[[Any, Any], None] | None = None,
        work: StepGroup | BatchArrays | None = None,
    ) -> int:
        """Return the status of ``decode``, which decodes ``n_tokens`` of sequences ``ids``.

        Its arguments, those of `Native.decode`, are named because a tuple of them takes more time.
        If there are no cells, defragment and call it again, once for each progress of the call.
        Then call ``record(work, token)``, or undo what a failed decode left in the cells. Both are
        undone if a signal handler raises before the record is complete.
        """
        if self._threads_due is not None and monotonic() >= self._threads_due:
            self._adapt_threads()
        policy = self.policy
        if policy.dirty:
            policy.before_decode()
        self._outputs.begin()
        recorded: int | None = None
        undone = False
        try:
            code = decode(handle, token, pos, counts, seq, logits)
            marks = -1
            while code == 1 and marks != self._marks and policy.defrag_after_failure(ids, n_tokens):
                marks = self._marks
                code = decode(handle, token, pos, counts, seq, logits)
            if not code and record is not None:
                recorded = self._marks
                record(work, token)
            if code:
                with Uninterrupted():
                    self._outputs.begin()
                    self._roll_back(ids, halfway=code != 1)
                    undone = True
        except BaseException as error:
            try:
                if not undone:
                    with Uninterrupted():
                        self._roll_back_after_error(error, ids, recorded)
                        undone = True
            finally:
                # The handler of another pending signal may have raised before the block began.
                if not undone:
                    with Uninterrupted():
                        self._roll_back_after_error(error, ids, recorded)
            if type(error) is NativeError:
                raise DecodeError(str(error), code=error.code, log=error.log) from error
            raise
        return code

    def _roll_back_after_error(
        self, error: BaseException, ids: Iterable[int], recorded: int | None
    ) -> None:
        """Roll back a decode that raised or was interrupted, whose marks begin at ``recorded``."""
        context = self._context
        self._outputs.begin()
        if recorded is not None:
            for each in set(ids):
                context.ledgers[each].forget_since(recorded)
        if isinstance(error, KvError) and type(error) is not NativeError and _is_ours(error):
            return  # a refusal: nothing was decoded, and recurrent states must stay
        # The exception may be that of a signal handler, which can have any class, also one of ours.
        # Python may raise it after C has returned: then the decode succeeded, but its tokens are
        # not in the ledger. After a failed assertion, and in a closed library, calls are refused.
        with suppress(KvError):
            context.native.cancel(context.handle)  # a worker may still be decoding
            self._roll_back(ids, halfway=True)

    def _roll_back(self, ids: Iterable[int], *, halfway: bool) -> None:
        self.emptied = roll_back(self._context, ids, halfway=halfway)
        self.emptyings += bool(self.emptied)

    def _record_batch(self, batch: BatchArrays, _tokens: object) -> None:
        context, outputs = self._context, self._outputs
        if context.info.memory is not MemoryType.NONE:  # an encoder keeps nothing
            first, self._marks = self._marks, self._marks + len(batch.token)
            record_batch(context.ledgers, batch, first, outputs.epoch)
        outputs.take(len(batch.token), batch.logits)

    def _record_steps(
        self, group: StepGroup, places: list[int], first: int, rows: list[list[int]]
    ) -> None:
        """Record steps whose cells begin at ``places`` and whose marks begin at ``first``.

        A second call with equal arguments completes one that a signal handler interrupted.
        """
        ledgers, n = group.ledgers, len(places)
        done = min(ledger.next - place for ledger, place in zip(ledgers, places, strict=True))
        self._marks = first + done * n
        for ledger in ledgers:
            ledger.forget_since(self._marks)
        for row in rows[done:]:
            self._record_step(group, row)

    def _record_step(self, group: StepGroup, tokens: list[int]) -> None:
        n, mark, outputs = len(tokens), self._marks, self._outputs
        self._marks = mark + n
        if n == 1:
            group.ledgers[0].append_next(tokens[0], mark, 0, outputs.epoch)
        else:
            record_step(group.ledgers, tokens, mark, outputs.epoch)
        outputs.take_all(n)

    def _adapt_threads(self) -> None:
        """Choose the number of threads for the present load."""
        self._threads_due = monotonic() + _ADAPT_EVERY
        context = self._context
        n_threads = free_cpus(context.params.n_threads)
        if n_threads != context.info.n_threads:
            context.use_threads(n_threads, n_threads)
