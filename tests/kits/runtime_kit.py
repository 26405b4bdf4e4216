"""Helpers for tests of the runtime without a build: a simulated library, a model, contexts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakes.simulated import SimulatedNative
from fakes.tiny_gguf import write_gguf

from pyllamakv.open_variant import OpenLibrary

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model


def library(*, isolated: bool = False, **options: Any) -> OpenLibrary:
    """Return an opened library that is simulated."""
    return OpenLibrary(SimulatedNative(**options), Path("simulated"), None, isolated=isolated)


def model(folder: Path, **options: Any) -> Model:
    """Return a model of a simulated library."""
    return library(**options).load_model(write_gguf(folder / "tiny.gguf"))


def context(folder: Path, native: dict[str, Any] | None = None, **options: Any) -> Context:
    """Return a context, by default of 64 cells and 4 sequences."""
    wanted = {"n_ctx": 64, "n_batch": 32, "n_ubatch": 8, "n_seq_max": 4, **options}
    return model(folder, **(native or {})).context(**wanted)
