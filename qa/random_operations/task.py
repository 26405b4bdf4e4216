"""Say what is to be played, and what came of it: what goes between two processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pyllamakv.errors import ScenarioFailed
from qa.random_operations.combination import Combination
from qa.random_operations.operation_cases import Operation

if TYPE_CHECKING:
    from qa.random_operations.operations import Operations


@dataclass(frozen=True)
class CaseTask:
    """Name a schedule and what it is played on; with ``trace`` it is recorded into that file."""

    combination: Combination
    operations: tuple[Operation, ...]
    watched: float = 1.0
    trace: Path | None = None


@dataclass
class Played:
    """Count what was done: operations, how decodes ended, and what was compared.

    ``compared`` are sequences whose K and V were compared by their bytes, ``logits`` rows of logits
    behind restored states, ``exact`` those of them that had to be the same to the last bit,
    ``turned`` sequences whose keys were compared with a twin's after shifts.
    ``absent`` says why the library has nothing to play on; ``faint`` that a device is there, and
    fails at a first batch.
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
    def of(cls, work: Operations | None, failed: ScenarioFailed | None) -> Self:
        """Count what was done by what played a schedule, or by nothing."""
        if work is None:
            return cls(failed=failed)
        proof = work.proof
        return cls(
            work.done,
            work.ended,
            proof.compared,
            proof.logits,
            proof.exact,
            proof.turning.proved,
            failed,
        )

    def add(self, other: Played) -> None:
        """Count what another schedule did as well; its failure is left out."""
        self.done += other.done
        self.ended += other.ended
        self.compared += other.compared
        self.logits += other.logits
        self.exact += other.exact
        self.shifts_checked += other.shifts_checked
