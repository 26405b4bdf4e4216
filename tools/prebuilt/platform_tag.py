"""Tag the wheel for the platform of its libraries and for every Python 3."""

from __future__ import annotations

import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformTag(BuildHookInterface):
    """A hook of hatchling. `auditwheel repair` replaces the tag by that of the oldest C library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag."""
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
