"""Pack patches and C sources into the wheel: a hook of hatchling, before any package is there."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pack(BuildHookInterface):
    """Put an archive of the patches, the shim and the C programs beside the lock in the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the archive; an editable install reads the checkout's own files."""
        if version == "editable":
            return
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("shipped", root / "pyllamakv" / "shipped.py")
        assert spec is not None
        assert spec.loader is not None
        shipped = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(shipped)
        self._place = tempfile.TemporaryDirectory()
        file = Path(self._place.name) / "sources.tar.xz"
        shipped.pack(root, file, "pyllamakv/native/**/*", "pyllamakv/*/**/native/*", "patches/**/*")
        build_data["force_include"][str(file)] = f"pyllamakv/data/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the archive."""
        if version != "editable":
            self._place.cleanup()
