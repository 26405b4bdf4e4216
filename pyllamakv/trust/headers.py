"""Know the headers that patches bring, and the native program that tests each by itself.

The programs stand in ``tests/native`` of a checkout; an installed package has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyllamakv.home import checkout


@dataclass(frozen=True)
class Header:
    """Hold where a patch puts a header, and the name of the program that tests it.

    Each group of its tests is named by the program's first argument; ``in_folder`` says that the
    second is a folder to work in, which a group leaves empty.
    """

    patch: str
    path: str
    program: str
    in_folder: bool = False

    @property
    def source(self) -> Path | None:
        """Return the program's source, None outside a checkout."""
        return native(f"{self.program}.cpp")


def native(name: str) -> Path | None:
    """Return a source of the native tests, None outside a checkout."""
    root = checkout()
    found = root / "tests" / "native" / name if root else None
    return found if found is not None and found.is_file() else None


HEADERS = (
    Header("full-defrag", "src/llama-kv-defrag.h", "kv_defrag"),
    Header("mmap-kv", "src/llama-kv-mmap.h", "kv_mmap", in_folder=True),
)
