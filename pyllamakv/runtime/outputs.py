"""Know which places of the last batch have logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import StaleLogits, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyllamakv.runtime.batch import Arrays


class Outputs:
    """Hold how many tokens the last batch had (0: it failed) and which asked for logits.

    ``flags`` None stands for the last token alone.
    """

    __slots__ = ("flags", "n")

    def __init__(self) -> None:
        self.n = 0
        self.flags: NDArray[np.int8] | None = None

    def take(self, batch: Arrays) -> None:
        """Take over what a decoded batch asked for."""
        self.n, self.flags = len(batch.token), batch.logits

    def check(self, index: int) -> None:
        """Refuse a place without logits; a negative one counts from the last that has any."""
        n, flags = self.n, self.flags
        if n == 0:
            msg = "there are no logits: nothing was decoded yet, or the last decode failed"
            raise StaleLogits(msg)
        outputs = 1 if flags is None else int((flags != 0).sum())
        has = index == n - 1 if flags is None else 0 <= index < n and bool(flags[index])
        if not (has or -outputs <= index < 0):
            msg = (
                f"place {index} of the last batch has no logits: it had {n} tokens, and asked for "
                f"logits of {outputs} of them"
            )
            raise UsageError(msg)
