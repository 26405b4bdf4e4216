"""Compare results with the accepted verdict of each cell in ``expected.toml``.

A cell without an entry must have a good verdict. A result that is worse than accepted, for a
release or for one of its scenarios, is a regression. A better one is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomlkit
from tomlkit.exceptions import TOMLKitError

from pyllamakv.errors import UsageError
from pyllamakv.patching import foreign_series
from pyllamakv.source import verified
from pyllamakv.source.files import write_text_atomic
from pyllamakv.verification.cell import CellResult, CellSpec
from pyllamakv.verification.verdict import GOOD, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Outcome = Literal["same", "new", "changed", "better", "worse"]

_SCHEMA = 1
_NAME = "expected.toml"
_HEAD = (
    "What is accepted, per release and backend; anything worse is a regression. Written by\n"
    "`pyllamakv matrix accept`; comments are kept. `bad` names the scenarios that are accepted as\n"
    "they are although they are not good."
)

#: From harmless to harmful; good verdicts are equal. An obvious failure (no port, no build) is less
#: bad than a patch that seems to work and does not.
_RANK = {
    **dict.fromkeys(GOOD, 0),
    Verdict.UNTESTABLE: 1,
    Verdict.BROKEN_APPLY: 2,
    Verdict.BROKEN_BUILD: 3,
    Verdict.BROKEN_CARRY: 4,
    Verdict.INEFFECTIVE: 5,
    Verdict.HARMFUL: 6,
}


@dataclass(frozen=True)
class Accepted:
    """The accepted verdict of a cell; ``bad`` maps scenarios to verdicts that are not good."""

    verdict: str
    bad: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Compare a result with the accepted verdict."""

    spec: CellSpec
    outcome: Outcome
    expected: str
    found: str
    why: str = ""

    @property
    def regression(self) -> bool:
        """Return whether it is worse than accepted."""
        return self.outcome == "worse"

    def __str__(self) -> str:
        expected = self.expected or "a good verdict"
        line = f"{self.spec.name}: {self.outcome}: expected {expected}, found {self.found}"
        return f"{line}: {self.why}" if self.why else line


Table = dict[str, Accepted]


def rank(verdict: str) -> int:
    """Return the badness of a verdict, 0 for good ones."""
    return _RANK[Verdict(verdict)]


def file_of(patches: str) -> Path | None:
    """Return the file that accepting the verdicts of a series writes; it may not exist yet.

    It is in the directory of another series than the shipped one, or beside its file. Commits of a
    repository have none: nothing of it is changed.
    """
    if not patches:
        return verified.local_file()
    if patches.startswith(foreign_series.GIT):
        return None
    place = Path(patches)
    return place / _NAME if place.is_dir() else place.with_name(f"{place.name}.{_NAME}")


def load(path: Path | None = None, patches: str = "") -> Table:
    """Return the accepted verdicts by cell, of a file or of a series (default: the shipped one).

    Of the shipped series, local entries override shipped ones. Nothing is accepted without a file.
    """
    if path is None and patches:
        path = file_of(patches)
        if path is None:
            return {}
    if path is not None:
        return _read(path)
    return {
        name: one
        for file in dict.fromkeys((verified.shipped(), verified.local_file()))
        for name, one in _read(file).items()
    }


def name_of(spec: CellSpec) -> str:
    """Return the name under which a cell is accepted: the same for tuned and portable builds."""
    patches = spec.isolate or ",".join(spec.series) or "patched"
    return f"{spec.release}+{patches} {spec.backend}"


def compare(results: Iterable[CellResult], table: Table) -> list[Comparison]:
    """Compare results with the accepted verdicts, one by one."""
    return [_compare(result, table.get(name_of(result.spec))) for result in results]


def _compare(result: CellResult, accepted: Accepted | None) -> Comparison:
    expected = accepted.verdict if accepted else ""
    worse = _worse(result, accepted)
    outcome: Outcome = "same"
    if worse:
        outcome = "worse"
    elif accepted is None:
        outcome = "new"
    elif rank(result.verdict) < rank(expected) or _improved(result, accepted):
        outcome = "better"
    elif result.verdict != expected:
        outcome = "changed"
    why = worse or ("" if outcome == "same" else result.measured)
    return Comparison(result.spec, outcome, expected, result.verdict, why)


def _worse(result: CellResult, accepted: Accepted | None) -> str:
    bound = rank(accepted.verdict) if accepted else 0
    if rank(result.verdict) > bound:
        return result.reason
    for row in result.scenarios:
        # A scenario without a patched side, or one that is skipped, is not worse.
        if row.verdict == Verdict.UNTESTABLE:
            continue
        allowed = accepted.bad.get(row.id) if accepted else None
        if rank(row.verdict) > (rank(allowed) if allowed else 0):
            return f"{row.id} is {row.verdict}: stock {row.stock}, patched {row.patched}"
    return ""


def _improved(result: CellResult, accepted: Accepted) -> bool:
    now = {row.id: row.verdict for row in result.scenarios}
    return any(name in now and rank(now[name]) < rank(bad) for name, bad in accepted.bad.items())


def accept(results: Iterable[CellResult], path: Path | None = None) -> list[str]:
    """Write results as accepted, keeping comments and other cells; return the changes in words."""
    path = path or verified.local_file()
    document = _document(path)
    if "schema" not in document:
        for line in _HEAD.splitlines():
            document.add(tomlkit.comment(line))
        document.add("schema", tomlkit.item(_SCHEMA))
        document.add(tomlkit.nl())
    if "cell" not in document:
        document.add("cell", tomlkit.aot())
    tables = document["cell"]
    changed = []
    for result in results:
        before = _read_tables(path, tables).get(name_of(result.spec))
        now = Accepted(result.verdict, _bad(result))
        if before == now:
            continue
        was = f" (was {before.verdict})" if before and before.verdict != now.verdict else ""
        changed.append(f"{result.spec.name}: {now.verdict}{was}")
        _put(tables, result.spec, now)
    if changed:
        write_text_atomic(path, tomlkit.dumps(document))
    return changed


def _bad(result: CellResult) -> dict[str, str]:
    rows = [row for row in result.scenarios if row.verdict != Verdict.UNTESTABLE]
    return {row.id: row.verdict for row in rows if rank(row.verdict)}


def _put(tables: Any, spec: CellSpec, now: Accepted) -> None:
    patches = spec.isolate or ",".join(spec.series)
    for table in tables:
        if _name(table) == name_of(spec):
            break
    else:
        table = tomlkit.table()
        table.add("release", spec.release)
        if patches:
            table.add("patches", patches)
        if spec.backend != "cpu":
            table.add("backend", spec.backend)
        table.add("verdict", now.verdict)
        table.add(tomlkit.nl())
        tables.append(table)
    table["verdict"] = now.verdict
    table.pop("bad", None)
    if now.bad:
        inline = tomlkit.inline_table()
        inline.update(now.bad)
        table.add("bad", inline)


def _name(table: Any) -> str:
    release, patches = table["release"], table.get("patches", "patched")
    return f"{release}+{patches} {table.get('backend', 'cpu')}"


def _read(path: Path) -> Table:
    return _read_tables(path, _document(path).get("cell", []))


def _read_tables(path: Path, tables: Any) -> Table:
    return dict(_entries(path, tables))


def _entries(path: Path, tables: Any) -> Iterator[tuple[str, Accepted]]:
    for table in tables:
        try:
            bad = {str(key): str(Verdict(value)) for key, value in table.get("bad", {}).items()}
            yield _name(table), Accepted(str(Verdict(table["verdict"])), bad)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            words = ", ".join(Verdict)
            msg = f"{path}: a [[cell]] needs a release and a verdict ({words}); {error!r}"
            raise UsageError(msg) from error


def _document(path: Path) -> tomlkit.TOMLDocument:
    try:
        document = tomlkit.parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return tomlkit.document()
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        msg = f"cannot read {path}: {error}"
        raise UsageError(msg) from error
    if document.get("schema") != _SCHEMA or not isinstance(document.get("cell", []), list):
        msg = f"{path}: expected `schema = {_SCHEMA}` and a list of [[cell]] tables"
        raise UsageError(msg)
    return document
