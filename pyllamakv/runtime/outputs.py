"""Know which places of the last batch have logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.errors import StaleLogits, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.runtime.batch import Arrays


class Outputs:
    """Hold how many tokens the last batch had (0: it failed) and which asked for logits.

    ``every`` stands for all of them; else ``flags`` None stands for the last token alone.
    """

    __slots__ = ("every", "flags", "n")

    def __init__(self) -> None:
        self.n = 0
        self.every = False
        self.flags: NDArray[np.int8] | None = None

    def take(self, batch: Arrays) -> None:
        """Take over what a decoded batch asked for."""
        self.n, self.flags, self.every = len(batch.token), batch.logits, False

    def count(self) -> int:
        """Return how many places have logits; StaleLogits when none can have any."""
        if self.n == 0:
            msg = "there are no logits: nothing was decoded yet, or the last decode failed"
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
