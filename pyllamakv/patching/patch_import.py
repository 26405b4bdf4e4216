"""Import a patch of a user into the series: apply it strictly to releases, then write it.

The files of a directory are one patch, applied in order. The result has the layout of the series:
`patch.toml`, one port, and a place in the order. `origin` names the author.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tomlkit

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import (
    foreign_series,
    hunks,
    lint,
    mail_header,
    patch_export,
    port_writer,
    shared_files,
    trees,
)
from pyllamakv.patching import series as series_module
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source.files import write_bytes_atomic, write_text_atomic
from pyllamakv.source.releases import is_safe_name
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyllamakv.patching.definition import Marker
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class ApplyResult:
    """The state of a patch on one release: every hunk exact, moved by lines, or the conflict."""

    release: Release
    offset: int = 0
    conflict: PatchConflict | None = None

    @property
    def applies(self) -> bool:
        """Return whether every hunk has a certain place."""
        return self.conflict is None

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        said = str(self.conflict) if self.conflict else None
        return {
            "release": self.release.name,
            "applies": self.applies,
            "offset": self.offset,
            "conflict": said,
        }


@dataclass(frozen=True)
class Imported:
    """The result of an import: the written patch, and the releases on which it applies."""

    id: str
    base: str
    path: Path
    trials: tuple[ApplyResult, ...]
    findings: tuple[lint.LintFinding, ...] = ()

    @property
    def applies(self) -> tuple[str, ...]:
        """Return the names of the releases that it applies to."""
        return tuple(trial.release.name for trial in self.trials if trial.applies)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "patch": self.id,
            "base": self.base,
            "path": str(self.path),
            "applies": list(self.applies),
            "trials": [trial.as_json() for trial in self.trials],
            "findings": [finding.__dict__ for finding in self.findings],
        }


def read(path: Path) -> tuple[Port, ...]:
    """Read what a user hands over: a file, a mailbox of several mails, or a folder of files."""
    return tuple(text for definition in foreign_series.load(path) for text in definition.ports)


def try_releases(
    texts: Sequence[Port],
    releases: Sequence[Release],
    *,
    store: Store,
    progress: Progress | None = None,
) -> tuple[ApplyResult, ...]:
    """Apply texts, one on top of the other, to each release; nothing is written."""
    found = []
    for number, release in enumerate(releases):
        if progress:
            progress("trying releases", number, len(releases))
        there = trees.ensure_fetched(store, release, progress)
        tree = trees.StoreTree(store, store.tree_of(there))
        try:
            moved = _applied(TreeOverlay(tree), texts)
        except PatchConflict as error:
            found.append(ApplyResult(there, conflict=error))
        else:
            found.append(ApplyResult(there, moved))
    return tuple(found)


def import_patch(
    path: Path,
    id_: str,
    releases: Sequence[Release],
    *,
    folder: Path,
    scenarios: Sequence[str],
    base: str | None = None,
    title: str | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Copy a user's patch into a series directory (created if necessary) as the patch ``id_``.

    ``base`` is the release for which it was written. The default is the release in its header, else
    the one among ``releases`` with the smallest offsets, the newest of several. Raises
    PatchConflict if it does not apply there, NoPortApplies if it applies nowhere, and UsageError
    for an existing id; nothing is written then.
    """
    store = store or open_store()
    if not _ID.fullmatch(id_):
        raise UsageError(
            f"{id_!r} is not an id: expected a-z, 0-9 and single hyphens between them."
        )
    if not scenarios:
        raise UsageError("A patch needs at least one scenario that verifies it.")
    if (folder / id_).exists():
        raise UsageError(f"{folder / id_} exists already; choose another id.")
    texts = read(path)
    tried = try_releases(texts, releases, store=store, progress=progress)
    chosen = _base(tried, base or texts[0].base, named=base is not None, path=path)
    if not is_safe_name(chosen.name):
        raise UsageError(
            f"{chosen.name} has no archive; a base must be a release in the lock file."
        )
    stock = trees.StoreTree(store, store.tree_of(chosen))
    draft = TreeOverlay(stock)
    _applied(draft, texts)
    shape = _described(texts, id_, path, scenarios, title)
    text = Port(id_, hunks.Patch(b"", ()), chosen.name, title=shape.title)
    tree = trees.write(store, stock.tree, draft)
    data = patch_export.export_tree(store, chosen.commit, tree, shape, text)
    text = replace(text, patch=hunks.parse(data, f"{id_}.patch"))
    found = port_writer.propose_markers(text.patch, stock)
    file = folder / id_ / f"{chosen.name}.patch"
    write_bytes_atomic(file, shared_files.separate(text.patch, ())[0])
    write_text_atomic(folder / id_ / "patch.toml", _toml(shape, chosen, found))
    _order(folder / "series.toml", id_)
    faults = [f for f in lint.lint(folder) if f.path.startswith(f"{id_}/")]
    return Imported(id_, chosen.name, file, tried, tuple(faults))


def _applied(draft: TreeOverlay, texts: Sequence[Port]) -> int:
    moved = 0
    for text in texts:
        placements = draft.apply(text.patch, text.name)
        moved += sum(abs(place.offset or 0) for place in placements)
    return moved


def _base(tried: Sequence[ApplyResult], base: str, *, named: bool, path: Path) -> Release:
    for trial in tried:
        if trial.release.name == base and trial.applies:
            return trial.release
        if trial.release.name == base and named and trial.conflict:
            raise trial.conflict
    if named:
        raise UsageError(f"{base} is not among the releases that were tried.")
    good = sorted((t for t in tried if t.applies), key=lambda t: t.release.order, reverse=True)
    if not good:
        conflicts = [trial.conflict for trial in tried if trial.conflict]
        said = "".join(f"\n  {trial.release.name}: {trial.conflict}" for trial in tried)
        raise NoPortApplies(f"{path} applies strictly to none of the releases.{said}", conflicts)
    return min(good, key=lambda trial: trial.offset).release


def _described(
    texts: Sequence[Port], id_: str, path: Path, scenarios: Sequence[str], title: str | None
) -> Definition:
    mails = [mail_header.parse(text.patch.header) for text in texts]
    who = next((f", by {m.name} <{m.email}>" for m in mails if m.name and m.email), "")
    subject = title or mails[0].subject or id_.replace("-", " ").capitalize()
    body = "\n\n".join(part for mail in mails for part in (_trimmed(mail.body),) if part)
    return Definition(
        id=id_,
        title=_short(subject),
        why=body or f"Imported from {path.name}, which says nothing more.",
        origin=f"imported from {path.name}{who}",
        upstream="not submitted",
        scenarios=tuple(scenarios),
    )


def _short(subject: str) -> str:
    plain = " ".join(subject.encode("ascii", "replace").decode().split()).rstrip(".")
    return textwrap.shorten(plain, lint.TITLE, placeholder=" ...").rstrip(" .") or "Imported patch"


def _trimmed(body: str) -> str:
    """Return a message so that git keeps it whole: short lines, none that looks like a patch's."""
    lines: list[str] = []
    for line in body.splitlines():
        safe = f"| {line}" if lint.DIFF_LIKE_LINE.match(line) else line
        lines += textwrap.wrap(safe, lint.LINE, break_on_hyphens=False) or [""]
    return "\n".join(line.rstrip() for line in lines).strip()


def _toml(shape: Definition, base: Release, found: Sequence[Marker]) -> str:
    document: Any = tomlkit.document()
    document["schema"] = 1
    document["id"] = shape.id
    document["title"] = shape.title
    document["why"] = tomlkit.string(f"{shape.why}\n", multiline=True)
    document["origin"] = shape.origin
    document["upstream"] = shape.upstream
    document["scenarios"] = tomlkit.array()
    document["scenarios"].extend(shape.scenarios)
    document["scenarios"].multiline(True)
    # TOML drops a line break right behind the quotes, and so would tomlkit
    text = tomlkit.dumps(document).replace('why = """', 'why = """\n', 1)
    return text + port_writer.port_table(base.name, base.era, (), found)


def _order(file: Path, id_: str) -> None:
    """Add an id at the end of the order; the comments of the file stay."""
    if not file.is_file():
        write_text_atomic(file, f'schema = 1\norder = [\n  "{id_}",\n]\n')
        return
    series_module.load(file.parent)  # an order that cannot be read is not written to
    document = tomlkit.parse(file.read_text("utf-8"))
    order: Any = document["order"]
    order.add_line(id_, indent="  ")
    text = tomlkit.dumps(document)
    write_text_atomic(file, re.sub(r",?\s*\]\s*\Z", ",\n]\n", text))
