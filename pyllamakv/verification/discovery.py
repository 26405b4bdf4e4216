"""Find scenarios: in the package, and in any other directory, as Python files or traces."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyllamakv.scenarios.builtin
from pyllamakv.errors import UsageError
from pyllamakv.scenarios.scenario import Scenario
from pyllamakv.traces import trace_scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Directories of more scenarios, separated like PATH.
VARIABLE = "PYLLAMAKV_SCENARIOS"

_PACKAGE = Path(pyllamakv.scenarios.builtin.__file__).resolve().parent


def discover(folders: Iterable[Path] = ()) -> dict[str, Scenario]:
    """Return every scenario by id: the package's, then those of folders and of the environment.

    Traces and scripts (``*.jsonl``) are scenarios too. Raises UsageError or ScriptError for a
    folder or file that cannot be read as scenarios, UsageError for a repeated id.
    """
    outside = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    found: dict[str, Scenario] = {}
    for folder in (_PACKAGE, *folders, *outside):
        if not folder.is_dir():
            msg = f"expected a directory of scenarios at {folder}"
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
    """Return the scenario in a file; raises UsageError or ScriptError if there is none."""
    if not path.is_file():
        msg = f"there is no scenario file {path}"
        raise UsageError(msg)
    if path.suffix == ".jsonl":
        return replace(trace_scenario.scenario(path), source=path)
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
        msg = f"{path} is not a scenario: expected `SCENARIO = Scenario(…)` at its end"
        raise UsageError(msg)
    return replace(scenario, source=path)
