"""Find signs that upstream already does what a patch does.

Three signs, two of which must agree: the release contains the text of the port; the names that the
patch needs are gone, or those that it adds exist; the stock release passes the patch's scenarios.
The verification provides the third one. Nothing is deleted automatically.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.patching import cpp_lines, port_comparison, status, trees
from pyllamakv.patching import series as series_module
from pyllamakv.source import lockfile
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.hunks import Patch
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.status import PatchStatus
    from pyllamakv.patching.strict_apply import Tree
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

#: A name in more files than this does not identify a file.
_FEW = 4
_WORD = re.compile(rb"[A-Za-z_]\w{3,}")
#: Minimum fraction of names for a sign: hooked names that are gone, or added names that exist.
_GONE, _THERE = 1 / 3, 1 / 2


@dataclass(frozen=True)
class Sign:
    """One sign that a patch is obsolete or not, with the reason; ``obsolete`` None: unknown."""

    name: str
    obsolete: bool | None
    why: str


@dataclass(frozen=True)
class Obsolescence:
    """The signs about one patch on one release."""

    release: str
    id: str
    signs: tuple[Sign, ...]
    #: Whether the patch covers this release, and the markers of a port match its tree.
    meant: bool = True

    @property
    def votes(self) -> int:
        """Count the signs that the patch is obsolete."""
        return sum(sign.obsolete is True for sign in self.signs)

    @property
    def obsolete(self) -> bool:
        """Return whether two of three signs agree."""
        return self.votes >= 2

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "release": self.release,
            "patch": self.id,
            "obsolete": self.obsolete,
            "meant": self.meant,
            "signs": [{"sign": s.name, "says": s.obsolete, "why": s.why} for s in self.signs],
        }


def obsolete(
    release: Release,
    ids: Sequence[str] = (),
    *,
    series: Series | None = None,
    stock: Mapping[str, Mapping[str, str]] | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[Obsolescence, ...]:
    """Collect the signs for patches (all of the series by default) on a release.

    ``stock`` maps each patch to the outcomes of its fix scenarios on the stock release.
    """
    store = store or open_store()
    series = series_module.load() if series is None else series
    series = series.including(ids)
    release = trees.ensure_fetched(store, release, progress)
    tree = trees.StoreTree(store, store.tree_of(release))
    found = []
    for one in status.of_release(release, series, store, progress):
        if not ids or one.id in ids:
            texts = series.definition(one.id).ports
            signs = (
                reverse_apply_sign(one, texts, tree),
                symbols_sign(texts, release, store, series.lock),
                scenario_sign((stock or {}).get(one.id, {})),
            )
            found.append(Obsolescence(release.name, one.id, signs, one.state != "not-applicable"))
    return tuple(found)


def scenario_sign(stock: Mapping[str, str]) -> Sign:
    """Decide from the outcomes of a patch's fix scenarios on the stock release.

    If stock passes every fix scenario, no patch is needed. One failure shows that it is.
    Scenarios without a result do not count.
    """
    verified = {name: how for name, how in stock.items() if how in ("pass", "fail")}
    failed = sorted(name for name, how in verified.items() if how == "fail")
    if not verified:
        return Sign("behaviour", None, "nothing was run on stock; `pyllamakv matrix run` does")
    if failed:
        return Sign("behaviour", False, f"stock fails {', '.join(failed)}")
    return Sign("behaviour", True, f"stock passes {', '.join(sorted(verified))}")


def reverse_apply_sign(one: PatchStatus, texts: Iterable[Port], tree: Tree) -> Sign:
    """Decide from the text: whether the tree already contains everything the port would write."""
    if one.good:
        return Sign("text", False, f"{_port(one.port)} applies")
    best = 0.0
    for text in texts:
        part = present_fraction(text.patch, tree)
        if part == 1:
            return Sign("text", True, f"the tree contains everything that {_port(text.base)} adds")
        best = max(best, part)
    return Sign("text", False, f"{best:.0%} of the lines that a port adds are in the tree")


def _port(base: str) -> str:
    return f"port {base}" if base else "the patch"


def present_fraction(patch: Patch, tree: Tree) -> float:
    """Return the part of a patch's hunks that a tree has already: 1 where it reverse-applies."""
    total = there = 0
    for file in patch.files:
        entry = tree.entry(file.path)
        if file.new is None:
            total += 1
            there += entry is None
            continue
        data = entry.data if entry else b""
        lines = b"\n" + data
        for hunk in file.hunks:
            total += 1
            new = b"".join(hunk.new)
            # an unchanged place has the old lines, which may contain the new ones
            there += entry is not None and b"\n" + new in lines and not _before(hunk.old, lines)
    return there / total if total else 0.0


def _before(old: Sequence[bytes], lines: bytes) -> bool:
    return bool(old) and b"\n" + b"".join(old) in lines


def symbols_sign(
    texts: Sequence[Port], release: Release, store: Store, lock: Path | None = None
) -> Sign:
    """Decide from names: those that the patch hooks into are gone, or those that it adds exist.

    The names are read from the port's base release; the port whose requirements the release meets
    best decides. Unknown if the store has no base older than the release, because names that do not
    exist yet are not gone.
    """
    known = lockfile.bases(lock)
    best: tuple[float, set[str], set[str], set[str]] | None = None
    for text in texts:
        base = known.get(text.base)
        if base is None or not store.has(base) or base.order > release.order:
            continue
        places = {path.split("/", 1)[0] for path in text.patch.paths} | {"include"}
        needs, brings = hooks(text.patch, _tree(store, base), places)
        there = set(holders(_tree(store, release), needs | brings, places))
        part = len(needs - there) / len(needs) if needs else 0.0
        if best is None or part < best[0]:
            best = part, needs - there, brings, brings & there
    if best is None:
        return Sign("symbols", None, "no base of the patch, older than this, is fetched")
    part, gone, brings, there = best
    if brings and len(there) / len(brings) >= _THERE:
        return Sign("symbols", True, f"upstream has {_some(there)}")
    if gone and part >= _GONE:
        return Sign("symbols", True, f"gone from upstream: {_some(gone)}")
    return Sign("symbols", False, f"upstream has {1 - part:.0%} of the names it hooks into")


def hooks(patch: Patch, base: trees.StoreTree, places: set[str]) -> tuple[set[str], set[str]]:
    """Return the names that a patch hooks into, and those that it brings.

    It hooks into names of its old lines that occur in few files of the base, because other names
    are too common. It brings names of functions that no file of the base has.
    """
    parts = [file for file in patch.files if file.old is not None]
    old = [line for file in parts for hunk in file.hunks for line in hunk.removed]
    heads = [port_comparison.heading(hunk).encode() for file in parts for hunk in file.hunks]
    added = [line for file in patch.files for hunk in file.hunks for line in hunk.added]
    asked, made = set(cpp_lines.names([*old, *heads])), set(cpp_lines.calls(added))
    files = holders(base, asked | made, places)
    few = {name for name in asked if 1 <= len(files.get(name, ())) <= _FEW}
    return few, {name for name in made if name not in files and "_" in name}


def holders(tree: trees.StoreTree, names: set[str], places: set[str]) -> dict[str, list[str]]:
    """Return, for names that occur as words in files below some folders, those files."""
    paths = [path for path in tree.modes if path.split("/", 1)[0] in places]
    tree.fetch(paths)
    found: dict[str, list[str]] = {}
    for path in paths:
        entry = tree.entry(path)
        for name in names & _words(entry.data if entry else b""):
            found.setdefault(name, []).append(path)
    return found


@functools.lru_cache(maxsize=1024)
def _words(data: bytes) -> frozenset[str]:
    return frozenset(word.decode() for word in _WORD.findall(data))


def _tree(store: Store, release: Release) -> trees.StoreTree:
    return trees.StoreTree(store, store.tree_of(release))


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown) + more
