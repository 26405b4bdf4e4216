"""Explain how to resolve conflicts: the likely decision for each place, and the files to edit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pyllamakv.errors import RebaseConflict
from pyllamakv.patching import (
    carry,
    cpp_lines,
    hunks,
    patch_export,
    rename_detection,
    token_merge,
    trees,
    worktree,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyllamakv.patching.rebase_session import Session
    from pyllamakv.source.store import Store

_ADVICE = {
    "content": "resolve the marked places",
    "gone": "{onto} has no such file; carry its change over{where}, then delete it",
    "kept": "the patch deletes it, {onto} changed it; delete it, or `git add` it to keep it",
    "both": "both sides add it; resolve the marked places",
}
_GENERAL = "make the change of the patch in upstream's lines"


def decision(upstream: Iterable[str], base: Iterable[str], patch: Iterable[str]) -> str:
    """Return the likely way to resolve a conflict, from the lines of its three sides.

    Sides are compared by their tokens, without blanks and comments. A decision that keeps the
    lines of one side requires that they contain the change of the other one: in doubt, the hunk is
    to be rewritten.
    """
    sides = tuple(map(tuple, (upstream, base, patch)))
    ours, old, theirs = map(_tokens, sides)
    if theirs == old:
        return "take upstream's lines: the patch changes no code here"
    if ours == old:
        return "take the patch's lines: upstream changed no code here"
    ours, old, theirs = map(_code, sides)
    here, before, after = map(Counter, (ours, old, theirs))
    added, removed = after - before, before - after
    if not added and not removed:
        return _GENERAL  # the patch only moves lines
    present = added & (here - before)
    # Upstream has made the removals of the patch if no removed line is left, also not changed.
    touched = _names(removed)
    changed = [line for line in here - before - added if _names([line]).keys() & touched.keys()]
    done = not removed & here and not changed
    if done and present == added and _in_order(ours, [line for line in theirs if line in added]):
        return "drop the hunk: upstream makes its change"
    if done and present == added and _names(present):
        return "take upstream's lines, if their order does not matter: it is not that of the patch"
    if not ours:
        return "rewrite the hunk: upstream removed these lines"
    if done and _names(present):
        lacking = _lines((added - present).total())
        return f"take upstream's lines, and add {lacking} of the patch that they lack"
    used, known, left = map(_names, (added, old, ours))
    gone = [name for name in used if name in known and name not in left]
    if gone:
        return f"rewrite the hunk: it uses `{gone[0]}`, which upstream's lines do not have"
    if not removed:
        return f"take upstream's lines, and add {_lines(added.total())} of the patch"
    if not removed & here:
        verb = "replaces" if added else "removes"
        return f"rewrite the hunk: upstream changed {_lines(removed.total())} that it {verb}"
    return _GENERAL


def _tokens(lines: Iterable[str]) -> list[str]:
    return [token.text for token in token_merge.split("\n".join(lines)) if token.text]


def _code(lines: Iterable[str]) -> list[str]:
    """Return the lines with code, also lone braces, each as its tokens with single spaces."""
    code = (line for line in lines if cpp_lines.normalize(line.encode("utf-8", "replace")))
    return [" ".join(_tokens([line])) for line in code]


def _names(lines: Iterable[str]) -> Counter[str]:
    """Count the names and calls in lines."""
    data = [line.encode("utf-8", "replace") for line in lines]
    return cpp_lines.names(data) | cpp_lines.calls(data)


def _in_order(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether lines contain others in this order, with any lines between them."""
    rest = iter(lines)
    return all(line in rest for line in wanted)


def _lines(count: int) -> str:
    return "a line" if count == 1 else f"{count} lines"


def conflict_error(
    store: Store, session: Session, why: str, marked: Sequence[str] | None = None
) -> RebaseConflict:
    """Create the error with directory, files and the action for each.

    ``marked`` are the files that still have conflict markers, if known; the others are resolved.
    """
    folder = session.folder(store)
    clashes = worktree.unmerged_files(folder) if folder.is_dir() else ()
    rows = {
        clash.path: _ADVICE[clash.kind].format(
            onto=session.onto, where=_where(store, session, clash)
        )
        for clash in clashes
        if marked is None or clash.path in marked or clash.kind != "content"
    }
    rows |= {path: _ADVICE["content"] for path in marked or () if path not in rows}
    rows = {path: advice + _likely(folder / path) for path, advice in rows.items()}
    id_ = session.id
    lines = [
        f"{why}; in {folder}",
        *(f"  {path}: {advice}" for path, advice in rows.items()),
        f"Then `pyllamakv patch rebase --continue {id_}`; --skip leaves it out, --abort ends it.",
    ]
    return RebaseConflict("\n".join(lines), folder, tuple(rows))


def _likely(file: Path) -> str:
    """Return the likely decision for each marked place of a file, with the lines of its markers."""
    data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
    found: dict[str, list[str]] = {}
    for match in carry.CONFLICT.finditer(data):
        sides = [match[n].decode("utf-8", "surrogateescape").splitlines() for n in (1, 2, 3)]
        line = data.count(b"\n", 0, match.start()) + 1
        found.setdefault(decision(*sides), []).append(f"{line}")
    words = [
        f"line{'s' * (len(lines) > 1)} {', '.join(lines)}: {text}" for text, lines in found.items()
    ]
    return f"; likely: {'; '.join(words)}" if words else ""


def _where(store: Store, session: Session, clash: worktree.UnmergedFile) -> str:
    """Name the file that most of the vanished file's code went to."""
    if clash.kind != "gone":
        return ""
    patch = hunks.parse(patch_export.format_patch(store, session.picked_commit), session.id)
    old = [line for hunk in patch.file(clash.path).hunks for line in hunk.old]
    tree = trees.StoreTree(store, store.tree_of(session.parent))
    found = rename_detection.find(tree, clash.path, old)
    return f" to {found[0].path}" if found else " to where its code went"
