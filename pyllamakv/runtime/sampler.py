"""Choose the next token from the logits, in C if the build supports it, else with numpy."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.owner import LoadedModel, Lock, free_quietly
from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.json_schema import SchemaProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import ContextHandle
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sequence import Sequence


class TokenSampler(Protocol):
    """Choose a token from the logits at a place of the context's last batch."""

    def sample(self, context: Context, index: int = -1) -> int:
        """Return the token; the context's logits are current."""


#: Options of `Model.sampler` that are not parameters of the samplers in C.
_MORE_OPTIONS = ("processors", "json_schema", "top_logprobs")

#: Names of options in llama-cpp-python and OpenAI's API, and the names here.
_OTHER_NAMES = {
    "repeat_penalty": "penalty_repeat",
    "frequency_penalty": "penalty_freq",
    "presence_penalty": "penalty_present",
    "mirostat_mode": "mirostat",
    "temp": "temperature",
    "logprobs": "top_logprobs",
    "logits_processor": "processors",
    "response_format": "json_schema",
}


def sampler_option(name: str) -> str | None:
    """Return the option of `Model.sampler` that a name means, also in OpenAI's API, or None."""
    known = name in SamplerParams.__dataclass_fields__ or name in _MORE_OPTIONS
    return name if known else _OTHER_NAMES.get(name)


def params_from_options(options: Mapping[str, Any]) -> SamplerParams:
    """Return sampler parameters; raise UsageError for an unknown option, with a similar one."""
    known = (*SamplerParams.__dataclass_fields__, *_MORE_OPTIONS)
    for name in options:
        meant = sampler_option(name)
        if meant != name:
            import difflib

            close = [meant] if meant else difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"a sampler has no option {name}; {hint}")
    return SamplerParams(**options)


def check_params(params: SamplerParams) -> SamplerParams:
    """Return sampler parameters, which check their own values."""
    return arguments.instance("params", params, SamplerParams, "SamplerParams")


def check_sampler(sampler: Any) -> None:
    """Raise unless the argument is a sampler, sampler parameters or None."""
    picks = isinstance(sampler, type) or not callable(getattr(sampler, "sample", None))
    if picks and sampler is not None and not isinstance(sampler, SamplerParams):
        expected = "a sampler (it has a method sample), SamplerParams or None"
        raise arguments.wrong_type("sampler", sampler, expected)


def sample_token(sampler: TokenSampler, context: Context, index: int = -1) -> int:
    """Return a token of a sampler; raise UsageError if it returns anything else."""
    token = sampler.sample(context, index)
    if type(token) is not int or not 0 <= token < context.n_vocab:
        name = f"the result of {type(sampler).__name__}.sample"
        token = arguments.integer(name, token, 0, context.n_vocab - 1)
    return token


def context_lock(context: Context) -> Lock[Any]:
    """Return the lock of a context; raise ArgumentTypeError for another object."""
    try:
        return context.lock
    except AttributeError:
        raise arguments.wrong_type("context", context, "a Context") from None


class LogitsProcessor(Protocol):
    """Change logits before a token is sampled."""

    def __call__(self, tokens: list[int], logits: NDArray[np.float32]) -> None:
        """Change ``logits`` (n_vocab,) in place; -inf excludes a token.

        ``tokens`` were sampled since the sampler was created or reset. A result other than None
        raises UsageError.
        """


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a sampled token, and the most likely tokens with theirs, best first.

    They are natural logarithms, those of the model: before processors, penalties and temperature.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: NDArray[np.float32], token: int, n: int) -> TokenLogprobs:
    """Return the log-probabilities of a token and of the ``n`` most likely ones in a row of logits.

    Of equal logits, the lower token comes first.
    """
    best = float(logits.max())
    total = best + math.log(np.exp(logits - best, dtype=np.float64).sum())
    top: tuple[tuple[int, float], ...] = ()
    if n:
        n = min(n, len(logits))
        candidates = np.flatnonzero(logits >= np.partition(logits, -n)[-n])
        order = candidates[np.argsort(-logits[candidates], kind="stable")][:n]
        top = tuple((int(each), float(logits[each]) - total) for each in order)
    return TokenLogprobs(token, float(logits[token]) - total, top)


def uses_penalties(params: SamplerParams) -> bool:
    """Return whether tokens chosen before count in `NumpySampler`."""
    return params.penalty_last_n > 0 and params.penalty_repeat != 1.0


def check_single_sequence(keeps_history: bool, n: int) -> None:
    """Refuse to choose for several places with a memory for one sequence's tokens."""
    if n > 1 and keeps_history:
        msg = (
            f"this sampler has the history of one sequence, and the last batch has {n} rows: "
            "create one sampler for each sequence, and call sample(context, index)"
        )
        raise UsageError(msg)


class SampledAhead:
    """Keep the token that a generation sampled and did not decode, because it ended early.

    The token is in the history of the sampler, so the next generation must begin with it.
    """

    _ahead: tuple[weakref.ref[Sequence], int, int] | None = None

    def keep_ahead(self, sequence: Sequence, mark: int, token: int) -> None:
        """Keep a token that was sampled when the last token of a sequence had this mark."""
        # Some copied tokens have no mark, but -1.
        self._ahead = (weakref.ref(sequence), mark, token) if mark >= 0 else None

    def take_ahead(self, sequence: Sequence) -> tuple[int, int]:
        """Return the token and the mark once; twice -1 if there is none.

        There is none if the sequence has another last token.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0]() is not sequence:
            return -1, -1
        return (ahead[2], ahead[1]) if sequence.ledger.marks[-1:] == [ahead[1]] else (-1, -1)


class Sampler(SampledAhead, ClosedOnExit):
    """Sample in C. Closing the model closes the sampler.

    ``processors`` are called in order before each choice, the one for ``json_schema`` last. With
    ``top_logprobs``, `logprobs` has an entry for each sampled token, with this number of most
    likely tokens. Either makes it a sampler of one sequence. Raises Unsupported, with the
    capability, for a sampler that the build lacks; GrammarError; SchemaError; UsageError for a
    grammar together with ``json_schema``.
    """

    _internal = frozenset(
        (
            "begin",
            "check",
            "check_context",
            "check_in_c",
            "keep_ahead",
            "lock",
            "sample_locked",
            "take_ahead",
        )
    )

    def __init__(
        self,
        model: Model,
        params: SamplerParams,
        *,
        processors: Iterable[LogitsProcessor] = (),
        json_schema: Mapping[str, Any] | str | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        arguments.instance("model", model, LoadedModel, "a Model")
        if json_schema is not None and getattr(params, "grammar", None) is not None:
            msg = "grammar and json_schema both restrict the text; pass one of them"
            raise UsageError(msg)
        #: The parameters in effect, with the seed.
        self.params = params = check_params(params).seeded()
        _check_capabilities(params, model.native.about.capabilities)
        self.processors = list(arguments.items("processors", processors, "functions"))
        for each in self.processors:
            if not callable(each):
                raise arguments.wrong_type("an item of processors", each, "a function")
        self._n_top = arguments.whole_or_none("top_logprobs", top_logprobs, 0, arguments.INT32)
        self._tokens: list[int] = []
        #: Of each token sampled since the last reset, with ``top_logprobs``.
        self.logprobs: list[TokenLogprobs] = []
        #: Whether a choice needs the logits in Python.
        self._in_python = bool(
            self.processors or json_schema is not None or top_logprobs is not None
        )
        #: Whether a choice depends on the tokens of one sequence.
        self.keeps_history = self._in_python or params.keeps_history
        #: Whether the sampled tokens are one text, which a grammar or schema restricts.
        self._restricts = json_schema is not None or params.grammar is not None
        #: Whether a token was sampled since the last reset, and the owner of the text.
        self._sampled = False
        self._text: weakref.ref[object] | None = None
        self._native, self._n_vocab = model.native, model.info.n_vocab
        last = max(dict(params.logit_bias), default=0)
        arguments.integer("a token of logit_bias", last, 0, self._n_vocab - 1)
        with model.owner as raw:
            if json_schema is not None:
                self.processors.append(SchemaProcessor(model, json_schema))
            made = self._native.sampler_new(raw, params)
            free = partial(free_quietly, self._native.sampler_free)
            try:
                #: Held by the thread that samples.
                self.lock: Lock[Any] = Lock(made, free, "sampler", model.owner)
            except BaseException:
                free(made)
                raise

    def sample(self, context: Context, index: int = -1) -> int:
        """Return a token sampled from the logits at ``index`` of the last batch.

        Raises NoTokenAllowed if a grammar, schema, processor or bias excludes every token.
        """
        if type(index) is not int:
            index = arguments.integer("index", index)
        with context_lock(context) as raw, self.lock as handle:
            if context.model.native is not self._native:
                self.check_context(context)
            context.outputs.check(index)
            self._sampled = True
            if not self._in_python:
                return self._native.sample(handle, raw, index)
            return self._sample_copy(handle, context.logits(index).copy())

    def _sample_copy(self, handle: Any, logits: NDArray[np.float32]) -> int:
        if len(logits) != self._n_vocab:
            msg = (
                f"the sampler was created for a model of {self._n_vocab} tokens, and this one has "
                f"{len(logits)}: create it with the model of the context"
            )
            raise UsageError(msg)
        changed = logits.copy() if self.processors else logits
        for process in self.processors:
            result = process(self._tokens, changed)
            if result is not None:
                msg = (
                    "a processor must change the logits in place and return None, not "
                    f"{arguments.shown(result)}: write logits[...] = scores"
                )
                raise UsageError(msg)
        if self.processors and not (changed < np.inf).all():
            msg = "a processor set a logit to nan or inf: expected finite numbers and -inf"
            raise UsageError(msg)
        token = self._native.sample_logits(handle, changed)
        self._tokens.append(token)
        if self._n_top is not None:
            self.logprobs.append(token_logprobs(logits, token, self._n_top))
        return token

    def sample_all(self, context: Context) -> list[int]:
        """Return a token for each row of the last batch with logits, in order.

        Raises UsageError if the sampler keeps a history, which would mix several sequences.
        """
        with context_lock(context) as raw:
            return self.sample_locked(context, raw)

    def sample_locked(self, context: Context, raw: ContextHandle) -> list[int]:
        """Do what `sample_all` does, for a caller that holds the context's lock as ``raw``."""
        with self.lock as handle:
            if context.model.native is not self._native:
                self.check_context(context)
            n = context.outputs.count()
            if n > 1:
                check_single_sequence(self.keeps_history, n)
            if self._in_python:
                return [self.sample(context)]
            return self._native.sample_all(handle, raw, n)

    def accept(self, tokens: Iterable[int]) -> None:
        """Add tokens, such as a prompt, to the history of penalties and DRY.

        A grammar or schema still begins with the first sampled token.
        """
        numbers = as_int32(tokens, "tokens")
        with self.lock as handle:
            self._native.sampler_accept(handle, numbers)

    def begin(self, text: object, *, new: bool) -> None:
        """Note whose text is generated: a sequence or a `Generation`; ``new`` starts another text.

        Raises UsageError if a grammar or schema has sampled tokens of another text.
        """
        other = new or (self._text is not None and self._text() is not text)
        if self._restricts and self._sampled and other:
            msg = (
                "the grammar or schema of this sampler has the tokens of another text: call "
                "sampler.reset(), or create a sampler for each text"
            )
            raise UsageError(msg)
        self._text = weakref.ref(text)

    def check_context(self, context: Context) -> None:
        """Raise UsageError for a context of another library."""
        context_lock(context)
        if context.model.native is not self._native:
            msg = "the sampler and the context belong to two libraries: create both from one model"
            raise UsageError(msg)
        if context.embeds:
            raise UsageError("a context with embeddings has no logits: sample in another context")

    def check_in_c(self) -> None:
        """Raise UsageError if choices need Python, which a loop in C cannot call."""
        if self._in_python:
            msg = (
                "a sampler with processors, json_schema or top_logprobs runs in Python: call step "
                "and sample for each token"
            )
            raise UsageError(msg)

    def check(self, n: int) -> None:
        """Raise UsageError for ``n`` sequences if the sampler keeps a token history."""
        if type(n) is not int or n < 0:
            n = arguments.integer("n", n, 0)
        if n > 1:
            check_single_sequence(self.keeps_history, n)

    def reset(self) -> None:
        """Drop the token history and restart from the seed."""
        with self.lock as handle:
            self._native.sampler_reset(handle)
            self._ahead = self._text = None
            self._sampled = False
            self._tokens = []
            self.logprobs = []

    def close(self) -> None:
        """Free the sampler; further use raises Closed."""
        self.lock.close()

    def __repr__(self) -> str:
        state = "closed" if self.lock.closed else _changed_options(self.params)
        return f"<Sampler {state}>"


def _changed_options(params: SamplerParams) -> str:
    """Return the options that differ from their defaults, and the seed."""
    changed = {
        each.name: value
        for each in fields(params)
        if (value := getattr(params, each.name)) != each.default
    }
    return ", ".join(f"{name}={arguments.shown(value)}" for name, value in changed.items())


def _check_capabilities(params: SamplerParams, there: Capability) -> None:
    """Raise Unsupported if a build lacks a sampler that is on."""
    if Capability.SAMPLER not in there:
        msg = "this build has no sampler in C; use NumpySampler"
        raise Unsupported(msg, "SAMPLER")
    missing = [each for each in params.needs if each not in there]
    if missing:
        name = missing[0].name or ""
        msg = f"this build lacks a sampler with the capability {name}; open a newer release"
        raise Unsupported(msg, name)


class NumpySampler(SampledAhead):
    """Sample with numpy: repetition penalty, top-k, top-p, min-p, temperature, in this order.

    Raises Unsupported for parameters of other samplers.
    """

    def __init__(self, params: SamplerParams | None = None) -> None:
        #: The parameters in effect, with the seed.
        self.params = (SamplerParams() if params is None else check_params(params)).seeded()
        more = [each for each in self.params.needs if each != Capability.SAMPLER]
        if more or self.params.logit_bias:
            name = (more[0].name or "") if more else "SAMPLER"
            msg = "NumpySampler has no logit bias and none of the samplers in C; use model.sampler"
            raise Unsupported(msg, name)
        self.reset()

    def reset(self) -> None:
        """Drop the token history and restart from the seed."""
        self._random = np.random.default_rng(self.params.seed)
        self._last: list[int] = []
        self._ahead = None

    def sample(self, context: Context, index: int = -1) -> int:
        """Return a token sampled from the logits at ``index`` of the last batch."""
        context_lock(context)
        logits = context.logits(index)
        if self.params.temperature <= 0 and not uses_penalties(self.params):
            return logits.argmax()
        return self._take(logits.copy())

    def sample_all(self, context: Context) -> list[int]:
        """Return a token for each row of the last batch with logits, like `Sampler`."""
        context_lock(context)
        return self.sample_locked(context, None)

    def sample_locked(self, context: Context, _: ContextHandle | None) -> list[int]:
        """Do what `sample_all` does: the interface of `Sampler`."""
        rows = context.logits_all()
        check_single_sequence(uses_penalties(self.params), len(rows))
        if self.params.temperature <= 0 and not uses_penalties(self.params):
            found: list[int] = rows.argmax(axis=1).tolist()
            return found
        return [self._take(row) for row in rows.copy()]

    def __repr__(self) -> str:
        return f"<NumpySampler {_changed_options(self.params)}>"

    def _take(self, logits: NDArray[np.float32]) -> int:
        token = self.sample_logits(logits)
        self._last = [*self._last, token][-max(self.params.penalty_last_n, 1) :]
        return token

    def sample_logits(self, logits: NDArray[np.float32]) -> int:
        """Return a token sampled from logits (n,), which are modified."""
        good = isinstance(logits, np.ndarray) and logits.ndim == 1 and logits.dtype.kind == "f"
        if not good or not logits.size:
            expected = "a flat array of floats, at least one"
            raise arguments.wrong_type("logits", logits, expected)
        params = self.params
        if uses_penalties(params) and self._last:
            seen = np.unique(self._last)
            part = logits[seen]
            by = params.penalty_repeat
            logits[seen] = np.where(part > 0, part / by, part * by)
        if params.temperature <= 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        if params.top_k > 0:
            order = order[: params.top_k]
        chances = _softmax(logits[order].astype(np.float64))
        if params.top_p < 1:
            order = order[: int(np.searchsorted(np.cumsum(chances), params.top_p)) + 1]
            chances = _softmax(logits[order].astype(np.float64))
        if params.min_p > 0:
            order = order[chances >= params.min_p * chances[0]]
        wide = logits[order].astype(np.float64)
        # Subtract the maximum first: dividing by a tiny temperature could overflow.
        with np.errstate(over="ignore"):
            chances = _softmax((wide - wide.max()) / params.temperature)
        return int(self._random.choice(order, p=chances))


def make_sampler(model: Model, params: SamplerParams) -> Sampler | NumpySampler:
    """Return a sampler in C if the build has one, else in Python."""
    if Capability.SAMPLER in model.native.about.capabilities:
        return Sampler(model, params)
    return NumpySampler(params)


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
