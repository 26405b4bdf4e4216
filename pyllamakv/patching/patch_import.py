"""Import patches of a user into a series: apply them strictly to releases, then write them.

Each mail, or file, becomes one patch with its author, date and message. Its directory has the
layout of the series: `patch.toml`, one port, and a place in the order.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from pyllamakv.errors import NoPortApplies, PatchConflict, UsageError
from pyllamakv.patching import (
    apply,
    foreign_series,
    hunks,
    lint,
    mail_header,
    patch_export,
    port_choice,
    port_writer,
    shared_files,
    trees,
)
from pyllamakv.patching import series as series_module
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import lockfile, spec_resolver
from pyllamakv.source.files import write_bytes_atomic, write_text_atomic
from pyllamakv.source.releases import sdist_version
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyllamakv.patching.definition import Marker
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

_WORD = re.compile(rb"[A-Za-z_]\w{3,}")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
#: Keys of `patch.toml` for the releases that a patch is meant for.
_BOUNDS = ("releases", "since", "until")
#: The keys that follow the bounds; `port` is a table, and a key after it would belong to it.
_AFTER_BOUNDS = ("scenarios", "carry", "port")


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
        conflict = str(self.conflict) if self.conflict else None
        return {
            "release": self.release.name,
            "applies": self.applies,
            "offset": self.offset,
            "conflict": conflict,
        }


@dataclass(frozen=True)
class Imported:
    """The result of an import: ids and files of the written patches, and where they apply."""

    ids: tuple[str, ...]
    base: str
    paths: tuple[Path, ...]
    trials: tuple[ApplyResult, ...]
    findings: tuple[lint.LintFinding, ...] = ()
    #: The files that are no patches, with the reasons.
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def applies(self) -> tuple[str, ...]:
        """Return the names of the releases that all of them apply to."""
        return tuple(trial.release.name for trial in self.trials if trial.applies)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "patches": [
                {"patch": id_, "path": str(path)}
                for id_, path in zip(self.ids, self.paths, strict=True)
            ],
            "base": self.base,
            "applies": list(self.applies),
            "trials": [trial.as_json() for trial in self.trials],
            "findings": [finding.__dict__ for finding in self.findings],
            "refused": self.refused,
        }


@dataclass(frozen=True)
class _ImportBase:
    """The commit and tree that ports are applied to.

    ``earlier`` are the ports of the series that were applied to the tree ``below``, by id.
    """

    commit: str
    tree: str
    below: str
    earlier: dict[str, Port]


def try_releases(
    ports: Sequence[Port],
    releases: Sequence[Release],
    *,
    store: Store,
    series: Series,
    progress: Progress | None = None,
) -> tuple[ApplyResult, ...]:
    """Apply ports, one on top of the other, to each release.

    The patches of ``series`` are applied first, or if the ports do not apply then, those that they
    require. No file is written.
    """
    found = []
    for number, release in enumerate(releases):
        if progress:
            progress("trying releases", number, len(releases))
        there = trees.ensure_fetched(store, release, progress)
        try:
            _, moved = _placed(ports, there, series, store)
        except PatchConflict as error:
            found.append(ApplyResult(there, conflict=error))
        except NoPortApplies as error:
            needs = ", ".join(sorted({id_ for port in ports for id_ in port.requires}))
            reason = PatchConflict(f"requires {needs}, which does not apply")
            found.append(ApplyResult(there, conflict=next(iter(error.conflicts), reason)))
        else:
            found.append(ApplyResult(there, moved))
    return tuple(found)


def import_patch(
    path: Path | str,
    id_: str,
    releases: Sequence[Release],
    *,
    folder: Path,
    scenarios: Sequence[str] = (),
    base: str | None = None,
    until: str | None = None,
    title: str | None = None,
    strip: int = 1,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Copy patches of a user into a series directory, which is created if necessary.

    ``path`` is a file, a mailbox, a directory, or ``git:REPOSITORY@FROM..TO``; files of a directory
    that are no patches are left out. ``strip`` is the number of directories that paths begin with
    (``-pN``). A single patch gets
    the id ``id_``; several get ``id_-1``, ``id_-2``. They follow the patches of the series. Each
    requires the patches that its header requires, and the earlier ones without which it does not
    apply, or whose files or names it uses.
    ``base`` is the release for which they were written. The default is the release in their header,
    else the one among ``releases`` with the smallest offsets, the newest of several. They are meant
    for the oldest release that they apply to, and later ones through ``until``; without it,
    `patch status` reports newer ones that they do not apply to. Without ``scenarios``, a patch
    claims those that its header names. Raises PatchConflict if they do not apply to the base,
    NoPortApplies if they apply nowhere, and UsageError for an existing id, or for changes that the
    series has already; nothing is written then.
    """
    store = store or open_store()
    if not _ID.fullmatch(id_):
        raise UsageError(
            f"{id_!r} is not an id: expected a-z, 0-9 and single hyphens between them."
        )
    if Path(path, "series.toml").is_file():
        raise UsageError(f"{path} is a series already: use it with --patches {path}.")
    refused: dict[str, str] = {}
    definitions = tuple(foreign_series.load(path, strip=strip, refused=refused))
    ports = [port for definition in definitions for port in definition.ports]
    series = _preceding(folder, ports)
    ids = [id_] if len(ports) == 1 else [f"{id_}-{n}" for n in range(1, len(ports) + 1)]
    if title and len(ports) > 1:
        raise UsageError(f"A title is for one patch; {path} contains {len(ports)}.")
    tried = try_releases(ports, releases, store=store, series=series, progress=progress)
    for each in ids:
        if (folder / each).exists():
            raise UsageError(f"{folder / each} exists already; choose another id.")
    chosen = _base(tried, base or ports[0].base, named=base is not None, path=path)
    fitting = [trial.release for trial in tried if trial.applies and trial.release.kind != "path"]
    covered = _bounds(min(fitting, key=lambda release: release.order), until, series.lock)
    written: dict[Path, str | bytes] = {}
    files = []
    stock = trees.StoreTree(store, store.tree_of(chosen))
    stocks = [trees.StoreTree(store, store.tree_of(release)) for release in fitting]
    ground, _ = _placed(ports, chosen, series, store)
    commit, tree = ground.commit, trees.StoreTree(store, ground.tree)
    below = trees.StoreTree(store, ground.below)
    named = {port.id: each for port, each in zip(ports, ids, strict=True)}
    earlier = dict(ground.earlier)
    claims = [scenarios or each.scenarios for each in definitions for _ in each.ports]
    for foreign, each, claimed in zip(ports, ids, claims, strict=True):
        shape = replace(_described(foreign, each, path, claimed, title), **covered)
        needs = (named.get(id_, id_) for id_ in foreign.requires)
        requires = _requirements(foreign, tuple(needs), earlier, below)
        port = Port(each, hunks.Patch(b"", ()), chosen.key, title=shape.title, requires=requires)
        draft = TreeOverlay(tree)
        draft.apply(foreign.patch, foreign.name)
        made = trees.write(store, tree.tree, draft)
        data = patch_export.export_tree(store, commit, made, shape, port)
        port = replace(port, patch=hunks.parse(data, f"{each}.patch"))
        head = mail_header.write(shape, port)
        commit = apply.commit_port(
            store, made, commit, replace(port, patch=replace(port.patch, header=head))
        )
        tree = trees.StoreTree(store, made)
        earlier[each] = port
        markers = port_writer.propose_markers(port.patch, stock, fits=stocks)
        files.append(folder / each / f"{chosen.key}.patch")
        written[files[-1]] = shared_files.separate(port.patch, ())[0]
        written[folder / each / "patch.toml"] = _toml(shape, chosen, requires, markers)
    for file, content in written.items():
        if isinstance(content, bytes):
            write_bytes_atomic(file, content)
        else:
            write_text_atomic(file, content)
    for each in ids:
        _order(folder / "series.toml", each)
    lockfile.pin(folder, chosen)
    faults = [f for f in lint.lint(folder) if f.path.split("/")[0] in ids]
    return Imported(tuple(ids), chosen.key, tuple(files), tried, tuple(faults), refused)


def accept_until(folder: Path, id_: str, until: str) -> Path:
    """Set the last release that an imported patch is meant for; return its `patch.toml`."""
    series = series_module.load(folder)
    definition = series.definition(id_)
    if not definition.author:
        raise UsageError(f"{id_} was not imported; edit the releases in its patch.toml.")
    since = definition.since or definition.releases.partition(",")[0].removeprefix(">=")
    file = folder / id_ / "patch.toml"
    bounds = _bounds(spec_resolver.resolve(since, series.lock), until, series.lock)
    document = tomlkit.document()
    for key, value in tomlkit.parse(file.read_text("utf-8")).items():
        if key in _AFTER_BOUNDS:
            document.update(bounds)
            bounds = {}
        if key not in _BOUNDS:
            document.append(key, value)
    write_text_atomic(file, tomlkit.dumps(document))
    return file


def _bounds(first: Release, until: str | None, lock: Path | None) -> dict[str, Any]:
    """Return the keys of the covered releases; only versions of sdists fit into a specifier."""
    found = {"releases": f">={first.name}"} if sdist_version(first.name) else {"since": first.key}
    if until is None:
        return found
    last = spec_resolver.resolve(until, lock)
    if last.order < first.order:
        raise UsageError(f"{last.name} is older than {first.name}, the first release of the patch.")
    if "releases" in found and sdist_version(last.name):
        return {"releases": f">={first.name},<={last.name}"}
    return {**found, "until": last.key}


def _preceding(folder: Path, ports: Sequence[Port]) -> Series:
    """Return the series in a folder, if any, after the shipped patches that ports require."""
    shipped = series_module.load()
    series = series_module.Series(())
    if (folder / "series.toml").is_file():
        series = port_choice.with_requirements(series_module.load(folder), shipped)
    needs = {need for port in ports for need in port.requires}
    needs -= {*series.order, *(port.id for port in ports)}
    found = port_choice.only(shipped, sorted(needs & set(shipped.order)))
    before = [patch for patch in found if patch.id not in series.order]
    return replace(series, definitions=(*before, *series))


def _placed(
    ports: Sequence[Port], release: Release, series: Series, store: Store
) -> tuple[_ImportBase, int]:
    """Return the tree of a release that ports apply to, and by how many lines their hunks moved.

    It is the tree after all patches of the series that apply. A patch that replaces others applies
    to the release with the patches that it requires.
    """
    conflict: PatchConflict | None = None
    own = {port.id for port in ports}
    requires = dict.fromkeys(id_ for port in ports for id_ in port.requires if id_ not in own)
    stock = store.tree_of(release)
    carrier = Carrier(store, release, series)
    with contextlib.suppress(NoPortApplies):
        plan = port_choice.choose_for_release(release, series=series, store=store, carrier=carrier)
        earlier = {port.id: port for port in plan.ports}
        if requires.keys() <= earlier.keys():
            made = apply.write(store, release, plan)
            after = trees.StoreTree(store, made.tree)
            try:
                moved = _applied(TreeOverlay(after), ports)
            except PatchConflict as error:
                conflict = error
            else:
                return _ImportBase(made.commit, made.tree, stock, earlier), moved
    commit, tree = apply.apply_requirements(series, tuple(requires), release, store=store)
    try:
        moved = _applied(TreeOverlay(trees.StoreTree(store, tree)), ports)
    except PatchConflict as error:
        if conflict is not None and not error.contained:
            _check_new(ports, after, earlier, release)
        raise conflict or error from None
    if conflict is not None:
        _check_new(ports, after, earlier, release)
    return _ImportBase(commit, tree, tree, {}), moved


def _check_new(
    ports: Sequence[Port], tree: Tree, earlier: Mapping[str, Port], release: Release
) -> None:
    """Refuse ports that a tree contains because the patches of the series made their changes.

    ``earlier`` are the ports of these patches. Raises UsageError for a second import.
    """
    draft = TreeOverlay(tree)
    left = list(ports)
    with contextlib.suppress(PatchConflict):
        while left:
            draft.apply(left[0].patch, left[0].name)
            del left[0]
    definitions = [foreign_series.definition_of(port) for port in left]
    there: list[str] = []
    while ids := port_choice.contained_ids(definitions[len(there) :], tree, release.name):
        there += ids
    known = {id_: _changes(port) for id_, port in earlier.items()}
    names = []
    for port in left[: len(there)]:
        changes = _changes(port)
        same = [id_ for id_ in known if known[id_] >= changes]
        same = same[:1] or [id_ for id_ in known if known[id_] & changes]
        if changes <= set().union(*(known[id_] for id_ in same)):
            names.append(f"{port.name} (as {', '.join(same)})")
    if names:
        raise UsageError(
            f"the series has the changes of {', '.join(names)} already, so nothing is imported: "
            "import the others alone, or first remove these patches from series.toml"
        )


def _changes(port: Port) -> set[tuple[str, bytes]]:
    """Return the changed lines of a port, with their signs and files."""
    return {
        (file.path, line)
        for file in port.patch.files
        for hunk in file.hunks
        for line in hunk.lines
        if line[:1] in (b"+", b"-")
    }


def _requirements(
    port: Port, named: Sequence[str], earlier: Mapping[str, Port], tree: Tree
) -> tuple[str, ...]:
    """Return the patches that must be applied before a port, in order.

    ``named`` are required in any case. Of the earlier patches, those are required that add a file
    or a name that the port uses, and those that are needed for its hunks to have their places.
    """
    added = b"".join(
        line for file in port.patch.files for hunk in file.hunks for line in hunk.added
    )
    words = set(_WORD.findall(added))

    def used(other: Port) -> bool:
        lines = [h for file in other.patch.files for hunk in file.hunks for h in hunk.added]
        files = {file.path for file in other.patch.files if file.old is None}
        names = {Path(path).name.encode() for path in files}
        if files & set(port.patch.paths) or any(name in added for name in names):
            return True
        return bool(words & set(_declared(lines, other, tree)))

    always = [id_ for id_, other in earlier.items() if id_ in named or used(other)]
    near = [id_ for id_, other in earlier.items() if set(other.patch.paths) & set(port.patch.paths)]
    needed = list(dict.fromkeys((*always, *near)))
    if not _fits(port, needed, earlier, tree):
        needed = list(earlier)
    for id_ in list(needed):
        left = [other for other in needed if other != id_]
        if id_ not in always and _fits(port, left, earlier, tree):
            needed = left
    outside = [id_ for id_ in named if id_ not in earlier]
    return (*outside, *(id_ for id_ in earlier if id_ in needed))


def _declared(lines: Iterable[bytes], port: Port, tree: Tree) -> Iterator[bytes]:
    """Yield the names that a port adds to files which did not have them."""
    before = b"".join(
        entry.data for file in port.patch.files if file.old and (entry := tree.entry(file.old))
    )
    present = set(_WORD.findall(before))
    for word in dict.fromkeys(_WORD.findall(b"".join(lines))):
        if word not in present and b"_" in word:
            yield word


def _fits(port: Port, ids: Sequence[str], earlier: Mapping[str, Port], tree: Tree) -> bool:
    """Return whether a port applies to a tree after some of the earlier patches."""
    wanted = set(ids)
    for id_ in reversed(list(earlier)):
        if id_ in wanted:
            wanted.update(earlier[id_].requires)
    draft = TreeOverlay(tree)
    try:
        for id_, other in earlier.items():
            if id_ in wanted:
                draft.apply(other.patch, other.name)
        draft.apply(port.patch, port.name)
    except PatchConflict:
        return False
    return True


def _applied(draft: TreeOverlay, ports: Sequence[Port]) -> int:
    moved = 0
    for port in ports:
        placements = draft.apply(port.patch, port.name)
        moved += sum(abs(place.offset or 0) for place in placements)
    return moved


def _base(tried: Sequence[ApplyResult], base: str, *, named: bool, path: Path | str) -> Release:
    """Return the release to write ports for.

    A directory is none, because it may change.
    """
    possible = [trial for trial in tried if trial.release.kind != "path"]
    if named and base.startswith("path:"):
        raise UsageError(f"{base} may change: commit it, and name git:URL@COMMIT as the base.")
    for trial in possible:
        same = base in (trial.release.name, trial.release.key)
        if same and trial.applies:
            return trial.release
        if same and named and trial.conflict:
            raise trial.conflict
    if named:
        raise UsageError(f"{base} is not among the releases that were tried.")
    good = sorted((t for t in possible if t.applies), key=lambda t: t.release.order, reverse=True)
    if not good and any(trial.applies for trial in tried):
        names = ", ".join(trial.release.name for trial in tried if trial.applies)
        raise UsageError(
            f"{path} applies to {names} only, which may change: commit it, and name "
            "git:URL@COMMIT as the base."
        )
    if not good:
        conflicts = [trial.conflict for trial in tried if trial.conflict]
        listed = "".join(f"\n  {trial.release.name}: {trial.conflict}" for trial in tried)
        raise NoPortApplies(f"{path} applies strictly to none of the releases.{listed}", conflicts)
    return min(good, key=lambda trial: trial.offset).release


def _described(
    port: Port, id_: str, path: Path | str, scenarios: Sequence[str], title: str | None
) -> Definition:
    mail = mail_header.parse(port.patch.header)
    name = Path(path).name if isinstance(path, Path) else path
    subject = " ".join((title or mail.subject).split())
    return Definition(
        id=id_,
        title=subject or id_.replace("-", " ").capitalize(),
        why=_safe(mail.body),
        origin=f"imported from {name}",
        upstream="not submitted",
        author=f"{mail.name or 'unknown'} <{mail.email}>",
        date=mail.date,
        scenarios=tuple(scenarios),
    )


def _safe(body: str) -> str:
    """Return a message without lines that git would read as the start of a change."""
    lines = [f"| {line}" if lint.DIFF_LIKE_LINE.match(line) else line for line in body.splitlines()]
    return "\n".join(line.rstrip() for line in lines).strip()


def _toml(
    shape: Definition, base: Release, requires: Sequence[str], found: Sequence[Marker]
) -> str:
    document: Any = tomlkit.document()
    document["schema"] = 1
    document["id"] = shape.id
    document["title"] = shape.title
    document["why"] = tomlkit.string(f"{shape.why}\n", multiline=True) if shape.why else ""
    document["origin"] = shape.origin
    document["upstream"] = shape.upstream
    document["author"] = shape.author
    if shape.date:
        document["date"] = shape.date
    for key in _BOUNDS:
        if getattr(shape, key):
            document[key] = getattr(shape, key)
    document["scenarios"] = tomlkit.array()
    document["scenarios"].extend(shape.scenarios)
    document["scenarios"].multiline(True)
    # TOML drops a line break right behind the quotes, and so would tomlkit
    text = tomlkit.dumps(document).replace('why = """', 'why = """\n', 1)
    return text + port_writer.port_table(base.key, base.era, requires, found)


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
    write_text_atomic(file, re.sub(r"(order = \[[^\]]*?),?\s*\]\n*", r"\1,\n]\n", text, count=1))
