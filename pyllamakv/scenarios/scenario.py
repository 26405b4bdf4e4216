"""Describe scenarios, and find them: in the package and in any folder outside it.

A scenario is one small file that ends in ``SCENARIO = Scenario(…)``: a deterministic KV workload
with a claim. What it may do is what `pyllamakv.scenarios.lab.Lab` offers.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import UsageError
from pyllamakv.scenarios import synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.verification.verdict import Kind

#: Folders of more scenarios, separated like PATH.
VARIABLE = "PYLLAMAKV_SCENARIOS"

_PACKAGE = Path(__file__).resolve().parent / "scenarios"


@dataclass(frozen=True)
class Setting:
    """Name one configuration of the cache that a scenario runs in."""

    flash_attn: bool = False
    type_k: str = "f16"
    type_v: str = "f16"
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the setting in a word: ``flash q8_0``, ``plain f16``."""
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        words = ["flash" if self.flash_attn else "plain", types]
        words += [f"{key}={value}" for key, value in self.environment]
        return " ".join(words)


#: Every layout of the cache: V by columns (no flash attention) or rows, whole or quantised rows.
#: Without flash attention llama.cpp has no quantised V.
CACHES = (
    Setting(False, "f16", "f16"),
    Setting(False, "q8_0", "f16"),
    Setting(False, "q4_0", "f16"),
    Setting(True, "f16", "f16"),
    Setting(True, "q8_0", "q8_0"),
    Setting(True, "q4_0", "q4_0"),
)

#: The movers that host memory would not choose: what devices get, tried where everyone can. A
#: build without them (stock) ignores the variable.
MOVERS = tuple(
    replace(setting, environment=(("LLAMA_KV_DEFRAG_MOVER", mover),))
    for mover in ("gather", "graph", "staged")
    for setting in (CACHES[0], CACHES[4])
)

#: The plan that keeps the order of cells, whose moves overlap, in place and by graphs.
ORDERED = tuple(
    replace(
        CACHES[3],
        environment=(("LLAMA_KV_DEFRAG_MOVER", mover), ("LLAMA_KV_DEFRAG_PLAN", "ordered")),
    )
    for mover in ("host", "gather", "graph")
)

#: Releases from 0.3.12 to 0.3.16 place a batch in scattered cells where this is 1 (the default from
#: 0.3.15); 0 asks for one hole, as all releases before them do. Others ignore it.
CONTIGUOUS = (("LLAMA_SET_ROWS", "0"),)
SCATTERED = Setting(True, "f16", "f16", (("LLAMA_SET_ROWS", "1"),))

#: One layout of each kind, for scenarios whose claim has nothing to do with row sizes.
PLAIN = (CACHES[0], CACHES[4])


#: A model with more layers than this is a deep one.
FEW_LAYERS = 8


@dataclass(frozen=True)
class Scenario:
    """Hold a workload and its claim.

    A *cure* fails on stock and passes on patched; a *guard* must hold on patched; a *feature*
    shows a capability that stock lacks. ``issue`` is the public issue it stands for.
    ``model`` is a name of `synthetic.SHAPES`. ``film`` keeps the cells after every operation of its
    first run, for a timeline in the report. ``source`` is filled in by `discover`.
    """

    id: str
    kind: Kind
    claim: str
    issue: str
    run: Callable[[Lab], None] = field(compare=False)
    model: str = "tiny"
    settings: tuple[Setting, ...] = CACHES
    environment: tuple[tuple[str, str], ...] = CONTIGUOUS
    film: bool = False
    source: Path | None = None

    @property
    def few(self) -> tuple[Setting, ...]:
        """Return one setting per layout of V, and of a deep model one alone.

        For devices behind a network, where every read of a row takes a round trip.
        """
        usual = [each for each in self.settings if not each.environment] or list(self.settings)
        rows = [each for each in usual if each.flash_attn]
        columns = [each for each in usual if not each.flash_attn]
        if synthetic.cost(self.model) > FEW_LAYERS:
            return tuple((rows or columns)[-1:])
        return (*columns[:1], *rows[-1:])

    @property
    def digest(self) -> str:
        """Return a digest of the file that the scenario stands in."""
        data = self.source.read_bytes() if self.source else repr(self).encode()
        return hashlib.sha256(data).hexdigest()


def discover(folders: Iterable[Path] = ()) -> dict[str, Scenario]:
    """Return every scenario by id: the package's, then those of folders and of the environment.

    Traces and scripts (``*.jsonl``) are scenarios too. Raises UsageError or ScriptError for a
    folder or file that cannot be read as scenarios, UsageError for a repeated id.
    """
    outside = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    found: dict[str, Scenario] = {}
    for folder in (_PACKAGE, *folders, *outside):
        if not folder.is_dir():
            msg = f"expected a folder of scenarios at {folder}"
            raise UsageError(msg)
        for path in sorted(path for kind in ("*.py", "*.jsonl") for path in folder.glob(kind)):
            if path.name.startswith("_"):
                continue
            scenario = read(path)
            if scenario.id in found:
                msg = f"{path}: another scenario is called {scenario.id!r}; choose another id"
                raise UsageError(msg)
            found[scenario.id] = scenario
    return found


def find(scenario_id: str, folders: Iterable[Path] = ()) -> Scenario:
    """Return one scenario, or raise UsageError with the closest names."""
    return select(discover(folders), [scenario_id])[0]


def select(scenarios: dict[str, Scenario], names: Sequence[str] = ()) -> list[Scenario]:
    """Return the named scenarios, all when none is named; a file that is one may be named too."""
    chosen = []
    for name in names:
        if name not in scenarios and Path(name).suffix in (".jsonl", ".py"):
            chosen.append(read(Path(name)))
            continue
        if name not in scenarios:
            close = difflib.get_close_matches(name, scenarios, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else ", ".join(scenarios)
            msg = f"there is no scenario {name!r}: {hint}"
            raise UsageError(msg)
        chosen.append(scenarios[name])
    return chosen or list(scenarios.values())


def read(path: Path) -> Scenario:
    """Return the scenario that a file is; raises UsageError or ScriptError where it is none."""
    if not path.is_file():
        msg = f"there is no scenario file {path}"
        raise UsageError(msg)
    if path.suffix == ".jsonl":
        from pyllamakv.record import traced

        return replace(traced.scenario(path), source=path)
    inside = path.parent == _PACKAGE
    name = f"pyllamakv.scenarios.builtin.{path.stem}" if inside else f"_scenario_{path.stem}"
    module = sys.modules.get(name) if inside else None
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            msg = f"{path} cannot be read as a scenario: {type(error).__name__}: {error}"
            raise UsageError(msg) from error
        if inside:
            sys.modules[name] = module
    scenario = getattr(module, "SCENARIO", None)
    if not isinstance(scenario, Scenario):
        msg = f"{path} is no scenario: expected `SCENARIO = Scenario(…)` at its end"
        raise UsageError(msg)
    return replace(scenario, source=path)
