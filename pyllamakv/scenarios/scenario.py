"""Define scenarios and the settings that they run in.

A scenario is one small file that ends in ``SCENARIO = Scenario(…)``: a deterministic KV workload
with a claim. Its operations are those of `pyllamakv.scenarios.lab.Lab`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.outcome import Kind


@dataclass(frozen=True)
class Setting:
    """One configuration of the cache that a scenario runs in."""

    flash_attn: bool = False
    type_k: str = "f16"
    type_v: str = "f16"
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the setting: ``flash q8_0``, ``plain f16``."""
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        words = ["flash" if self.flash_attn else "plain", types]
        words += [f"{key}={value}" for key, value in self.environment]
        return " ".join(words)


#: All layouts of the cache: V by columns (no flash attention) or rows, f16 or quantized rows.
#: Without flash attention, llama.cpp has no quantized V.
CACHES = (
    Setting(False, "f16", "f16"),
    Setting(False, "q8_0", "f16"),
    Setting(False, "q4_0", "f16"),
    Setting(True, "f16", "f16"),
    Setting(True, "q8_0", "q8_0"),
    Setting(True, "q4_0", "q4_0"),
)

#: Movers that are the default on devices only, tested in host memory too. A build without them
#: (stock) ignores the variable.
MOVERS = tuple(
    replace(setting, environment=(("LLAMA_KV_DEFRAG_MOVER", mover),))
    for mover in ("gather", "graph", "staged")
    for setting in (CACHES[0], CACHES[4])
)

#: The plan that keeps the order of cells, whose moves overlap: in place and with graphs.
ORDERED = tuple(
    replace(
        CACHES[3],
        environment=(("LLAMA_KV_DEFRAG_MOVER", mover), ("LLAMA_KV_DEFRAG_PLAN", "ordered")),
    )
    for mover in ("host", "gather", "graph")
)

#: Between 0.3.12 and 0.3.16, a batch may use scattered cells if this is 1 (the default since
#: 0.3.15). 0 requires one hole, as in earlier releases. Other releases ignore the variable.
CONTIGUOUS = (("LLAMA_SET_ROWS", "0"),)
SCATTERED = Setting(True, "f16", "f16", (("LLAMA_SET_ROWS", "1"),))

#: One layout of each kind, for scenarios whose claim does not depend on row sizes.
PLAIN = (CACHES[0], CACHES[4])


#: Number of layers above which a model is deep.
FEW_LAYERS = 8


@dataclass(frozen=True)
class Scenario:
    """A workload and its claim.

    A *fix* scenario must fail on stock and pass on patched, a *guard* must pass on patched, and a
    *feature* is absent on stock. ``issue`` is the public issue that reports the failure.
    ``model`` is a name in `synthetic_models.SHAPES`. ``record_frames`` keeps the cells after every
    operation of the first run, for the report. `verification.discovery` sets ``source``.
    """

    id: str
    kind: Kind
    claim: str
    issue: str
    run: Callable[[Lab], None] = field(compare=False)
    model: str = "tiny"
    settings: tuple[Setting, ...] = CACHES
    environment: tuple[tuple[str, str], ...] = CONTIGUOUS
    record_frames: bool = False
    source: Path | None = None

    @property
    def few(self) -> tuple[Setting, ...]:
        """Return one setting per layout of V; for a deep model, a single one.

        For devices behind a network, where each read of a row is a round trip.
        """
        usual = [each for each in self.settings if not each.environment] or list(self.settings)
        rows = [each for each in usual if each.flash_attn]
        columns = [each for each in usual if not each.flash_attn]
        if synthetic_models.cost(self.model) > FEW_LAYERS:
            return tuple((rows or columns)[-1:])
        return (*columns[:1], *rows[-1:])

    @property
    def digest(self) -> str:
        """Return a digest of the scenario's file."""
        data = self.source.read_bytes() if self.source else repr(self).encode()
        return hashlib.sha256(data).hexdigest()
