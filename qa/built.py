"""Name the build that is tried where one is enough, the default release's, and stock beside it."""

from __future__ import annotations

from typing import Final

from pyllamakv.source.releases import DEFAULT_RELEASE

SPEC: Final = f"{DEFAULT_RELEASE}+patched"
STOCK: Final = f"{DEFAULT_RELEASE}+stock"
