"""The variants for sections that need one release: the default release, patched and stock."""

from __future__ import annotations

from typing import Final

from pyllamakv.source.releases import DEFAULT_RELEASE

SPEC: Final = f"{DEFAULT_RELEASE}+patched"
STOCK: Final = f"{DEFAULT_RELEASE}+stock"
