"""Look for signs that upstream does itself what a patch is for.

Three signs, none of which decides alone: the text is in the release already, the names that the
patch needs are gone or those that it brings are there, and the stock release passes the patch's
scenarios. Two of three make a patch obsolete. The third is the harness's: it hands over what it
saw. Nothing is ever deleted on such a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.patching import series as series_module
from pyllamakv.patching import status, telling, trees
from pyllamakv.source import gitting
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyllamakv.patching.definition import PatchText
    from pyllamakv.patching.draft import Tree
    from pyllamakv.patching.hunks import Patch
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.status import PatchStatus
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

#: Where upstream's own code stands.
_PLACES = ("src", "ggml", "include", "common", "llama.cpp", "llama.h")
#: From this part of the names on, gone or there, the sign counts.
_ENOUGH = 0.5


@dataclass(frozen=True)
class Sign:
    """Hold one sign: does it say that the patch is obsolete, and why; ``says`` None: it is mute."""

    name: str
    says: bool | None
    why: str


@dataclass(frozen=True)
class Obsolescence:
    """Hold what the signs say about one patch on one release."""

    release: str
    id: str
    signs: tuple[Sign, ...]

    @property
    def votes(self) -> int:
        """Count the signs that say obsolete."""
        return sum(sign.says is True for sign in self.signs)

    @property
    def obsolete(self) -> bool:
        """Tell whether two signs of three say so."""
        return self.votes >= 2

    def with_behaviour(self, stock: Mapping[str, str]) -> Obsolescence:
        """Return the same with what the harness saw of the stock release (see `behaviour`)."""
        others = tuple(sign for sign in self.signs if sign.name != "behaviour")
        return Obsolescence(self.release, self.id, (*others, behaviour(stock)))

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "release": self.release,
            "patch": self.id,
            "obsolete": self.obsolete,
            "signs": [{"sign": s.name, "says": s.says, "why": s.why} for s in self.signs],
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

    ``stock`` holds, by patch, how each of its cures ended on the stock release.
    """
    store = store or open_store()
    series = series_module.load() if series is None else series
    for id_ in ids:
        series.definition(id_)
    release = trees.present(store, release, progress)
    tree = trees.StoreTree(store, store.tree_of(release))
    found = []
    for one in status.of_release(release, series, store, progress):
        if not ids or one.id in ids:
            texts = series.definition(one.id).texts
            signs = (
                text_sign(one, texts, tree),
                symbols_sign(texts, release, series, store),
                behaviour((stock or {}).get(one.id, {})),
            )
            found.append(Obsolescence(release.name, one.id, signs))
    return tuple(found)


def behaviour(stock: Mapping[str, str]) -> Sign:
    """Judge by how a patch's cures ended on the stock release: scenario to "pass", "fail", ....

    Stock that passes every cure needs no patch; one failure is enough against it. Scenarios that
    could not be judged do not count.
    """
    judged = {name: how for name, how in stock.items() if how in ("pass", "fail")}
    failed = sorted(name for name, how in judged.items() if how == "fail")
    if not judged:
        return Sign("behaviour", None, "no cure was run on stock")
    if failed:
        return Sign("behaviour", False, f"stock fails {', '.join(failed)}")
    return Sign("behaviour", True, f"stock passes {', '.join(sorted(judged))}")


def text_sign(one: PatchStatus, texts: Iterable[PatchText], tree: Tree) -> Sign:
    """Judge by the text: is everything that it would write there already?"""
    if one.good:
        return Sign("text", False, f"the text for {one.text} applies")
    best = 0.0
    for text in texts:
        part = written(text.patch, tree)
        if part == 1:
            return Sign("text", True, f"all that the text for {text.base} adds is there already")
        best = max(best, part)
    return Sign("text", False, f"{best:.0%} of what a text adds is there already")


def written(patch: Patch, tree: Tree) -> float:
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
    texts: Sequence[PatchText], release: Release, series: Series, store: Store
) -> Sign:
    """Judge by names: those that the patch calls into are gone, or those that it brings are there.

    The text whose needs the release meets best speaks.
    """
    asked: set[str] = set()
    sets = []
    for text in texts:
        shipped = _shipped(text, series)
        needs, brings = needed(text.patch) - shipped, brought(text.patch)
        sets.append((text, needs, brings))
        asked |= needs | brings
    there = present(store, store.tree_of(release), asked)
    ranked = [
        (len(needs - there) / len(needs) if needs else 0.0, text, needs - there, brings & there)
        for text, needs, brings in sets
    ]
    if not ranked:
        return Sign("symbols", None, "the patch has no text")
    part, text, gone, there_now = min(ranked, key=lambda row: row[0])
    brings = brought(text.patch)
    if brings and len(there_now) / len(brings) >= _ENOUGH:
        return Sign("symbols", True, f"upstream has {_some(there_now)}")
    if gone and part >= _ENOUGH:
        return Sign("symbols", True, f"gone from upstream: {_some(gone)}")
    return Sign("symbols", False, f"upstream still has {1 - part:.0%} of the names it needs")


def needed(patch: Patch) -> set[str]:
    """Return the functions that a patch hooks into: called or defined in lines that it removes.

    Where it removes nothing that calls, those of the context.
    """
    hunks = [hunk for file in patch.files if file.old is not None for hunk in file.hunks]
    removed = telling.calls(line for hunk in hunks for line in hunk.removed)
    return set(removed or telling.calls(line for hunk in hunks for line in hunk.old))


def brought(patch: Patch) -> set[str]:
    """Return the names of functions that appear in what a patch adds and nowhere in its context."""
    hunks = [hunk for file in patch.files if file.new is not None for hunk in file.hunks]
    old = telling.names(line for hunk in hunks for line in hunk.old)
    added = telling.calls(line for hunk in hunks for line in hunk.added)
    # a name that is called without being a word of the base may be the library's: two words or more
    return {name for name in added if name not in old and "_" in name}


def present(store: Store, tree: str, names: Iterable[str]) -> set[str]:
    """Return those names that stand as whole words somewhere in a tree's code."""
    wanted = sorted(names)
    if not wanted:
        return set()
    words = ("grep", "--no-color", "-h", "-o", "-w", "-F", "-I", "-f", "-", tree, "--", *_PLACES)
    out = gitting.git(store.path, *words, input="\n".join(wanted) + "\n", check=False)
    return set(out.splitlines()) & set(wanted)


def _shipped(text: PatchText, series: Series) -> set[str]:
    """Return the names that required patches bring: their absence upstream says nothing."""
    found: set[str] = set()
    for id_ in text.requires:
        for other in series.definition(id_).texts:
            found |= brought(other.patch)
    return found


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(shown) + more
