"""Create the mutants of a patch: drop one hunk, or change one line."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchConflict, PatchError
from pyllamakv.patching import port_choice, trees
from qa.mutation import line_origins, operators

if TYPE_CHECKING:
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.hunks import Hunk
    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

HUNK = "hunk dropped"


@dataclass(frozen=True)
class Mutant:
    """One mutant: file, original and mutated line, and the files that it changes.

    ``above`` is the code above that line. ``files`` maps paths of the patched tree to their new
    content (None: deleted). A dropped hunk has no line, unless one line is its only change;
    ``hunk`` has the lines of code that it added.
    """

    patch: str
    file: str
    line: int
    operator: str
    was: str = ""
    now: str = ""
    above: str = ""
    files: dict[str, bytes | None] = field(default_factory=dict, repr=False, compare=False)
    hunk: str = ""

    @property
    def id(self) -> str:
        """Return a name that depends on the mutated text alone."""
        whole = hashlib.sha256(f"{self.patch}\0{self.operator}".encode())
        for path, data in sorted(self.files.items()):
            whole.update(path.encode() + b"\0" + (b"\1" + data if data is not None else b"\0"))
        return whole.hexdigest()[:20]

    def __str__(self) -> str:
        what = f"`{self.was.strip()}` became `{self.now.strip()}`" if self.was else ""
        return ": ".join(part for part in (f"{self.file}:{self.line}", self.operator, what) if part)


@dataclass(frozen=True)
class Made:
    """The mutants of a patch, and the number of its lines that were left out, by reason."""

    mutants: tuple[Mutant, ...]
    left_out: dict[str, int]


def make(store: Store, release: Release, patched: PatchedRelease, patch: str) -> Made:
    """Return all mutants of one patch of a patched release, dropped hunks first."""
    reasons: Counter[str] = Counter()
    stock = trees.StoreTree(store, store.tree_of(release))
    tree = trees.StoreTree(store, patched.tree)
    found: list[Mutant] = list(_without_hunks(store, release, patched, patch, tree, reasons))
    for path, content in line_origins.trace_lines(patched.steps, stock).items():
        if not any(line.patch == patch for line in content):
            continue
        entry = tree.entry(path)
        assert entry is not None
        # Counted from the patches, and confirmed in the tree.
        assert entry.data == b"".join(line.data for line in content), path
        found += _wrong_lines(path, content, patch, reasons)
    return Made(tuple({each.id: each for each in found}.values()), dict(reasons))


def listed(port: Port) -> Iterator[Mutant]:
    """Return the mutants of a port's lines, and its hunks, without applying them to a tree."""
    for file in port.patch.files:
        for hunk in file.hunks:
            if hunk.added:
                yield _dropped(port.id, file.path, hunk)
            content = tuple(
                line_origins.PatchedLine(line[1:], port.id if line[:1] == b"+" else "")
                for line in hunk.lines
                if line[:1] in (b"+", b" ")
            )
            yield from _wrong_lines(file.path, content, port.id, Counter())


def _wrong_lines(
    path: str, content: tuple[line_origins.PatchedLine, ...], patch: str, reasons: Counter[str]
) -> Iterator[Mutant]:
    above = ""
    begin: list[bytes] = [line.data for line in content]
    for number, line in enumerate(content):
        text = line.data.decode("utf-8", "replace").rstrip("\r\n")
        if line.patch == patch:
            why = operators.left_out(text)
            made = operators.changes(text, above)
            if not made:
                reasons[why or "no operator"] += 1
            for change in made:
                wrong = [*begin[:number], change.now.encode() + b"\n", *begin[number + 1 :]]
                files: dict[str, bytes | None] = {path: b"".join(wrong)}
                yield Mutant(
                    patch, path, number + 1, change.operator, text, change.now, above, files
                )
        if operators.left_out(text) not in ("comment", "preprocessor") and text.strip():
            above = operators.code_of(text)


def _without_hunks(
    store: Store,
    release: Release,
    patched: PatchedRelease,
    patch: str,
    tree: trees.StoreTree,
    reasons: Counter[str],
) -> Iterator[Mutant]:
    port = next(each for each in patched.ports if each.id == patch)
    for file in port.patch.files:
        for number, hunk in enumerate(file.hunks, 1):
            if not hunk.added:
                # The hunk only deletes: without it, an unused declaration remains.
                reasons["hunk adds no lines"] += 1
                continue
            texts = [
                each.without(file.path, number) if each is port else each for each in patched.ports
            ]
            try:
                plan = port_choice.choose_for_release(release, texts, store=store)
            except (PatchConflict, PatchError):
                reasons["other hunks require it"] += 1
                continue
            changed = plan.draft.changes
            files: dict[str, bytes | None] = {}
            for path in {*changed, *(p for each in patched.ports for p in each.patch.paths)}:
                now, was = plan.draft.entry(path), tree.entry(path)
                if now != was:
                    files[path] = None if now is None else now.data
            yield replace(_dropped(patch, file.path, hunk), files=files)


def _dropped(patch: str, path: str, hunk: Hunk) -> Mutant:
    code = "\n".join(operators.code_of(text).strip() for text in _code(hunk))
    return Mutant(patch, path, hunk.new_start, HUNK, _only(hunk), hunk=code)


def _only(hunk: Hunk) -> str:
    """Return the line of code that is a hunk's only change, "" for any other hunk.

    Only such a dropped hunk is equal to the dropped line, and accepted with it.
    """
    found = _code(hunk)
    alone = len(found) == 1 and not hunk.removed and not operators.left_out(found[0])
    return found[0] if alone else ""


def _code(hunk: Hunk) -> list[str]:
    """Return the lines of code that a hunk adds."""
    added = [line.decode("utf-8", "replace").rstrip("\n") for line in hunk.added]
    return [text for text in added if operators.left_out(text) not in ("no code", "comment")]
