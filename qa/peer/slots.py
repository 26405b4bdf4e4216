"""Ask through llama_cpp whether a batch finds its cells where the free ones lie scattered."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import Untestable
from qa.peer import slots_child
from qa.peer.suite import environment

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

SECONDS = 300
#: Logits come to the same up to the order in which attention meets the cells.
NOISE = 0.02


@dataclass(frozen=True)
class Slots:
    """Hold what `llama_decode` returned for as many tokens as cells are free.

    ``difference`` is how far the logits are from those of a cache without holes.
    """

    version: str
    library: str
    code: int
    difference: float | None = None

    @property
    def placed(self) -> bool:
        """Return whether the tokens found their cells, and the logits are right."""
        near = self.difference is not None and self.difference <= NOISE
        return self.code == 0 and near

    def __str__(self) -> str:
        if self.placed:
            return "placed"
        if self.code:
            return f"{'no slot: ' if self.code == 1 else ''}`llama_decode` gives {self.code}"
        return f"wrong logits, off by {self.difference}"


def ask(python: Path, variant: Variant, model: Path) -> Slots:
    """Decode through the llama_cpp of a Python, on the libraries of a variant.

    Raises Untestable where it cannot be imported, or does not load the variant.
    """
    done = subprocess.run(
        [os.fspath(python), os.fspath(Path(slots_child.__file__)), os.fspath(model)],
        # Where releases know it, slots have to be one hole again.
        env=environment(variant) | {"LLAMA_SET_ROWS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        msg = f"llama-cpp-python on {variant.id} failed: {lines[-1]}"
        raise Untestable(msg)
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    library = Path(facts["library"])
    if library.resolve().parent != variant.dropin.resolve():
        msg = f"llama-cpp-python loaded {library}, not the libraries of {variant.id}"
        raise Untestable(msg)
    return Slots(facts["version"], str(library), facts["code"], facts["difference"])
