"""Try a device out before a patch is judged on it, while nothing is moved.

A device whose kernels are wrong by themselves would fail scenarios for which no patch can help. So
it gets the same tokens twice: in one batch at the start of a cache, and one at a time behind it.
What it cannot do without ending the process is not judged either; where stock can do it, patched
has failed (`verdict.Pair`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import Untestable, WorkerDied, WorkerTimeout
from pyllamakv.scenarios.reference import distance

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pyllamakv.scenarios.lab import Lab

#: More than a micro-batch; the second half of the cells then begins at odd numbers as well.
TOKENS = 40


class Controls:
    """Remember for each key what the control found."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Untestable | None] = {}

    def check(self, key: Hashable, make: Callable[[], Lab]) -> None:
        """Raise Untestable where a control fails, with the reason; it is played once per key."""
        if key not in self._found:
            self._found[key] = _tried(make)
        reason = self._found[key]
        if reason is not None:
            raise reason


def _tried(make: Callable[[], Lab]) -> Untestable | None:
    """Play the control in a lab of its own; return why nothing can be judged there, if so."""
    lab = make()
    try:
        wrong = control(lab)
        reason = Untestable(wrong) if wrong else None
    except Untestable as error:
        reason = error
    except WorkerTimeout:
        # Another time it may be in time.
        raise
    except WorkerDied as error:
        msg = f"the device ends the process before anything is moved: {error}"
        return Untestable(msg, failure="crash")
    lab.close()
    return reason


def control(lab: Lab) -> str:
    """Return what the device does wrong, or nothing."""
    player = lab.player()
    same = [number % player.n_vocab for number in range(TOKENS)]
    player.decode({0: same})
    for token in same:
        player.decode({1: [token]})
    one, *_, other = (next(iter(step.logits.values())) for step in player.steps)
    found, bound = distance(one, other), lab.reference(player).bound
    if found <= bound:
        return ""
    return (
        "the device computes this wrongly before anything is moved: logits of the same tokens "
        f"differ by {found:.3g}, allowed {bound:g}"
    )
