"""Play random schedules of operations on a context, and prove every step.

An operation is a name, and a number from which it draws its arguments once it is played, out of
what the ledger has then. So a schedule is still one when operations are left out of it, and a
failure is told by the fewest of them that still fail, written as a script (docs/scripts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pyllamakv.errors import KvError, ScenarioFailed, WorkerDied
from qa.random_operations.operation_base import NUMBERS
from qa.random_operations.operations import WEIGHTS, Operations

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

#: Opens the context that a schedule is played on, or a second one to compare with.
Opener = Callable[[], "Context"]
#: Plays operations, and returns how they failed.
Play = Callable[[Sequence["Operation"]], ScenarioFailed | None]


@dataclass(frozen=True)
class Operation:
    """Name what is done, and the number that it draws its arguments from."""

    name: str
    number: int


VERIFY = Operation("verify", 0)


@dataclass(frozen=True)
class CaseRunner:
    """Say where a schedule is played, and what it is held to.

    ``other`` opens the context that states are restored into, where that must not be one like the
    first; ``again`` goes on with what a file kept of the first. ``heals`` holds the library to it
    that a decode finds its cells whenever enough are free; ``watched`` is the share of operations
    around which K and V are compared.
    """

    opener: Opener
    other: Opener | None = None
    again: Opener | None = None
    defrags_on_failure: bool = True
    watched: float = 1.0

    def play(
        self, operations: Sequence[Operation], begun: Callable[[Operations], None] | None = None
    ) -> ScenarioFailed | None:
        """Play operations and a last proof; return how they failed, with the script so far.

        ``begun`` is called with what plays them, before the first.
        """
        # Both close with the work; one that was opened before the other failed, too.
        with ExitStack() as opened:
            context = opened.enter_context(self.opener())
            other = opened.enter_context((self.other or self.opener)())
            # Every proof rests on states: a memory whose states this release cannot save raises
            # Unsupported here, before anything is played, and not in the middle.
            other.native.state_save(other.handle, 0)
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


def generate_operations(seed: int, count: int) -> tuple[Operation, ...]:
    """Return ``count`` operations, always the same of a seed."""
    chance = Random(seed)
    names = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return tuple(Operation(name, chance.randrange(NUMBERS)) for name in names)


def run_seed(opener: Opener, seed: int, count: int, *, heals: bool = True) -> None:
    """Play the schedule of a seed; raise ScenarioFailed with the shortest one that still fails.

    The error's evidence has those ``operations``, and the ``script`` of what they did.
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
    """Return a short start of a failing schedule that fails, less what it fails without.

    It has to fail in the same class. ``enough`` is asked before each try, and ends the search.
    With its worker gone a library cannot be asked again, and that start has to do, unless ``play``
    ``revives`` it.
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
        # Single ones are tried again until none can be left out.
        if size > 1 or len(short) == before:
            size //= 2
    return short, failed


def _close(work: Operations) -> None:
    with suppress(WorkerDied):
        work.close()
