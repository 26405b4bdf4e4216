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


def decision(upstream: Iterable[str], base: Iterable[str], patch: Iterable[str]) -> str:
    """Return the likely way to resolve a conflict, from the lines of its three sides.

    Lines are compared by their tokens, without blanks and comments.
    """
    ours, old, theirs = (_code(side) for side in (upstream, base, patch))
    added, removed = theirs - old, old - theirs
    if not added and not removed:
        return "take upstream's lines: the patch changes no code here"
    if ours == old:
        return "take the patch's lines: upstream changed no code here"
    present = added & (ours - old)
    if present == added and not removed & ours:
        return "drop the hunk: upstream makes its change"
    if not ours:
        return "rewrite the hunk: upstream removed these lines"
    if present:
        lacking = _lines((added - present).total())
        return f"take upstream's lines, and add {lacking} of the patch that they lack"
    names = [
        cpp_lines.names(line.encode("utf-8", "replace") for line in side)
        for side in (added, old, ours)
    ]
    gone = [name for name in names[0] if name in names[1] and name not in names[2]]
    if gone:
        return f"rewrite the hunk: it uses `{gone[0]}`, which upstream's lines do not have"
    if not removed:
        return f"take upstream's lines, and add {_lines(added.total())} of the patch"
    if not removed & ours:
        return f"rewrite the hunk: upstream changed {_lines(removed.total())} that it replaces"
    return "make the change of the patch in upstream's lines"


def _code(lines: Iterable[str]) -> Counter[str]:
    code = (line for line in lines if cpp_lines.is_significant(line.encode("utf-8", "replace")))
    return Counter(" ".join(token.text for token in token_merge.split(line)) for line in code)


def _names(lines: Iterable[str]) -> Counter[str]:
    return cpp_lines.names(line.encode("utf-8", "replace") for line in lines)


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
    """Return the likely decisions for the marked places of a file, each once."""
    data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
    sides = (
        [match[number].decode("utf-8", "surrogateescape").splitlines() for number in (1, 2, 3)]
        for match in carry.CONFLICT.finditer(data)
    )
    found = dict.fromkeys(decision(*each) for each in sides)
    return f"; likely: {'; '.join(found)}" if found else ""


def _where(store: Store, session: Session, clash: worktree.UnmergedFile) -> str:
    """Name the file that most of the vanished file's code went to."""
    if clash.kind != "gone":
        return ""
    patch = hunks.parse(patch_export.format_patch(store, session.picked_commit), session.id)
    old = [line for hunk in patch.file(clash.path).hunks for line in hunk.old]
    tree = trees.StoreTree(store, store.tree_of(session.parent))
    found = rename_detection.find(tree, clash.path, old)
    return f" to {found[0].path}" if found else " to where its code went"
