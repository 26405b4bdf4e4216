"""Decode one token of a sequence, or of each of several, as cheaply as Python can.

Between two decodes the processor's caches hold the model, so every line here costs several times
what it costs in a loop of its own: plain lists, no numpy, and nothing looked up twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Status
from pyllamakv.errors import UsageError
from pyllamakv.runtime import decoding, sequence
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.sequence import Sequence


#: Steps in one call of C, which needs room for the tokens of all of them.
_STEPS = 1 << 14

#: The types of the items of a list that needs no conversion.
_WHOLE = {int}


class Group:
    """Hold sequences that step together.

    Raises UsageError for what is no sequence of the context, for none or too many, and one twice.
    """

    __slots__ = ("ids", "ledgers", "sequences")

    def __init__(self, context: Context, sequences: list[Sequence]) -> None:
        for each in sequences:
            arguments.instance("an item of sequences", each, sequence.Sequence, "a Sequence")
            each.check(context)
        #: A tuple, so that whoever has seen it knows that it is the same.
        self.ids = tuple(each.id for each in sequences)
        if not 0 < len(self.ids) <= context.info.n_batch or len(set(self.ids)) != len(self.ids):
            msg = (
                f"expected 1 to {context.info.n_batch} sequences (n_batch), each of them once, "
                f"not {list(self.ids)}"
            )
            raise UsageError(msg)
        self.sequences = sequences
        self.ledgers: list[Ledger] = [each.ledger for each in sequences]


def group(context: Context, sequences: Iterable[Sequence]) -> Group:
    """Return the group of these sequences: the last one, where they are the same."""
    last = context.group
    if type(sequences) is list:
        wanted = sequences.copy()
    else:
        wanted = arguments.items("sequences", sequences, "sequences of this context")
    try:
        if last is not None and last.sequences == wanted:
            return last
    except Exception:  # what is no sequence may refuse to be compared
        last = None
    made = context.group = Group(context, wanted)
    return made


def check_token(context: Context, token: int) -> None:
    """Refuse a token that the vocabulary lacks."""
    if not 0 <= token < context.n_vocab and (context.guard or abs(token) > arguments.INT32):
        msg = (
            f"token {arguments.shown(token)} is out of range: this model has tokens "
            f"0..{context.n_vocab - 1}"
        )
        raise UsageError(msg)


def one(context: Context, sequence: Sequence, token: int) -> None:
    """Decode one token of one sequence; `Context.step` describes it."""
    with context.turn as handle:
        try:
            if sequence.context is not context or not sequence.open:
                sequence.check(context)
        except AttributeError:
            raise arguments.wrong_type("sequence", sequence, "a Sequence") from None
        if type(token) is not int:
            token = arguments.whole("token", token)
        if not 0 <= token < context.n_vocab:
            check_token(context, token)
        ledger, number, keeper = sequence.ledger, sequence.id, context.keeper
        if keeper.dirty:
            keeper.before_decode()
        context.epoch = epoch = context.epoch + 1
        outputs = context.outputs
        outputs.n = 0
        pos = ledger.next
        try:
            code = context.decode_one(handle, token, pos, number)
            if code == 1 and keeper.heal((number,)):
                code = context.decode_one(handle, token, pos, number)
        except BaseException as error:
            decoding.threw(context, error, (number,))
            raise
        if code:
            context.emptied = decoding.settle(context, (number,), halfway=code != 1)
            raise decoding.failure(context, code, (number,))
        ledger.tokens.append(token)
        ledger.positions.append(pos)
        ledger.marks.append(context.new_marks(1))
        ledger.next = pos + 1
        ledger.logits_at, ledger.logits_epoch = 0, epoch
        outputs.n, outputs.every = 1, True


def each(context: Context, sequences: Iterable[Sequence], tokens: Any) -> None:
    """Decode one token of each sequence; `Context.step_all` describes it."""
    with context.turn as handle:
        together = group(context, sequences)
        given, ids = _given(context, together, tokens), together.ids
        places = _begin(context, together)
        try:
            code = context.native.decode_each(handle, given, places, ids)
            if code == 1 and context.keeper.heal(ids):
                code = context.native.decode_each(handle, given, places, ids)
        except BaseException as error:
            decoding.threw(context, error, ids)
            raise
        if code:
            context.emptied = decoding.settle(context, ids, halfway=code != 1)
            raise decoding.failure(context, code, ids)
        _record(context, together, given, places)


def advance(
    context: Context, sequences: Iterable[Sequence], tokens: Any, steps: int, sampler: Sampler
) -> list[list[int]]:
    """Decode and choose many times in one call of C; `Context.advance` describes it."""
    steps = arguments.whole("steps", steps, 1, arguments.INT32)
    arguments.instance("sampler", sampler, Sampler, "a Sampler in C (model.sampler)")
    sampler.check_context(context)
    with context.turn as handle, sampler.life as raw:
        together = group(context, sequences)
        given, ids = _given(context, together, tokens), together.ids
        sampler.check(len(ids))
        chosen: list[list[int]] = []
        healed, cancels = False, context.cancels
        while True:
            places = _begin(context, together)
            left = min(steps - len(chosen), _STEPS)
            try:
                code, rows = context.native.run(raw, handle, given, places, ids, left, True)
            except BaseException as error:
                decoding.threw(context, error, ids)
                raise
            for step, row in enumerate([given, *rows][: len(rows)]):
                _record(context, together, row, [pos + step for pos in places])
            chosen += rows
            if not code:
                ended = len(rows) < left or any(map(context.model.is_end, rows[-1]))
                if ended or len(chosen) == steps:
                    return chosen
                healed, given = False, rows[-1]
                if context.cancels == cancels:
                    continue
                code = int(Status.ABORTED)
            context.epoch += 1
            context.outputs.n = 0
            # Having moved cells helps once; the next failure must have decoded something first.
            if code != 1 or (healed and not rows) or not context.keeper.heal(ids):
                context.emptied = decoding.settle(context, ids, halfway=code != 1)
                raise decoding.failure(context, code, ids)
            healed, given = True, rows[-1] if rows else given


def _given(context: Context, together: Group, tokens: Any) -> list[int]:
    given: list[int] = tokens
    if type(tokens) is not list or set(map(type, tokens)) != _WHOLE:
        given = as_int32(tokens, "tokens").tolist()
    if len(given) != len(together.ids):
        msg = f"expected one token for each of {len(together.ids)} sequences, not {len(given)}"
        raise UsageError(msg)
    if min(given) < 0 or max(given) >= context.n_vocab:
        for token in given:
            check_token(context, token)
    return given


def _begin(context: Context, together: Group) -> list[int]:
    if context.keeper.dirty:
        context.keeper.before_decode()
    context.epoch += 1
    context.outputs.n = 0
    return [ledger.next for ledger in together.ledgers]


def _record(context: Context, together: Group, tokens: list[int], places: list[int]) -> None:
    n, epoch, outputs = len(tokens), context.epoch, context.outputs
    mark = context.new_marks(n)
    rows = zip(together.ledgers, tokens, places, strict=True)
    for place, (ledger, token, pos) in enumerate(rows):
        ledger.tokens.append(token)
        ledger.positions.append(pos)
        ledger.marks.append(mark + place)
        ledger.next = pos + 1
        ledger.logits_at, ledger.logits_epoch = place, epoch
    outputs.n, outputs.every = n, True
