"""Play random schedules of operations on a context, and prove every step.

An operation is a name, and a number from which it draws its arguments once it is played, out of
what the ledger has then. So a schedule is still one when operations are left out of it, and a
failure is told by the fewest of them that still fail, written as a script (docs/scripts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pyllamakv.errors import KvError, ScenarioFailed, WorkerDied
from pyllamakv.harness.operations import WEIGHTS, Operations

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

#: Opens the context that a schedule is played on, and a second one to compare with.
Opener = Callable[[], "Context"]


@dataclass(frozen=True)
class Operation:
    """Name what is done, and the number that it draws its arguments from."""

    name: str
    number: int


VERIFY = Operation("verify", 0)


def draw(seed: int, count: int) -> tuple[Operation, ...]:
    """Return ``count`` operations, always the same of a seed."""
    chance = Random(seed)
    names = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return tuple(Operation(name, chance.randrange(1 << 16)) for name in names)


def prove(opener: Opener, seed: int, count: int, *, heals: bool = True) -> None:
    """Play the schedule of a seed; raise ScenarioFailed with the shortest one that still fails.

    ``heals`` holds the library to it that a decode finds its cells whenever enough are free. The
    error's evidence has those ``operations``, and the ``script`` of what they did.
    """
    operations = draw(seed, count)
    failed = failure(opener, operations, heals=heals)
    if failed is not None:
        short, failed = shorten(opener, operations, failed, heals=heals)
        script = "\n".join(failed.evidence["script"])
        msg = f"seed {seed}: {failed}; {len(short)} operations of {count} still fail:\n{script}"
        evidence = {**failed.evidence, "operations": short}
        raise ScenarioFailed(msg, failure=failed.failure, evidence=evidence) from failed


def failure(
    opener: Opener, operations: Sequence[Operation], *, heals: bool = True
) -> ScenarioFailed | None:
    """Play operations and a last proof; return how they failed, with the script so far."""
    with opener() as context, opener() as other:
        work = Operations(context, other, heals=heals)
        proven = 0
        try:
            for done, operation in enumerate((*operations, VERIFY), start=1):
                work.do(operation.name, operation.number)
                proven = done if operation.name == "verify" else proven
        except KvError as error:
            kind = getattr(error, "failure", "crash")
            evidence = {"script": work.script, "done": done, "proven": proven}
            failed = ScenarioFailed(f"{operation.name}: {error}", failure=kind, evidence=evidence)
            failed.__cause__ = error
            return failed
        finally:
            work.proof.close()
    return None


def shorten(
    opener: Opener, operations: Sequence[Operation], failed: ScenarioFailed, *, heals: bool
) -> tuple[tuple[Operation, ...], ScenarioFailed]:
    """Return the shortest start of a failing schedule that fails, less what it fails without.

    With its worker gone a library cannot be asked again: that start has to do.
    """
    short = tuple(operations[: failed.evidence["done"]])
    if isinstance(failed.__cause__, WorkerDied):
        return short, failed
    for end in range(failed.evidence["proven"] + 1, failed.evidence["done"] + 1):
        found = failure(opener, short[:end], heals=heals)
        if found is not None:
            short, failed = short[:end], found
            break
    size = len(short) // 2
    while size:
        before = len(short)
        for start in range(len(short) - size, -1, -size):
            less = short[:start] + short[start + size :]
            found = failure(opener, less, heals=heals)
            if found is not None:
                short, failed = less, found
        # Single ones are tried again until none can be left out.
        if size > 1 or len(short) == before:
            size //= 2
    return short, failed
