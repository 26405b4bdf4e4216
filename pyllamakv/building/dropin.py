"""The environment variable with which llama-cpp-python loads a variant's libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from pyllamakv.errors import Unsupported
from pyllamakv.source.releases import sdist_version

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant

#: Since this version, llama-cpp-python reads the path of a directory; earlier ones that of a file.
_FOLDER_SINCE = Version("0.3.1")


@dataclass(frozen=True)
class DropIn:
    """The environment variable, its value, and the package that reads it."""

    variable: str
    value: str
    package: str

    def export(self) -> str:
        """Return the line for a shell."""
        quoted = self.value.replace("'", "'\\''")
        return f"export {self.variable}='{quoted}'"


def describe(variant: Variant) -> DropIn:
    """Return how the llama-cpp-python of the variant's release loads it.

    Raises Unsupported for a release that no llama-cpp-python contains, or a variant without
    ordinary libraries: another version's declarations would not match the library's structs.
    """
    name = variant.manifest.release
    version = sdist_version(name)
    if version is None:
        raise Unsupported(
            f"release {name} is not a release of llama-cpp-python; choose one such as 0.3.9",
            "dropin",
        )
    library = _library(variant.dropin)
    if library is None:
        raise Unsupported(
            f"variant {variant.id} has no libllama in {variant.dropin}, which prebuilt variants "
            f"lack; build it: pyllamakv build {name}",
            "dropin",
        )
    package = f"llama-cpp-python=={name}"
    if version < _FOLDER_SINCE:
        return DropIn("LLAMA_CPP_LIB", str(library), package)
    return DropIn("LLAMA_CPP_LIB_PATH", str(variant.dropin), package)


def _library(folder: Path) -> Path | None:
    for name in ("libllama.so", "libllama.dylib"):
        if (folder / name).exists():
            return folder / name
    return None
