"""Name the build that is tried where one is enough, the default release's, and stock beside it."""

from __future__ import annotations

from typing import Final

from pyllamakv.source.releases import DEFAULT

SPEC: Final = f"{DEFAULT}+patched"
STOCK: Final = f"{DEFAULT}+stock"
