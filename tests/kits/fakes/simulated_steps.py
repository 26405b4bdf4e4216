"""Steps of fault injection over a simulated library, which opens in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import runtime_kit
from fakes.tiny_gguf import write_gguf

from qa.faults.steps.caching import StorePrefixes


class StoreSimulatedPrefixes(StorePrefixes):
    """Flush and reuse prefixes of simulated sequences."""

    def __init__(self) -> None:
        super().__init__(Path("simulated"), Path("model.gguf"))

    def prepare(self, folder: Path) -> None:
        """Write the model."""
        write_gguf(folder / self.model)

    def run(self, folder: Path) -> Any:
        """Run in the directory of the attempt."""
        self.model = folder / "model.gguf"
        return super().run(folder)

    def open(self) -> Any:
        """Open a simulated library."""
        return runtime_kit.library()
