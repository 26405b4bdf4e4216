"""Measure the drift of a release from a patch: per hunk, with the release that caused it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import NoPortApplies, PatchConflict
from pyllamakv.patching import (
    apply,
    hunk_locator,
    port_choice,
    port_comparison,
    rename_detection,
    status,
    strict_apply,
    trees,
)
from pyllamakv.patching import series as series_module
from pyllamakv.source import lockfile, release_chain, releases
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.hunks import FilePatch, Hunk
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.strict_apply import Placement, Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.release_chain import ChainLink
    from pyllamakv.source.releases import Release

#: Minimum similarity of a file that the lines of one hunk may have moved to.
_LIKE = 0.25

#: Minimum number of context lines to ignore at a place; None: no place fits.
Fuzz = int | None


@dataclass(frozen=True)
class HunkDrift:
    """The state of one hunk on a release.

    ``fuzz`` is the number of context lines at each end that a lenient applier would have to ignore
    (0: none; None: that does not help either). ``blanks``: only whitespace differs. ``moved`` are
    the files that the lines moved to, and ``changed`` the release that changed them, as far as the
    release chain shows.
    """

    placement: Placement
    function: str = ""
    fuzz: Fuzz = 0
    whitespace_only: bool = False
    moved: tuple[rename_detection.Successor, ...] = ()
    changed_in: str = ""
    #: The last known release before ``changed_in``, which has the other state of the lines.
    changed_after: str = ""

    def __str__(self) -> str:
        place = self.placement
        where = f"{place.file}, hunk {place.hunk}" if place.hunk else place.file
        if self.function:
            where += f" in {self.function.rsplit(' ', 1)[-1]}"
        said = [f"{where} (line {place.line}): {strict_apply.STATE_MESSAGES[place.state]}"]
        if self.changed_in:
            said.append(changed_text(self.changed_after, self.changed_in))
        if self.moved:
            said.append(f"similar lines are in {self.moved[0].path}")
        if place.expected.strip():
            said.append(f"expected `{place.expected.strip()}`, found `{place.found.strip()}`")
        return "; ".join(said)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        place = self.placement
        return {
            "file": place.file,
            "hunk": place.hunk,
            "line": place.line,
            "function": self.function,
            "state": place.state,
            "offset": place.offset,
            "fuzz": self.fuzz,
            "blanks": self.whitespace_only,
            "moved_to": [{"file": m.path, "likeness": m.similarity} for m in self.moved],
            "changed_in": self.changed_in or None,
            "changed_after": self.changed_after or None,
            "expected": place.expected or None,
            "found": place.found or None,
        }


@dataclass(frozen=True)
class Drift:
    """The drift of one patch on one release: that of the port with the best match."""

    release: str
    id: str
    state: status.State
    base: str
    hunks: tuple[HunkDrift, ...]
    reason: str = ""

    @property
    def bad(self) -> tuple[HunkDrift, ...]:
        """Return the hunks without a place."""
        return tuple(hunk for hunk in self.hunks if not hunk.placement.good)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "release": self.release,
            "patch": self.id,
            "state": self.state,
            "base": self.base or None,
            "reason": self.reason or None,
            "hunks": [hunk.as_json() for hunk in self.hunks],
        }


def drift(
    release: Release,
    ids: Sequence[str] = (),
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[Drift, ...]:
    """Measure the drift of patches (all of the series by default) on a release."""
    store = store or open_store()
    series = series_module.load() if series is None else series
    series = series.including(ids)
    found = []
    for one in status.of_release(release, series, store, progress):
        if not ids or one.id in ids:
            found.append(_one(one, release, series, store))
    return tuple(found)


def why(
    release: Release, names: Sequence[str | Port] | None = None, series: Series | None = None
) -> str:
    """Summarise in one line which hunks fail on a release, and since which release.

    ``names`` as in `port_choice.choose_for_release`; of each patch the first such hunk. Empty where
    all apply.
    """
    series = port_choice.only(series_module.load() if series is None else series, names)
    said = []
    for one in drift(release, series=series):
        if one.state in ("manual", "fails") and one.bad:
            more = f" (and {len(one.bad) - 1} more hunks)" if len(one.bad) > 1 else ""
            said.append(f"{one.id} does not apply: {one.bad[0]}{more}")
    return "; ".join(said)


def _best(one: status.PatchStatus, release: Release, series: Series) -> status.Attempt | None:
    """Return the attempt to measure; without an applicable port, that of the nearest base."""
    if one.state != "not-applicable":
        return one.best
    there = {each.key: each for each in lockfile.bases(series.lock).values()}
    line = sorted({**there, release.key: release}.values(), key=lambda r: r.order)
    names = [each.key for each in line]
    here = names.index(release.key)
    far = {name: abs(place - here) for place, name in enumerate(names)}
    return min(one.attempts, key=lambda a: far.get(a.base, len(far)), default=None)


def _one(one: status.PatchStatus, release: Release, series: Series, store: Store) -> Drift:
    best = _best(one, release, series)
    if best is None:
        return Drift(one.release, one.id, one.state, "", (), one.reason)
    port = next(t for t in series.definition(one.id).ports if t.base == best.base)
    tree = _ground(port, release, series, store)
    line = release_chain.chain(store)
    measured = tuple(_hunk(place, port, tree, store, line, release) for place in best.placements)
    return Drift(one.release, one.id, one.state, best.base, measured, one.reason)


def _ground(port: Port, release: Release, series: Series, store: Store) -> trees.StoreTree:
    # The tree to compare with contains the lines of required patches, if these apply.
    try:
        _, tree = apply.apply_requirements(series, port.requires, release, store=store)
    except (PatchConflict, NoPortApplies):
        tree = store.tree_of(release)
    return trees.StoreTree(store, tree)


def _hunk(
    place: Placement,
    port: Port,
    tree: trees.StoreTree,
    store: Store,
    line: Sequence[ChainLink],
    release: Release,
) -> HunkDrift:
    file = port.patch.file(place.file)
    if not place.hunk or not file.hunks:
        return HunkDrift(place)
    hunk = file.hunks[place.hunk - 1]
    function = port_comparison.heading(hunk)
    if place.good or file.old is None:
        return HunkDrift(place, function)
    entry = tree.entry(file.old)
    needed: Fuzz = None
    blanks = stands = False
    if entry is not None:
        index = hunk_locator.LineIndex(hunk_locator.lines_of(entry.data))
        stands = bool(index.find(hunk.old, hunk))
        needed = fuzz(hunk, index)
        blanks = needed != 0 and _blanks(hunk, index)
    # lines without an approximate match may have moved to another file
    gone = needed is None and place.state in ("conflict", "missing")
    # all hunks of a removed file are treated alike
    lost = [line for part in (file.hunks if entry is None else (hunk,)) for line in part.old]
    went = _successors(tree, file.old, tuple(lost)) if gone else ()
    return HunkDrift(
        place,
        function,
        needed,
        blanks,
        tuple(there for there in went if entry is None or there.similarity >= _LIKE),
        # Lines that exist at a refused place did not change.
        *(("", "") if stands else changed(port, file, hunk, release, line, store)),
    )


@functools.lru_cache(maxsize=64)
def _successors(
    tree: trees.StoreTree, path: str, lines: tuple[bytes, ...]
) -> tuple[rename_detection.Successor, ...]:
    return rename_detection.find(tree, path, lines)


def fuzz(hunk: Hunk, index: hunk_locator.LineIndex) -> Fuzz:
    """Return the fuzz that `patch` would need for a hunk, or None if it would fail."""
    before, after = hunk.context
    if not hunk.added and not hunk.removed:
        return None
    longest = max(before, after)
    for count in range(longest + 1):
        # Like `patch`, ignore lines of the longer side first.
        head = max(0, count + before - longest)
        tail = max(0, count + after - longest)
        block = hunk.old[head : len(hunk.old) - tail]
        if block and index.matches(block):
            return count
    return None


def _blanks(hunk: Hunk, index: hunk_locator.LineIndex) -> bool:
    bare = hunk_locator.LineIndex([b" ".join(line.split()) for line in index.lines])
    return bool(bare.matches([b" ".join(line.split()) for line in hunk.old]))


def changed(
    port: Port,
    file: FilePatch,
    hunk: Hunk,
    release: Release,
    line: Sequence[ChainLink],
    store: Store,
) -> tuple[str, str]:
    """Return the release between a port's base and the target that changed a hunk's lines.

    Also returns the release before it in the chain; upstream changed the lines between the two.
    Searches the chain from the base for the first release without the lines. For a target older
    than the base, it is the release that added them. A port without a base is treated as written
    for the release nearest to the target that has the lines, an older one first. Empty if the base
    is not in the chain, or its stock tree does not have the lines (a required patch adds them), and
    for a git commit or a directory: its date does not state what of the chain it contains.
    """
    if release.kind not in releases.ARCHIVE_KINDS:
        return "", ""
    links = [link for link in line if link.release.kind in releases.ARCHIVE_KINDS]
    names = [link.release.name for link in links]
    base = port.base or _matching_release(file, hunk, release, links, store)
    if base not in names:
        return "", ""
    start = names.index(base)
    later = release.order > links[start].release.order
    stretch = links[start:] if later else links[start::-1]
    previous = ""
    for link in stretch:
        if (link.release.order > release.order) is later and link.release.order != release.order:
            break
        if not _matches(file, hunk, trees.StoreTree(store, store.tree_of(link.commit))):
            if not previous:
                return "", ""
            pair = (link.release.name, previous)
            return pair if later else pair[::-1]
        previous = link.release.name
    return (release.name, previous) if later else (previous, release.name)


def changed_text(after: str, release: str) -> str:
    """Return when the lines changed: only pinned releases are known."""
    return f"changed between {after} and {release}" if after else f"changed in {release}"


def _matching_release(
    file: FilePatch, hunk: Hunk, release: Release, links: Sequence[ChainLink], store: Store
) -> str:
    """Return the release with a hunk's lines: the newest before the target, else a later one."""
    older = [link for link in links if link.release.order < release.order]
    for link in (*older[::-1], *links[len(older) :]):
        if _matches(file, hunk, trees.StoreTree(store, store.tree_of(link.commit))):
            return link.release.name
    return ""


def _matches(file: FilePatch, hunk: Hunk, tree: Tree) -> bool:
    entry = tree.entry(file.old or "")
    if entry is None:
        return False
    return bool(hunk_locator.LineIndex(hunk_locator.lines_of(entry.data)).matches(hunk.old))
