"""Read logits and embeddings of the last decode, until a later one overwrites them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from pyllamakv.binding import arguments
from pyllamakv.errors import StaleLogits, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

    from pyllamakv.binding.owner import Lock


class Outputs:
    """Store which decode was the last one, its size (0: it failed), and which tokens have logits.

    ``epoch`` counts decodes, and the end of the context. ``every`` means all tokens; otherwise,
    ``flags`` None means the last one. With ``embeds``, they have embeddings instead.
    """

    __slots__ = ("embeds", "epoch", "every", "flags", "n")

    def __init__(self, *, embeds: bool = False) -> None:
        self.embeds = embeds
        self.epoch = 0
        self.n = 0
        self.every = False
        self.flags: NDArray[np.int8] | None = None

    def begin(self) -> None:
        """Begin a decode, or end the context: the outputs of the last decode are gone."""
        self.epoch += 1
        self.n = 0

    def take(self, n: int, flags: NDArray[np.int8] | None) -> None:
        """Store which of the ``n`` tokens of a decoded batch have logits."""
        self.n, self.flags, self.every = n, flags, False

    def take_all(self, n: int) -> None:
        """Store that all ``n`` tokens of a decoded batch have logits."""
        self.n, self.every = n, True

    def count(self) -> int:
        """Return how many places have logits; StaleLogits when none can have any."""
        if self.embeds:
            raise UsageError("a context with embeddings has no logits: use another context")
        if self.n == 0:
            msg = "there are no logits: no decode yet, or the last decode failed"
            raise StaleLogits(msg)
        if self.every:
            return self.n
        return 1 if self.flags is None else int(np.count_nonzero(self.flags))

    def check(self, index: int) -> None:
        """Refuse a place without logits; a negative one counts from the last that has any."""
        n, flags = self.n, self.flags
        outputs = self.count()
        if self.every or not 0 <= index < n:
            has = -outputs <= index < (n if self.every else 0)
        else:
            has = index == n - 1 if flags is None else bool(flags[index])
        if not has:
            msg = (
                f"place {arguments.shown(index)} of the last batch has no logits: it had "
                f"{n} tokens, and asked for "
                f"logits of {outputs} of them"
            )
            raise UsageError(msg)


#: Methods of an array that change it.
_IN_PLACE = frozenset(
    ("fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort")
)


class _View(NDArrayOperatorsMixin):
    """A read-only array of results of a decode, valid until the next one.

    Attributes and methods are those of a numpy array, and work on a read-only copy. A later decode
    writes into the memory of the view, so no array that this class returns shares it.
    """

    __slots__ = ("_epoch", "_lock", "_outputs", "_values")
    #: What the view shows, for messages.
    _noun = "logits"

    def __init__(self, lock: Lock[Any], outputs: Outputs, values: NDArray[np.float32]) -> None:
        self._lock = lock
        self._outputs = outputs
        self._values = values
        self._epoch = outputs.epoch

    @property
    def stale(self) -> bool:
        """Return whether a later decode, or the context's end, has made these unreadable."""
        return self._epoch != self._outputs.epoch

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (n_vocab,), (n, n_vocab) for all rows, or the size of an embedding."""
        return self._values.shape

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """Return float32."""
        return self._values.dtype

    def copy(self) -> NDArray[np.float32]:
        """Return an independent array."""
        return self._read().copy()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        if name in _IN_PLACE:
            return self._refuse_change
        values = self.copy()
        values.flags.writeable = False
        return getattr(values, name)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        found = self._read()[index]
        return found.copy() if isinstance(found, np.ndarray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._read_only()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copy())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Any:
        if copy is False:
            msg = f"{self._noun} are overwritten by the next decode: they can only be copied"
            raise UsageError(msg)
        return np.array(self._read(), dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        changed = (*kwargs.get("out", ()), *(inputs[:1] if method == "at" else ()))
        if any(isinstance(each, _View) for each in changed):
            raise self._read_only()
        plain = [each._read() if isinstance(each, _View) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __reduce__(self) -> Any:
        return self.copy().__reduce__()  # copy, deepcopy and pickle make an array

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape}{', stale' if self.stale else ''}>"

    def _read(self) -> NDArray[np.float32]:
        if self._epoch != self._outputs.epoch:
            _ = self._lock.raw  # raises Closed
            msg = (
                f"a later decode has overwritten these {self._noun}; read or copy() them before it"
            )
            raise StaleLogits(msg)
        return self._values

    def _refuse_change(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._read_only()

    def _read_only(self) -> UsageError:
        msg = (
            f"{self._noun} are read-only, because the next decode overwrites them: change a copy, "
            f"np.array({self._noun})"
        )
        return UsageError(msg)


class Logits(_View):
    """A view of the logits (n_vocab,) float32 of one row of the last batch, without a copy.

    Indexing, operators, functions of numpy and methods of an array (``max``, ``astype``) read it
    and return new objects. A read raises StaleLogits after a later decode, and Closed after the
    context was closed. `copy` and ``np.array`` return a permanent array. Changes in place raise
    UsageError.
    """

    __slots__ = ()

    def argmax(self, axis: int | None = None) -> int:
        """Return the most likely token, the lowest id of equal ones."""
        if axis is not None:
            axis = arguments.integer("axis", axis, -1, 0)
        return int(self._read().argmax(axis))  # without a copy: for every sampled token

    def top(self, n: int = 5) -> list[tuple[int, float]]:
        """Return the ``n`` most likely tokens with their logits, best first."""
        n = arguments.integer("n", n, 0)
        values = self._read()
        best = np.argsort(-values, kind="stable")[:n]
        return [(int(token), float(values[token])) for token in best]


class LogitsRows(_View):
    """A view of the logits (n, n_vocab) float32 of all rows of the last batch.

    Reads work, and become stale, as with `Logits`: ``argmax(axis=1)`` (n,) is the most likely token
    of each row.
    """

    __slots__ = ()


class Embedding(_View):
    """A view of one embedding (n,) float32 of the last batch.

    ``n`` is `ModelInfo.n_embd_out`; with pooling "rank", the number of outputs of the model's head.
    Reads work, and become stale, as with `Logits`.
    """

    __slots__ = ()
    _noun = "embeddings"
