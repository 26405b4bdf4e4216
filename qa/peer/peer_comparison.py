"""Compare llama-cpp-python on stock and on patched libraries of its own release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.building import llama_cpp_python_env as install
from pyllamakv.building.build import build
from pyllamakv.building.variant import Spec
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source.progress import no_progress
from qa.peer import slots, suite

if TYPE_CHECKING:
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from qa.peer.slots import Slots
    from qa.peer.suite import Suite


@dataclass(frozen=True)
class PeerResult:
    """The results of one variant."""

    variant: str
    suite: Suite
    slots: Slots


@dataclass(frozen=True)
class PeerComparison:
    """The results of both variants of a release."""

    release: str
    era: str
    stock: PeerResult
    patched: PeerResult

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the defects of the patched side, one sentence each."""
        found = [
            f"{name} passes on stock, not on patched"
            for name in self.patched.suite.worse_than(self.stock.suite)
        ]
        if self.patched.suite.crash and self.patched.suite.crash != self.stock.suite.crash:
            found.append(f"its tests on patched: {self.patched.suite.crash}")
        if not self.patched.suite.counts().get(suite.PASSED):
            found.append("no test of its own passed")
        if not self.patched.slots.placed:
            found.append(f"scattered cells on patched: {self.patched.slots}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return asdict(self) | {"faults": list(self.faults)}


def run(
    release: Release, *, backend: str = "cpu", progress: Progress | None = None
) -> PeerComparison:
    """Install the llama-cpp-python of a release, build both variants, and test it on both."""
    tell = progress or no_progress
    peer = install.install(release, progress=progress)
    model = synthetic_models.model("deep")
    sides = {}
    for name, series in (("stock", ()), ("patched", None)):
        variant = build(Spec(release.name, series), backend=backend, progress=progress)
        tell(f"run the tests of {release.package} on {name}", 0, None)
        done = suite.run(peer, variant)
        sides[name] = PeerResult(variant.id, done, slots.ask(peer.python, variant, model))
    return PeerComparison(release.name, release.era, sides["stock"], sides["patched"])


def markdown(trials: Sequence[PeerComparison]) -> str:
    """Return the table of docs/drop-in.md."""
    lines = [
        "| llama-cpp-python | era | its own tests, stock | patched | scattered cells, stock "
        "| patched |",
        "|---|---|---|---|---|---|",
    ]
    for one in trials:
        same = one.patched.suite.outcomes == one.stock.suite.outcomes
        tests = "the same" if same and not one.patched.suite.crash else str(one.patched.suite)
        lines.append(
            f"| {one.release} | {one.era} | {one.stock.suite} | {tests} "
            f"| {one.stock.slots} | {one.patched.slots} |"
        )
    return "\n".join(lines) + "\n"
