"""Define a case and its results, as sent between two processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pyllamakv.errors import ScenarioFailed

if TYPE_CHECKING:
    from qa.random_operations.combination import Combination
    from qa.random_operations.manager_operations import ManagerOperations
    from qa.random_operations.operation_cases import Operation
    from qa.random_operations.operations import Operations


@dataclass
class CheckCounts:
    """Counts of comparisons, as in `Played`."""

    compared: int = 0
    logits: int = 0
    exact: int = 0
    shifts_checked: int = 0


@dataclass(frozen=True)
class CaseTask:
    """A case and its combination; with ``trace`` it is recorded into that file.

    ``seed`` selects the options of a manager, which remain when operations are left out.
    """

    combination: Combination
    operations: tuple[Operation, ...]
    watched: float = 1.0
    trace: Path | None = None
    seed: int = 0


@dataclass
class Played:
    """Counts of a case: operations, results of decodes, and comparisons.

    ``compared`` counts sequences whose K and V were compared by their bytes, ``logits`` rows of
    logits after restored states, ``exact`` those of them that had to be bit-identical, ``turned``
    sequences whose keys were compared with a reference after shifts. ``absent`` is the reason if
    the objects are not available; ``faint`` that a device fails at a first batch.
    """

    done: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    logits: int = 0
    exact: int = 0
    shifts_checked: int = 0
    failed: ScenarioFailed | None = None
    absent: str = ""
    device_failed: bool = False

    @classmethod
    def of(cls, work: Operations | ManagerOperations | None, failed: ScenarioFailed | None) -> Self:
        """Return the counts of an object that ran a case; zeros without one."""
        if work is None:
            return cls(failed=failed)
        return cls(work.done, work.ended, **asdict(work.checks), failed=failed)

    def add(self, other: Played) -> None:
        """Add the counts of another case, without its failure."""
        self.done += other.done
        self.ended += other.ended
        self.compared += other.compared
        self.logits += other.logits
        self.exact += other.exact
        self.shifts_checked += other.shifts_checked
