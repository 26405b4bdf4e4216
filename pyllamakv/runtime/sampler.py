"""Choose the next token from the logits, in C if the build supports it, else with numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.handle import Handle, LoadedModel, free_quietly
from pyllamakv.binding.protocol import Capability, SamplerParams
from pyllamakv.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model


class TokenSampler(Protocol):
    """Choose a token from the logits at a place of the context's last batch."""

    def sample(self, context: Context, index: int = -1) -> int:
        """Return the token; the context's logits are current."""


def check_params(params: SamplerParams) -> SamplerParams:
    """Return sampler parameters, which check their own values."""
    return arguments.instance("params", params, SamplerParams, "SamplerParams")


def check_sampler(sampler: Any) -> None:
    """Raise unless the argument is a sampler, sampler parameters or None."""
    picks = isinstance(sampler, type) or not callable(getattr(sampler, "sample", None))
    if picks and sampler is not None and not isinstance(sampler, SamplerParams):
        expected = "a sampler (it has a method sample), SamplerParams or None"
        raise arguments.wrong_type("sampler", sampler, expected)


def context_lock(context: Context) -> Handle[Any]:
    """Return the lock of a context; raise ArgumentTypeError for another object."""
    try:
        return context.lock
    except AttributeError:
        raise arguments.wrong_type("context", context, "a Context") from None


def uses_penalties(params: SamplerParams) -> bool:
    """Return whether tokens chosen before count."""
    return params.penalty_last_n > 0 and params.penalty_repeat != 1.0


def check_single_sequence(params: SamplerParams, n: int) -> None:
    """Refuse to choose for several places with a memory for one sequence's tokens."""
    if n > 1 and uses_penalties(params):
        msg = (
            f"a sampler with a repetition penalty has the history of one sequence, and the last "
            f"batch "
            f"has {n} rows: create one for each, and call sample(context, index)"
        )
        raise UsageError(msg)


class Sampler:
    """Sample in C. Closing the model closes the sampler."""

    def __init__(self, model: Model, params: SamplerParams) -> None:
        arguments.instance("model", model, LoadedModel, "a Model")
        if Capability.SAMPLER not in model.native.about.capabilities:
            msg = "this build has no sampler in C; use NumpySampler"
            raise Unsupported(msg, "SAMPLER")
        self.params = check_params(params)
        self._uses_penalties = uses_penalties(params)
        self._native = model.native
        with model.life as raw:
            #: Held by the thread that samples.
            self.life: Handle[Any] = Handle(
                self._native.sampler_new(raw, params),
                partial(free_quietly, self._native.sampler_free),
                "sampler",
                model.life,
                exclusive=True,
            )

    def sample(self, context: Context, index: int = -1) -> int:
        """Return a token sampled from the logits at ``index`` of the last batch."""
        if type(index) is not int:
            index = arguments.integer("index", index)
        with context_lock(context) as raw, self.life as handle:
            if context.model.native is not self._native:
                self.check_context(context)
            context.outputs.check(index)
            return self._native.sample(handle, raw, index)

    def sample_all(self, context: Context) -> list[int]:
        """Return a token for each row of the last batch with logits, in order.

        Raises UsageError if a repetition penalty would mix several sequences.
        """
        with context_lock(context) as raw, self.life as handle:
            if context.model.native is not self._native:
                self.check_context(context)
            n = context.outputs.count()
            self.check(n)
            return self._native.sample_all(handle, raw, n)

    def check_context(self, context: Context) -> None:
        """Raise UsageError for a context of another library."""
        context_lock(context)
        if context.model.native is not self._native:
            msg = "the sampler and the context belong to two libraries: create both from one model"
            raise UsageError(msg)

    def check(self, n: int) -> None:
        """Raise UsageError for ``n`` sequences if the sampler keeps a token history."""
        if type(n) is not int or n < 0:
            n = arguments.integer("n", n, 0)
        if n > 1 and self._uses_penalties:
            check_single_sequence(self.params, n)

    def reset(self) -> None:
        """Drop the token history and restart from the seed."""
        with self.life as handle:
            self._native.sampler_reset(handle)

    def close(self) -> None:
        """Free the sampler; further use raises Closed."""
        self.life.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class NumpySampler:
    """Sample with numpy: repetition penalty, top-k, top-p, min-p, temperature, in this order."""

    def __init__(self, params: SamplerParams | None = None) -> None:
        self.params = SamplerParams() if params is None else check_params(params)
        self.reset()

    def reset(self) -> None:
        """Drop the token history and restart from the seed."""
        self._random = np.random.default_rng(self.params.seed)
        self._last: list[int] = []

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
        rows = context.logits_all()
        check_single_sequence(self.params, len(rows))
        if self.params.temperature <= 0 and not uses_penalties(self.params):
            found: list[int] = rows.argmax().tolist()
            return found
        return [self._take(row) for row in rows.copy()]

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


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
