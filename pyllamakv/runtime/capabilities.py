"""Ask a build for what it can do, before it is asked to do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import Unsupported

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Capability
    from pyllamakv.runtime.context import Context


def require(context: Context, capability: Capability, deed: str) -> None:
    """Raise Unsupported unless the build has the capability."""
    if capability not in context.native.about.capabilities:
        msg = f"this build cannot {deed} (capability {capability.name} is absent)"
        raise Unsupported(msg, capability.name or "")
