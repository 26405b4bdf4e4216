"""Write the records in `tests/data/records`, which later changes must keep.

``python tests/kits/records.py [NAME…]`` writes the records again. Change a record only on purpose,
and state the reason in the commit. The records of trees are updated for fetched releases only.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "records"

# An address in a default value differs from run to run.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read(name: str) -> Any:
    """Return a stored record."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def trees(releases: list[str] | None = None) -> dict[str, Any]:
    """Return the ids that patches make of each fetched release.

    Per release: the stock tree; per patch the port, the tree of stock with this patch and what it
    requires, and the commit; the tree and commit of the whole series; what does not apply.
    """
    from pyllamakv.errors import NoPortApplies, PatchConflict
    from pyllamakv.patching import apply, series
    from pyllamakv.source import lockfile
    from pyllamakv.source.store import open_store

    store, found = open_store(), {}
    for release in lockfile.known().values():
        if not store.has(release) or (releases and release.name not in releases):
            continue
        patches: dict[str, Any] = {}
        for definition in series.load():
            try:
                made = apply.apply(release, [definition.id], store=store)
            except (NoPortApplies, PatchConflict):
                continue
            port = next(port.base for port in made.ports if port.id == definition.id)
            patches[definition.id] = {"port": port, "tree": made.tree, "commit": made.commit}
        whole = apply.apply(release, store=store)
        found[release.name] = {
            "stock": release.tree,
            "patches": patches,
            "series": {
                "patches": list(whole.patches),
                "tree": whole.tree,
                "commit": whole.commit,
            },
        }
    return found


def api() -> dict[str, Any]:
    """Return every public name with its signature, and classes with their public members."""
    import pyllamakv

    found: dict[str, Any] = {}
    for name in sorted(pyllamakv.__all__):
        value = getattr(pyllamakv, name)
        if inspect.isclass(value):
            members = {
                member: _signature(inspect.getattr_static(value, member))
                for member in sorted(dir(value))
                if not member.startswith("_") and _own(value, member)
            }
            bases = [base.__name__ for base in value.__mro__[1:] if base is not object]
            call = "" if issubclass(value, enum.Enum) else _signature(value)
            found[name] = {"call": call, "bases": bases, "members": members}
        elif callable(value):
            found[name] = {"call": _signature(value)}
        else:
            found[name] = type(value).__name__
    return found


def exit_codes() -> dict[str, int]:
    """Return the exit status of every error and verdict."""
    from pyllamakv import errors
    from pyllamakv.verification.verdict import Verdict

    classes = [errors.KvError]
    for one in classes:
        classes += [below for below in one.__subclasses__() if below not in classes]
    ours = [one for one in classes if one.__module__.startswith("pyllamakv.errors")]
    found = {one.__name__: one.exit_code for one in ours}
    return {**dict(sorted(found.items())), **_verdict_codes(Verdict)}


def schemas() -> dict[str, Any]:
    """Return the JSON schemas that ship, and the shape of what verbs print with ``--json``."""
    from pyllamakv.verification import matrix_reports

    found: dict[str, Any] = {"matrix.schema.json": matrix_reports.schema()}
    for words in COMMANDS:
        done = run(*words)
        found[" ".join(words)] = {"exit": done.returncode, "shape": shape(json.loads(done.stdout))}
    return found


def verdicts() -> dict[str, Any]:
    """Return the rows of README's table of verdicts, by release and backend."""
    found = {}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = re.compile(
        r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| stock fails (\d+) of (\d+) runs, patched (\d+)"
        r" \| (\d+) scenarios",
        re.MULTILINE,
    )
    for release, era, backend, verdict, stock, runs, patched, fixed in row.findall(text):
        found[f"{release} {backend}"] = {
            "era": era,
            "verdict": verdict,
            "runs": int(runs),
            "stock_fails": int(stock),
            "patched_fails": int(patched),
            "scenarios": int(fixed),
        }
    return found


#: Verbs whose output is the same shape on any machine that has the test release.
COMMANDS = (
    ("upstream", "list", "--json"),
    ("model", "list", "--json"),
    ("patch", "show", "full-defrag", "--json"),
    ("patch", "status", "0.3.9", "--json"),
    ("patch", "apply", "0.3.9", "--json"),
    ("patch", "lint", "--json"),
    ("patch", "export", "full-defrag", "--base", "0.3.9", "--check", "--json"),
    ("patch", "drift", "0.3.9", "full-defrag", "--json"),
    ("patch", "diff", "full-defrag", "0.3.9", "0.3.8", "--json"),
    ("build", "0.3.9", "--json"),
    ("check", "0.3.9", "--scenario", "fragmented", "--json"),
    ("dropin", "env", "0.3.9+patched", "--json"),
    ("build", "0.3.9+typo", "--json"),
    ("check", "0.3.9", "--unknown", "--json"),
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [sys.executable, "-m", "pyllamakv.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def shape(value: Any) -> Any:
    """Return keys and types of a JSON value; the elements of a list are merged into one."""
    if isinstance(value, dict):
        return {key: shape(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_merged([shape(each) for each in value])] if value else []
    return type(value).__name__


def _merged(shapes: list[Any]) -> Any:
    if all(isinstance(each, dict) for each in shapes):
        keys = sorted({key for each in shapes for key in each})
        return {key: _merged([each[key] for each in shapes if key in each]) for key in keys}
    if all(isinstance(each, list) for each in shapes):
        inner = [each[0] for each in shapes if each]
        return [_merged(inner)] if inner else []
    names = sorted({json.dumps(each, sort_keys=True) for each in shapes})
    return shapes[0] if len(names) == 1 else {"any of": [json.loads(name) for name in names]}


def _own(owner: type, member: str) -> bool:
    value = inspect.getattr_static(owner, member)
    return any(
        member in vars(base) and base.__module__.startswith("pyllamakv")
        for base in owner.__mro__
        if vars(base).get(member) is value
    )


def _signature(value: Any) -> str:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return "property"
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__


def _verdict_codes(verdict: Any) -> dict[str, int]:
    from pyllamakv.verification.verdict import Decision

    return {word.value: Decision(word, "").exit_code for word in verdict}


RECORDS = {one.__name__: one for one in (trees, api, exit_codes, schemas, verdicts)}


def write(name: str) -> None:
    """Write a record; releases that are not fetched keep their records."""
    made = RECORDS[name]()
    path = FOLDER / f"{name}.json"
    if name == "trees" and path.is_file():
        made = {**read(name), **made}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RECORDS:
        write(wanted)
