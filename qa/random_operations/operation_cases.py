"""Run random operations on a context, and check each step.

An operation is a name and a random number, from which its arguments are derived when it runs,
according to the ledger. Therefore, a case without some of its operations is still a case, and a
failure is reduced to the fewest operations that still fail, written as a script (docs/scripts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pyllamakv.errors import KvError, ScenarioFailed, WorkerDied
from qa.random_operations import manager_operations
from qa.random_operations.manager_operations import ManagerOperations
from qa.random_operations.operation_base import NUMBERS
from qa.random_operations.operations import WEIGHTS, Operations

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

#: Opens the context of a case, or a second one to compare with.
Opener = Callable[[], "Context"]
#: Runs operations, and returns their failure.
Play = Callable[[Sequence["Operation"]], ScenarioFailed | None]


@dataclass(frozen=True)
class Operation:
    """The name of an operation, and the random number for its arguments."""

    name: str
    number: int


VERIFY = Operation("verify", 0)


@dataclass(frozen=True)
class CaseRunner:
    """The contexts of a case, and its requirements.

    ``other`` opens the context that states are restored into, if it must differ from the first one;
    ``again`` opens the first one with the content of its file. ``heals``: every decode must succeed
    if enough cells are free; ``watched`` is the share of operations around which K and V are
    compared. With a ``manager``, the operations are those of `manager_operations`; ``seed``
    selects its options.
    """

    opener: Opener
    other: Opener | None = None
    again: Opener | None = None
    defrags_on_failure: bool = True
    watched: float = 1.0
    manager: str = "none"
    seed: int = 0

    def play(
        self,
        operations: Sequence[Operation],
        begun: Callable[[Operations | ManagerOperations], None] | None = None,
    ) -> ScenarioFailed | None:
        """Run operations and a last check; return the failure, with the script so far.

        ``begun`` is called with the object that runs them, before the first.
        """
        # Both close with the operations; also if opening the other one failed.
        with ExitStack() as opened:
            context = opened.enter_context(self.opener())
            other = opened.enter_context((self.other or self.opener)())
            # Every check needs states: a memory whose states this release cannot save raises
            # Unsupported here, before the first operation.
            other.native.state_save(other.handle, 0)
            work: Operations | ManagerOperations
            if self.manager != "none":
                work = ManagerOperations(context, other, self.manager, self.seed)
            else:
                work = Operations(
                    context,
                    other,
                    heals=self.defrags_on_failure,
                    watched=self.watched,
                    again=self.again,
                )
            opened.callback(_close, work)
            if begun:
                begun(work)
            proven = 0
            try:
                for done, operation in enumerate((*operations, VERIFY), start=1):
                    work.do(operation.name, operation.number)
                    proven = done if operation.name == "verify" else proven
            except KvError as error:
                evidence = {"script": work.script, "done": done, "proven": proven}
                promise = (getattr(error, "evidence", None) or {}).get("promise")
                failed = ScenarioFailed(
                    f"{operation.name}: {error}",
                    failure=getattr(error, "failure", "crash"),
                    evidence={**evidence, "promise": promise} if promise else evidence,
                )
                failed.__cause__ = error
                return failed
        return None


def generate_operations(seed: int, count: int, manager: str = "none") -> tuple[Operation, ...]:
    """Return ``count`` operations, equal for equal seeds."""
    chance = Random(seed)
    weights = WEIGHTS if manager == "none" else manager_operations.WEIGHTS
    names = chance.choices(list(weights), list(weights.values()), k=count)
    return tuple(Operation(name, chance.randrange(NUMBERS)) for name in names)


def run_seed(opener: Opener, seed: int, count: int, *, heals: bool = True) -> None:
    """Run the case of a seed; raise ScenarioFailed with the shortest failing operations.

    The error's evidence has these ``operations``, and the ``script`` of their calls.
    """
    operations, ground = (
        generate_operations(seed, count),
        CaseRunner(opener, defrags_on_failure=heals),
    )
    failed = ground.play(operations)
    if failed is not None:
        short, failed = minimize_operations(ground.play, operations, failed)
        script = "\n".join(failed.evidence["script"])
        msg = f"seed {seed}: {failed}; {len(short)} operations of {count} still fail:\n{script}"
        evidence = {**failed.evidence, "operations": short}
        raise ScenarioFailed(msg, failure=failed.failure, evidence=evidence) from failed


def minimize_operations(
    play: Play,
    operations: Sequence[Operation],
    failed: ScenarioFailed,
    *,
    revives: bool = False,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[tuple[Operation, ...], ScenarioFailed]:
    """Return a short failing prefix of a case, without the operations that it does not need.

    It must fail in the same class. ``enough`` is called before each attempt, and ends the search.
    If the worker has died, the library cannot be used again, and the prefix is returned, unless
    ``play`` ``revives`` it.
    """
    short = tuple(operations[: failed.evidence["done"]])
    if isinstance(failed.__cause__, WorkerDied) and not revives:
        return short, failed

    def tried(less: tuple[Operation, ...]) -> ScenarioFailed | None:
        found = None if enough() else play(less)
        return found if found is not None and found.failure == failed.failure else None

    passes = failed.evidence["proven"]
    while passes + 1 < len(short):
        end = (passes + len(short)) // 2
        found = tried(short[:end])
        if found is None:
            passes = end
        else:
            short, failed = short[:end], found
    size = len(short) // 2
    while size:
        before = len(short)
        for start in range(len(short) - size, -1, -size):
            less = short[:start] + short[start + size :]
            found = tried(less)
            if found is not None:
                short, failed = less, found
        # Single operations are tried again until none can be left out.
        if size > 1 or len(short) == before:
            size //= 2
    return short, failed


def _close(work: Operations | ManagerOperations) -> None:
    with suppress(WorkerDied):
        work.close()
