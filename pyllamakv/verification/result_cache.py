"""Store the results of cells by their inputs, and the latest result of each cell.

A result is a function of the release, the patches, the shim, the scenarios, the code of this
package, and the machine type. Its key is a digest of these. A killed matrix continues, and a
completed one is free when repeated.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.building import backend as backends
from pyllamakv.building import compiler, variant
from pyllamakv.errors import KvError
from pyllamakv.home import data, home
from pyllamakv.patching import port_choice
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import spec_resolver
from pyllamakv.source.files import write_text_atomic
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.cell import CellResult, CellSpec
from pyllamakv.verification.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEMA = 1
_PACKAGE = Path(__file__).resolve().parents[1]
#: Modules that compute verdicts from runs, besides those that affect the runs.
_DECIDING_MODULES = ("cell.py", "check.py", "verdict.py", "check_report.py", "header_tests.py")

#: Verdicts that depend on the state of this machine more than on the release.
_TRANSIENT = (Verdict.UNTESTABLE, Verdict.BROKEN_BUILD, Verdict.BROKEN_CARRY)


def key(spec: CellSpec, where: str = "here") -> str | None:
    """Return the name of a cell's result, or None if it is unknown without a run.

    ``where`` other than "here" means other machines, whose type is unknown here.
    """
    try:
        release = spec_resolver.resolve(spec.release, port_choice.lock_of(spec.patches))
        chosen = discovery.select(discovery.discover(), spec.scenarios)
        facts: list[Any] = [
            _SCHEMA,
            spec.to_json(),
            release.commit,
            release.tree,
            _texts(spec.patches),
            variant.RECIPE,
            variant.shim_digest(),
            _code(),
            [(each.id, each.digest, synthetic_models.identity(each.model)) for each in chosen],
            where,
        ]
        if where == "here":
            options = backends.choose(spec.backend, native=spec.native).options
            found = compiler.find(home() / "objects" / "compilers.json")
            facts += [sorted(options.items()), found.identity, list(found.native_flags)]
    except KvError:
        return None
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load_result(name: str | None) -> CellResult | None:
    """Return the result kept under a key, or None when there is none that can be read."""
    if name is None:
        return None
    try:
        return CellResult.from_json(json.loads(_file(name).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def store_result(name: str | None, result: CellResult) -> None:
    """Store a result as its cell's latest, and under its key if it is reproducible."""
    text = json.dumps(result.to_json(), ensure_ascii=False)
    try:
        # The latest result first: an entry that is found by its key is never written again.
        write_text_atomic(_latest(result.spec), text)
        if name is not None and not is_transient(result):
            write_text_atomic(_file(name), text)
    except (OSError, KvError):
        # Without a writable data directory, the verdict is valid but not cached.
        return


def latest_result(spec: CellSpec) -> CellResult | None:
    """Return the latest result of a cell, marked as stale if inputs have changed since."""
    for where in ("here", "elsewhere"):
        found = load_result(key(spec, where))
        if found is not None:
            return found
    try:
        raw = json.loads(_latest(spec).read_text(encoding="utf-8"))
        found = CellResult.from_json(raw)
    except (OSError, ValueError):
        return None
    return replace(found, stale=not is_transient(found))


def latest_of(specs: Iterable[CellSpec]) -> tuple[CellResult, ...]:
    """Return the latest results of cells, without those that were never verified."""
    return tuple(found for spec in specs if (found := latest_result(spec)) is not None)


def is_transient(result: CellResult) -> bool:
    """Return whether the same inputs may have another result on the same machine."""
    hung = any(run.failure == "hang" for run in result.failing)
    return hung or result.verdict in _TRANSIENT


def stock(release: str, patches: str = "") -> dict[str, str]:
    """Return the known outcomes of scenarios on a stock release, from a run with any series."""
    specs = [CellSpec(release, patches=patches), CellSpec(release)]
    found = next(filter(None, map(latest_result, specs)), None)
    return {row.id: row.on_stock for row in found.scenarios} if found else {}


def _texts(patches: str) -> str:
    """Return the digest of a series and of the code that applies it.

    Accepted verdicts are stored beside the patches. They are compared with results and do not
    influence them.
    """
    code = _PACKAGE / "patching"
    if patches:
        return port_choice.load_series(patches).digest + variant.files_digest((code,))
    return variant.files_digest((data("patches"), code), without=variant.DIGEST_EXCLUDES)


def _code() -> str:
    digest = hashlib.sha256(parallel_runs.code_digest().encode())
    for name in _DECIDING_MODULES:
        digest.update((_PACKAGE / "verification" / name).read_bytes())
    return digest.hexdigest()


def _file(name: str) -> Path:
    return home() / "results" / "cells" / f"{name}.json"


def _latest(spec: CellSpec) -> Path:
    name = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode()).hexdigest()[:16]
    return home() / "results" / "latest" / f"{name}.json"
