"""Decode through llama_cpp into scattered free cells."""

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
#: Logits are equal up to the order in which attention visits the cells.
NOISE = 0.02


@dataclass(frozen=True)
class Slots:
    """The result of `llama_decode` for as many tokens as cells are free.

    ``difference`` is the distance of the logits from those of a cache without holes.
    """

    version: str
    library: str
    code: int
    difference: float | None = None

    @property
    def placed(self) -> bool:
        """Return whether the decode succeeded with correct logits."""
        near = self.difference is not None and self.difference <= NOISE
        return self.code == 0 and near

    def __str__(self) -> str:
        if self.placed:
            return "placed"
        if self.code:
            return f"{'no slot: ' if self.code == 1 else ''}`llama_decode` returns {self.code}"
        return f"wrong logits, off by {self.difference}"


def ask(python: Path, variant: Variant, model: Path) -> Slots:
    """Decode through the llama_cpp of a Python, on the libraries of a variant.

    Raises Untestable if it cannot be imported, or does not load the variant.
    """
    done = subprocess.run(
        [os.fspath(python), os.fspath(Path(slots_child.__file__)), os.fspath(model)],
        # Releases with this variable then require contiguous slots again.
        env=environment(variant) | {"LLAMA_SET_ROWS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        msg = f"llama-cpp-python on {variant.id} failed: {lines[-1]}"
        raise Untestable(msg)
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    library = Path(facts["library"])
    if library.resolve().parent != variant.dropin.resolve():
        msg = f"llama-cpp-python loaded {library}, not the libraries of {variant.id}"
        raise Untestable(msg)
    return Slots(facts["version"], str(library), facts["code"], facts["difference"])
