"""Know the headers that patches bring, and the native program that tests each by itself.

The programs stand in ``tests/native`` of a checkout; an installed package has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyllamakv.home import checkout


@dataclass(frozen=True)
class Header:
    """Where a patch puts a header, and the name of the program that tests it.

    Each group of its tests is named by the program's first argument; ``in_folder`` says that the
    second is a folder to work in, which a group leaves empty. ``needs`` are other headers of the
    patch that it includes; what it includes of llama.cpp stands in ``tests/native/stubs``.
    """

    patch: str
    path: str
    program: str
    needs_directory: bool = False
    needs: tuple[str, ...] = ()

    @property
    def source(self) -> Path | None:
        """Return the program's source, None outside a checkout."""
        return native(f"{self.program}.cpp")


def stubs() -> Path | None:
    """Return the folder of what the programs are compiled with, None outside a checkout."""
    root = checkout()
    found = root / "tests" / "native" / "stubs" if root else None
    return found if found is not None and found.is_dir() else None


def native(name: str) -> Path | None:
    """Return a source of the native tests, None outside a checkout."""
    root = checkout()
    found = root / "tests" / "native" / name if root else None
    return found if found is not None and found.is_file() else None


_DEFRAG = "src/llama-kv-defrag.h"
_DEFRAG_GGML = "src/llama-kv-defrag-ggml.h"
_MMAP = "src/llama-kv-mmap.h"

HEADERS = (
    Header("full-defrag", _DEFRAG, "kv_defrag"),
    Header(
        "full-defrag",
        _DEFRAG_GGML,
        "kv_defrag_ggml",
        needs_directory=True,
        needs=(_DEFRAG,),
    ),
    Header("mmap-kv", _MMAP, "kv_mmap", needs_directory=True),
    Header(
        "mmap-kv", "src/llama-kv-mmap-ggml.h", "kv_mmap_ggml", needs_directory=True, needs=(_MMAP,)
    ),
    Header(
        "mmap-kv",
        "src/llama-kv-mmap-api-impl.h",
        "kv_mmap_api",
        needs_directory=True,
        needs=(_MMAP, "src/llama-kv-mmap-api.h"),
    ),
    Header(
        "compaction",
        "src/llama-kv-compact-impl.h",
        "kv_compact",
        needs_directory=True,
        needs=("src/llama-kv-compact.h", _DEFRAG, _DEFRAG_GGML),
    ),
)
