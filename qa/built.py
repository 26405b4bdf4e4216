"""The variants for sections that need one release: the test release, patched and stock."""

from __future__ import annotations

from typing import Final

from pyllamakv.source.releases import TEST_RELEASE

SPEC: Final = f"{TEST_RELEASE}+patched"
STOCK: Final = f"{TEST_RELEASE}+stock"
