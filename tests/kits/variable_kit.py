"""Find the environment variables that the patches read."""

from __future__ import annotations

import re

from pyllamakv.home import data

_NAME = re.compile(r'"(LLAMA_(?:KV|SERVER)_[A-Z_]+)"')


def read_by_patches() -> set[str]:
    """Return the quoted names in the shared files, and in the lines that ports add."""
    found: set[str] = set()
    for file in data("patches").rglob("*.h"):
        found.update(_NAME.findall(file.read_text("utf-8")))
    for file in data("patches").rglob("*.patch"):
        lines = file.read_text("utf-8").splitlines()
        found.update(_NAME.findall("\n".join(line for line in lines if line.startswith("+"))))
    return found
